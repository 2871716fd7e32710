"""What clients keep between rounds, on disk: a checkpoint appends the states that changed since the one before.

A file is a sequence of records: the number of a client, a length, and the client's arrays as safetensors; of several
records of one client the last one counts.  A checkpoint records how long the file was, and a checksum of that part.
When more than half of a file is out of date, a new file with the present states takes its place; the old one is deleted
when no checkpoint refers to it any more.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raysim.core.plain import PlainDict, PlainMapping
from raysim.engine.object_store import get, put
from raysim.federation.state import ClientStates

_HEAD = struct.Struct("<qq")  # number of the client, bytes of its arrays
_NAME = "clients-{:06d}.states"


class ClientFileDamaged(Exception):
    """A file of client states does not have the content that a checkpoint recorded."""


class ClientFile:
    """The newest file of client states in the folder of a run's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._size = 0
        self._digest = hashlib.sha256()
        self._written: dict[int, Any] = {}  # the reference of each client's state on disk
        self._bytes: dict[int, int] = {}  # the size of its record

    def write(self, round_: int, states: ClientStates) -> PlainDict:
        """Append the states that differ from those on disk; returns the mark of the file for a checkpoint.

        The mark is empty where no client keeps anything.  Raises OSError; what earlier checkpoints refer to is intact.
        """
        now = dict(states.items())
        changed = {k: ref for k, ref in now.items() if self._written.get(k) != ref}
        live = sum(self._bytes.values())
        stale = self._size - live + sum(self._bytes.get(k, 0) for k in changed)
        if changed and (self._path is None or stale > live):
            self._begin(self._folder / _NAME.format(round_))
            changed = now
        if changed:
            self._append(changed)
        if self._path is None:
            return {}
        return {"file": self._path.name, "size": self._size, "sha256": self._digest.hexdigest()}

    def read(self, mark: PlainMapping) -> ClientStates:
        """Read the states of a checkpoint's mark and put them into the object store; later writes append to its file.

        Raises ClientFileDamaged where the file is missing or shorter, or differs before the mark.
        """
        from safetensors.numpy import load

        if not mark:
            self._begin(None)
            return ClientStates()
        path = self._folder / str(mark["file"])
        size = int(mark["size"])
        digest = hashlib.sha256()
        if not path.is_file() or path.stat().st_size < size:
            raise ClientFileDamaged(f"{path} is missing or cut short")
        with path.open("rb") as file:
            while block := file.read(min(size - file.tell(), 1 << 20)):
                digest.update(block)
            if digest.hexdigest() != mark["sha256"]:
                raise ClientFileDamaged(f"the checksum of {path} does not match")
            self._begin(path)
            newest: dict[int, int] = {}  # where the arrays of each client's last record begin
            file.seek(0)
            while file.tell() < size:
                client, length = _HEAD.unpack(file.read(_HEAD.size))
                newest[client] = file.tell()
                self._bytes[client] = _HEAD.size + length
                file.seek(length, os.SEEK_CUR)
            for client, start in newest.items():
                file.seek(start)
                self._written[client] = put(load(file.read(self._bytes[client] - _HEAD.size)))
        self._size = size
        self._digest = digest
        return ClientStates(dict(self._written))

    def prune(self, marks: Iterable[PlainMapping]) -> None:
        """Delete the files to which none of these marks refers.  Raises OSError."""
        named = {mark.get("file") for mark in marks}
        for path in self._folder.glob("clients-*.states"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _begin(self, path: Path | None) -> None:
        self._path = path
        self._size = 0
        self._digest = hashlib.sha256()
        self._written = {}
        self._bytes = {}

    def _append(self, changed: Mapping[int, Any]) -> None:
        from safetensors.numpy import save

        assert self._path is not None
        digest = self._digest.copy()
        sizes = {}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.truncate(self._size)  # a crash may have left more
                for client, ref in changed.items():
                    arrays = save(_contiguous(get(ref)))
                    record = _HEAD.pack(client, len(arrays)) + arrays
                    file.write(record)
                    digest.update(record)
                    sizes[client] = len(record)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._path, self._size)
            raise OSError(error.errno, error.strerror or str(error), str(self._path)) from error
        self._size += sum(sizes.values())
        self._digest = digest
        self._written.update(changed)
        self._bytes.update(sizes)


def _contiguous(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in C order: safetensors writes memory in its present order."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}
