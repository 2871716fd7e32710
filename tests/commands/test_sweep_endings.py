"""The end of a run of a sweep goes on beside the next run, and loses no guarantee by it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from raysim import Result
from raysim.commands.sweep.endings import Endings
from raysim.commands.sweep.entry import sweep
from raysim.core.errors import RunError
from raysim.core.signals import Interrupted
from raysim.federation.server import Server
from raysim.lifecycle import figures
from raysim.lifecycle.conclusion import Conclusion
from raysim.lifecycle.figure_process import FigureProcess
from raysim.lifecycle.figures import RunFigures
from raysim.lifecycle.runner import run_experiment

LIMIT_S = 120


@pytest.fixture
def small(small: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with one worker and two rounds."""
    return {**small, "rounds": 2, "resources": {"workers": 1}}


def written(folder: Path, base: dict[str, Any], grid: dict[str, Any]) -> Path:
    path = folder / "ends.yaml"
    path.write_text(yaml.safe_dump({"base": base, "grid": grid}))
    return path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[int, threading.Event]:
    """An event for each of two seeds, set once a round of its run has been trained."""
    events = {0: threading.Event(), 1: threading.Event()}
    train = Server.train

    def then_told(self: Server, state: Any) -> Any:
        result = train(self, state)
        events[self.config.seed].set()
        return result

    monkeypatch.setattr(Server, "train", then_told)
    return events


@pytest.mark.usefixtures("warm")
def test_the_figures_of_a_run_are_drawn_while_the_next_run_trains(
    tmp_path: Path, small: dict[str, Any], trained: dict[int, threading.Event], monkeypatch: pytest.MonkeyPatch
):
    """The first run cannot end before the second trains; both are finished then, in the folder and in the tables."""
    waited = []

    def draw(*_: object) -> None:
        waited.append(trained[1].wait(LIMIT_S))

    monkeypatch.setattr(FigureProcess, "draw", draw)
    result = sweep(written(tmp_path, small, {"seed": [0, 1]}))
    assert waited == [True, True] and not result.failed
    for folder in result.runs["run_directory"]:
        assert json.loads((Path(folder) / "summary.json").read_text())["status"] == "FINISHED"
        assert json.loads((Path(folder) / "status.json").read_text())["status"] == "FINISHED"
    assert list(pd.read_csv(result.directory / "runs.csv")["status"]) == ["FINISHED"] * 2


@pytest.mark.usefixtures("warm")
def test_the_results_are_those_of_runs_one_by_one(run: Callable[..., Result], tmp_path: Path, small: dict[str, Any]):
    swept = sweep(written(tmp_path, small, {"seed": [0, 1]})).runs
    output = {**small["output"], "dir": str(tmp_path / "alone")}
    alone = [run({**small, "seed": seed, "output": output}).summary["model_sha256"] for seed in (0, 1)]
    assert list(swept["model_sha256"]) == alone


@pytest.mark.usefixtures("warm")
def test_an_interrupt_in_the_next_run_leaves_the_run_that_ends_finished(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Its figures are still to be drawn when the interrupt comes."""
    interrupted = threading.Event()
    train = Server.train

    def stopped(self: Server, state: Any) -> Any:
        if self.config.seed == 1 and state.round == 1:
            interrupted.set()
            raise Interrupted("by a test")
        return train(self, state)

    monkeypatch.setattr(Server, "train", stopped)
    monkeypatch.setattr(FigureProcess, "draw", lambda *_: interrupted.wait(LIMIT_S))
    path = written(tmp_path, small, {"seed": [0, 1]})
    with pytest.raises(KeyboardInterrupt):
        sweep(path)
    folders = list(tmp_path.glob("runs/seed-*"))
    found = {folder: json.loads((folder / "status.json").read_text())["status"] for folder in folders}
    assert sorted(found.values()) == ["FINISHED", "KILLED"]
    (table,) = tmp_path.glob("runs/sweep-*/runs.csv")
    assert list(pd.read_csv(table)["status"]) == ["FINISHED"]
    monkeypatch.setattr(Server, "train", train)
    again = sweep(path)
    assert sorted(again.runs["run_directory"]) == sorted(map(str, found))


@pytest.mark.usefixtures("warm")
def test_a_run_whose_end_fails_is_recorded_with_its_cause_and_the_others_go_on(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuses(_: object, drawn: RunFigures, __: Path) -> None:
        if len(drawn.metrics) == 2:  # round 0 and the only one
            raise RuntimeError("no figure of one round")

    monkeypatch.setattr(FigureProcess, "draw", refuses)
    result = sweep(written(tmp_path, small, {"rounds": [1, 2]}))
    assert list(result.runs["status"]) == ["FAILED", "FINISHED"] and list(result.failed) == ["rounds 1"]
    assert "rounds 1 failed: RuntimeError: no figure of one round" in capsys.readouterr().out
    assert "no figure of one round" in (result.directory / "cells" / "rounds-1.error.txt").read_text()
    with pytest.raises(RunError, match="1 of 2 runs failed"):
        result.check()


def test_a_driver_that_is_killed_before_the_end_of_a_run_ends_it_the_next_time(
    tmp_path: Path, small: dict[str, Any], warm: Any, trained: dict[int, threading.Event]
):
    """What is left is never carried out, as if the process were gone; no round is trained again."""

    def never(conclusion: Conclusion) -> Result:
        conclusion.owned.close()
        return conclusion.result()

    left = run_experiment({**small, "seed": 0}, session=warm, conclude=never)
    assert json.loads((left.directory / "summary.json").read_text())["status"] == "UNFINISHED"
    trained[0].clear()
    swept = sweep(written(tmp_path, small, {"seed": [0]})).runs
    assert list(swept["run_directory"]) == [str(left.directory)] and not trained[0].is_set()
    assert list(swept["status"]) == ["FINISHED"] and list(swept["model_sha256"]) == [left.summary["model_sha256"]]


def test_an_end_that_raises_is_told_to_who_asks_and_only_one_goes_on_at_a_time():
    """Not to who adds the next one, which has nothing to do with it."""
    going = threading.Semaphore(1)

    def end() -> None:
        assert going.acquire(blocking=False)
        going.release()

    def wrong() -> None:
        raise OSError("no space")

    with Endings() as endings:
        for one in (end, end, wrong, end):
            endings.add(one)
        with pytest.raises(OSError, match="no space"):
            endings.check()
    with pytest.raises(OSError, match="no space"), Endings() as endings:
        endings.add(wrong)


def test_figures_are_drawn_in_a_process_of_their_own_and_here_where_it_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder that cannot be made is an OSError, as here."""
    metrics = pd.DataFrame({"round": [0, 1], "accuracy": [0.1, 0.5]})
    drawn = RunFigures(metrics, pd.DataFrame({"round": [1], "client": [0]}), None, ("a", "b"))
    monkeypatch.setattr(figures.RunFigures, "draw", lambda *_: pytest.fail("it was drawn here"))
    with FigureProcess() as process:
        process.draw(drawn, tmp_path / "there")
        assert (tmp_path / "there" / "accuracy.png").stat().st_size
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file"):
            process.draw(drawn, tmp_path / "file" / "figures")
        assert process._started is not None
        process._started[0].kill()
        process._started[0].wait()
        here: list[Path] = []
        monkeypatch.setattr(figures.RunFigures, "draw", lambda _, folder: here.append(folder))
        process.draw(drawn, tmp_path / "here")
    assert here == [tmp_path / "here"]
