"""Shared by all tests: a small real run, and one Ray with warm workers for those that need it."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hanging import Hanging

if TYPE_CHECKING:
    from full_disk import Disk
    from warm_session import WarmSession

    from raysim import Result
    from raysim.tracking.process import MlflowProcess

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several test processes would only wait for each other
os.environ.pop("RAY_ADDRESS", None)


_LONGEST = ("engine", "lifecycle", "federation", "commands", "second_opinion", "tests", "tracking", "generation")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Hanging())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes longest come first, so that two processes end at about the same time."""
    place = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(place)))


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A local Ray with room for 16 workers, shared by the tests of a session; runs inside it join it."""
    import ray
    from warm_session import CORES

    from raysim.engine.ray_private import lean_ray, own_token

    for attempt in range(3):
        with (
            own_token(),
            tempfile.TemporaryDirectory(prefix="raysim-test-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ):
            try:
                with lean_ray():
                    ray.init(
                        address="local", num_cpus=CORES, include_dashboard=False, object_store_memory=400_000_000,
                        log_to_driver=False, logging_level="ERROR", _temp_dir=folder,
                    )
            except Exception:  # Ray gives itself half a minute, which a busy machine may not have
                ray.shutdown()
                if attempt == 2:
                    raise
                continue
            yield
            ray.shutdown()
            return


@pytest.fixture(scope="session")
def session(ray_here: None) -> Iterator["WarmSession"]:
    """An open session on that Ray: its workers stay warm from one run to the next."""
    from warm_session import WarmSession

    with WarmSession() as opened:
        yield opened
        opened.discard_all()


@pytest.fixture(scope="session")
def mlflow_process() -> Iterator["Callable[[], contextlib.AbstractContextManager[MlflowProcess]]"]:
    """In place of `MlflowProcess`: one that has loaded MLflow already, while nothing has happened to it."""
    from raysim.tracking.process import MlflowProcess

    kept: list[tuple[dict[str, str], MlflowProcess]] = []

    def process() -> "contextlib.AbstractContextManager[MlflowProcess]":
        settings = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW")}
        if kept and (kept[0][0] != settings or kept[0][1]._process.poll() is not None or kept[0][1]._pipe.poll()):
            kept.pop()[1].end()
        if not kept:
            kept.append((settings, MlflowProcess()))
        return contextlib.nullcontext(kept[0][1])

    yield process
    for _, one in kept:
        one.end()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs; making one takes seconds, copying it none."""
    import mlflow

    path = tmp_path_factory.mktemp("store") / "empty.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """The address of an MLflow store of the test's own."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"


@pytest.fixture
def run(session: "WarmSession", undrawn: None, mlflow_process: Any) -> "Iterator[Callable[..., Result]]":
    """`raysim.run` on warm workers and with a warm process for MLflow."""
    import raysim

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysim.lifecycle.entry.MlflowProcess", mlflow_process)
        yield partial(raysim.run, session=session)


@pytest.fixture
def warm(session: "WarmSession", undrawn: None) -> Iterator["WarmSession"]:
    """Whatever opens a session in this process, such as a sweep, gets the one with warm workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysim.engine.background_start.Session", lambda *_: contextlib.nullcontext(session))
        yield session


@pytest.fixture
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs leave empty figures behind, because drawing takes longer than all else; real ones for `pytest.mark.drawn`.

    tests/ui draws the figures themselves.
    """

    def blank(_: object, folder: Path) -> None:
        for name in ("accuracy.png", "client_counts.png"):
            write_atomic(folder / name, b"")

    def blank_there(_: object, figures: object, folder: Path) -> None:
        blank(figures, folder)

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("drawn") is None:
            from raysim.core.files import write_atomic

            patch.setattr("raysim.lifecycle.figures.RunFigures.draw", blank)
            patch.setattr("raysim.lifecycle.figure_process.FigureProcess.draw", blank_there)
        yield


@pytest.fixture
def command(run: "Callable[..., Result]", monkeypatch: pytest.MonkeyPatch) -> "Callable[..., int]":
    """Call the command line in this process, with the workers of `run`; returns the exit code."""

    def called(*arguments: str) -> int:
        from raysim import cli

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr("raysim.lifecycle.entry.run", run)
            patch.setattr("sys.argv", ["raysim", *arguments])
            cli.main()
        return int(ended.value.code or 0)

    return called


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made as ever, and their files are empty, because rendering takes most of the time."""
    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", lambda *_, **__: None)
    monkeypatch.setattr("matplotlib.backends.backend_pdf.FigureCanvasPdf.print_pdf", lambda *_, **__: None)


@pytest.fixture
def disk(any_disk: "Disk") -> "Iterator[Disk]":
    """A disk that a test can make full; it has room again afterwards."""
    yield any_disk
    any_disk.emptied()


@pytest.fixture(scope="session")
def any_disk() -> "Disk":
    """The one that all tests share, since Python never takes its hook away again."""
    from full_disk import Disk

    return Disk()


@pytest.fixture
def not_under_nohup() -> Iterator[None]:
    """SIGHUP as on a terminal, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """A configuration that trains for about a second: 300 real digits, 6 skewed clients, 3 rounds, no tracking."""
    return {
        "rounds": 3,
        "clients_per_round": 4,
        "data": {"name": "digits", "train_samples": 300, "test_samples": 100},
        "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.3, "min_samples": 5},
        "model": {"name": "cnn", "width": 8, "hidden": 32},
        "local": {"name": "sgd", "epochs": 1, "batch_size": 16, "lr": 0.1},
        "resources": {"workers": 2},
        "tracking": {"uri": "none"},
        "output": {"dir": str(tmp_path / "runs"), "checkpoint_every": 1, "cache": str(tmp_path / "cache")},
    }
