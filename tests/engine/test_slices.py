"""Questions about all updates at once, cut into slices of coordinates."""

from types import SimpleNamespace

import numpy as np
import pytest

from raysim.config.schema import Resources
from raysim.core.records import ClientReport, ClientTask
from raysim.engine import collect, slices
from raysim.engine.messages import PartialSum, SumWeights
from raysim.engine.rounds import Round


@pytest.mark.parametrize(("parameters", "clients"), [(1, 1), (10, 3), (999, 7), (8_000_001, 1), (1_000_000, 100)])
def test_slices_cover_every_coordinate_once_and_stay_small(parameters, clients):
    cuts = slices.slices(parameters, clients)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == parameters
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert all(0 < 4 * clients * (stop - start) <= slices.SLICE_BYTES for start, stop in cuts)


def test_the_gram_matrix_of_two_rows():
    """(1, 2) and (3, -1): 1 + 4 = 5, 9 + 1 = 10, 3 - 2 = 1."""
    assert slices.gram_matrix(np.array([[1.0, 2.0], [3.0, -1.0]])).tolist() == [[5, 1], [1, 10]]


def test_the_gram_matrix_is_symmetric_and_equal_rows_have_distance_exactly_zero():
    rows = np.random.default_rng(0).normal(size=(4, 5000))
    rows[3] = rows[1]
    gram_KK = slices.gram_matrix(rows)
    np.testing.assert_array_equal(gram_KK, gram_KK.T)
    np.testing.assert_array_equal(gram_KK[1], gram_KK[3])
    assert gram_KK[1, 1] + gram_KK[3, 3] - 2 * gram_KK[1, 3] == 0
    np.testing.assert_allclose(gram_KK, rows @ rows.T, rtol=1e-12, atol=1e-9)


class OneNode:
    """What a pool says of workers that are all on the driver's node."""

    here = "node"
    resources = Resources()

    def node(self, worker: int) -> str:
        return "node"

    def worker_on(self, node: str) -> int | None:
        return 0


class TwoDeaths(OneNode):
    """A pool whose workers hold sums: worker 1 dies when it is first asked, worker 0 when it is asked again."""

    def __init__(self) -> None:
        self.asked = 0
        self.home = {1: 0, 2: 0, 3: 1}
        self.held: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    def map(self, items, submit, on_lost, last=None, kind="", take_back=None):
        for item in items:
            k, worker = item.payload.client, self.home[item.payload.client]
            self.held[worker].add(k)
            yield worker, [item], [(ClientReport(k, 1, 0, 1, 1.0, 0.0, 1.0, 0.0), None)]

    def ask(self, questions):
        self.asked += 1
        dies = {1: 1, 2: 0}.get(self.asked)
        self.home[3] = {1: 0, 2: 2}.get(self.asked, 2)
        got = {w: (None, self.sum_of(w)) for w in questions if w != dies}
        return got, [dies] if dies in questions else []

    def sum_of(self, worker):
        clients, self.held[worker] = self.held[worker], set()
        zero = np.zeros(0)
        return PartialSum(np.array([float(sum(10**k for k in clients))]) * 2.0**40, zero, np.zeros(0, np.int64), {})


@pytest.mark.parametrize("streams", [True, False])
def test_no_client_is_counted_twice_when_a_second_worker_dies_after_it_has_answered(
    streams: bool, monkeypatch: pytest.MonkeyPatch
):
    """Clients 1 and 2 are summed by worker 0, which dies later with client 3 in hand: 10 + 100 + 1000, each once."""
    monkeypatch.setattr(collect.ray, "get", lambda ref, **_: ref)
    sum_weights = {k: SumWeights(1.0, 0.0, 0.0) for k in (1, 2, 3)}
    round_ = Round(TwoDeaths(), 1, None, [ClientTask(k, 1) for k in (1, 2, 3)], sum_weights if streams else None, 1)  # type: ignore[arg-type]
    round_.train()
    assert round_.sums(sum_weights)[0].tolist() == [1110.0]


def test_a_slice_of_which_a_part_is_lost_is_no_answer(monkeypatch: pytest.MonkeyPatch):
    from ray.exceptions import ObjectLostError

    def lost(ref):
        raise ObjectLostError(ref, None, "")

    monkeypatch.setattr(slices.ray, "get", lost)
    assert slices.answer(np.sum, [([1], "ff" * 28)]) is None


class LosesSlicesOnce(OneNode):
    """A pool of one worker that holds (1, 2, 3), (5, 6, 7), (3, 1, 8) and loses each slice once."""

    members = {0: None}
    rows = {1: [1.0, 2.0, 3.0], 2: [5.0, 6.0, 7.0], 3: [3.0, 1.0, 8.0]}

    def __init__(self) -> None:
        self.lost: set[int] = set()

    def map(self, items, submit, on_lost, last=None, kind="", take_back=None):
        for item in items:
            if isinstance(item.payload, ClientTask):
                yield 0, [item], [(ClientReport(item.payload.client, 1, 0, 1, 1.0, 0.0, 1.0, 0.0), None)]
                continue
            ((_, start),) = item.payload[1]
            again = start in self.lost
            self.lost.add(start)
            column = np.array([[self.rows[k][start]] for k in sorted(self.rows)])
            yield 0, [item], [np.median(column, axis=0) if again else None]

    def ask(self, questions):
        put_slices = SimpleNamespace(remote=lambda _, wanted: [start for start, _ in wanted])
        actor = SimpleNamespace(put_slices=put_slices)
        return {worker: question(actor) for worker, question in questions.items()}, []


def test_lost_slices_are_asked_for_again_until_all_are_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slices, "SLICE_BYTES", 4 * 3)  # one coordinate of three clients
    pool = LosesSlicesOnce()
    round_ = Round(pool, 1, None, [ClientTask(k, 1) for k in (1, 2, 3)], None, 3)  # type: ignore[arg-type]
    round_.train()
    assert round_.by_coordinate(np.sum).tolist() == [3, 2, 7]
    assert pool.lost == {0, 1, 2}
