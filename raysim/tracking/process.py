"""MLflow in a process of its own, which loads it, for seconds, while the driver loads everything else."""

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from raysim.tracking.mlflow_run import load_mlflow
from raysim.tracking.tracker import NullTracker, Status, Tracker

END_S = 5.0  # for the process to end by itself
_LEFT_OUT = ("numpy", "pandas", "pyarrow")  # MLflow does without, as in its skinny package, in half the time and memory


def start_tracker(process: "MlflowProcess | None", *arguments: Any) -> NullTracker:
    """`Tracker.start(*arguments)`, in that process where there is one."""
    return Tracker.start(*arguments) if process is None else _Remote(process, arguments)


class MlflowProcess:
    """The process, which begins to load MLflow at once, and the way to it; a context manager, which ends it.

    Signals that a terminal sends do not reach it; it ends with the driver.
    """

    def __init__(self) -> None:
        self._asked = False
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "raysim.tracking.process", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], start_new_session=True, stdout=subprocess.DEVNULL
            )

    def ask(self, *question: Any) -> Any:
        """Its answer.  Raises EOFError or OSError where there is nobody to answer."""
        self._asked = True
        self._pipe.send(question)
        return self._pipe.recv()

    def tell(self, *question: Any) -> None:
        """Leave it a last question."""
        with contextlib.suppress(OSError):
            self._pipe.send(question)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let it end, after what it was told last; at once if it was never asked: it may still be loading MLflow."""
        self._pipe.close()
        if not self._asked:
            self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Remote(NullTracker):
    """A tracker in that process; as there, no method raises after the start."""

    def __init__(self, process: MlflowProcess, arguments: tuple[Any, ...]) -> None:
        self._process, self._lost = process, ""
        self._problems: list[str] = []
        self._directory = arguments[-1]
        try:
            self._ask("start", *arguments)
        except KeyboardInterrupt:
            process.tell("finish", "KILLED", "interrupted")
            raise

    def _ask(self, method: str, *arguments: Any) -> None:
        if self._lost:
            return
        try:
            error, self.run_id, self.uri, self._problems = self._process.ask(method, *arguments)
        except (EOFError, OSError):
            self._lost = f"the process that writes to MLflow has ended; what it lacks is in {self._directory}"
            return
        if error is not None:
            raise error

    @property
    def problems(self) -> list[str]:
        """What the store does not have, and whether the process is gone."""
        return [*self._problems, self._lost] if self._lost else self._problems

    def log_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Log a round's metrics."""
        self._ask("log_round", round, dict(metrics))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file or a folder into the run's artifacts."""
        self._ask("log_artifact", path, folder)

    def log_figure(self, path: Path) -> None:
        """Copy a figure into the run's artifacts."""
        self._ask("log_figure", path)

    def log_model_state(self, path: Path) -> None:
        """Copy a model into the run's artifacts."""
        self._ask("log_model_state", path)

    def finish(self, status: Status, message: str = "") -> None:
        """End the run truthfully."""
        self._ask("finish", status, message)


def serve(pipe: Connection) -> None:
    """Load MLflow, then do what is asked for until nobody is left to ask."""
    for name in _LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]
    with contextlib.suppress(ImportError):  # it comes again, and is reported, where MLflow is needed
        load_mlflow()
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - loaded late by MLflow itself
    tracker = NullTracker()
    while True:
        try:
            method, *arguments = pipe.recv()
        except EOFError:
            return
        if method == "start" and pipe.poll():  # the end, or a last question: nobody waits for a run to begin any more
            tracker = NullTracker()
            continue
        error = None
        try:
            if method == "start":
                tracker = Tracker.start(*arguments)
            else:
                getattr(tracker, method)(*arguments)
        except Exception as raised:  # noqa: BLE001 - raised where it was asked for
            error = raised
        with contextlib.suppress(OSError):  # nobody waits for the answer any more
            pipe.send((error, tracker.run_id, tracker.uri, tracker.problems))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
