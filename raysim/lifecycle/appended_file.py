"""A file that grows during a run: a checkpoint records how long it was at that time, and a checksum of that part."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class FileDamaged(Exception):
    """A file does not have the content that a checkpoint recorded."""


@dataclass(frozen=True)
class Mark:
    """How much of a file belongs to a checkpoint: its first `size` bytes, with this sha256."""

    size: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class AppendedFile:
    """A file of which the first `size` bytes count; what a crash has left after them is dropped by the next append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digest = hashlib.sha256()

    def mark(self) -> Mark:
        """The mark of the present content."""
        return Mark(self.size, self._digest.hexdigest())

    def go_back(self, mark: Mark) -> None:
        """Take the content up to a mark for the present one.

        Raises FileDamaged where the file is missing or shorter, or differs before the mark.
        """
        digest = hashlib.sha256()
        if mark.size:
            if not self.path.is_file() or self.path.stat().st_size < mark.size:
                raise FileDamaged(f"{self.path} is missing or cut short")
            with self.path.open("rb") as file:
                while block := file.read(min(mark.size - file.tell(), 1 << 20)):
                    digest.update(block)
            if digest.hexdigest() != mark.sha256:
                raise FileDamaged(f"the checksum of {self.path} does not match")
        self.size = mark.size
        self._digest = digest

    def append(self, parts: Iterable[bytes]) -> None:
        """Append bytes and force them to the disk.

        Raises OSError, which names the file; its content is then as before.
        """
        size = self.size
        digest = self._digest.copy()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.truncate(self.size)
                for part in parts:
                    file.write(part)
                    digest.update(part)
                    size += len(part)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self.size)
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error
        self.size = size
        self._digest = digest
