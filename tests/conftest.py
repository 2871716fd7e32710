"""Shared by all tests: a small real run, and one Ray for those that need it."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from full_disk import Disk

    from raysim import Result
    from raysim.engine.session import Session

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A local Ray with room for 8 workers, shared by the tests of a session; runs inside it join it."""
    import ray

    from raysim.engine.ray_private import lean_ray, own_token

    for attempt in range(3):
        with (
            own_token(),
            tempfile.TemporaryDirectory(prefix="raysim-test-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ):
            try:
                with lean_ray():
                    ray.init(
                        address="local", num_cpus=8, include_dashboard=False, object_store_memory=400_000_000,
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
def session(ray_here: None) -> Iterator["Session"]:
    """An open session on that Ray: its workers stay warm from one run to the next."""
    from raysim.config.schema import Resources
    from raysim.engine.session import Session

    with Session(Resources()) as opened:
        yield opened


@pytest.fixture
def run(session: "Session") -> "Callable[..., Result]":
    """`raysim.run` on warm workers."""
    import raysim

    return partial(raysim.run, session=session)


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
