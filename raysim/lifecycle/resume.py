"""Finds the run that a configuration continues, and refuses one that is not the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysim.config.load import load_config
from raysim.config.schema import Config, may_change_on_resume
from raysim.core.errors import UserError
from raysim.core.persistent import persistent_path
from raysim.lifecycle.checkpoint import newest
from raysim.lifecycle.directory import RunDirectory, folder_name
from raysim.lifecycle.identity import Identity
from raysim.lifecycle.mirror import gather

MOST_SHOWN = 10


def find(
    config: Config, name: str, say: Callable[[str], object] = lambda _: None, folder: Path | None = None
) -> RunDirectory:
    """Find the newest run of this configuration; its number of rounds may differ.  say: gets notes on damaged runs.

    folder: that of the run that is meant, if it is not to be looked for.

    Where `output.dir` has none, `output.mirror` is searched, and what is found there is fetched.

    Raises UserError where there is none; the message then says in which keys the most similar run differs. Among
    equally similar ones, runs called `name` are preferred.
    """
    root = persistent_path(config.output.dir)
    wanted = config.hash()
    found = gather(config.output, {wanted}, say).of(wanted) if folder is None else [_in_folder(folder, config)]
    if found:
        newest = found[0]
        done = rounds_done(newest)
        if done > config.rounds and not is_finished(newest, done):
            raise UserError(
                f"--resume: rounds = {config.rounds}, but {newest.path.name} was interrupted after round {done}; ask "
                f"for at least {done} rounds, or start a new run"
            )
        return newest
    closest = _closest(root, config.result_keys(), name)
    mirror = "" if config.output.mirror is None else f", nor in output.mirror = {config.output.mirror}"
    if closest is None:
        raise UserError(f"--resume: there is no run of this configuration in {root}{mirror}; start it without --resume")
    run, changes = closest
    raise UserError(
        f"--resume: no run in {root}{mirror} has this configuration; the closest, {run.name}, was made with other "
        f"values ({_few(changes)}); only {', '.join(may_change_on_resume())} may change. Undo that, or start a new run"
    )


def changes(folder: Path, config: Config) -> str:
    """The keys in which an earlier run differs from a configuration, for people; empty where it computes the same."""
    before = _result_keys(folder)
    if before is None:
        return "its run.json or config.yaml is damaged"
    return _few(differences(before, config.result_keys()))


def _in_folder(folder: Path, config: Config) -> RunDirectory:
    """The run in this folder; UserError where there is none, or where it computes something else."""
    if not (folder / "run.json").is_file():
        raise UserError(f"--resume {folder}: this is no folder of a run (it has no run.json); give one, or none at all")
    before = _result_keys(folder)
    if before is None:
        raise UserError(f"--resume {folder}: its run.json or config.yaml is damaged; start a new run")
    changes = differences(before, config.result_keys())
    if changes:
        raise UserError(
            f"--resume {folder}: this run was made with other values ({_few(changes)}); only "
            f"{', '.join(may_change_on_resume())} may change. Undo that, or start a new run"
        )
    return RunDirectory(folder)


def check_identity(
    directory: RunDirectory, identity: Identity, accept_changes: bool, note: Callable[[str], object]
) -> None:
    """Raise UserError where the inputs of an earlier run differ from the present ones.

    Data and generator: always.  Code, versions and device: unless accept_changes; then `note` is called with them.
    """
    before = directory.identity()
    inputs = identity.changed_inputs(before)
    if inputs:
        raise UserError(
            f"--resume: {_list(inputs)} changed since {directory.path.name} was started; put back what was there, or "
            "start a new run"
        )
    code = identity.changed_code(before)
    if code and not accept_changes:
        raise UserError(
            f"--resume: {_list(code)} changed since {directory.path.name} was started, so its result may not be that "
            "of one run; put back what was there, start a new run, or go on all the same with --accept-changes"
        )
    if code:
        note(f"{_list(code)} changed after round {rounds_done(directory)} (--accept-changes)")


def _few(changes: list[str]) -> str:
    return ", ".join(changes[:MOST_SHOWN]) + (f" and {len(changes) - MOST_SHOWN} more" if changes[MOST_SHOWN:] else "")


def _list(items: list[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _closest(root: Path, now: dict[str, Any], name: str) -> tuple[Path, list[str]] | None:
    """The earlier run with the fewest different keys, and these; of equals one of this name, then the newest."""
    runs = []
    for path in root.glob("*/run.json"):
        before = _result_keys(path.parent)
        if before is not None:
            changes = differences(before, now)
            has_name = path.parent.name.startswith(f"{folder_name(name)}-")
            runs.append((len(changes), not has_name, -path.stat().st_mtime_ns, path.parent, changes))
    return min(runs)[3:] if runs else None


def _result_keys(run: Path) -> dict[str, Any] | None:
    """The keys on which the results of an earlier run depend; None where its files cannot be read."""
    try:
        kept = json.loads((run / "run.json").read_bytes()).get("result_keys")
        return dict(kept) if kept is not None else load_config(run / "config.yaml").result_keys()
    except (OSError, ValueError, TypeError, AttributeError, UserError):
        return None


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`key: value before -> value now` of each key that differs; a key that one of them lacks is `unset` there."""
    return [
        f"{key}: {_shown(before, key)} -> {_shown(now, key)}"
        for key in {**before, **now}
        if (key in before) != (key in now) or before.get(key) != now.get(key)
    ]


def _shown(keys: dict[str, Any], key: str) -> str:
    return json.dumps(keys[key]) if key in keys else "unset"


def rounds_done(directory: RunDirectory) -> int:
    """How many rounds a run has finished, by its summary or its newest checkpoint; 0 if it has neither."""
    summary = directory.summary()
    return max(newest(directory.checkpoints) or 0, summary["rounds"] if summary else 0)


def is_finished(directory: RunDirectory, rounds: int) -> bool:
    """Whether the run has done that many rounds and written everything; UserError where its summary is damaged."""
    summary = directory.summary()
    return summary is not None and summary["rounds"] >= rounds
