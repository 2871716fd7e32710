"""Ray starts in the background: nothing waits for it too early, and however a run ends, it is ended, too."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from raysim.config.schema import Resources
from raysim.core.errors import RunError
from raysim.core.signals import Interrupted, Signals
from raysim.engine import background_start
from raysim.engine.background_start import BackgroundStart
from raysim.engine.session import Session

steps: list[tuple[str, str]] = []


class Slow:
    """In place of a session: takes 0.3 s to start, and notes what is done and in which thread."""

    fails = False

    def __init__(self, *_: object) -> None:
        """Nothing to keep."""

    def note(self, step: str) -> None:
        steps.append((step, threading.current_thread().name))

    def __enter__(self) -> "Slow":
        time.sleep(0.3)
        if self.fails:
            raise RunError("no memory left")
        self.note("started")
        return self

    def pool(self, _: Resources) -> None:
        self.note("pool")

    def __exit__(self, *_: object) -> None:
        self.note("ended")


def equip(_: object) -> None:
    steps.append(("equipped", threading.current_thread().name))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Slow]]:
    steps.clear()
    monkeypatch.setattr(background_start, "Session", Slow)
    monkeypatch.setattr(background_start, "starts_here", lambda _: True)
    before = threading.active_count()
    yield Slow
    assert threading.active_count() == before


def test_the_driver_goes_on_while_ray_starts_and_one_thread_starts_and_ends_it(slow: type[Slow]):
    with BackgroundStart(Signals()) as start:
        start.begin(Resources(), equip)
        assert steps == []
        assert isinstance(start.session(Resources()), Slow)
        assert [step for step, _ in steps] == ["started", "pool", "equipped"]
    assert [step for step, _ in steps] == ["started", "pool", "equipped", "ended"]
    assert len({thread for _, thread in steps}) == 1 and steps[0][1] != threading.main_thread().name


def test_without_a_beginning_the_main_thread_starts_it_when_it_is_asked_for(slow: type[Slow]):
    with BackgroundStart(Signals()) as start:
        start.session(Resources())
    main = threading.main_thread().name
    assert steps == [("started", main), ("ended", main)]


def test_a_run_that_is_refused_meanwhile_waits_for_ray_and_ends_it(slow: type[Slow]):
    with pytest.raises(ValueError, match="refused"), BackgroundStart(Signals()) as start:
        start.begin(Resources(), equip)
        raise ValueError("refused")
    assert [step for step, _ in steps] == ["started", "pool", "equipped", "ended"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_meanwhile_interrupts_the_driver_and_ray_is_ended_though_a_second_one_comes(
    slow: type[Slow], number: signal.Signals
):
    again = threading.Timer(0.1, os.kill, (os.getpid(), number))
    with pytest.raises(Interrupted, match=number.name), Signals() as signals, BackgroundStart(signals) as start:
        start.begin(Resources(), equip)
        again.start()
        os.kill(os.getpid(), number)
        start.session(Resources())
    again.join()
    assert signals.names == [number.name] * 2
    assert [step for step, _ in steps] == ["started", "pool", "equipped", "ended"]


def test_a_ray_that_does_not_start_is_reported_when_it_is_asked_for(slow: type[Slow], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Slow, "fails", True)
    with BackgroundStart(Signals()) as start:
        start.begin(Resources(), equip)
        with pytest.raises(RunError, match="no memory left"):
            start.session(Resources())
    assert steps == []


def test_a_session_that_is_given_is_used_and_stays_open(session: Session):
    with BackgroundStart(Signals(), session) as start:
        start.begin(Resources(), equip)
        assert start.session(Resources()) is session
    assert session.pool(Resources(workers=1)).members


@pytest.mark.parametrize(("unwanted", "tried"), [(False, 2), (True, 1)])
def test_a_ray_that_does_not_start_is_tried_again_unless_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch, unwanted: bool, tried: int
):
    attempts: list[int] = []

    def fail(*_: object, **__: object) -> None:
        attempts.append(1)
        raise RuntimeError("its processes were ended")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Session, "_start_once", fail)
    monkeypatch.setattr("raysim.engine.session.ray.is_initialized", lambda: False)
    with pytest.raises(RunError, match="its processes were ended"), Session(Resources(), lambda: unwanted):
        pass
    assert len(attempts) == tried
