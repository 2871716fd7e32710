"""A cluster that grows and shrinks: how many workers there should be, and that they come and go."""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from raysim.config.schema import Resources
from raysim.core.errors import RunError, UserError
from raysim.engine import cluster as module
from raysim.engine import pool as pool_module
from raysim.engine import ray_private
from raysim.engine.cluster import Cluster, place_on_cluster
from raysim.engine.placement import Node, Placement
from raysim.engine.pool import Item, Pool
from raysim.engine.session import Session, placement_before_start
from raysim.engine.versions import check_versions, installed

HEAD = Node("10.0.0.1", 0, 0)
ONE_GPU = Node("10.0.0.2", 4, 1)
AWS = """
provider: {type: aws}
head_node_type: head
max_workers: 3
available_node_types:
  head: {resources: {CPU: 0, GPU: 0}, max_workers: 0}
  gpu: {resources: {CPU: 4, GPU: 1}, min_workers: 0, max_workers: 4}
"""
LOCAL = """
provider: {type: local}
head_node_type: local.cluster.node
max_workers: 2
available_node_types:
  local.cluster.node: {resources: {}, min_workers: 2, max_workers: 2}
"""


@pytest.mark.parametrize(
    ("text", "workers", "to_come", "unknown"),
    [
        (AWS, 0, 3, 0), (AWS, 2, 1, 0), (AWS, 3, 0, 0), (LOCAL, 0, 0, 2), (LOCAL, 1, 0, 1), (LOCAL, 2, 0, 0),
        ("", 1, 0, 0),
    ],
)
def test_the_cluster_file_says_what_may_still_come(tmp_path: Path, text: str, workers: int, to_come: int, unknown: int):
    """At most max_workers in all, whatever the kinds of node allow; on premises their size is not known before."""
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    coming, of_unknown_size = module._declared([Node("", 4, 1)] * workers, file)
    assert [(n.cpus, n.gpus) for n in coming] == [(4, 1)] * to_come
    assert of_unknown_size == unknown


def at(monkeypatch: pytest.MonkeyPatch, *stages: Cluster) -> None:
    """The cluster is in these stages, one after another; the last one stays."""
    left = list(stages)
    monkeypatch.setattr(module, "survey", lambda: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(module.time, "sleep", lambda _: None)


def never(text: str) -> None:
    raise AssertionError(f"nothing had to be said, but: {text}")


def test_nodes_that_the_autoscaler_will_add_count_and_are_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    at(monkeypatch, Cluster([HEAD], [ONE_GPU] * 3))
    assert place_on_cluster(Resources(), never) == Placement(3, 1.0)
    assert place_on_cluster(Resources(workers=6, gpus_per_worker=0.5), never) == Placement(6, 0.5)


def test_too_few_gpus_in_the_whole_cluster_are_refused_with_what_is_there_and_what_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two nodes of one GPU and one to come hold floor(1 / 0.5) = 2 each: 6, not 7."""
    coming = Node("gpu, to come", 4, 1)
    at(monkeypatch, Cluster([HEAD, ONE_GPU, Node("10.0.0.3", 4, 1)], [coming]))
    with pytest.raises(UserError, match=r"workers = 7.* = 2, so 6 fit .*10.0.0.2: 1 GPU.*to come: 1 GPU.*at most 6"):
        place_on_cluster(Resources(workers=7, gpus_per_worker=0.5), never)
    with pytest.raises(UserError, match="no node has that many GPUs"):
        place_on_cluster(Resources(gpus_per_worker=2.0), never)


def test_a_head_without_cores_waits_for_the_first_node_and_says_so(monkeypatch: pytest.MonkeyPatch):
    """`ray up` returns before the workers are there."""
    said: list[str] = []
    joined = Cluster([HEAD, Node("10.0.0.2", 2, 0)], [], unknown=1)
    at(monkeypatch, Cluster([HEAD], [], unknown=2), Cluster([HEAD], [], unknown=2), joined)
    assert place_on_cluster(Resources(), said.append) == Placement(2, 0.0)
    assert len(said) == 1 and re.match(
        r"waiting since ..:..:.., up to 1800 s .*cluster_timeout_s.*, for the first of 2 nodes that are still to join; "
        "no autoscaler reports to this cluster", said[0],
    )


def test_the_wait_for_the_first_node_has_an_end(monkeypatch: pytest.MonkeyPatch):
    at(monkeypatch, Cluster([HEAD], [], unknown=2))
    with pytest.raises(UserError, match=r"no node .* joined within 0.01 s.*cluster_timeout_s.*autoscaler.*ray status"):
        place_on_cluster(Resources(cluster_timeout_s=0.01), lambda _: time.sleep(0.02))


def test_without_nodes_to_come_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    at(monkeypatch, Cluster([HEAD], []))
    with pytest.raises(UserError, match="no node has a CPU core"):
        place_on_cluster(Resources(), never)


@pytest.mark.parametrize(
    ("workers", "now", "expected"),
    [
        ("auto", Cluster([HEAD, ONE_GPU], [ONE_GPU]), 2),
        ("auto", Cluster([HEAD], [], unknown=2), 1),
        (3, Cluster([HEAD, ONE_GPU], []), 1),
        (3, Cluster([HEAD, ONE_GPU], [], unknown=1), 3),
        (1, Cluster([HEAD, ONE_GPU], [ONE_GPU]), 1),
    ],
)
def test_the_number_of_workers_follows_the_cluster(
    monkeypatch: pytest.MonkeyPatch, workers: Any, now: Cluster, expected: int
):
    """As many as fit, at least one, never more than asked for; where sizes are unknown, as many as were asked for."""
    at(monkeypatch, now)
    assert module.room(Resources(workers=workers), 1.0)() == expected


def light(broken: bool = False) -> type:
    """A worker without torch; a local class, so that it travels as it is.  broken: on a node that lacks a package."""

    class Light:
        def __init__(self, *_: Any) -> None:
            if broken:
                raise ModuleNotFoundError("No module named 'torch'")

        def configure(self) -> tuple[str, str]:
            return "10.0.0.9", "node 9"

        def where(self) -> tuple[str, str]:
            return self.configure()

        def work(self, items: list[int]) -> list[int]:
            time.sleep(0.1)
            return items

    return Light


def test_workers_start_where_nodes_join_and_are_taken_back_where_they_leave(
    ray_here: None, monkeypatch: pytest.MonkeyPatch
):
    """1 worker, room for 3, then for 2: the work is done, and two more took part; no worker at work is ended."""
    monkeypatch.setattr(pool_module, "Worker", light())
    monkeypatch.setattr(pool_module, "ROOM_S", 0.1)
    sizes, said = iter([1, 3]), list[str]()
    pool = Pool(Placement(1, 0.0), Resources(workers=1))
    pool.begin_run(Resources(), lambda: next(sizes, 3), said.append)
    pool.configure()
    items = [Item(i, 1.0, f"item {i}") for i in range(100)]
    done = [(worker, i.payload) for worker, chunk, _ in pool.map(items, _work, largest=2) for i in chunk]
    assert sorted(payload for _, payload in done) == list(range(100))
    assert len({worker for worker, _ in done}) == 3
    assert said[-1] == "3 of 3 workers are up (10.0.0.9: 3)"
    pool._room = lambda: 2
    pool._measured_at = 0.0
    pool._follow_the_cluster()
    assert (pool.wanted, len(pool.members), pool.lost) == (2, 3, 0)
    pool.close()


def _work(actor: Any, payloads: list[int]) -> Any:
    return actor.work.remote(payloads)


def test_a_worker_that_is_lost_where_there_is_no_room_any_more_is_not_replaced(
    ray_here: None, monkeypatch: pytest.MonkeyPatch
):
    """2 workers, one is killed with its node: the other does all the work."""
    monkeypatch.setattr(pool_module, "Worker", light())
    monkeypatch.setattr(pool_module, "ROOM_S", 0.1)
    said: list[str] = []
    pool = Pool(Placement(2, 0.0), Resources(workers=2))
    pool.begin_run(Resources(), lambda: 2, said.append)
    pool.configure()
    items = [Item(i, 1.0, f"item {i}") for i in range(20)]
    done: list[int] = []
    for _, chunk, _ in pool.map(items, _work, largest=1):
        done += [i.payload for i in chunk]
        if len(done) == 5:
            while not all(m.ready for m in pool.members.values()):
                pool._wait()
            pool._room = lambda: 1
            pool.wanted = 1
            ray.kill(next(m.actor for m in pool.members.values() if m.chunks))
    assert sorted(done) == list(range(20))
    assert (pool.lost, len(pool.members)) == (1, 1)
    assert any(text.startswith("a worker on 10.0.0.9 is lost, its work is done again: its worker") for text in said)
    pool.close()


def test_a_worker_that_cannot_start_stops_the_run_and_names_node_and_cause(
    ray_here: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_module, "Worker", light(broken=True))
    pool = Pool(Placement(1, 0.0), Resources(workers=1))
    pool.configure()
    with pytest.raises(RunError, match=r"a worker cannot start on [\d.]+: .*No module named 'torch'"):
        list(pool.map([Item(0, 1.0, "item")], _work))
    pool.close()


def test_a_node_with_another_version_is_refused_by_name():
    with pytest.raises(UserError, match=r"node 10.0.0.7 has ray \S+ instead of 2.0, torch \S+ instead of 1.0: .*every"):
        check_versions({**installed(), "torch": "1.0", "ray": "2.0"}, "10.0.0.7")
    check_versions(installed(), "10.0.0.7")


# Addresses that cannot work


def refused(address: str) -> tuple[str, float]:
    """(the message, seconds) of a session with this address."""
    began = time.monotonic()
    with pytest.raises(UserError) as error, Session(Resources(address=address)):
        pass
    return str(error.value), time.monotonic() - began


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were not connected; the Ray of the other tests, if there is one, stays."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


def test_an_address_where_something_else_listens_is_refused_within_30_s(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
):
    """Ray itself tries for minutes. Of the 10 s that an answer may take, the test waits for one."""
    saved_s = ray_private.ANSWER_S - 1.0
    monkeypatch.setattr(ray_private, "ANSWER_S", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        message, seconds = refused(f"127.0.0.1:{other.getsockname()[1]}")
    assert "no Ray cluster answers at 127.0.0.1:" in message
    assert "resources.address" in message
    assert seconds < 30 - saved_s


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://127.0.0.1:8265"])
def test_an_address_for_clients_far_away_is_refused_with_the_remedy(no_ray: None, address: str):
    message, seconds = refused(address)
    assert f"{address} (from resources.address)" in message
    assert "ray job submit --working-dir . -- python -m raysim run" in message
    assert seconds < 1


def test_the_placement_is_not_known_before_a_cluster_is_joined(no_ray: None):
    assert placement_before_start(Resources(address="10.0.0.1:6379")) is None


def test_a_dead_cluster_in_the_environment_is_refused_with_its_address_and_where_that_comes_from(
    no_ray: None, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(UserError, match=f"at {address} .from the environment variable RAY_ADDRESS.: .*ray start"):
        Session(Resources()).__enter__()
    assert time.monotonic() - began < 30


def test_a_worker_without_a_share_of_a_gpu_sees_none(monkeypatch: pytest.MonkeyPatch):
    """Ray shows every GPU to an actor that owns none."""
    import torch

    from raysim.engine.worker import Worker

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Worker("cpu", torch.get_num_threads()).device == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
