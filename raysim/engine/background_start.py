"""Ray starts, and its workers load torch, while the driver does something else."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from raysim.config.schema import Resources
from raysim.core.signals import Signals
from raysim.engine.pool import Pool
from raysim.engine.session import Session, starts_here


class BackgroundStart:
    """The Ray session of a run: one that the caller gives, or a new one that may start before it is needed.

    A context manager, which ends a session that it started. A Ray on this machine is started by a thread; a cluster is
    joined by the main thread, when the session is asked for.  alone: whether the session serves this run only.
    """

    def __init__(self, signals: Signals, given: Session | None = None) -> None:
        self.alone = given is None
        self._signals = signals
        self._given = given
        self._stack = contextlib.ExitStack()
        self._started: Future[Session] | None = None
        self._over = threading.Event()

    def begin(
        self, resources: Resources, equip: Callable[[Pool], None] = lambda _: None, workers: Resources | None = None
    ) -> None:
        """Start Ray and the workers in the background, if Ray is to be started here at all.

        equip: called in that thread with the new pool of workers, to send them what they need before anything else.
        workers: the resources of the workers that are started; None: those that Ray is started for.
        """
        if self._given is not None or not starts_here(resources):
            return
        self._started = Future()
        told = resources, workers or resources, equip, self._started, self._over
        thread = threading.Thread(target=_hold, args=told, daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._over.set)

    def session(self, resources: Resources) -> Session:
        """Wait until the session has started, and return it.  Raises UserError or RunError if it did not start."""
        if self._given is not None:
            return self._given
        if self._started is None:
            return self._stack.enter_context(Session(resources))
        return self._started.result()

    def listen(self) -> None:
        """Hear signals again, for Ray installs a handler of its own for SIGTERM when it starts or is joined."""
        self._signals.listen()

    def let_go(self) -> None:
        """End a Ray that was started in the background, there; the end of this context waits for it."""
        self._over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._signals.held():  # a Ray that is still starting is waited for: it cannot be stopped half-way
            self._stack.close()


def _hold(
    resources: Resources, workers: Resources, equip: Callable[[Pool], None], started: "Future[Session]",
    over: threading.Event,
) -> None:
    """Open a session and its workers, call `equip` with them, and close the session when `over` is set.

    One thread does all of this, and runs as long as the session: the operating system ends Ray's processes together
    with the thread that started them.
    """
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(Session(resources, over.is_set))
            equip(session.pool(workers))
        except Exception as error:  # noqa: BLE001 - raised by `session`, in the thread that can act on it
            started.set_exception(error)
            return
        started.set_result(session)
        over.wait()
