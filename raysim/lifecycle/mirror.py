"""A copy of each run's folder at another place (`output.mirror`), where it outlives the machine of the driver."""

import contextlib
import json
import os
import queue
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from raysim.config.schema import Output
from raysim.core.errors import DiskError, UserError
from raysim.core.files import FULL, cannot_write
from raysim.core.persistent import persistent_path
from raysim.core.plain import PlainDict
from raysim.core.secrets import without_secrets
from raysim.lifecycle.find_runs import RunIndex

FINISH_S = 120.0  # how long the end of a run waits for the last files,
SAY_AFTER_S = 2.0  # and after how long it says so
_CHECKPOINTS = "checkpoints/"
_WITH_FOLDERS = {"file", "local", "sftp", "ssh", "smb"}  # kinds of places where a folder has to be made first


class Mirror:
    """Copies what changes in the folder of a run to a place, under the same names, in a thread of its own.

    No method raises because of the place: `problem` says what it lacks, and is empty where it lacks nothing.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.problem = ""
        self._address = address
        self._shown = f"output.mirror = {without_secrets(address)}"
        self._folder = folder
        self._place: _Place | None = None
        self._there: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Have what has changed copied; returns at once."""
        self._asked.put(True)

    def finish(self, say: Callable[[str], object] = lambda _: None, wait_s: float = FINISH_S) -> None:
        """Have what has changed copied, and wait for it, at most `wait_s`; the last call.  say: told of a long wait."""
        self._asked.put(True)
        self._asked.put(False)
        self._thread.join(min(wait_s, SAY_AFTER_S))
        if self._thread.is_alive():
            say(f"waiting up to {wait_s:g} s for the last files to be copied to {self._shown}")
            self._thread.join(wait_s - min(wait_s, SAY_AFTER_S))
        if self._thread.is_alive():
            late = f"not every file had been copied after {wait_s:g} s"
            self.problem = f"{self._shown}: {late}; all of them are in {self._folder}"

    def _work(self) -> None:
        while self._asked.get():
            try:
                self._copy()
                self.problem = ""
            except Exception as error:  # noqa: BLE001 - each kind of place has a library of its own, with own errors
                cause = f"cannot be written ({_cause(error, self._address)})"
                self.problem = f"{self._shown}: {cause}; what is missing there is in {self._folder}"

    def _copy(self) -> None:
        """Copy what has changed.

        What is listed before anything is copied refers to what is copied before it: first the history and all else,
        then the arrays of checkpoints, then their JSON files; what is no longer here is deleted last, unless something
        else went meanwhile: there is then always a checkpoint that is complete.
        """
        name = self._folder.name
        if self._place is None:
            self._place = _Place(self._address)
            self._there = {file.removeprefix(f"{name}/") for file in self._place.files(name)}
        here = _files(self._folder)
        vanished = False
        for file in sorted(here, key=lambda file: (file.startswith(_CHECKPOINTS), file.endswith(".json"), file)):
            if self._sent.get(file) == here[file]:
                continue
            try:
                self._place.put(self._folder / file, f"{name}/{file}")
            except FileNotFoundError:
                if (self._folder / file).exists():
                    raise
                vanished = True  # a checkpoint that is old by now
                continue
            self._sent[file] = here[file]
            self._there.add(file)
        old = [] if vanished else [file for file in self._there if file.startswith(_CHECKPOINTS) and file not in here]
        for file in old:
            self._place.delete(f"{name}/{file}")
            self._there.discard(file)
            self._sent.pop(file, None)


def check_mirror(address: str | None, output_dir: str) -> None:
    """Write to the place and delete it again; UserError where that fails, or the place is the folder of the runs."""
    if address is None:
        return
    try:
        place = _Place(address)
        if place.is_folder(persistent_path(output_dir)):
            raise ValueError("that is output.dir itself")
        with tempfile.NamedTemporaryFile() as probe:
            name = f".raysim-{secrets.token_hex(8)}"
            place.put(Path(probe.name), name)
            place.delete(name)
    except Exception as error:  # each kind of place has a library of its own, with errors of its own
        raise UserError(
            f"output.mirror = {address}: cannot be written ({_cause(error, address)}); check the address, and what "
            "this machine may write there, or leave output.mirror out"
        ) from error


def gather(output: Output, hashes: Collection[str], say: Callable[[str], object] = lambda _: None) -> RunIndex:
    """The runs in `output.dir`, with those of these configurations that so far only `output.mirror` had.

    hashes: of the configurations.  say: gets notes on damaged runs and on those that are fetched.  Raises UserError
    where the mirror cannot be read.
    """
    root = persistent_path(output.dir)
    index = RunIndex(root, say)
    lacking = {one for one in hashes if not index.of(one)}
    if output.mirror is None or not lacking:
        return index
    fetch(output.mirror, root, lacking, say)
    return RunIndex(root)


def fetch(address: str, root: Path, hashes: Collection[str], say: Callable[[str], object]) -> None:
    """Copy runs from the place into the folder `root`: of each of these configurations the newest, unless it is there.

    hashes: of the configurations.  say: called with a line on each run.  Raises UserError where the place, or a file
    that belongs to such a run, cannot be read, and DiskError where `root` has no room.
    """
    try:
        place = _Place(address)
        newest: dict[str, str] = {}
        for name, identity in place.runs():
            found = str(identity.get("config_hash"))
            if found in hashes and _stamp(name) >= _stamp(newest.get(found, "")):
                newest[found] = name
        for name in newest.values():
            if not (root / name).exists():
                say(f"fetching {name} from {without_secrets(address)}")
                _fetch(place, name, root)
    except Exception as error:  # each kind of place has a library of its own, with errors of its own
        if isinstance(error, OSError) and error.errno in FULL:
            raise DiskError(cannot_write(root, error)) from error
        raise UserError(
            f"output.mirror = {address}: cannot be read ({_cause(error, address)}); check the address, and what "
            "this machine may read there, or leave output.mirror out"
        ) from error


def _fetch(place: "_Place", name: str, root: Path) -> None:
    """Copy a run; its folder appears once it is complete."""
    partial = root / f".{name}.{os.getpid()}.part"
    try:
        # run.json comes last: without it, what a killed process leaves is not taken for a run.
        for file in sorted(place.files(name), key=lambda file: file == f"{name}/run.json"):
            target = partial / file.removeprefix(f"{name}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            place.get(file, target)
        (partial / "figures").mkdir(exist_ok=True)
        partial.replace(root / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stamp(name: str) -> str:
    """When a run was begun, by the name of its folder."""
    found = re.search(r"\d{8}-\d{6}", name)
    return found[0] if found else ""


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """The files of a run and what changes when one does, without those that a writer is not done with."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or path.suffix == ".arrays":
            continue
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[name.as_posix()] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def _cause(error: Exception, address: str) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return without_secrets(" ".join(str(error).split()), address)[:300] or type(error).__name__


class _Place:
    """A folder that fsspec can reach; names in it are relative, with slashes."""

    def __init__(self, address: str) -> None:
        import fsspec

        whole = address if "://" in address else str(persistent_path(address))
        system, root = fsspec.core.url_to_fs(whole)
        self._system: Any = system  # fsspec has no types
        self._root: str = root.rstrip("/")
        self._protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)

    def is_folder(self, path: Path) -> bool:
        """Whether the place is this folder of this machine."""
        return bool(self._protocols & {"file", "local"}) and Path(self._root).resolve() == path.resolve()

    def put(self, source: Path, name: str) -> None:
        """Copy a file there; a reader finds the old one or the new one, where the place can do that."""
        target = f"{self._root}/{name}"
        if not self._protocols & _WITH_FOLDERS:
            self._system.put_file(str(source), target)
            return
        self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
        partial = f"{target}.part"
        self._system.put_file(str(source), partial)
        self._system.mv(partial, target)

    def get(self, name: str, target: Path) -> None:
        """Copy a file here."""
        self._system.get_file(f"{self._root}/{name}", str(target))

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def files(self, folder: str) -> list[str]:
        """The names of the files in and below a folder; none where there is no such folder."""
        self._system.invalidate_cache()
        found = self._system.find(f"{self._root}/{folder}")
        return [self._relative(path) for path in found if not path.endswith(".part")]

    def runs(self) -> list[tuple[str, PlainDict]]:
        """(name of its folder, content of its run.json) of each run whose run.json can be read."""
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(self._root, detail=True)  # no glob: the address may have brackets in it
        except FileNotFoundError:
            return []
        found = []
        for folder in (entry["name"] for entry in entries if entry["type"] == "directory"):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, ValueError):
                content = json.loads(self._system.cat_file(f"{folder.rstrip('/')}/run.json"))
                if isinstance(content, dict):
                    found.append((self._relative(folder).strip("/"), content))
        return found

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")
