"""The ends of a sweep's runs, each carried out while the next run goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self


class Endings:
    """A thread that carries out the end of one run after another; a context manager, which waits for the last one.

    At most one goes on at a time, so that runs which are shorter than their ends do not pile up.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "end of a run")
        self._added: list[Future[None]] = []

    def add(self, end: Callable[[], None]) -> None:
        """Carry out the end of a run in the thread, after waiting for the one before."""
        wait(self._added)
        self._added.append(self._thread.submit(end))

    def check(self) -> None:
        """Raise what an end has raised, if one has."""
        for ended in [future for future in self._added if future.done()]:
            self._added.remove(ended)
            ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self.check()
