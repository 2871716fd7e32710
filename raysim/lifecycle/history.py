"""The record of a run's rounds, appended to files during the run: its cost does not grow with the number of rounds.

A file is a sequence of arrays in numpy's own format, one after another; each has the rows of some rounds, with one
field per column. A checkpoint records how long each file was at that time, and a checksum of that part. A resumed run
truncates the files to that length, so rounds that are done again are never recorded twice.
"""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysim.core.records import ClientTable
from raysim.lifecycle.appended_file import AppendedFile, Mark

if TYPE_CHECKING:
    import pandas as pd

MOST_PENDING = 20_000
"""Rows that may wait in memory for the next checkpoint; more are written at once."""


class RowFile:
    """One file of rows, written in blocks of columns."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)
        self._pending: list[ClientTable] = []
        self._rows = 0

    def cut(self, mark: Mark) -> None:
        """Truncate the file to a mark.  Raises FileDamaged where the file is shorter, or differs before the mark."""
        self._file.go_back(mark)
        if self._file.path.exists():
            os.truncate(self._file.path, mark.size)
        self._pending = []
        self._rows = 0

    def append(self, columns: ClientTable) -> None:
        """Append rows, given as columns of equal length.  Raises OSError where many wait and cannot be written."""
        self._pending.append(columns)
        self._rows += len(next(iter(columns.values())))
        if self._rows > MOST_PENDING:
            self.flush()

    def flush(self) -> Mark:
        """Write the rows that wait; returns the mark of the file's present length.

        Raises OSError; the rows then still wait, and are written the next time.
        """
        if self._pending:
            block = io.BytesIO()
            np.save(block, _joined(self._pending), allow_pickle=False)
            self._file.append([block.getvalue()])
            self._pending = []
            self._rows = 0
        return self._file.mark()

    def frame(self) -> "pd.DataFrame":
        """Read all rows, written or waiting, as a table; where a row lacks a column, it has nan."""
        import pandas as pd

        blocks: list[NDArray[Any]] = []
        if self._file.size:
            with self._file.path.open("rb") as file:
                while file.tell() < self._file.size:
                    blocks.append(np.load(file, allow_pickle=False))
        if self._pending:
            blocks.append(_joined(self._pending))
        frames = [pd.DataFrame({name: block[name] for name in block.dtype.names or ()}) for block in blocks]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


class History:
    """The history of a run: metrics, one row per round, and clients, one row per participant and round."""

    def __init__(self, folder: Path) -> None:
        self.metrics = RowFile(folder / "metrics.npy")
        self.clients = RowFile(folder / "clients.npy")

    def append(self, metrics: Mapping[str, float], clients: ClientTable) -> None:
        """Append a finished round; `clients` is empty where none took part.

        Raises OSError where many rows wait and cannot be written.
        """
        self.metrics.append({name: np.array([value]) for name, value in metrics.items()})
        if clients:
            self.clients.append(clients)

    def flush(self) -> dict[str, dict[str, Any]]:
        """Write the rows that wait; returns the marks for a checkpoint, as plain data.  Raises OSError."""
        return {name: vars(file.flush()) for name, file in self._files()}

    def cut(self, marks: Mapping[str, Mapping[str, Any]]) -> None:
        """Truncate the files to a checkpoint's marks; without marks, empty them.  Raises FileDamaged."""
        for name, file in self._files():
            file.cut(Mark(**marks[name]) if name in marks else Mark())

    def _files(self) -> Sequence[tuple[str, RowFile]]:
        return ("metrics", self.metrics), ("clients", self.clients)


def _joined(tables: Sequence[ClientTable]) -> NDArray[Any]:
    """The columns of several rounds as one array with one field per column; numbers that a round lacks are nan."""
    names = list(dict.fromkeys(name for table in tables for name in table))
    lengths = [len(next(iter(table.values()))) for table in tables]
    columns = {}
    for name in names:
        missing = [np.full(n, np.nan) for n in lengths]
        columns[name] = np.concatenate([table.get(name, nan) for table, nan in zip(tables, missing, strict=True)])
    block = np.empty(sum(lengths), dtype=[(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        block[name] = column
    return block
