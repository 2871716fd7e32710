"""A run that is interrupted and resumed is the run that was not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import raysim
from raysim import Result
from raysim.core.errors import UserError
from raysim.core.locks import NAME
from raysim.ui.display import Display

Run = Callable[..., Result]

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedoui with memory": {"aggregation": {"name": "fedoui", "window": 3, "ema": 0.5}},
    "server adam": {"server": {"name": "adam", "lr": 0.01}},
    "scaffold": {"local": {"name": "scaffold", "lr": 0.05}, "aggregation": {"name": "uniform"}},
    "moon": {"local": {"name": "moon", "lr": 0.05}},
    "feddyn": {"local": {"name": "feddyn", "lr": 0.05}, "aggregation": {"name": "uniform"}},
    "own batch statistics": {
        "model": {"name": "tiny_models:batch_norm_cnn"}, "aggregation": {"name": "fedavg", "buffers": "local"},
    },
}


def timeless(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns=[c for c in frame if c.startswith("seconds")])


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_and_three_more_are_six(run: Run, small: dict[str, Any], tmp_path: Path, method: str):
    config = {**small, **METHODS[method]}
    whole = run({**config, "output": {**small["output"], "dir": str(tmp_path / "whole")}}, rounds=6)
    run(config, rounds=3)
    resumed = run(config, rounds=6, resume=True)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    pd.testing.assert_frame_equal(timeless(resumed.metrics), timeless(whole.metrics), check_exact=True)
    clients = [timeless(pd.read_parquet(r.directory / "clients.parquet")) for r in (resumed, whole)]
    pd.testing.assert_frame_equal(*clients, check_exact=True)


def test_a_second_resume_of_a_run_that_goes_on_is_refused_with_the_process_that_has_it(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """A new run, and one that is resumed; both end as if the second one had not been."""
    show, refused = Display.round, []

    def resumed_elsewhere(self: Display, number: int, *others: Any) -> None:
        show(self, number, *others)
        if number == 2 or number == 4:
            with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on .*; wait until that has ended"):
                run(small, resume=True, rounds=9)
            refused.append(number)

    monkeypatch.setattr(Display, "round", resumed_elsewhere)
    first = run(small)
    assert run(small, resume=True, rounds=4).directory == first.directory
    assert refused == [2, 4]
    assert not (first.directory / NAME).exists()


def test_a_finished_run_says_so_and_does_nothing(run: Run, small: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    first = run(small)
    again = run(small, resume=True)
    assert again.directory == first.directory
    assert again.summary == first.summary
    assert "has finished all 3 rounds; nothing to do" in capsys.readouterr().out


def test_a_run_that_has_gone_beyond_the_rounds_asked_for_says_how_many_it_has(
    run: Run, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    run(small)
    again = run(small, rounds=2, resume=True)
    assert again.summary["rounds"] == 3
    said = "has finished all 3 rounds; nothing to do (rounds = 2 asks for fewer: the results are those of 3 rounds)"
    assert said in capsys.readouterr().out
    (again.directory / "summary.json").unlink()  # as if it had been interrupted after round 3
    with pytest.raises(UserError, match=r"rounds = 2, but .* was interrupted after round 3; ask for at least 3 rounds"):
        run(small, rounds=2, resume=True)


def test_a_damaged_run_json_is_named_and_the_run_before_it_goes_on(
    run: Run, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    first, second = run(small), run(small)
    damaged = second.directory / "run.json"
    for content in ("{", "[]", "{}"):
        damaged.write_text(content)
        assert run(small, resume=True).directory == first.directory
        said = f"note: {damaged} is damaged, so the run {second.directory.name} is passed over"
        assert said in capsys.readouterr().out


def test_a_change_is_refused_by_name(run: Run, small: dict[str, Any]):
    run(small)
    with pytest.raises(UserError, match=r"local.lr: 0.1 -> 0.2, seed: 0 -> 4|seed: 0 -> 4, local.lr: 0.1 -> 0.2"):
        run({**small, "local": {**small["local"], "lr": 0.2}}, seed=4, resume=True)


def test_nothing_to_resume_is_an_error_that_says_where_it_looked(small: dict[str, Any]):
    with pytest.raises(UserError, match=f"no run of this configuration in {small['output']['dir']}"):
        raysim.run(small, resume=True)


def start(config: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "raysim", "run", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never printed")


def children(process: subprocess.Popen[str]) -> list[Any]:
    import psutil

    return psutil.Process(process.pid).children(recursive=True)


def interrupt(process: subprocess.Popen[str], number: signal.Signals, after: str) -> None:
    """Send a signal once this text has been printed; it says that it was interrupted and leaves no process behind."""
    wait_for(process, after)
    left = children(process)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    for child in left:
        child.wait(timeout=20)


def test_signals_end_a_run_truthfully_and_it_resumes_to_the_same_bits(
    run: Run, command: Callable[..., int], small: dict[str, Any], store: str, tmp_path: Path, capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """SIGTERM ends a process, which leaves none behind; SIGINT ends what is resumed here; the next resume ends it.

    MLflow says KILLED each time, and it is one MLflow run with each round once.
    """
    import mlflow

    config = {**small, "rounds": 400, "tracking": {"uri": store}}
    config["resources"] = {"workers": 1}
    config["output"] = {**small["output"], "checkpoint_every": 1000}
    client, done = mlflow.MlflowClient(tracking_uri=config["tracking"]["uri"]), 0
    job, show = str(tmp_path / "job.yaml"), Display.round

    def interrupted(self: Display, number: int, *others: Any) -> None:
        show(self, number, *others)
        os.kill(os.getpid(), signal.SIGINT)

    for begins in (True, False):
        if begins:
            interrupt(start(config, tmp_path), signal.SIGTERM, "round 1/400")
        else:
            with monkeypatch.context() as patch:
                patch.setattr(Display, "round", interrupted)
                assert command("run", job, "--resume") == 130
        (directory,) = Path(config["output"]["dir"]).iterdir()
        identity = json.loads((directory / "run.json").read_text())
        assert client.get_run(identity["mlflow_run_id"]).info.status == "KILLED"
        before, done = done, max(int(p.stem.split("-")[1]) for p in (directory / "checkpoints").glob("*.json"))
        assert before < done < 400
    capfd.readouterr()
    code = command("run", job, "--resume", f"rounds={done + 2}")
    output = capfd.readouterr().out
    assert code == 0, output
    assert f"after round {done}" in output
    assert output.rstrip().endswith(str(directory))
    history = client.get_metric_history(identity["mlflow_run_id"], "train_loss")
    assert sorted(m.step for m in history) == list(range(1, done + 3))
    assert client.get_run(identity["mlflow_run_id"]).info.status == "FINISHED"
    assert len(client.search_runs([e.experiment_id for e in client.search_experiments()])) == 1
    straight = run({**config, "tracking": {"uri": "none"}}, rounds=done + 2)
    assert json.loads((directory / "summary.json").read_text())["model_sha256"] == straight.summary["model_sha256"]
