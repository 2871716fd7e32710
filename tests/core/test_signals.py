"""Signals become an exception, once the run is being wound up they are only noted, and nothing of it stays behind."""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from raysim.core.signals import Interrupted, Signals

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


@pytest.mark.parametrize("waits", [False, True], ids=["busy", "blocked"])
def test_a_signal_in_the_middle_of_an_import_is_raised_at_its_end_and_leaves_other_threads_able_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
):
    """The module sends the signal and would swallow the exception; afterwards the main thread works, or is blocked."""
    (tmp_path / "half_way.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0.2)\n"
        "    done = True\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "another.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted, match="by SIGTERM"), Signals() as signals:
        importlib.import_module("half_way")
        if waits:
            threading.Event().wait(20)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            pass
    assert sys.modules.pop("half_way").done and signals.names == ["SIGTERM"]
    thread = threading.Thread(target=importlib.import_module, args=("another",), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert sys.modules.pop("another")


def test_a_run_that_is_itself_part_of_an_import_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "whole_run.py").write_text(
        "import os, signal\nfrom raysim.core.signals import Signals\nwith Signals():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    os.environ['NOT_INTERRUPTED'] = '1'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted, match="by SIGINT"):
        importlib.import_module("whole_run")
    assert "NOT_INTERRUPTED" not in os.environ


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


def test_a_signal_that_the_outer_of_two_has_seen_and_lost_is_met_by_the_next_check_of_the_inner():
    with Signals():
        with pytest.raises(Interrupted):  # as if it were raised in a destructor, where it is lost
            os.kill(os.getpid(), signal.SIGTERM)
        with Signals() as inner, pytest.raises(Interrupted, match="by SIGTERM"):
            inner.check()


def test_a_signal_that_the_outer_of_two_has_put_off_goes_to_the_inner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It arrives in the middle of an import, in which a run starts to listen for itself."""
    (tmp_path / "starts_to_listen.py").write_text(
        "import os, signal, time\nfrom raysim.core.signals import Signals\nos.kill(os.getpid(), signal.SIGHUP)\n"
        "with Signals():\n    time.sleep(20)\n    os.environ['NOT_INTERRUPTED'] = '1'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted, match="by SIGHUP"), Signals():
        importlib.import_module("starts_to_listen")
    assert "NOT_INTERRUPTED" not in os.environ
