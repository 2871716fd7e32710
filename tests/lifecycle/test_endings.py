"""However a run ends, its folder and MLflow say so truthfully, and nothing of Ray is left behind."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from raysim import Result
from raysim.core.errors import RayLost, UserError
from raysim.engine import liveness
from raysim.engine.session import Session, clean_up
from raysim.lifecycle.directory import RunDirectory
from raysim.lifecycle.runner import run_experiment
from raysim.tracking.tracker import Tracker
from raysim.ui.display import Display

Run = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("not_under_nohup")


@pytest.fixture
def tracked(small: dict[str, Any], store: str) -> dict[str, Any]:
    return {**small, "tracking": {"uri": store}}


def status(config: dict[str, Any]) -> str:
    """What the only run of a configuration says of itself; MLflow, where it is used, agrees."""
    (directory,) = Path(config["output"]["dir"]).iterdir()
    said: str = json.loads((directory / "status.json").read_text())["status"]
    run_id = json.loads((directory / "run.json").read_text())["mlflow_run_id"]
    if run_id:
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=config["tracking"]["uri"])
        assert client.get_run(run_id).info.status == said
    return said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_summary_leaves_a_finished_run_finished(
    run: Run, tracked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    """It still ends what called the run, such as a sweep."""
    config = tracked if number == signal.SIGINT else {**tracked, "tracking": {"uri": "none"}}
    summary = Display.summary

    def interrupted(self: Display, content: dict[str, Any]) -> None:
        summary(self, content)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Display, "summary", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"by {number.name}"):
        run(config)
    assert status(config) == "FINISHED"
    monkeypatch.undo()
    assert run(config, resume=True).summary["status"] == "FINISHED"


def test_a_signal_in_the_middle_of_a_write_to_mlflow_leaves_it_unlocked_to_say_killed(
    session: Session, undrawn: None, tracked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The signal comes as the rows of round 2 of 3 are about to be committed."""
    import sqlalchemy

    log_round, sent = Tracker.log_round, []

    def interrupt(_: Any) -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted(self: Tracker, number: int, metrics: Any) -> None:
        if number != 2:
            log_round(self, number, metrics)
            return
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", interrupt)
        try:
            log_round(self, number, metrics)
        finally:
            sqlalchemy.event.remove(sqlalchemy.Engine, "commit", interrupt)

    monkeypatch.setattr(Tracker, "log_round", interrupted)
    with pytest.raises(KeyboardInterrupt, match="by SIGINT"):
        run_experiment(tracked, session=session)  # MLflow in this process, where its commits can be listened to
    assert sent and status(tracked) == "KILLED"


def test_a_signal_before_the_summary_kills_the_run_a_second_one_does_not_hurry_it_and_it_resumes(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The first one comes after round 2 of 3, the second while the state is saved."""
    from raysim.lifecycle import state_io

    straight = run(small)
    config = {**small, "output": {**small["output"], "dir": small["output"]["dir"] + "-other"}}
    save = state_io.save

    def stopped(self: Display, number: int, *_: object) -> None:
        if number == 2:
            (directory,) = Path(config["output"]["dir"]).iterdir()
            assert json.loads((directory / "status.json").read_text())["status"] == "RUNNING"
            os.kill(os.getpid(), signal.SIGTERM)

    def saved(*arguments: Any) -> None:
        if arguments[1].round == 2:
            os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    monkeypatch.setattr(Display, "round", stopped)
    monkeypatch.setattr(state_io, "save", saved)
    with pytest.raises(KeyboardInterrupt, match="by SIGTERM"):
        run(config)
    assert status(config) == "KILLED"
    monkeypatch.undo()
    assert run(config, resume=True).summary["model_sha256"] == straight.summary["model_sha256"]


def test_a_run_whose_tracking_is_refused_leaves_no_folder_behind(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Or the next --resume would find it in place of a run that did something."""

    def refuse(*_: object) -> None:
        raise UserError("tracking.experiment: was deleted")

    monkeypatch.setattr(Tracker, "start", refuse)
    with pytest.raises(UserError, match="was deleted"):
        run(small)
    assert list(Path(small["output"]["dir"]).iterdir()) == []


def test_a_full_disk_does_not_hide_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = RunDirectory(tmp_path)
    assert directory.write_status("RUNNING", "") == []

    def full(*_: object) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr("raysim.core.files.write_atomic", full)
    remedy = "free space there or set output.dir to another disk"
    told = f"cannot write {tmp_path / 'status.json'}: No space left; {remedy}"
    assert directory.write_status("FAILED", "why") == [told]


def test_the_death_of_ray_is_named_and_the_run_failed(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """As seen after round 2: an error of Ray's own becomes one that says what happened and how to go on."""
    assert liveness.lost_part() == ""
    show = Display.round

    def dead(self: Display, number: int, *others: Any) -> None:
        show(self, number, *others)
        if number == 2:
            monkeypatch.setattr(liveness, "lost_part", lambda: "raylet")
            raise RuntimeError("Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr(Display, "round", dead)
        with pytest.raises(RayLost, match=r"its process raylet is gone .* with --resume goes on from there"):
            run(small)
    monkeypatch.undo()
    assert status(small) == "FAILED"
    assert run(small, resume=True).summary["rounds"] == 3


# In processes of their own


def start(config: dict[str, Any], folder: Path, terminal: int | None = None) -> subprocess.Popen[bytes]:
    """`raysim run` with one worker, as a session of its own on a terminal if one is given."""
    (folder / "job.yaml").write_text(yaml.safe_dump({**config, "resources": {"workers": 1}}))
    output = terminal if terminal is not None else (folder / "output.txt").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", "raysim", "run", "job.yaml"], stdin=terminal, stdout=output, stderr=subprocess.STDOUT,
        cwd=folder, start_new_session=terminal is not None, env={**os.environ, "TERM": "dumb"},
    )


def wait_until(true: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while not true():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)


def assert_nothing_left(process: subprocess.Popen[bytes], family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert not list(Path("/tmp").glob(f"raysim-{process.pid}-*"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_while_ray_starts_leaves_no_process_and_no_folder(
    small: dict[str, Any], tmp_path: Path, number: signal.Signals
):
    """Sent when the first process of Ray is there, which is long before the last one is.

    The run is killed where it was on record by then, and has left no folder at all where it was not.
    """
    process = start(small, tmp_path)
    folders = f"raysim-{process.pid}-*"
    wait_until(lambda: list(Path("/tmp").glob(folders)) and psutil.Process(process.pid).children(), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(timeout=90) == 130, (tmp_path / "output.txt").read_text()
    assert_nothing_left(process, family)
    on_record = Path(small["output"]["dir"]).exists() and list(Path(small["output"]["dir"]).iterdir())
    assert not on_record or status(small) == "KILLED"


def test_a_run_that_is_refused_while_ray_starts_leaves_no_process_and_no_folder(small: dict[str, Any], tmp_path: Path):
    """The MLflow store is opened meanwhile; a file that is no database can never be one."""
    (tmp_path / "text.db").write_text("no database, but long enough to be taken for one " * 20)
    process = start({**small, "tracking": {"uri": f"sqlite:///{tmp_path}/text.db"}}, tmp_path)
    family: set[psutil.Process] = set()
    began = False
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family.update(psutil.Process(process.pid).children(recursive=True))
        began = began or bool(list(Path("/tmp").glob(f"raysim-{process.pid}-*")))
        time.sleep(0.02)
    output = (tmp_path / "output.txt").read_text()
    assert process.returncode == 2 and "file is not a database" in output and "Traceback" not in output
    assert began and family, "it was refused before Ray started, which is not what is tested"
    assert_nothing_left(process, list(family))
    assert list(Path(small["output"]["dir"]).iterdir()) == []


@pytest.mark.slow
def test_a_closed_terminal_kills_the_run_truthfully(tracked: dict[str, Any], tmp_path: Path):
    config = {**tracked, "rounds": 400}
    master, slave = pty.openpty()
    process = start(config, tmp_path, slave)
    os.close(slave)
    runs = Path(config["output"]["dir"])
    wait_until(lambda: list(runs.glob("*/checkpoints/round-000002.json")), process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.close(master)
    process.send_signal(signal.SIGHUP)  # the kernel sends it to whom the terminal controls
    assert process.wait(timeout=90) == 130
    assert_nothing_left(process, family)
    assert status(config) == "KILLED"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_the_death_of_the_only_ray_ends_the_run_with_a_message_and_it_resumes(
    run: Run, tracked: dict[str, Any], tmp_path: Path, part: str
):
    config = {**tracked, "rounds": 400}
    process = start(config, tmp_path)
    runs = Path(config["output"]["dir"])
    wait_until(lambda: list(runs.glob("*/checkpoints/round-000002.json")), process)
    family = psutil.Process(process.pid).children(recursive=True)
    next(p for p in family if p.name().startswith(part)).kill()
    assert process.wait(timeout=120) == 1
    output = (tmp_path / "output.txt").read_text()
    assert f"error: Ray on this machine has died: its process {part} is gone" in output
    clean_up()  # as at the next start: Ray makes its folder anew when it disconnects at the end of the process
    assert_nothing_left(process, family)
    assert status(config) == "FAILED"
    (directory,) = runs.iterdir()
    done = max(int(p.stem.split("-")[1]) for p in directory.glob("checkpoints/*.json"))
    resumed = run({**config, "tracking": {"uri": "none"}}, rounds=done + 1, resume=True)
    assert resumed.directory == directory and resumed.summary["rounds"] == done + 1
