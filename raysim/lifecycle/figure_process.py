"""Figures of runs drawn in a process of its own, which takes what the workers leave of the processors."""

import contextlib
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from raysim.core.process import NICENESS, end_beside, start_beside
from raysim.lifecycle.figures import RunFigures


class FigureProcess:
    """The process, which starts when it is needed and keeps matplotlib loaded; a context manager, which ends it."""

    def __init__(self) -> None:
        self._started: tuple[subprocess.Popen[bytes], Connection] | None = None

    def draw(self, figures: RunFigures, folder: Path) -> None:
        """Draw figures as `RunFigures.draw` does, and wait for them; where the process has died, here.

        Raises what drawing raises, such as OSError for a disk that refuses a file.
        """
        if self._started is None:
            self._started = start_beside("raysim.lifecycle.figure_process")
        pipe = self._started[1]
        try:
            pipe.send((figures, folder))
            error = pipe.recv()
        except (EOFError, OSError):
            figures.draw(folder)
            return
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process after what it draws."""
        if self._started is None:
            return
        process, pipe = self._started
        self._started = None
        pipe.close()
        end_beside(process)


def serve(pipe: Connection) -> None:
    """Draw what is asked for until the other end of the connection is closed."""
    os.nice(NICENESS)
    while True:
        try:
            figures, folder = pipe.recv()
        except EOFError:
            return
        error = None
        try:
            figures.draw(folder)
        except Exception as raised:  # noqa: BLE001 - raised where it was asked for
            error = raised
        with contextlib.suppress(OSError):  # nobody waits for the answer any more
            pipe.send(error)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
