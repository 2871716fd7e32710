"""Signals become an exception, once the run is being wound up they are only noted, and nothing of it stays behind."""

import os
import signal
import threading

import pytest

from raysim.interrupts import Interrupted, Signals

pytestmark = pytest.mark.usefixtures("not_under_nohup")
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", ALL)
def test_a_signal_raises_and_is_kept_by_name(number):
    with Signals() as signals:
        with pytest.raises(Interrupted, match=f"by {number.name}"):
            os.kill(os.getpid(), number)
        assert signals.names == [number.name]
        with pytest.raises(Interrupted):  # although the exception may have been lost on its way
            signals.check()


@pytest.mark.parametrize("number", ALL)
def test_a_signal_while_the_run_is_wound_up_is_only_noted(number):
    with Signals() as signals:
        signals.ending = True
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert signals.names == [number.name] * 2


def test_a_signal_that_arrives_in_work_that_must_not_be_cut_short_is_raised_after_it():
    done = []
    with Signals() as signals:
        with pytest.raises(Interrupted, match="by SIGINT"), signals.held():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)
        assert done == [1] and not signals.ending
        signals.ending = True
        with signals.held():
            done.append(2)
        assert done == [1, 2] and signals.ending


def test_handlers_are_put_back_also_after_somebody_else_took_the_signal():
    before = [signal.getsignal(number) for number in ALL]
    with Signals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does when it starts
        signals.listen()
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in ALL] == before


def test_under_nohup_a_closed_terminal_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.names == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_in_another_thread_leaves_the_signals_alone():
    before = [signal.getsignal(number) for number in ALL]
    seen = []

    def enter() -> None:
        with Signals():
            seen.extend(signal.getsignal(number) for number in ALL)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == before
