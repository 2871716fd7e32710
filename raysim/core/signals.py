"""Signals that end a run, turned into an exception."""

import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

from raysim.core.errors import WithoutTrace

AGAIN_S = 0.05  # seconds between checks whether an import that a signal interrupted has ended
_P = ParamSpec("_P")
_R = TypeVar("_R")
_CAUGHT = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Interrupted(WithoutTrace, KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP reached the driver."""


@dataclass
class Signals:
    """Turns SIGINT, SIGTERM and SIGHUP into Interrupted while it is entered (in the main thread, where signals arrive).

    names: the signals so far.  They are kept because an exception that is raised inside a destructor is lost.
    ending: signals are only noted, since the run is ending and its last steps must be completed.

    A signal that arrives in the middle of an import is raised at the end of the import: an interrupted import may hide
    the exception, or keep a lock for which all other threads would wait forever.  A SIGHUP that is ignored, as under
    nohup, stays ignored.
    """

    names: list[str] = field(default_factory=list)
    ending: bool = False
    _before: dict[int, Any] = field(default_factory=dict)  # handlers by signal, whose type only typeshed names
    _put_off: set[int] = field(default_factory=set)
    _imports: int = 0

    def __enter__(self) -> Self:
        self._imports = _imports(inspect.currentframe())
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def listen(self) -> None:
        """Install the handlers, or install them again where another took their place, as Ray does for SIGTERM."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _CAUGHT:
            handler = signal.getsignal(number)
            if handler is None or (number not in (signal.SIGINT, signal.SIGTERM) and handler == signal.SIG_IGN):
                continue
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, Signals) and outer is not self:
                self.names = outer.names  # a signal that arrived before, and was lost, is raised by the next `check`
            self._before.setdefault(number, handler)
            signal.signal(number, self._arrived)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.names:
            raise Interrupted(f"by {self.names[0]}")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals: one that arrives inside this context is raised at its end.

        A write to a database that is interrupted may leave it locked, even for this process itself.
        """
        before = self.ending
        self.ending = True
        try:
            yield
        finally:
            self.ending = before
        if not self.ending:
            self.check()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if number in self._put_off:
            self._put_off.discard(number)
        else:
            self.names.append(signal.Signals(number).name)
        if self.ending:
            return
        if _imports(frame) <= self._imports:
            self.check()
        again = threading.Timer(AGAIN_S, self._send_again, (number,))
        again.daemon = True
        again.start()

    def _send_again(self, number: int) -> None:
        """Send the signal again, to its present handler, unless this context has been left."""
        if self._before:
            if signal.getsignal(number) == self._arrived:
                self._put_off.add(number)
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # which wakes it from any wait


def stoppable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that Ctrl-C stops without harm to what it imports, as `Signals` says: what the user calls from Python.

    An import of Ray or torch that is cut short leaves the process, such as the kernel of a notebook, without them.
    """

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with Signals() as signals:
            result = function(*args, **kwargs)
            signals.check()
        return result

    return guarded


def _imports(frame: FrameType | None) -> int:
    """How many steps of imports are under way in this frame and those that called it."""
    steps = 0
    while frame is not None:
        steps += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return steps
