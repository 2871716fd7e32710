"""Who does what next: longest first, evenly, in calls that get smaller; nothing is lost or done twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.engine.schedule import Item, first, parts

COSTS = st.lists(st.integers(1, 1000).map(float), min_size=1, max_size=60)


def queue_of(costs: list[float]) -> list[Item]:
    return [Item(i, cost, f"item {i}") for i, cost in enumerate(sorted(costs))]


def costs_of(part: list[Item]) -> list[float]:
    return [item.cost for item in part]


def test_each_item_goes_to_whoever_is_free_first():
    """5 to worker 0; 4 and 3 to worker 1, free at 4; then 2 to worker 0, free at 5: 7 and 7."""
    dealt = parts(queue_of([2.0, 3.0, 4.0, 5.0]), {0: 0.0, 1: 0.0})
    assert {worker: costs_of(part) for worker, part in dealt.items()} == {0: [5.0, 2.0], 1: [4.0, 3.0]}


def test_what_a_worker_has_before_it_counts():
    """Worker 0 is busy for 10: all of 4, 3 and 2 go to worker 1, free at 9."""
    assert costs_of(parts(queue_of([2.0, 3.0, 4.0]), {0: 10.0, 1: 0.0})[1]) == [4.0, 3.0, 2.0]


@given(COSTS, st.integers(1, 8))
def test_every_item_is_dealt_once_and_no_worker_waits_for_long(costs: list[float], workers: int):
    """Graham: the longest part is at most 4/3 - 1/(3 m) of the best possible, which is no less than these two."""
    dealt = parts(queue_of(costs), dict.fromkeys(range(workers), 0.0))
    assert sorted(i.payload for part in dealt.values() for i in part) == list(range(len(costs)))
    least_possible = max(max(costs), sum(costs) / workers)
    if len(costs) <= workers:
        assert max(sum(costs_of(part)) for part in dealt.values()) == max(costs)
    assert max(sum(costs_of(part)) for part in dealt.values()) < least_possible + max(costs)


@given(COSTS, st.floats(0.0, 500.0))
def test_calls_shrink_and_end(costs: list[float], least: float):
    part, calls = queue_of(costs)[::-1], []
    while part:
        calls.append(first(part, least))
        part = part[len(calls[-1]) :]
    assert sum(len(call) for call in calls) == len(costs)
    assert all(call for call in calls)


@pytest.mark.parametrize(("least", "sizes"), [(1.0, [4, 2, 1, 1]), (3.0, [4, 4]), (5.0, [8]), (100.0, [8])])
def test_a_call_takes_half_of_what_is_left_but_no_sliver(least: float, sizes: list[int]):
    """8 items of cost 1: halves down to `least`; where less than `least` would remain, all of it."""
    part, taken = queue_of([1.0] * 8)[::-1], []
    while part:
        call = first(part, least)
        taken.append(len(call))
        part = part[len(call) :]
    assert taken == sizes


def test_an_item_that_failed_travels_alone():
    part = queue_of([1.0, 2.0, 3.0, 4.0])[::-1]
    part[1].attempts = 1
    assert costs_of(first(part, 100.0)) == [4.0]
    assert costs_of(first(part[1:], 100.0)) == [3.0]
    assert costs_of(first(part[2:], 100.0)) == [2.0, 1.0]
