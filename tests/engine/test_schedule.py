"""Who does what next: longest first, evenly, in calls that get smaller; nothing is lost or done twice."""

import heapq
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.engine.schedule import Chunk, Item, Paces, Plan, WorkerLoad, assign, next_chunk

EQUAL = {0: 1.0, 1: 1.0}
COSTS = st.lists(st.integers(1, 1000).map(float), min_size=1, max_size=60)


def queue_of(costs: list[float]) -> list[Item]:
    return [Item(i, cost, f"item {i}") for i, cost in enumerate(sorted(costs))]


def costs_of(part: list[Item]) -> list[float]:
    return [item.cost for item in part]


def test_each_item_goes_to_whoever_is_free_next_chunk():
    """5 to worker 0; 4 and 3 to worker 1, free at 4; then 2 to worker 0, free at 5: 7 and 7."""
    dealt = assign(queue_of([2.0, 3.0, 4.0, 5.0]), {0: 0.0, 1: 0.0}, EQUAL)
    assert {worker: costs_of(part) for worker, part in dealt.items()} == {0: [5.0, 2.0], 1: [4.0, 3.0]}


def test_what_a_worker_has_before_it_counts():
    """Worker 0 is busy for 10: all of 4, 3 and 2 go to worker 1, free at 9."""
    assert costs_of(assign(queue_of([2.0, 3.0, 4.0]), {0: 10.0, 1: 0.0}, EQUAL)[1]) == [4.0, 3.0, 2.0]


@given(COSTS, st.integers(1, 8))
def test_every_item_is_dealt_once_and_no_worker_waits_for_long(costs: list[float], workers: int):
    """Graham: the longest part is at most 4/3 - 1/(3 m) of the best possible, which is no less than these two."""
    dealt = assign(queue_of(costs), dict.fromkeys(range(workers), 0.0), dict.fromkeys(range(workers), 1.0))
    assert sorted(i.payload for part in dealt.values() for i in part) == list(range(len(costs)))
    least_possible = max(max(costs), sum(costs) / workers)
    if len(costs) <= workers:
        assert max(sum(costs_of(part)) for part in dealt.values()) == max(costs)
    assert max(sum(costs_of(part)) for part in dealt.values()) < least_possible + max(costs)


@given(COSTS, st.floats(0.0, 500.0))
def test_calls_shrink_and_end(costs: list[float], least: float):
    part, calls = queue_of(costs)[::-1], []
    while part:
        calls.append(next_chunk(part, least))
        part = part[len(calls[-1]) :]
    assert sum(len(call) for call in calls) == len(costs)
    assert all(call for call in calls)


@pytest.mark.parametrize(("least", "sizes"), [(1.0, [4, 2, 1, 1]), (3.0, [4, 4]), (5.0, [8]), (100.0, [8])])
def test_a_call_takes_half_of_what_is_left_but_no_sliver(least: float, sizes: list[int]):
    """8 items of cost 1: halves down to `least`; where less than `least` would remain, all of it."""
    part, taken = queue_of([1.0] * 8)[::-1], []
    while part:
        call = next_chunk(part, least)
        taken.append(len(call))
        part = part[len(call) :]
    assert taken == sizes


def test_an_item_that_failed_travels_alone():
    part = queue_of([1.0, 2.0, 3.0, 4.0])[::-1]
    part[1].attempts = 1
    assert costs_of(next_chunk(part, 100.0)) == [4.0]
    assert costs_of(next_chunk(part[1:], 100.0)) == [3.0]
    assert costs_of(next_chunk(part[2:], 100.0)) == [2.0, 1.0]


def test_an_item_goes_to_whoever_would_be_done_with_it_first():
    """Worker 0 takes 10 s per unit, worker 1 takes 1: of 4, 3, 3, 2, 1 the slow one gets nothing before 1 * 13 s > 10.

    4 + 3 + 3 + 2 = 12 s on worker 1; the last, of cost 1, would end there after 13 s, on worker 0 after 10.
    """
    assigned = assign(queue_of([1.0, 2.0, 3.0, 3.0, 4.0]), {0: 0.0, 1: 0.0}, {0: 10.0, 1: 1.0})
    assert {worker: costs_of(part) for worker, part in assigned.items()} == {0: [1.0], 1: [4.0, 3.0, 3.0, 2.0]}


def test_the_pace_of_a_worker_is_the_mean_of_what_was_known_and_what_was_measured():
    """4 s for cost 2 is 2; then 8 s for cost 2 is 4, the mean 3.  A worker that is not known has the median."""
    paces = Paces()
    assert paces.of("train", [0, 1]) == {}
    paces.measured("train", 0, 4.0, 2.0)
    paces.measured("train", 0, 8.0, 2.0)
    assert paces.of("train", [0, 1]) == {0: 3.0, 1: 3.0}
    assert paces.of("evaluate", [0]) == {}
    paces.forget(0)
    assert paces.of("train", [0, 1]) == {}


def test_a_worker_that_got_no_work_is_tried_again_some_day():
    """10 against 1 and 1: each `map` without work takes a twentieth off the logarithm, so 3 is reached in 15."""
    paces = Paces()
    for worker, seconds in ((0, 10.0), (1, 1.0), (2, 1.0)):
        paces.measured("train", worker, seconds, 1.0)
    for _ in range(15):
        paces.idle("train", [0])
    assert paces.of("train", [0, 1, 2]) == pytest.approx({0: 10 ** (0.95**15), 1: 1.0, 2: 1.0})
    assert paces.of("train", [0])[0] < 3.0


class Simulation:
    """One `map` by a simulated clock: workers that do the items of a call one after another, and no messages.

    seconds_per_unit: (worker, time) -> how long a unit of cost takes it.
    """

    def __init__(self, costs: list[float], workers: int, seconds_per_unit: Any, paces: Paces) -> None:
        self.items = [Item(i, cost, f"item {i}") for i, cost in enumerate(costs)]
        self.plan = Plan(self.items, "train", paces, workers)
        self.loads = {w: WorkerLoad[Chunk](w, ready=True) for w in range(workers)}
        self.seconds_per_unit = seconds_per_unit
        self.now = 0.0
        self.calls = 0
        self.begun: dict[int, int] = {}
        self.running: list[tuple[float, int]] = []

    def seconds(self) -> float:
        """Do everything; the time it takes.  Every item is begun once, or this fails."""
        self.hand_out()
        while self.running:
            self.now, worker = heapq.heappop(self.running)
            self.go_on(worker)
            self.hand_out()
        assert sorted(self.begun) == [item.payload for item in self.items]
        assert not self.plan.queue and not any(load.chunks for load in self.loads.values())
        self.plan.ended(self.loads)
        return self.now

    def hand_out(self) -> None:
        while True:
            for worker, items, _ in self.plan.hand_out(self.loads, self.now):
                load = self.loads[worker]
                load.chunks.append(Chunk(items))
                self.calls += 1
                if len(load.chunks) == 1:
                    load.since = self.now
                    self.go_on(worker)
            wanted = self.plan.to_take_back(self.loads, self.now)
            if wanted is None:
                return
            worker, items = wanted
            free = {id(item) for item in items if item.payload not in self.begun}
            for chunk in self.loads[worker].chunks:
                self.plan.add(chunk.take_back(item for item in chunk.items if id(item) in free))

    def go_on(self, worker: int) -> None:
        load = self.loads[worker]
        while load.chunks:
            item = next((item for item in load.chunks[0].left() if item.payload not in self.begun), None)
            if item is not None:
                self.begun[item.payload] = worker
                ends = self.now + item.cost * self.seconds_per_unit(worker, self.now)
                heapq.heappush(self.running, (ends, worker))
                return
            done = load.chunks.popleft()
            self.plan.answered(worker, self.now - load.since, done.left())
            load.since = self.now


def one_is_slow(worker: int, now: float) -> float:
    return 10.0 if worker == 3 else 1.0


def all_alike(worker: int, now: float) -> float:
    return 1.0


@pytest.mark.parametrize("mean_s", [0.05, 0.35, 1.0])
def test_a_worker_ten_times_slower_than_three_others_costs_less_than_half_as_much_again(mean_s: float):
    """42 s of work: 14 s on three workers.  With a fourth that is slow less than 21 s, in every round.

    Nothing is known of it in the first. It can do no harm with what it has not begun; one item takes it 10 * mean_s.
    """
    rng = np.random.default_rng(0)
    paces, of_three = Paces(), Paces()
    for _ in range(12):
        costs = rng.uniform(0.5 * mean_s, 1.5 * mean_s, round(42 / mean_s)).tolist()
        without = Simulation(costs, 3, all_alike, of_three).seconds()
        assert Simulation(costs, 4, one_is_slow, paces).seconds() < 1.5 * without


def test_what_a_worker_that_becomes_slow_has_not_begun_is_done_by_others():
    """From 2 s on worker 3 takes ten times as long, half of its part before it: 120 items of 0.35 s, 4 workers."""
    paces = Paces()
    costs = [0.35] * 120
    quick = Simulation(costs, 4, all_alike, paces).seconds()
    slowed = Simulation(costs, 4, lambda worker, now: 10.0 if worker == 3 and now > 2 else 1.0, paces).seconds()
    assert quick < 11.5
    assert slowed < 1.5 * quick


@settings(max_examples=30)
@given(COSTS, st.integers(1, 6), st.lists(st.floats(0.01, 20.0), min_size=6, max_size=6))
def test_every_item_is_done_once_however_different_the_workers_are(
    costs: list[float], workers: int, speeds: list[float]
):
    paces = Paces()
    for _ in range(3):
        Simulation([c / 100 for c in costs], workers, lambda worker, _: speeds[worker], paces).seconds()


def test_equal_workers_get_few_calls_and_end_together():
    """4 parts of 10 s in 0.1 s items: halves down to an eighth of a part, 4 calls each, and a few at the end."""
    paces = Paces()
    for _ in range(3):
        simulation = Simulation([0.1] * 400, 4, all_alike, paces)
        assert simulation.seconds() < 10.2
        assert simulation.calls <= 20


def test_nothing_is_taken_back_for_a_gain_that_is_less_than_what_it_costs():
    """Worker 1 has two items of 0.05 s and has just begun one: the other would be done 0.05 s sooner by worker 0."""
    paces = Paces()
    paces.measured("train", 0, 1.0, 1.0)
    items = queue_of([0.05, 0.05])
    plan = Plan([], "train", paces, 2)
    loads = {0: WorkerLoad[Chunk](0, ready=True), 1: WorkerLoad[Chunk](1, True, deque([Chunk(items)]))}
    assert plan.to_take_back(loads, 0.0) is None
    loads[1].chunks = deque([Chunk(queue_of([0.5, 0.5]))])
    worker, wanted = plan.to_take_back(loads, 0.0) or (-1, [])
    assert (worker, costs_of(wanted)) == (1, [0.5])
    assert plan.to_take_back(loads, 0.0) is None, "asked for once"
