"""What clients keep between rounds, on disk: a checkpoint appends the states that changed since the one before.

A file is a sequence of records: the number of a client, a length, and the client's arrays as safetensors; of several
records of one client the last one counts.  A checkpoint records how long the file was, and a checksum of that part.
When more than half of a file is out of date, a new file with the present states takes its place; the old one is deleted
when no checkpoint refers to it any more.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raysim.core.plain import PlainDict, PlainMapping
from raysim.engine.object_store import get, put
from raysim.federation.state import ClientStates
from raysim.lifecycle.appended_file import AppendedFile, Mark

_HEAD = struct.Struct("<qq")  # number of the client, bytes of its arrays
_NAME = "clients-{:06d}.states"


class ClientFile:
    """The newest file of client states in the folder of a run's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: AppendedFile | None = None
        self._written: dict[int, Any] = {}  # the reference of each client's state on disk
        self._bytes: dict[int, int] = {}  # the size of its record

    def write(self, round_: int, states: ClientStates) -> PlainDict:
        """Append the states that differ from those on disk; returns the mark of the file for a checkpoint.

        The mark is empty where no client keeps anything.  Raises OSError; what earlier checkpoints refer to is intact.
        """
        now = dict(states.items())
        changed = {k: ref for k, ref in now.items() if self._written.get(k) != ref}
        live = sum(self._bytes.values())
        replaced = sum(self._bytes.get(k, 0) for k in changed)
        if changed and (self._file is None or self._file.size - live + replaced > live):
            self._begin(AppendedFile(self._folder / _NAME.format(round_)))
            changed = now
        if self._file is None:
            return {}
        if changed:
            sizes: dict[int, int] = {}
            self._file.append(_records(changed, sizes))
            self._written.update(changed)
            self._bytes.update(sizes)
        return {"file": self._file.path.name, **vars(self._file.mark())}

    def read(self, mark: PlainMapping) -> ClientStates:
        """Read the states of a checkpoint's mark and put them into the object store; later writes append to its file.

        Raises FileDamaged where the file is missing or shorter, or differs before the mark.
        """
        from safetensors.numpy import load

        if not mark:
            self._begin(None)
            return ClientStates()
        found = AppendedFile(self._folder / str(mark["file"]))
        found.go_back(Mark(mark["size"], mark["sha256"]))
        self._begin(found)
        newest: dict[int, int] = {}  # where the arrays of each client's last record begin
        with found.path.open("rb") as file:
            while file.tell() < found.size:
                client, length = _HEAD.unpack(file.read(_HEAD.size))
                newest[client] = file.tell()
                self._bytes[client] = _HEAD.size + length
                file.seek(length, os.SEEK_CUR)
            for client, start in newest.items():
                file.seek(start)
                self._written[client] = put(load(file.read(self._bytes[client] - _HEAD.size)))
        return ClientStates(dict(self._written))

    def prune(self, marks: Iterable[PlainMapping]) -> None:
        """Delete the files to which none of these marks refers.  Raises OSError."""
        named = {mark.get("file") for mark in marks}
        for path in self._folder.glob("clients-*.states"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _begin(self, file: AppendedFile | None) -> None:
        self._file = file
        self._written = {}
        self._bytes = {}


def _records(states: Mapping[int, Any], sizes: dict[int, int]) -> Iterator[bytes]:
    """The record of each client, whose size is put into `sizes`."""
    from safetensors.numpy import save

    for client, ref in states.items():
        arrays = save(_contiguous(get(ref)))
        sizes[client] = _HEAD.size + len(arrays)
        yield _HEAD.pack(client, len(arrays)) + arrays


def _contiguous(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in C order: safetensors writes memory in its present order."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}
