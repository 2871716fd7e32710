"""MLflow in a process of its own, which loads it, for some seconds, while the driver loads everything else."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from raysim.tracking.mlflow_run import load_mlflow
from raysim.tracking.tracker import NullTracker, Status, Tracker

_DIRECTORY = 6  # the place of the run's folder among the arguments of `Tracker.start`
NICENESS = 19  # Ray gives its workers 15
GATHER_S = 2.0  # seconds for which rounds wait to be written together
MOST_OWED = 16  # answers that may be outstanding; what they take lies in the connection until it is read
END_S = 5.0  # seconds that the process has to end by itself
_LEFT_OUT = ("numpy", "pandas", "pyarrow")  # without them, as in its skinny package, MLflow loads in half the time


def start_tracker(process: "MlflowProcess | None", *arguments: Any) -> NullTracker:  # Any: those of `Tracker.start`
    """Call `Tracker.start(*arguments)`, in the given process if there is one; returns the tracker."""
    return Tracker.start(*arguments) if process is None else _Remote(process, arguments)


class MlflowProcess:
    """The process, which begins to load MLflow at once, and the connection to it; a context manager, which ends it.

    Signals that a terminal sends do not reach it; it ends with the driver.  Once a run has begun, it takes what the
    workers leave of the processors; it stays in the driver's session, as Linux shares processors out by session first.
    """

    def __init__(self) -> None:
        self._asked = False
        self._owed = 0  # answers that have not been read
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "raysim.tracking.process", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], process_group=0, stdout=subprocess.DEVNULL
            )

    def ask(self, *question: object) -> Any:  # the answer is a tuple of what `serve` sends
        """Send a question and wait for the answer.  Raises EOFError or OSError if the process has ended."""
        self.send(*question)
        return self.answers()[-1]  # those of a run that was interrupted while it waited come first

    def send(self, *question: object) -> None:
        """Send a question, whose answer is read later.  Raises OSError if the process has ended."""
        self._asked = True
        self._pipe.send(question)
        self._owed += 1

    def answers(self, outstanding: int = 0) -> list[Any]:
        """The answers that have come, once at most so many more are outstanding.  Raises EOFError or OSError."""
        found = []
        while self._owed > outstanding or (self._owed and self._pipe.poll()):
            found.append(self._pipe.recv())
            self._owed -= 1
        return found

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def tell(self, *question: object) -> None:
        """Send a last question without waiting for the answer."""
        with contextlib.suppress(OSError):
            self.send(*question)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process after its last question; at once if it was never asked, as it may still be loading MLflow."""
        self._pipe.close()
        if not self._asked:
            self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Remote(NullTracker):
    """A tracker in that process; like a Tracker, no method raises after the start.

    What is logged is sent, and not waited for until `problems` or the end: the process writes it while the run goes on.
    """

    def __init__(self, process: MlflowProcess, arguments: tuple[Any, ...]) -> None:
        self._process = process
        self._lost = ""
        self._problems: list[str] = []
        self._directory = arguments[_DIRECTORY]
        about = arguments[_DIRECTORY + 1 :] or (None,)
        try:
            self._ask("start", *arguments[: _DIRECTORY + 1], *about, os.getpid())
        except KeyboardInterrupt:
            process.tell("finish", "KILLED", "interrupted")
            raise

    def _ask(self, method: str, *arguments: object) -> None:
        """Call a method there and wait until it has returned."""
        self._settle()
        self._exchange(lambda: [self._process.ask(method, *arguments)])

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method there, and do not wait for it, unless many calls are outstanding."""
        self._settle(MOST_OWED - 1)
        self._exchange(functools.partial(self._process.send, method, *arguments))

    def _settle(self, outstanding: int = 0) -> None:
        """Wait until the process has done all but so many of the things that it was asked for."""
        self._exchange(functools.partial(self._process.answers, outstanding))

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
    tracker = NullTracker()
    while True:
        while not pipe.poll(GATHER_S):
            tracker.idle()
        try:
            method, *arguments = pipe.recv()
        except EOFError:
            return
        error = None
        try:
            if method == "start" and pipe.poll():  # closed, or a last question: nobody waits for a run to begin
                tracker = NullTracker()
            elif method == "start":
                tracker = Tracker.start(*arguments)
                tracker.gather_s = GATHER_S
                os.nice(NICENESS)  # up to the lowest, however often
            else:
                getattr(tracker, method)(*arguments)
        except Exception as raised:  # noqa: BLE001 - raised where it was asked for
            error = raised
        with contextlib.suppress(OSError):  # nobody waits for the answer any more
            pipe.send((error, tracker.run_id, tracker.experiment_id, tracker.uri, tracker.problems))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
