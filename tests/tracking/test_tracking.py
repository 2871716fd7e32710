"""The store has the truth, once; and a store in trouble costs the run nothing but the log."""

import inspect
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from raysim.core.errors import UserError
from raysim.tracking import store as tracking_store
from raysim.tracking import tracker as tracking
from raysim.tracking.tracker import NullTracker, Tracker, check_uri

ROOT = Path(__file__).parents[2]


@pytest.fixture
def database(store):
    return Path(store.removeprefix("sqlite:///"))


@pytest.fixture
def start(database, tmp_path):
    def start(params=None, tags=None, resume=None, experiment="exp"):
        address = f"sqlite:///{database}"
        return Tracker.start(address, experiment, "a name", params or {}, tags or {}, resume, tmp_path / "run")

    return start


def steps(tracker, key):
    """The rounds at which the store has a metric, in order, with repetitions."""
    return sorted(metric.step for metric in tracker._client.get_metric_history(tracker.run_id, key))


def run_of(tracker):
    return tracker._client.get_run(tracker.run_id)


@pytest.fixture
def locked(database):
    """Functions that lock the sqlite file as another program would, and free it."""
    connection = sqlite3.connect(database, isolation_level=None)
    yield lambda: connection.execute("BEGIN IMMEDIATE"), lambda: connection.execute("ROLLBACK")
    connection.close()


# Addresses


def test_the_default_store_is_a_sqlite_file_with_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert check_uri("auto") == f"sqlite:///{tmp_path}/mlflow.db"
    assert check_uri("sqlite:///sub/x.db") == f"sqlite:///{tmp_path}/sub/x.db"


def test_auto_honours_the_environment_and_blames_it(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert check_uri("auto") == "http://server:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        check_uri("auto")


@pytest.mark.parametrize("uri", ["none", "https://host/x", "sqlite:////a/b.db", "postgresql+psycopg2://u:p@h/db"])
def test_addresses_of_stores_are_accepted_as_they_are(uri):
    assert check_uri(uri) == uri


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:./mlruns", "file:///data/mlruns", "C:mlruns", ""])
def test_a_folder_is_refused_and_sqlite_suggested(uri):
    with pytest.raises(UserError, match=r"tracking\.uri: .* use sqlite:////.*mlflow\.db"):
        check_uri(uri)


@pytest.mark.parametrize("uri", ["sqlite://mlflow.db", "sqlite:///:memory:", "sqlite:", "htp://x", "s3://bucket"])
def test_an_address_that_cannot_hold_a_run_is_refused(uri):
    with pytest.raises(UserError, match=r"tracking\.uri: "):
        check_uri(uri)


def test_a_password_is_not_shown_in_an_error():
    with pytest.raises(UserError, match=r"'ftp://\*\*\*@host' cannot be used"):
        check_uri("ftp://me:hidden@host")


@pytest.mark.parametrize(
    ("masked", "environment", "used"),
    [
        ("postgresql://me:***@h/db", {"MLFLOW_TRACKING_URI": "postgresql://me:pw@h/db"}, "postgresql://me:pw@h/db"),
        ("https://h?token=***", {"MLFLOW_TRACKING_URI": "https://h?token=T"}, "https://h?token=T"),
        ("https://***@h/x", {"MLFLOW_TRACKING_TOKEN": "T"}, "https://h/x"),
        ("https://***@h/x", {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "pw"}, "https://h/x"),
    ],
)
def test_a_masked_address_is_completed_from_the_environment(monkeypatch, masked, environment, used):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert check_uri(masked) == used


@pytest.mark.parametrize(
    ("masked", "environment"),
    [
        ("postgresql://me:***@h/db", {"MLFLOW_TRACKING_URI": "postgresql://me:pw@other/db"}),
        ("postgresql://me:***@h/db", {"MLFLOW_TRACKING_PASSWORD": "pw"}),
        ("https://***@h?token=***", {"MLFLOW_TRACKING_TOKEN": "T"}),
        ("https://***@h", {}),
    ],
)
def test_a_masked_address_that_stays_incomplete_is_refused_with_the_remedy(monkeypatch, masked, environment):
    for name in ("URI", "TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"tracking\.uri: in .* the secret is masked.*as MLFLOW_TRACKING_URI"):
        check_uri(masked)


# What is stored


def test_the_run_has_parameters_tags_and_the_whole_configuration(start):
    """A list too long for a parameter is cut, and says so; the artifact is whole.

    0 to 9,999: 10 + 2 x 90 + 3 x 900 + 4 x 9,000 digits, 9,999 times ", ", 2 brackets: 38,890 + 19,998 + 2 characters.
    """
    params = {"lr": 1e-5, "data": {"name": "digits", "path": None, "index": list(range(10_000))}, "empty": {}}
    tracker = start(params, {"note": "x" * 20_000})
    run = run_of(tracker)
    assert {k: run.data.params[k] for k in ("lr", "data.name", "data.path", "empty")} == {
        "lr": "1e-05",
        "data.name": "digits",
        "data.path": "null",
        "empty": "{}",
    }
    assert run.data.params["data.index"].startswith("[0, 1, 2, ")
    assert run.data.params["data.index"].endswith("(cut: 58890 characters in all)")
    assert run.data.tags["version.python"] == sys.version.split()[0]
    assert {"version.torch", "version.ray", "version.raysim", "platform"} <= run.data.tags.keys()
    assert run.data.tags["note"].endswith("(cut: 20000 characters in all)")
    assert run.info.run_name == "a name"
    artifact = tracker._client.download_artifacts(tracker.run_id, "config.yaml")
    assert yaml.safe_load(Path(artifact).read_text()) == params


def test_artifacts_lie_beside_the_store_and_in_their_folders(start, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "curve.png").write_bytes(b"png")
    tracker = start(experiment="a/b [c]")
    tracker.log_model_state(tmp_path / "model.safetensors")
    tracker.log_figure(tmp_path / "curve.png")
    (tmp_path / "summary.json").write_text("{}")
    tracker.log_artifact(tmp_path / "summary.json")
    tracker.finish("FINISHED")
    files = [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()]
    found = {str(path).split("/artifacts/")[1] for path in files}
    assert found == {"config.yaml", "model/model.safetensors", "figures/curve.png", "summary.json"}
    assert tracker.problems == []


def test_values_that_are_not_finite_are_counted_but_never_stored(start):
    tracker = start()
    tracker.log_round(1, {"loss": float("nan"), "accuracy": 0.5})
    tracker.log_round(2, {"loss": float("inf"), "norm": float("-inf")})
    run = run_of(tracker)
    assert run.data.metrics == {"accuracy": 0.5}
    assert run.data.tags["non_finite_metrics"] == "3 not stored: loss (2), norm (1)"


def test_a_round_is_one_request_and_2500_metrics_are_three(start, monkeypatch):
    tracker = start()
    sent = []
    log_batch = tracker._client.log_batch

    def count(run_id, metrics=(), **others):
        sent.append(len(metrics))
        return log_batch(run_id, metrics=metrics, **others)

    monkeypatch.setattr(tracker._client, "log_batch", count)
    tracker.log_round(1, {f"client/{k}/loss": 0.5 for k in range(300)})
    tracker.log_round(2, {f"client/{k}/loss": 0.5 for k in range(2500)})
    assert sent == [300, 1000, 1000, 500]
    assert steps(tracker, "client/299/loss") == [1, 2]
    assert steps(tracker, "client/2499/loss") == [2]


def test_there_is_exactly_one_run_none_in_default_and_no_active_one(start):
    import mlflow

    tracker = start()
    tracker.log_round(1, {"accuracy": 0.5})
    experiments = {e.name: e.experiment_id for e in tracker._client.search_experiments()}
    runs = {name: len(tracker._client.search_runs([number])) for name, number in experiments.items()}
    assert runs == {"Default": 0, "exp": 1}
    assert mlflow.active_run() is None


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_the_first_outcome_counts(start, status):
    tracker = start()
    assert run_of(tracker).info.status == "RUNNING"
    tracker.finish(status, "why it ended")
    tracker.finish("FINISHED" if status != "FINISHED" else "FAILED", "later")
    run = run_of(tracker)
    assert (run.info.status, run.data.tags["message"]) == (status, "why it ended")


def test_a_deleted_experiment_is_the_users_to_restore(start):
    tracker = start()
    tracker._client.delete_experiment(run_of(tracker).info.experiment_id)
    with pytest.raises(UserError, match=r"tracking\.experiment: 'exp' was deleted .*mlflow experiments restore"):
        start()


# Resume


def test_a_resumed_run_keeps_its_id_and_has_every_round_once(start):
    """Rounds 1-3 logged, killed; the checkpoint was of round 1, so 2 and 3 come again, with rounds to 5."""
    params = {"rounds": 3, "seed": 0}
    first = start(params)
    for round_ in (1, 2, 3):
        first.log_round(round_, {f"m{i}": round_ + i for i in range(1010)})
    first.finish("KILLED")
    second = start({**params, "rounds": 5}, resume=first.run_id)
    assert second.run_id == first.run_id
    assert run_of(second).info.status == "RUNNING"
    for round_ in (2, 3, 4, 5):
        second.log_round(round_, {f"m{i}": round_ + i for i in range(1010)})
    second.finish("FINISHED")
    assert steps(second, "m0") == steps(second, "m1009") == [1, 2, 3, 4, 5]
    run = run_of(second)
    assert run.info.status == "FINISHED"
    assert run.data.params["rounds"] == "3"
    assert run.data.tags["resumed_with.rounds"] == "5"
    assert second.problems == []


def test_a_resume_fills_the_gaps_that_a_store_in_trouble_left(start):
    first = start()
    for round_ in (1, 3):
        first.log_round(round_, {"accuracy": 0.5})
    second = start(resume=first.run_id)
    for round_ in (1, 2, 3, 4):
        second.log_round(round_, {"accuracy": 0.5})
    assert steps(second, "accuracy") == [1, 2, 3, 4]


def test_a_run_that_was_deleted_in_the_meantime_is_replaced_and_reported(start):
    first = start()
    first._client.delete_run(first.run_id)
    for gone in (first.run_id, "0" * 32):
        second = start(resume=gone)
        assert second.run_id != gone
        assert second.problems == [f"MLflow lacks run {gone}: it is gone; a new one takes its place"]


# A store in trouble


def test_a_lock_delays_the_log_and_not_the_run(start, locked):
    lock, free = locked
    tracker = start()
    tracker.log_round(1, {"accuracy": 0.1})
    lock()
    began = time.monotonic()
    for round_ in range(2, 50):
        tracker.log_round(round_, {"accuracy": round_ / 50})
    assert time.monotonic() - began < 24  # each failure waits 1 s: tried every second round, it would be 24 s
    assert tracker.problems == [
        "MLflow lacks the metrics of 48 rounds (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...), "
        f"which are in {tracker._directory}: database is locked"
    ]
    free()
    tracker.finish("FINISHED")
    assert tracker.problems == []
    assert steps(tracker, "accuracy") == list(range(1, 50))


def test_after_a_lock_the_next_round_takes_along_what_waited(start, locked, monkeypatch):
    lock, free = locked
    tracker = start()
    lock()
    tracker.log_round(1, {"accuracy": 0.1})
    free()
    tracker._outbox._try_again_at = 0.0  # as if the pause were over
    tracker.log_round(2, {"accuracy": 0.2})
    assert steps(tracker, "accuracy") == [1, 2]
    assert tracker.problems == []


def test_what_stays_locked_to_the_end_is_named(start, locked, monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 0.05)
    lock, _ = locked
    tracker = start()
    lock()
    tracker.log_round(7, {"accuracy": 0.1})
    tracker.finish("FAILED")
    assert tracker.problems == [
        "MLflow lacks the final status FAILED: database is locked",
        f"MLflow lacks the metrics of round 7, which are in {tracker._directory}: database is locked",
    ]


def test_a_store_that_is_deleted_is_noticed_although_sqlite_would_write_on(start, database):
    tracker = start()
    tracker.log_round(1, {"accuracy": 0.1})
    database.unlink()
    tracker.log_round(2, {"accuracy": 0.2})
    tracker.finish("FINISHED")
    assert not database.exists()
    assert "round 2" in tracker.problems[-1] and "removed or replaced" in tracker.problems[-1]


@pytest.fixture
def as_nobody():
    """Functions that give up the rights of root, for whom nothing is read-only, and take them back."""
    if os.geteuid() != 0:
        yield lambda: None, lambda: None
        return
    yield lambda: os.seteuid(65534), lambda: os.seteuid(0)
    os.seteuid(0)


def test_a_store_that_is_read_only_is_named_in_mid_run_and_done_without_at_the_start(start, database, as_nobody):
    drop, regain = as_nobody
    tracker = start()
    shared = Path("/tmp") / f"raysim-test-{os.getpid()}"
    shared.mkdir()
    try:
        copy = Path(shutil.copy(database, shared / "mlflow.db"))
        copy.chmod(0o444)
        tracker._outbox._store = tracking_store.SqliteFile(f"sqlite:///{copy}")
        drop()
        tracker.log_round(1, {"accuracy": 0.1})
        without = Tracker.start(f"sqlite:///{copy}", "exp", "name", {}, {}, None, shared)
        without.log_round(1, {"accuracy": 0.1})
        regain()
        assert "readonly database" in tracker.problems[0]
        (problem,) = without.problems
        assert problem.startswith(f"the MLflow store sqlite:///{copy} cannot be used for now (")
        assert problem.endswith(f"readonly database); it has nothing of this run, whose metrics are in {shared}")
    finally:
        regain()
        shutil.rmtree(shared)


def not_a_database(folder):
    (folder / "x.db").write_bytes(b"This is a letter, not a database. " * 50)
    return folder / "x.db"


@pytest.mark.parametrize("place", ["a letter", "a folder", "/proc/no/mlflow.db", "/dev/full/x.db"])
def test_a_store_that_cannot_be_used_is_refused_at_the_start_with_a_remedy(tmp_path, place):
    path = {"a letter": not_a_database(tmp_path), "a folder": tmp_path}.get(place, Path(place))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"tracking\.uri: the MLflow store sqlite:///.* cannot be used: .*uri=none"):
        Tracker.start(f"sqlite:///{path}", "exp", "name", {}, {}, None, tmp_path)
    assert time.monotonic() - began < 60  # MLflow itself tries again for minutes


def test_a_server_that_is_not_there_is_done_without_and_named_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tracker = Tracker.start(address, "exp", "name", {}, {}, None, tmp_path)
        tracker.log_round(1, {"accuracy": 0.5})
        tracker.log_artifact(Path(__file__))
        tracker.finish("FINISHED", "done")
    (problem,) = tracker.problems
    assert problem.startswith(f"the MLflow store {address} cannot be used for now (")
    assert "Connection refused" in problem
    assert problem.endswith(f"it has nothing of this run, whose metrics are in {tmp_path}")
    assert tracker.run_id == ""


def test_a_store_that_is_locked_at_the_start_gets_everything_once_it_is_free(start, locked, monkeypatch, tmp_path):
    """The parameters, the rounds before and after, and the outcome."""
    monkeypatch.setattr(tracking, "START_WAIT_S", 0.05)
    lock, free = locked
    lock()
    tracker = start({"lr": 0.5})
    (problem,) = tracker.problems
    assert "cannot be used for now (database is locked)" in problem and str(tmp_path / "run") in problem
    tracker.log_round(1, {"accuracy": 0.1})
    assert tracker.run_id == ""
    free()
    tracker._outbox._try_again_at = 0.0  # as if the pause were over
    tracker.log_round(2, {"accuracy": 0.2})
    tracker.finish("FINISHED")
    run = run_of(tracker)
    assert (run.info.status, run.info.run_name, run.data.params["lr"]) == ("FINISHED", "a name", "0.5")
    assert steps(tracker, "accuracy") == [1, 2]
    assert tracker.problems == []


def test_a_run_resumed_while_the_store_is_locked_goes_on_in_its_own_mlflow_run(start, locked, monkeypatch):
    monkeypatch.setattr(tracking, "START_WAIT_S", 0.05)
    lock, free = locked
    first = start()
    first.log_round(1, {"accuracy": 0.1})
    first.finish("KILLED")
    lock()
    second = start(resume=first.run_id)
    second.log_round(1, {"accuracy": 0.1})
    second.log_round(2, {"accuracy": 0.2})
    assert "nothing of this run since it was resumed" in second.problems[0]
    free()
    second.finish("FINISHED")
    assert second.run_id == first.run_id and second.problems == []
    assert steps(second, "accuracy") == [1, 2]
    assert run_of(second).info.status == "FINISHED"


def test_an_interrupt_while_the_run_is_described_leaves_it_killed(database, tmp_path, monkeypatch, start):
    describe, calls = tracking.describe, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        describe(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tracking, "describe", interrupted)
        start(experiment="stopped")
    client = start()._client
    (run,) = client.search_runs([client.get_experiment_by_name("stopped").experiment_id])
    assert run.info.status == "KILLED"


@pytest.mark.parametrize("uri", ["postgresql+nonsense://host/db", "mysql://host/db"])
def test_a_database_without_its_driver_is_refused_at_the_start(tmp_path, uri):
    with pytest.raises(UserError, match=r"tracking\.uri: the MLflow store .* cannot be used: .*uri=none"):
        Tracker.start(uri, "exp", "name", {}, {}, None, tmp_path)


def test_a_file_that_is_missing_or_a_name_that_is_refused_does_not_hold_up_the_rest(start, tmp_path):
    tracker = start()
    tracker.log_artifact(tmp_path / "missing.png")
    tracker.log_round(1, {"accuracy": 0.5, "größe [x]": 1.0})
    tracker.finish("FINISHED")
    assert run_of(tracker).data.metrics == {"accuracy": 0.5, "größe _x_": 1.0}
    assert run_of(tracker).info.status == "FINISHED"
    (problem,) = tracker.problems
    assert problem.startswith(f"MLflow lacks the file {tmp_path / 'missing.png'}: ")


def test_a_run_deleted_while_it_goes_on_is_reported(start):
    tracker = start()
    tracker._client.delete_run(tracker.run_id)
    tracker.log_round(1, {"accuracy": 0.5})
    tracker.finish("FINISHED")
    assert len(tracker.problems) == 2 and "round 1" in tracker.problems[1]


def test_only_so_much_waits_for_a_store_that_is_away(monkeypatch):
    """With room for 3, of 5 requests the first two are given up, and are still named."""
    monkeypatch.setattr(tracking_store.Outbox, "limit", 3)
    outbox = tracking_store.Outbox(tracking_store.SqliteFile("http://x"), (OSError,), frozenset())

    def fail():
        raise OSError("away")

    for round_ in range(5):
        outbox.submit(tracking_store.Write("metrics", fail, (round_,)))
    assert [write.rounds for write in outbox.missing()] == [(0,), (1,), (2,), (3,), (4,)]
    assert len(outbox._waiting) == 3
    assert {write.error for write in outbox.missing()} == {"away"}


TWO_AT_ONCE = """
import sys
from pathlib import Path
from raysim.tracking.tracker import Tracker
assert "mlflow" not in sys.modules
tracker = Tracker.start("auto", "shared", sys.argv[1], {}, {}, None, Path("."))
for round_ in range(20):
    tracker.log_round(round_, {f"m{i}": 1.0 for i in range(20)})
tracker.finish("FINISHED")
print(tracker.run_id, tracker.problems)
"""


def test_two_runs_at_once_make_and_share_one_store_in_silence(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TWO_AT_ONCE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [subprocess.Popen([*command, name], cwd=tmp_path, env=environment, **pipes) for name in ("a", "b")]
    said = [run.communicate(timeout=120)[0].split() for run in runs]
    assert [words[1:] for words in said] == [["[]"], ["[]"]], said
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        rows = connection.execute("SELECT run_uuid, COUNT(*) FROM metrics GROUP BY run_uuid").fetchall()
        finished = connection.execute("SELECT COUNT(*) FROM runs WHERE status = 'FINISHED'").fetchone()
    connection.close()
    assert dict(rows) == {words[0]: 400 for words in said}
    assert finished == (2,)


@pytest.mark.slow
def test_a_server_that_goes_away_costs_the_run_little_and_is_named(tmp_path):
    """Ended in mid-run: 300 rounds of 10 ms, of which tracking may add a third at most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "a"),
    ]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        tracker = start_when_up(address, tmp_path, until=time.monotonic() + 120)
        tracker.log_round(0, {"accuracy": 0.1})
        tracker.log_artifact(Path(__file__))
        assert steps(tracker, "accuracy") == [0] and tracker.problems == []
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    began = time.monotonic()
    for round_ in range(1, 301):
        tracker.log_round(round_, {"accuracy": 0.1})
        time.sleep(0.01)
    assert time.monotonic() - began < 4 + 5
    began = time.monotonic()
    tracker.finish("FINISHED")
    assert time.monotonic() - began < 30
    assert "300 rounds (1, 2, " in tracker.problems[-1]


def start_when_up(address, directory, until):
    while True:
        tracker = Tracker.start(address, "exp", "name", {"a": 1}, {}, None, directory)
        if not tracker.problems or time.monotonic() > until:
            return tracker
        time.sleep(1)


# Switched off


def test_tracking_can_be_switched_off(tmp_path):
    tracker = Tracker.start("none", "exp", "name", {}, {}, None, tmp_path)
    tracker.log_round(1, {"accuracy": float("nan")})
    tracker.log_artifact(tmp_path / "missing")
    tracker.finish("FAILED", "boom")
    assert (tracker.run_id, tracker.uri, tracker.problems) == ("", "none", [])
    assert list(tmp_path.iterdir()) == []


def test_the_tracker_that_does_nothing_has_the_same_methods():
    def interface(kind):
        return {n: inspect.signature(f) for n, f in vars(kind).items() if inspect.isfunction(f) and n[0] != "_"}

    assert interface(NullTracker) == interface(Tracker)


def test_waiting_for_another_run_that_opens_the_store_has_a_limit(tmp_path):
    store = tracking_store.SqliteFile(f"sqlite:///{tmp_path}/mlflow.db")
    with store.alone(wait_s=0), pytest.raises(TimeoutError, match="another run"), store.alone(wait_s=0.1):
        raise AssertionError("two runs were alone at once")
    with store.alone(wait_s=0):
        assert list(tmp_path.iterdir()) == []


def test_a_store_in_a_folder_that_is_read_only_is_done_without_and_named(tmp_path, as_nobody):
    drop, regain = as_nobody
    shared = Path("/tmp") / f"raysim-test-folder-{os.getpid()}"
    shared.mkdir()
    try:
        shared.chmod(0o555)
        drop()
        without = Tracker.start(f"sqlite:///{shared}/mlflow.db", "exp", "name", {}, {}, None, tmp_path)
        without.log_round(1, {"accuracy": 0.1})
        regain()
        (problem,) = without.problems
        assert f"cannot be used for now ({shared}: the folder cannot be written to); it has nothing of" in problem
        shared.chmod(0o755)
        without.log_round(2, {"accuracy": 0.2})
        without.finish("FINISHED")
        assert without.problems == [] and steps(without, "accuracy") == [1, 2]
    finally:
        regain()
        shutil.rmtree(shared)


def test_a_new_store_on_a_full_disk_is_not_begun_and_named_by_its_cause(tmp_path, monkeypatch):
    """Half of its tables would be of no use later; with room, the store is made and gets everything."""
    free = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tracking_store.shutil, "disk_usage", lambda _: free._replace(free=700_000))
        tracker = Tracker.start(f"sqlite:///{tmp_path}/mlflow.db", "exp", "name", {}, {}, None, tmp_path)
        tracker.log_round(1, {"accuracy": 0.1})
        (problem,) = tracker.problems
        assert "No space left on device, 700,000 bytes are free and a new store takes 2,000,000" in problem
    tracker.log_round(2, {"accuracy": 0.2})
    tracker.finish("FINISHED")
    assert tracker.problems == [] and steps(tracker, "accuracy") == [1, 2]


def test_a_store_that_was_left_half_made_is_named_as_that():
    error = sqlite3.OperationalError("table spans already exists")
    assert "left half-made, as by a disk that was full; delete the file" in tracking_store.one_line(error)


def test_a_server_that_does_not_answer_is_named_by_the_cause_and_not_by_the_request():
    refused = "HTTPConnection(host='h', port=1): Failed to establish a new connection: [Errno 111] Connection refused"
    request = f"API request to http://h:1/api failed with exception HTTPConnectionPool(host='h'): url: /{'x' * 300}"
    error = RuntimeError(f'{request} (Caused by NewConnectionError("{refused}"))')
    assert tracking_store.one_line(error) == f'NewConnectionError("{refused}")'


@pytest.mark.parametrize("name", ["..", ".", "...", "a/../b", "ä" * 250])
def test_the_artifacts_of_any_experiment_stay_in_their_folder(start, tmp_path, name):
    tracker = start(experiment=name)
    tracker.log_artifact(Path(__file__))
    assert tracker.problems == []
    (folder,) = (tmp_path / "mlartifacts").iterdir()
    assert folder.name.strip(".") and len(folder.name.encode()) <= 100
    assert run_of(tracker).info.artifact_uri.startswith(folder.as_uri())
