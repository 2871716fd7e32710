"""Workers that wait for a machine, or start slowly, are waited for; it is said why, and it has an end."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from warm_session import CORES

from raysim.config.schema import Config, Resources
from raysim.core.errors import RunError
from raysim.engine import pool as pool_module
from raysim.engine import starting
from raysim.engine.placement import Placement
from raysim.engine.pool import Item, Pool
from raysim.engine.starting import Starting, autoscaler_state


def starts_with(file: Path) -> type:
    """A worker that starts once this file is there, at most 60 s late; a local class, so that it travels as it is."""

    class Slow:
        def __init__(self, *_: Any) -> None:
            for _ in range(1200):
                if file.exists():
                    return
                time.sleep(0.05)

        def where(self) -> tuple[str, str]:
            return "10.0.0.9", "node 9"

        def work(self, items: list[int]) -> list[int]:
            return items

    return Slow


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ROOM_S", 0.1)
    monkeypatch.setattr(starting, "SAY_AFTER_S", 0.3)


def work(pool: Pool) -> list[int]:
    """Do three items; returns what was done."""
    items = [Item(i, 1.0, f"item {i}") for i in range(3)]
    return sorted(i for _, _, done in pool.map(items, lambda actor, some: actor.work.remote(some)) for i in done)


def test_a_worker_that_waits_for_a_machine_has_not_failed_to_start(
    ray_here: None, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """For ten times start_timeout_s another job leaves no room for a worker's six cores; then the same actors work.

    The workers of other tests keep the cores that they have, four at most.
    """
    (tmp_path / "go on").touch()
    monkeypatch.setattr(pool_module, "Worker", starts_with(tmp_path / "go on"))
    other: Any = ray.remote(num_cpus=CORES - 5)(starts_with(tmp_path / "go on")).remote()
    ray.get(other.where.remote())
    resources = Resources(workers=2, threads_per_worker=6, start_timeout_s=0.2)
    pool = Pool(Placement(2, 0.0), resources)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            time.sleep(10 * resources.start_timeout_s)
            ray.kill(other)
            pool._starting.limit_s = 60.0  # they have a machine now, and may take the time that this one needs

    pool.begin_run(resources, lambda: 2, say)
    before = list(pool.members)
    assert work(pool) == [0, 1, 2]
    assert list(pool.members) == before and not pool._failed_starts
    assert said[0].startswith("no machine has room for any of 2 workers since ")
    assert "waiting up to 1800 s (resources.cluster_timeout_s); no autoscaler reports to this cluster" in said[0]
    pool.close()


def test_a_cluster_without_a_machine_is_given_up_after_a_time_of_its_own(
    ray_here: None, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """No node has that many cores. Twelve times start_timeout_s pass, and more workers wait than starts may fail."""
    monkeypatch.setattr(pool_module, "Worker", starts_with(tmp_path))
    monkeypatch.setattr(starting, "autoscaler_status", lambda: STATUS)
    resources = Resources(workers=11, threads_per_worker=CORES + 1, start_timeout_s=0.1, cluster_timeout_s=1.2)
    pool = Pool(Placement(11, 0.0), resources)
    pool.begin_run(resources, lambda: 11, lambda _: None)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no machine had room for any of 11 workers for 1.2 s.*: pending: gpu, 2"):
        work(pool)
    assert time.monotonic() - began > 1.2
    pool.close()


def test_a_start_that_is_slow_on_a_busy_machine_gets_more_time_and_it_is_said(
    ray_here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The limit doubles; both workers are those that were started first."""
    monkeypatch.setattr(pool_module, "Worker", starts_with(tmp_path / "go on"))
    resources = Resources(workers=2, start_timeout_s=8.0)
    pool = Pool(Placement(2, 0.0), resources)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (tmp_path / "go on").touch()

    pool.begin_run(resources, None, say)
    pool._starting.limit_s = 0.5  # has been missed at once
    assert work(pool) == [0, 1, 2]
    assert set(pool.members) == {0, 1} and not pool._failed_starts
    assert said[0].startswith("a worker has not started within 0.5 s (resources.start_timeout_s), at a load of ")
    assert said[0].endswith("cores; waiting up to 1 s")
    pool.close()


def test_a_start_that_never_ends_is_given_up_with_the_remedy(
    ray_here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """After 0.1 + 0.1 + 0.2 + 0.4 s."""
    monkeypatch.setattr(pool_module, "Worker", starts_with(tmp_path / "never"))
    resources = Resources(workers=1, start_timeout_s=0.1)
    pool = Pool(Placement(1, 0.0), resources)
    said: list[str] = []
    pool.begin_run(resources, None, said.append)
    with pytest.raises(RunError, match=r"no worker has started within 0.8 s .*raise resources.start_timeout_s, or set"):
        work(pool)
    assert [text.rpartition(" up to ")[2] for text in said] == ["0.2 s", "0.4 s", "0.8 s"]
    pool.close()


def test_the_time_without_a_machine_begins_anew_when_one_was_there():
    """A limit of 100 s: a machine is there at 90 s; the end comes at 190 s, not before."""
    said: list[str] = []
    waits = Starting(Resources(cluster_timeout_s=100.0), said.append, now=0.0)
    waits.without_machine(4, 9.0)
    assert said == []
    for now in (10.0, 50.0, 69.0, 70.0):
        waits.without_machine(4, now)
    assert len(said) == 2
    waits.placed(90.0)
    waits.without_machine(4, 190.0)
    with pytest.raises(RunError, match="4 workers for 100 s"):
        waits.without_machine(4, 190.1)


STATUS = """======== Autoscaler status: 2026-11-30 08:18:14 ========
Node status
---------------------------------------------------------------
Active:
 1 head
Pending:
 gpu, 2 launching
 10.0.0.7: gpu, setting-up
Recent failures:
 gpu: InsufficientInstanceCapacity (latest_attempt: 08:17:10)

Resources
---------------------------------------------------------------
Total Demands:
 {'CPU': 1.0}: 16+ pending tasks/actors
"""


def test_the_state_of_the_autoscaler_is_what_it_starts_and_what_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(starting, "autoscaler_status", lambda: STATUS)
    assert autoscaler_state() == (
        "autoscaler: pending: gpu, 2 launching, 10.0.0.7: gpu, setting-up; recent failures: gpu: "
        "InsufficientInstanceCapacity (latest_attempt: 08:17:10)"
    )
    idle = STATUS.replace(" gpu, 2 launching\n 10.0.0.7: gpu, setting-up", " (no pending nodes)")
    idle = idle.replace(" gpu: InsufficientInstanceCapacity (latest_attempt: 08:17:10)", " (no failures)")
    monkeypatch.setattr(starting, "autoscaler_status", lambda: idle)
    assert autoscaler_state() == "autoscaler: no node is being started, and no failure is reported"


def test_the_limits_may_change_on_a_resume_and_change_no_result():
    plain = {"rounds": 1, "data": {"name": "digits"}}
    one = Config.model_validate(plain)
    other = Config.model_validate({**plain, "resources": {"cluster_timeout_s": 5.0, "start_timeout_s": 5.0}})
    assert one.hash() == other.hash()
