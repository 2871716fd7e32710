"""A Ray of raysim's own runs nothing but what it needs; Ray itself is left as it was, and may change."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray._private.node
import ray._private.ray_constants
import ray._private.utils

import raysim
from raysim.config.schema import Resources
from raysim.core.errors import RunError, UserError
from raysim.engine import join, ray_private
from raysim.engine.ray_private import ENVIRONMENT, REPLACED, lean_environment, lean_ray
from raysim.engine.session import Session


def test_no_dashboard_autoscaler_or_log_monitor_runs(ray_here: None):
    lines = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker of an earlier test that has just ended
            lines.append(" ".join(process.cmdline()))
    assert any("raylet" in line for line in lines)
    for script in ("dashboard/dashboard.py", "autoscaler/_private/monitor.py", "log_monitor.py"):
        assert not [line for line in lines if line.partition(" --")[0].endswith(script)]


def test_what_is_replaced_exists_in_this_ray_and_is_put_back():
    parts = [(ray_private._found(part.module, part.owner), part.name) for part in REPLACED]
    before = [getattr(*part) for part in parts]
    with lean_ray():
        assert all(getattr(*part) is not old for part, old in zip(parts, before, strict=True))
        assert isinstance(ray._private.utils.get_dashboard_dependency_error(), ImportError)
    assert [getattr(*part) for part in parts] == before


def test_the_environment_is_put_back_and_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    ours, theirs, *_ = ENVIRONMENT
    monkeypatch.delenv(ours, raising=False)
    monkeypatch.setenv(theirs, "7")
    with lean_environment():
        assert (os.environ[ours], os.environ[theirs]) == (ENVIRONMENT[ours], "7")
    assert ours not in os.environ and os.environ[theirs] == "7"


def test_private_parts_of_ray_are_named_in_one_module():
    package = Path(raysim.__file__).parent
    naming = [p.name for p in package.rglob("*.py") if "ray._private" in p.read_text() or "ray.rpc" in p.read_text()]
    assert naming == ["ray_private.py"]


@pytest.fixture
def without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Ray that has moved everything that is private."""
    monkeypatch.setattr(ray_private, "_found", lambda *_: None)


def test_without_private_names_nothing_is_known_and_nothing_fails(without_private_names: None):
    with lean_ray():
        pass
    assert ray_private.dead_process() == ray_private.raylet_socket() == ""
    assert ray_private.address_of_auto() is None
    assert ray_private.show_token()
    with ray_private.own_token():
        pass


def test_without_private_names_auto_is_left_to_ray(without_private_names: None, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def init(address: str, **_: Any) -> None:
        asked.append(address)
        raise ConnectionError("no Ray here")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match=r"no Ray cluster answers at auto .from a test.: no Ray here"):
        join.join("auto", "a test", {})
    assert asked == ["auto"]


def test_a_token_that_cannot_be_read_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(join, "asks_for_token", lambda _: True)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    ray_private._forget_token()
    with pytest.raises(UserError, match=r"10.0.0.1:6379 .from a test. asks for a token.*_TOKEN_PATH is set but"):
        join.join("10.0.0.1:6379", "a test", {})
    ray_private._forget_token()


RUN_WITHOUT = """
import sys
from raysim.engine import ray_private
ray_private._found = lambda *_: None
ray_private.ENVIRONMENT.clear()
import raysim
if __name__ == "__main__":
    result = raysim.run({
        "rounds": 1, "clients_per_round": 2, "data": {"name": "digits", "train_samples": 100, "test_samples": 50},
        "partition": {"name": "dirichlet", "clients": 2, "alpha": 0.5, "min_samples": 5},
        "model": {"name": "linear"}, "local": {"name": "sgd", "lr": 0.1}, "resources": {"workers": 1},
        "tracking": {"uri": "none"}, "output": {"dir": sys.argv[1], "cache": None},
    })
    print("finished", result.summary["model_sha256"][:4] != "")
"""


@pytest.mark.slow
def test_a_run_works_without_any_private_name(tmp_path: Path):
    """A full start of Ray, in a process of its own: slower, nothing else."""
    command = [sys.executable, "-c", RUN_WITHOUT, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["finished True"], done.stderr


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_that_fails_is_tried_once_more_without_anything_private(
    monkeypatch: pytest.MonkeyPatch, failures: int
):
    """At the first attempt Ray's Node starts no dashboard and the environment is ours, at the second both are Ray's."""
    theirs, seen = ray._private.node.Node.start_api_server, []
    variable = next(iter(ENVIRONMENT))
    monkeypatch.delenv(variable, raising=False)

    def init(**_: Any) -> Any:
        seen.append((ray._private.node.Node.start_api_server is theirs, variable in os.environ))
        if len(seen) <= failures:
            raise TypeError("start_ray_processes() got an unexpected argument")
        return SimpleNamespace(address_info={"gcs_address": "10.0.0.1:6379"})

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if failures == 1:
        with Session(Resources(workers=1)) as session:
            assert session.where.startswith("Ray started on this machine, where it listens at 10.0.0.1:6379 and asks")
    else:
        with pytest.raises(RunError, match=r"did not start on this machine, tried 2 times, at a load of .* unexpec"):
            Session(Resources(workers=1)).__enter__()
    assert seen == [(False, True), (True, False)]


AFTER_A_SIGNAL = """
import os, signal, sys, time
from raysim.config.schema import Resources
from raysim.engine.background_start import BackgroundStart
from raysim.core.signals import Interrupted, Signals
try:
    with Signals() as signals, BackgroundStart(signals) as start:
        start.begin(Resources(workers=1), lambda pool: None)
        start.session(Resources(workers=1))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
except Interrupted as stop:
    print("wound up", stop)
"""


def test_sigterm_is_the_drivers_own_although_another_thread_started_ray():
    """Ray's handler would print a stack at once, and end the process after 3 s, wound up or not."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_SIGNAL], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wound up by SIGTERM\n", "")
