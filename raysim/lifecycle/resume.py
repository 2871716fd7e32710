"""Finds the run that a configuration continues, and refuses one that is not the same."""

import json
from collections.abc import Callable
from typing import Any

import yaml

from raysim.config.schema import Config
from raysim.core.errors import UserError
from raysim.core.persistent import persistent_path
from raysim.lifecycle import checkpoint
from raysim.lifecycle.directory import RunDirectory

MAY_CHANGE = ("rounds", "tracking", "output", "resources")


def find(config: Config, name: str, say: Callable[[str], object] = lambda _: None) -> RunDirectory:
    """The newest run of this configuration; its number of rounds may differ.  say: takes notes on damaged ones.

    Raises UserError where there is none; if the newest run of the same name differs, the message says in which keys.
    """
    root = persistent_path(config.output.dir)
    found = checkpoint.find_runs(root, config.hash(), say)
    if found:
        newest = RunDirectory(found[0])
        done = rounds_done(newest)
        if done > config.rounds and not is_finished(newest, done):
            raise UserError(
                f"--resume: rounds = {config.rounds}, but {newest.path.name} was interrupted after round {done}; ask "
                f"for at least {done} rounds, or start a new run"
            )
        return newest
    relatives = sorted(root.glob(f"{name}-*/config.yaml"), key=lambda p: p.stat().st_mtime_ns)
    if not relatives:
        raise UserError(f"--resume: there is no run of this configuration in {root}; start it without --resume")
    before = yaml.safe_load(relatives[-1].read_text(encoding="utf-8"))
    changes = ", ".join(_differences(before, config.resolved()))
    raise UserError(
        f"--resume: the newest run of this name, {relatives[-1].parent.name}, was made with other values ({changes}); "
        "only the number of rounds, resources, tracking and output may change. Undo that, or start a new run"
    )


def _differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [k for k in {**before, **now} if prefix or k not in MAY_CHANGE]
        return [d for k in keys for d in _differences(before.get(k), now.get(k), f"{prefix}.{k}" if prefix else k)]
    return [] if before == now else [f"{prefix}: {json.dumps(before)} -> {json.dumps(now)}"]


def rounds_done(directory: RunDirectory) -> int:
    """The rounds of a finished run, or that of the newest checkpoint; 0 if there is neither."""
    kept = [int(path.stem.removeprefix("round-")) for path in directory.checkpoints.glob("round-*.json")]
    if (directory.path / "summary.json").exists():
        kept.append(int(directory.read_json("summary.json")["rounds"]))
    return max(kept, default=0)


def is_finished(directory: RunDirectory, rounds: int) -> bool:
    """Whether the run has done that many rounds and written its summary."""
    path = directory.path / "summary.json"
    return path.exists() and int(directory.read_json("summary.json")["rounds"]) >= rounds
