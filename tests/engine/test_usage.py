"""Idle is what is left of a round's time when the calls are taken off."""

import pytest

from raysim.engine import usage
from raysim.engine.usage import Usage


def test_idle_is_the_time_of_the_rounds_without_the_calls():
    """Round 1, 10 s: worker 0 busy 6 + 2 s, worker 1 busy 5 s: idle 2 and 5, mean 3.5.

    Round 2, 4 s: worker 0 busy 4 s, worker 1 not at all, which is idle for 0 and 4, mean 2.  Of 14 s: 12 and 5 busy.
    """
    used = Usage()
    used.worked(1, 100.0)  # before the rounds
    used.begin_round()
    for worker, seconds in ((0, 6.0), (1, 5.0), (0, 2.0)):
        used.worked(worker, seconds)
    assert used.end_round([0, 1], 10.0) == 3.5
    used.worked(0, 4.0)
    assert used.end_round([0, 1], 4.0) == 2.0
    assert used.workers() == [
        {"worker": 0, "busy_s": 12.0, "idle_frac": round(1 - 12 / 14, 4)},
        {"worker": 1, "busy_s": 5.0, "idle_frac": round(1 - 5 / 14, 4)},
    ]


def test_a_worker_counts_for_the_rounds_that_it_was_there():
    """Worker 1 is lost in round 1 after 3 of 4 s, its replacement 2 is busy for 1 of the 2 s of round 2."""
    used = Usage()
    used.worked(1, 3.0)
    assert used.end_round([2], 4.0) == (1.0 + 4.0) / 2
    used.worked(2, 1.0)
    assert used.end_round([2], 2.0) == 1.0
    assert [(w["worker"], w["idle_frac"]) for w in used.workers()] == [(1, 0.25), (2, round(5 / 6, 4))]


def test_only_the_waiting_of_the_driver_is_counted_as_waiting(monkeypatch: pytest.MonkeyPatch):
    """By the clock, 5 s pass inside and 7 s outside; a wait that is cut short counts, too."""
    clock = [0.0]
    monkeypatch.setattr(usage.time, "monotonic", lambda: clock[0])
    used = Usage()
    with pytest.raises(KeyboardInterrupt), used.waiting():
        clock[0] += 5.0
        raise KeyboardInterrupt
    clock[0] += 7.0
    assert used.waited_s == 5.0
