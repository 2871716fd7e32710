"""The runs in an output folder, found by what they compute."""

import json
from collections.abc import Callable
from pathlib import Path

from raysim.lifecycle.directory import RunDirectory


class RunIndex:
    """The runs of a folder by the hash of their configuration; the folder is read once, later runs are added by `add`.

    say: called with a note on each run.json that cannot be read; its run is left out.
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
        """Add a run that was begun, or continued, since the folder was read."""
        content = directory.identity()
        entries = self._found.setdefault(content["config_hash"], [])
        entries[:] = [entry for entry in entries if entry[1] != directory.path]
        entries.append(((directory.path / "run.json").stat().st_mtime_ns, directory.path))
