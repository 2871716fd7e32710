"""Signals that end a run, turned into an exception."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM reached the driver."""


@contextlib.contextmanager
def interruptible(signals: list[str]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into Interrupted for the time of a run (in the main thread, where signals arrive).

    Their names are also kept: an exception that is raised inside somebody's destructor is lost, the list is not.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        signals.append(signal.Signals(number).name)
        raise Interrupted(f"by {signals[0]}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
