"""The runs in an output folder, found by what they compute."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysim.lifecycle.directory import RunDirectory


class RunIndex:
    """The runs of a folder by the hash of their configuration: read once, and told of what is added.

    say: is told of each run.json that cannot be read, whose run is passed over.
    """

    def __init__(self, output_dir: Path, say: Callable[[str], object] = lambda _: None) -> None:
        self._found: dict[str, list[tuple[int, Path]]] = {}
        for path in sorted(Path(output_dir).glob("*/run.json")):
            try:
                content = json.loads(path.read_bytes())
                entry = path.stat().st_mtime_ns, path.parent
                self._found.setdefault(content["config_hash"], []).append(entry)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except (OSError, ValueError, TypeError, KeyError):
                say(f"note: {path} is damaged, so the run {path.parent.name} is passed over")

    def of(self, config_hash: str) -> list[RunDirectory]:
        """The runs of a configuration, the newest first."""
        return [RunDirectory(path) for _, path in sorted(self._found.get(config_hash, []), reverse=True)]

    def add(self, directory: RunDirectory) -> None:
        """Note a run that was begun, or gone on with, since the folder was read."""
        content: dict[str, Any] = directory.read_json("run.json")
        entries = self._found.setdefault(content["config_hash"], [])
        entries[:] = [entry for entry in entries if entry[1] != directory.path]
        entries.append(((directory.path / "run.json").stat().st_mtime_ns, directory.path))
