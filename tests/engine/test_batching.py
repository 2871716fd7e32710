"""Which way clients are trained where that changes bits: the faster one, as the workers time it."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from raysim.core.records import BatchingChoice
from raysim.engine.batching import choose, without_effect
from raysim.engine.placement import Placement
from raysim.engine.schedule import calls_of


class TimedPool:
    """Workers that would take these seconds, one after another and at once.

    reasons: why a worker cannot train at once.  asked: what they were asked.
    """

    def __init__(self, alone_s: Sequence[float], at_once_s: Sequence[float], reasons: Sequence[str] = ("", "")) -> None:
        self.placement = Placement(len(alone_s), 0.5)
        self.members = dict.fromkeys(range(len(alone_s)))
        self.batching: dict[str, BatchingChoice] = {}
        self.asked: list[Any] = []
        self.seconds = {False: list(alone_s), True: list(at_once_s)}
        self.reasons = list(reasons)

    def ask_started(self, question: Callable[[Any], Any], name: str) -> list[Any]:
        def expected_s(sizes: list[int], seconds: float, at_once: bool) -> list[float]:
            self.asked.append((sizes, at_once))
            return self.seconds[at_once]

        def why_alone(trainer: str) -> list[str]:
            self.asked.append(trainer)
            return self.reasons

        remote = {"expected_s": expected_s, "why_alone": why_alone}
        return question(SimpleNamespace(**{k: SimpleNamespace(remote=f) for k, f in remote.items()}))


def chosen(pool: TimedPool, asked: str = "auto", key: str = "cnn") -> BatchingChoice | None:
    return choose(pool, asked, [50, 10, 40, 20], key)  # type: ignore[arg-type]


def test_the_faster_way_is_taken_by_what_all_workers_time_on_their_share():
    """Of 50, 40, 20 and 10 samples, each of two workers gets 50 and 20. Means: 3 s and 2 s; 2 s and 3 s."""
    pool = TimedPool([2.0, 4.0], [1.0, 3.0])
    assert chosen(pool) == BatchingChoice(
        True, "2 s at once, 3 s one after another, as timed, a round and worker", 3.0, 2.0
    )
    assert pool.asked == ["vmap", ([50, 20], False), ([50, 20], True)]
    slower = chosen(TimedPool([1.0, 3.0], [2.0, 4.0]))
    assert slower is not None and not slower.at_once and (slower.alone_s, slower.at_once_s) == (2.0, 3.0)


@pytest.mark.parametrize(("at_once_s", "at_once"), [(0.95, False), (0.89, True)])
def test_bits_do_not_change_for_less_than_a_tenth(at_once_s: float, at_once: bool):
    found = chosen(TimedPool([1.0], [at_once_s]))
    assert found is not None and found.at_once is at_once


def test_what_was_timed_once_holds_for_all_runs_of_a_session_that_train_the_same():
    pool = TimedPool([2.0], [1.0])
    first = chosen(pool)
    pool.seconds = {False: [1.0], True: [2.0]}
    assert chosen(pool) == first and len(pool.asked) == 3
    other = chosen(pool, key="lenet")
    assert other is not None and not other.at_once


def test_nothing_is_timed_where_there_is_one_way():
    batch_norm = TimedPool([1.0, 1.0], [1.0, 1.0], ["", "the network has running statistics"])
    for asked in ("auto", "on"):
        assert chosen(batch_norm, asked) == BatchingChoice(False, "the network has running statistics")
    assert chosen(TimedPool([1.0], [9.0]), "on") == BatchingChoice(True, "resources.client_batching = on")
    off = TimedPool([2.0], [1.0])
    assert chosen(off, "off") == BatchingChoice(False, "resources.client_batching = off") and not off.asked
    assert set(batch_norm.asked) == {"vmap"}


def test_a_resumed_run_keeps_its_choice_but_on_a_cpu_where_there_is_none():
    kept = BatchingChoice(True, "timed", 2.0, 1.0)
    pool = TimedPool([1.0], [9.0])
    assert choose(pool, "auto", [50], "cnn", kept) is kept and not pool.asked  # type: ignore[arg-type]
    pool.placement = Placement(1, 0.0)
    assert choose(pool, "auto", [50], "cnn", kept) is None  # type: ignore[arg-type]


def test_clients_without_samples_take_no_time():
    pool = TimedPool([2.0], [1.0])
    choose(pool, "auto", [0, 0, 3], "cnn")  # type: ignore[arg-type]
    choose(pool, "auto", [0], "other")  # type: ignore[arg-type]
    assert [asked[0] for asked in pool.asked if asked != "vmap"] == [[3], [3], [1], [1]]


def test_a_group_that_does_not_fit_into_the_memory_of_one_worker_is_not_taken():
    found = chosen(TimedPool([1.0, 1.0], [0.1, float("inf")]))
    assert found == BatchingChoice(False, "a group of clients does not fit into the memory")


def test_on_a_cpu_there_is_nothing_to_choose_and_a_key_without_effect_is_said():
    pool = TimedPool([1.0], [1.0], ["only small networks"])
    pool.placement = Placement(2, 0.0)
    assert chosen(pool) is chosen(pool, "on") is chosen(pool, "off") is None
    assert not pool.asked
    assert without_effect(pool) == "only small networks"  # type: ignore[arg-type]
    assert pool.asked == ["dense"]


def test_the_calls_of_a_lone_worker_hold_half_of_what_is_left_and_no_less_than_a_tenth_of_a_second():
    """Costs 4, 3, 2, 1, 1, 1: half of 12 is 4 and 3; half of 5 is 2 and 1; the rest, 2, is less than 2 * 12 / 8.

    At 0.01 s each all of them take 0.12 s: less than two calls of 0.1 s.
    """
    costs = [1, 4, 1, 3, 2, 1]
    assert [[costs[i] for i in call] for call in calls_of(costs, 1.0)] == [[4, 3], [2, 1], [1, 1]]
    assert [len(call) for call in calls_of(costs, 0.01)] == [6]
