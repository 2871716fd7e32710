"""Partial sums come together node by node, to the same bits, also when what made or held them is lost on the way."""

from collections.abc import Callable
from typing import Any

import pytest
import ray

from raysim import Result
from raysim.engine import rounds
from raysim.engine.collect import INLINE_BYTES, StoredSum
from raysim.engine.pool import Pool
from raysim.engine.rounds import Round

Run = Callable[..., Result]
NODES = 2


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are taken to be on two nodes, in turn, the driver on a third; all are up before a round begins."""
    nodes: dict[int, int] = {}

    def node(self: Pool, worker: int) -> str:
        if worker not in nodes:
            used = [nodes.get(id_) for id_ in self.members]
            nodes[worker] = min(range(NODES), key=used.count)
        return f"node {nodes[worker]}"

    train = Round._train

    def train_on_all(self: Round, clients: Any) -> None:
        while not all(m.ready for m in self.pool.members.values()):
            self.pool._wait()
        train(self, clients)

    monkeypatch.setattr(Pool, "node", node)
    monkeypatch.setattr(Round, "_train", train_on_all)


@pytest.fixture
def large(small: dict[str, Any]) -> dict[str, Any]:
    """A model whose sums do not travel along with an answer; 4 workers and 12 clients in each of two rounds."""
    return small | {
        "rounds": 2, "clients_per_round": 1.0, "resources": {"workers": 4},
        "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5, "min_samples": 5},
        "model": {"name": "cnn", "width": 16, "hidden": 64},
    }


def disturbed(monkeypatch: pytest.MonkeyPatch, disturb: Callable[..., None], gone: Any) -> None:
    """Let `disturb` happen once, when all partial sums of round 1 are made and none is fetched."""
    collect, done = rounds.collect, []

    def watched(pool: Pool, stored: list[StoredSum], parameters: int) -> Any:
        if not done:
            done.append(True)
            disturb(pool, stored, gone)
        return collect(pool, stored, parameters)

    monkeypatch.setattr(rounds, "collect", watched)


@pytest.fixture(scope="module")
def gone(ray_here: None) -> Any:
    """A reference to an object that is gone: its owner is dead."""

    class Owner:
        def put(self) -> list[Any]:
            return [ray.put(0)]

    owner = ray.remote(Owner).options(num_cpus=0).remote()
    (ref,) = ray.get(owner.put.remote())
    ray.kill(owner)
    with pytest.raises(ray.exceptions.ObjectLostError):
        while True:
            ray.get(ref)
    return ref


def lose(stored: list[StoredSum], lost: list[int], ref: Any) -> None:
    """Put an object that is gone in place of these sums' objects."""
    for i in lost:
        stored[i] = StoredSum(stored[i].clients, stored[i].node, ref)


def kill_the_makers(pool: Pool, stored: list[StoredSum], _: Any) -> None:
    """Of one node, whose sums stay where they are; another worker, or the driver, takes them up."""
    ours = [id_ for id_ in pool.members if pool.node(id_) == stored[0].node]
    for id_ in ours:
        ray.kill(pool.members[id_].actor)


def lose_the_sums(pool: Pool, stored: list[StoredSum], gone: Any) -> None:
    """Of one node, as when it loses its power."""
    lose(stored, [i for i, one in enumerate(stored) if one.node == stored[0].node], gone)


def one_of(pool: Pool, stored: list[StoredSum], gone: Any) -> None:
    """A single sum is lost, so that the others of its node cannot be added."""
    lose(stored, [0], gone)


def outcome(result: Result) -> tuple[str, list[float]]:
    return result.summary["model_sha256"], result.metrics["loss"].tolist()


@pytest.fixture(scope="module")
def calm() -> dict[str, tuple[str, list[float]]]:
    """The outcome of each rule where nothing is lost, once a test has needed it."""
    return {}


@pytest.mark.parametrize("rule", ["fedavg", "fedoui"])
def test_sums_added_on_their_nodes_are_those_of_one_worker_and_as_many_as_nodes_cross(
    run: Run, large: dict[str, Any], far: None, rule: str
):
    """P float64 numbers from each of 2 nodes, not from each of 4 workers; the model in float32 once to each."""
    config = large | {"aggregation": {"name": rule}}
    one, four = run(config | {"resources": {"workers": 1}}), run(config)
    assert outcome(four) == outcome(one)
    model_bytes = four.metrics["bytes_down"].iloc[1] // 12
    assert 2 * model_bytes > INLINE_BYTES
    assert four.metrics["engine_bytes_reduced"][1:].tolist() == [NODES * 2 * model_bytes] * 2
    assert four.metrics["engine_bytes_broadcast"][1:].tolist() == [NODES * model_bytes] * 2


def test_on_one_node_nothing_crosses(run: Run, small: dict[str, Any]):
    metrics = run(small | {"rounds": 1}).metrics[1:]
    assert metrics["engine_bytes_broadcast"].tolist() == metrics["engine_bytes_reduced"].tolist() == [0]


@pytest.mark.parametrize("rule", ["fedavg", "fedoui"])
@pytest.mark.parametrize("disturb", [kill_the_makers, lose_the_sums, one_of])
def test_what_is_lost_between_the_two_levels_changes_no_bit(
    run: Run, large: dict[str, Any], far: None, monkeypatch: pytest.MonkeyPatch, gone: Any,
    calm: dict[str, tuple[str, list[float]]], disturb: Any, rule: str,
):
    config = large | {"aggregation": {"name": rule}, "rounds": 1}
    if rule not in calm:
        calm[rule] = outcome(run(config))
    disturbed(monkeypatch, disturb, gone)
    assert outcome(run(config)) == calm[rule]
