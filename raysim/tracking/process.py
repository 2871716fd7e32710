"""MLflow in a process of its own, which loads it, for some seconds, while the driver loads everything else."""

import contextlib
import functools
import os
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from raysim.core.process import NICENESS, end_beside, start_beside
from raysim.core.secrets import without_secrets
from raysim.tracking.mlflow_run import load_mlflow
from raysim.tracking.tracker import NullTracker, Status, Tracker, check_uri

_EXPERIMENT_END = 2  # the first arguments of `Tracker.start` are the address and the experiment,
_DIRECTORY = 6  # and this is the place of the run's folder
ABANDON = "abandon"  # the question that takes back a start which nobody waits for any more
GATHER_S = 2.0  # seconds for which rounds wait to be written together
MOST_OWED = 64  # answers that may be outstanding; what they take lies in the connection until it is read
_LEFT_OUT = ("numpy", "pandas", "pyarrow")  # without them, as in its skinny package, MLflow loads in half the time


def start_tracker(process: "MlflowProcess | None", *arguments: Any) -> NullTracker:  # Any: those of `Tracker.start`
    """Call `Tracker.start(*arguments)`, in the given process if there is one; returns the tracker."""
    return Tracker.start(*arguments) if process is None else _Remote(process, arguments)


class MlflowProcess:
    """The process, which begins to load MLflow at once, and the connection to it; a context manager, which ends it.

    It serves several runs at a time, each by a number of its own, and each from a thread of its own if need be: the end
    of one run goes on while the next one begins.  Signals that a terminal sends do not reach it; it ends with the
    driver.  Once a run has begun, it takes what the workers leave of the processors.
    """

    def __init__(self) -> None:
        self._asked = False
        self._runs = 0
        self._owed: Counter[int] = Counter()  # answers that have not been read, by run
        self._come: defaultdict[int, deque[Any]] = defaultdict(deque)  # those that another thread has received
        self._turn = threading.Condition()
        self._receiving = False
        self._sending = threading.Lock()
        self._begun: set[tuple[object, ...]] = set()
        self._process, self._pipe = start_beside("raysim.tracking.process")

    def next_run(self) -> int:
        """The number of a new run."""
        self._runs += 1
        return self._runs

    def is_known(self, *store: object) -> bool:
        """Whether a run has begun in this store (its address, the experiment) before."""
        return store in self._begun

    def remember(self, *store: object) -> None:
        """Know a store in which a run has begun."""
        self._begun.add(store)

    def ask(self, run: int, *question: object) -> Any:  # the answer is a tuple of what `serve` sends
        """Send a question of a run and wait for the answer.  Raises EOFError or OSError if the process has ended."""
        self.send(run, *question)
        return self.answers(run)[-1]  # those of a question that was interrupted while it waited come first

    def send(self, run: int, *question: object) -> None:
        """Send a question, whose answer is read later.  Raises OSError if the process has ended."""
        self._asked = True
        with self._sending:
            self._pipe.send((run, *question))
        self._owed[run] += 1

    def answers(self, run: int, outstanding: int = 0) -> list[Any]:
        """The answers that have come, once at most so many more are outstanding.  Raises EOFError or OSError."""
        found = []
        while self._owed[run] > outstanding or (self._owed[run] and self._is_there(run)):
            found.append(self._receive(run))
            self._owed[run] -= 1
        return found

    def _is_there(self, run: int) -> bool:
        """Whether an answer can be read without a wait."""
        with self._turn:
            while not self._come[run] and not self._receiving and self._pipe.poll():
                self._take()
            return bool(self._come[run])

    def _receive(self, run: int) -> Any:
        """Wait for an answer to a run; one thread receives for all that wait."""
        with self._turn:
            while not self._come[run]:
                if self._receiving:
                    self._turn.wait()
                    continue
                self._receiving = True
                self._turn.release()
                try:
                    self._pipe.poll(None)
                finally:
                    self._turn.acquire()
                    self._receiving = False
                    self._turn.notify_all()
                self._take()
            return self._come[run].popleft()

    def _take(self) -> None:
        run, *answer = self._pipe.recv()
        self._come[run].append(answer)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def tell(self, run: int, *question: object) -> None:
        """Send a last question without waiting for the answer."""
        with contextlib.suppress(OSError):
            self.send(run, *question)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process after its last question; at once if it was never asked, as it may still be loading MLflow."""
        self._pipe.close()
        if not self._asked:
            self._process.kill()
        end_beside(self._process)


class _Remote(NullTracker):
    """A tracker in that process; like a Tracker, no method raises after the start.

    What is logged is sent, and not waited for until `problems` or the end: the process writes it while the run goes on.
    Nor is the start waited for where a run has begun in the same store before: the id of the run comes later, as from a
    store that is away at the start, and an error of the start is raised when the id would have come.
    """

    def __init__(self, process: MlflowProcess, arguments: tuple[Any, ...]) -> None:
        self._process = process
        self._run = process.next_run()
        self._lost = ""
        self._problems: list[str] = []
        self._directory = arguments[_DIRECTORY]
        about = arguments[_DIRECTORY + 1 :] or (None,)
        store = arguments[:_EXPERIMENT_END]
        start = ("start", *arguments[: _DIRECTORY + 1], *about, os.getpid())
        if process.is_known(*store):
            self.uri = without_secrets(check_uri(arguments[0]))
            self._tell(*start)
            return
        try:
            self._ask(*start)
        except KeyboardInterrupt:
            process.tell(self._run, ABANDON)
            raise
        if self.run_id:
            process.remember(*store)

    def _ask(self, method: str, *arguments: object) -> None:
        """Call a method there and wait until it has returned."""
        self._settle()
        self._exchange(lambda: [self._process.ask(self._run, method, *arguments)])

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method there, and do not wait for it, unless many calls are outstanding."""
        self._settle(MOST_OWED - 1)
        self._exchange(functools.partial(self._process.send, self._run, method, *arguments))

    def _settle(self, outstanding: int = 0) -> None:
        """Wait until the process has done all but so many of the things that it was asked for."""
        self._exchange(functools.partial(self._process.answers, self._run, outstanding))

    def _exchange(self, step: Callable[[], list[Any] | None]) -> None:
        """Send or receive, unless the process was lost before, and take the answers, if there are any."""
        if self._lost:
            return
        try:
            answers = step() or ()
        except (EOFError, OSError):
            self._lost = f"the process that writes to MLflow has ended; what it lacks is in {self._directory}"
            return
        for error, self.run_id, self.experiment_id, self.uri, self._problems in answers:
            if error is not None:
                raise error

    @property
    def problems(self) -> list[str]:
        """What the store lacks, and whether the process has ended, in sentences."""
        self._settle()
        return self.problems_so_far

    @property
    def problems_so_far(self) -> list[str]:
        """The same, as far as it is known without a wait."""
        return [*self._problems, self._lost] if self._lost else self._problems

    def log_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Log a round's metrics."""
        self._tell("log_round", round, dict(metrics))

    def describe(self, text: str, tags: Mapping[str, str]) -> None:
        """Replace the description of the run, and set tags."""
        self._tell("describe", text, dict(tags))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file or a folder into the run's artifacts."""
        self._tell("log_artifact", path, folder)

    def log_figure(self, path: Path) -> None:
        """Copy a figure into the run's artifacts."""
        self._tell("log_figure", path)

    def log_model_state(self, path: Path) -> None:
        """Copy a model into the run's artifacts."""
        self._tell("log_model_state", path)

    def log_model(self, folder: Path) -> None:
        """Upload the folder of a model."""
        self._tell("log_model", folder)

    def adopt(self, run_ids: Iterable[str]) -> None:
        """Make other runs the children of this one."""
        self._tell("adopt", list(run_ids))

    def finish(self, status: Status, message: str = "") -> None:
        """End the run with the given status."""
        self._ask("finish", status, message)


def serve(pipe: Connection) -> None:
    """Load MLflow, then answer questions until the other end of the connection is closed."""
    for name in _LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]
    with contextlib.suppress(ImportError):  # it is raised again, and reported, where MLflow is needed
        load_mlflow()
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - loaded late by MLflow itself
    trackers: defaultdict[int, NullTracker] = defaultdict(NullTracker)
    questions: deque[Any] = deque()
    while True:
        while not questions and not pipe.poll(GATHER_S):
            for tracker in trackers.values():
                tracker.idle()
        is_open = _read(pipe, questions)
        if not questions:
            return
        run, method, *arguments = questions.popleft()
        error = None
        try:
            if method == "start":
                if is_open and not any(question[:2] == (run, ABANDON) for question in questions):
                    trackers[run] = Tracker.start(*arguments)
                    trackers[run].gather_s = GATHER_S
                    os.nice(NICENESS)  # up to the lowest, however often
            elif method == ABANDON:
                trackers[run].finish("KILLED", "interrupted")
            else:
                getattr(trackers[run], method)(*arguments)
        except Exception as raised:  # noqa: BLE001 - raised where it was asked for
            error = raised
        tracker = trackers[run]
        with contextlib.suppress(OSError):  # nobody waits for the answer any more
            pipe.send((run, error, tracker.run_id, tracker.experiment_id, tracker.uri, tracker.problems))
        if method in ("finish", ABANDON):
            del trackers[run]


def _read(pipe: Connection, questions: "deque[Any]") -> bool:
    """Read the questions that have come; returns whether the other end is open: closed, nobody waits for a start."""
    try:
        while pipe.poll():
            questions.append(pipe.recv())
    except EOFError:
        return False
    return True


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
