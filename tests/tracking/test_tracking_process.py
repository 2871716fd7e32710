"""MLflow in a process of its own: what is asked for is done there, and whatever happens to it, the driver goes on."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from raysim.core.errors import UserError
from raysim.core.process import NICENESS
from raysim.tracking.process import ABANDON, MOST_OWED, MlflowProcess, start_tracker
from raysim.tracking.tracker import NullTracker, Tracker

pytestmark = pytest.mark.usefixtures("store")  # at the address of `begin`


@pytest.fixture(scope="module")
def apart() -> Iterator[MlflowProcess]:
    with MlflowProcess() as process:
        yield process


def child_of(process: MlflowProcess) -> psutil.Process:
    return psutil.Process(process._process.pid)


def begin(
    process: MlflowProcess | None, folder: Path, uri: str | None = None, resume: str | None = None
) -> NullTracker:
    uri = uri or f"sqlite:///{folder}/mlflow.db"
    return start_tracker(process, uri, "tests", "a run", {"seed": 3}, {"config_hash": "abc"}, resume, folder)


def stored(tracker: NullTracker) -> Any:
    return mlflow.MlflowClient(tracking_uri=tracker.uri).get_run(tracker.run_id)


def test_everything_arrives_in_the_store(apart: MlflowProcess, tmp_path: Path):
    tracker = begin(apart, tmp_path)
    assert not isinstance(tracker, Tracker)
    (tmp_path / "figure.png").write_bytes(b"png")
    tracker.log_round(1, {"accuracy": 0.5, "loss": float("nan")})
    tracker.log_figure(tmp_path / "figure.png")
    tracker.log_artifact(tmp_path / "figure.png", "other")
    tracker.log_model_state(tmp_path / "figure.png")
    tracker.finish("FINISHED", "well")
    run, client = stored(tracker), mlflow.MlflowClient(tracking_uri=tracker.uri)
    assert (run.info.status, run.data.metrics, run.data.params) == ("FINISHED", {"accuracy": 0.5}, {"seed": "3"})
    assert run.data.tags["message"] == "well" and "loss (1)" in run.data.tags["non_finite_metrics"]
    for folder in ("figures", "other", "model"):
        assert [f.path for f in client.list_artifacts(run.info.run_id, folder)] == [f"{folder}/figure.png"]
    assert tracker.problems == []


def test_what_is_logged_is_not_waited_for(apart: MlflowProcess, tmp_path: Path):
    """The process stands still while as much is logged as may be outstanding, and has all of it at the end."""
    tracker = begin(apart, tmp_path)
    child = child_of(apart)
    child.suspend()
    for round in range(1, MOST_OWED + 1):
        tracker.log_round(round, {"accuracy": round / 100})
    child.resume()
    for round in range(MOST_OWED + 1, 3 * MOST_OWED):
        tracker.log_round(round, {"accuracy": round / 100})
    tracker.finish("FINISHED")
    history = mlflow.MlflowClient(tracking_uri=tracker.uri).get_metric_history(tracker.run_id, "accuracy")
    assert [m.step for m in history] == list(range(1, 3 * MOST_OWED)) and tracker.problems == []


def test_once_a_run_has_begun_it_takes_what_the_workers_leave_of_the_processors(apart: MlflowProcess, tmp_path: Path):
    """Of its session, in which Linux weighs processes by their niceness; between sessions it does not."""
    for _ in range(2):
        begin(apart, tmp_path).finish("FINISHED")
    assert child_of(apart).nice() == NICENESS and os.getsid(child_of(apart).pid) == os.getsid(0)


def test_one_process_serves_one_run_after_another_and_a_resume(apart: MlflowProcess, tmp_path: Path):
    first = begin(apart, tmp_path)
    first.log_round(1, {"accuracy": 0.5})
    first.finish("KILLED")
    again = begin(apart, tmp_path, resume=first.run_id)
    again.log_round(1, {"accuracy": 0.5})
    again.log_round(2, {"accuracy": 0.6})
    again.finish("FINISHED")
    history = mlflow.MlflowClient(tracking_uri=again.uri).get_metric_history(again.run_id, "accuracy")
    assert again.run_id == first.run_id and [m.step for m in history] == [1, 2]
    assert begin(apart, tmp_path, uri="none").run_id == ""


def test_the_end_of_a_run_goes_on_while_the_next_one_begins(apart: MlflowProcess, tmp_path: Path):
    """Each from a thread of its own.  The second start is not waited for: the process stands still, and it returns."""
    first = begin(apart, tmp_path)
    child = child_of(apart)
    child.suspend()
    first.log_round(1, {"accuracy": 0.5})
    ending = threading.Thread(target=first.finish, args=("FINISHED",))
    ending.start()
    second = begin(apart, tmp_path)
    assert second.run_id == "" and second.uri == first.uri
    second.log_round(1, {"accuracy": 0.7})
    child.resume()
    second.finish("FAILED", "why")
    ending.join(60)
    assert first.problems == second.problems == [] and second.run_id not in ("", first.run_id)
    assert [stored(one).info.status for one in (first, second)] == ["FINISHED", "FAILED"]
    assert [stored(one).data.metrics["accuracy"] for one in (first, second)] == [0.5, 0.7]


def test_a_store_that_can_never_be_used_is_refused_here(apart: MlflowProcess, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("no database" * 100)
    with pytest.raises(UserError, match=r"tracking\.uri.*cannot be used"):
        begin(apart, tmp_path, uri=f"sqlite:///{tmp_path}/notes.txt")


def test_a_start_that_is_interrupted_leaves_a_run_that_says_so(
    apart: MlflowProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    process = apart
    asked = []

    def interrupted(run: int, *question: Any) -> None:
        asked.append(run)
        process.send(run, *question)
        process._pipe.poll(0.3)  # until it is at work
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(apart, tmp_path)
    process.answers(*asked)
    (run,) = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    assert (run.info.status, run.data.tags["message"]) == ("KILLED", "interrupted")


def test_a_start_that_nobody_waits_for_any_more_begins_no_run(apart: MlflowProcess, tmp_path: Path):
    """As when the driver is killed while MLflow is still being loaded."""
    process, child = apart, child_of(apart)
    child.suspend()
    run = process.next_run()
    process.send(run, "start", f"sqlite:///{tmp_path}/new.db", "tests", "a run", {}, {}, None, tmp_path)
    process.tell(run, ABANDON)
    child.resume()
    assert process.answers(run)[-1][1:] == ["", "", "none", []]
    assert not (tmp_path / "new.db").exists()


def test_a_run_whose_id_was_never_put_on_record_is_found_by_its_name(
    apart: MlflowProcess, empty_store: Path, tmp_path: Path
):
    """The driver died between the two."""
    first, other = begin(apart, tmp_path), begin(apart, tmp_path)
    other.finish("FINISHED")
    mlflow.MlflowClient(tracking_uri=first.uri).set_tag(other.run_id, "folder", "another")
    again = begin(apart, tmp_path, resume="")
    again.finish("FINISHED")
    assert again.run_id == first.run_id != other.run_id
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(empty_store, tmp_path / "elsewhere" / "mlflow.db")
    assert begin(apart, tmp_path / "elsewhere", resume="").run_id not in ("", first.run_id)


def test_the_run_goes_on_where_the_process_is_killed(tmp_path: Path):
    with MlflowProcess() as process:
        tracker = begin(process, tmp_path)
        child_of(process).kill()
        tracker.log_round(1, {"accuracy": 0.5})
        tracker.finish("FINISHED")
        (problem,) = tracker.problems
        assert "has ended" in problem and str(tmp_path) in problem


def test_a_process_that_nobody_used_ends_at_once_and_signals_of_the_terminal_pass_it_by():
    with MlflowProcess() as process:
        child = child_of(process)
        assert os.getpgid(child.pid) != os.getpgid(0)
    assert not child.is_running()


ORPHAN = """
import time
from raysim.tracking.process import MlflowProcess
with MlflowProcess() as process:
    print(process._process.pid, flush=True)
    time.sleep(100)
"""


def test_it_ends_with_a_driver_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        orphan = psutil.Process(int(driver.stdout.readline()))
        os.kill(driver.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.05)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
