"""A disk that is full, for tests: any write of this process can be the one that fails."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any


class Disk:
    """A folder on a disk that is full from the n-th write on, or at that one alone.

    A write is a file that is renamed into place, one that is opened in its place to be written, or a new folder.
    """

    def __init__(self) -> None:
        self.folder = ""
        self.left = 0
        self.only_once = False
        self.refused: list[str] = []
        self.seen: list[str] = []
        sys.addaudithook(self._event)  # which Python never takes away again: without a folder it does nothing

    def full_after(self, folder: Path, writes: int, only_once: bool) -> None:
        self.folder, self.left, self.only_once, self.refused, self.seen = str(folder), writes, only_once, [], []

    def emptied(self) -> None:
        self.folder = ""

    def watch(self, folder: Path) -> None:
        """Only note what is written there, for `seen` and `ends`."""
        self.full_after(folder, sys.maxsize, only_once=True)

    def ends(self) -> list[int]:
        """The numbers of the first and the last write of each file; names that differ by a number count as one."""
        of_file: dict[str, list[int]] = {}
        for n, path in enumerate(self.seen):
            of_file.setdefault(re.sub(r"[0-9a-f]{16,}|\d+", "*", Path(path).name), []).append(n)
        return sorted({n for numbers in of_file.values() for n in (numbers[0], numbers[-1])})

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder or event not in ("open", "os.rename", "os.mkdir", "os.truncate"):
            return
        path = str(arguments[1] if event == "os.rename" else arguments[0])
        if not path.startswith(self.folder) or (event == "open" and not self._is_write(path, arguments[2])):
            return
        if event == "os.mkdir" and Path(path).is_dir():
            return
        self.seen.append(path)
        self.left -= 1
        if self.left < 0 and not (self.only_once and self.refused):
            self.refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @staticmethod
    def _is_write(path: str, flags: int) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR)) and not path.endswith(".tmp")


def names_of(path: str) -> list[str]:
    """How a message may name a file: arrays of a checkpoint by their round, a new folder by the one that it is in."""
    name = re.sub(r"(round-\d+)[-.].*", r"\1", Path(path).name)
    return [name, *([] if "." in name.removesuffix(".seg") else [str(Path(path).parent)])]
