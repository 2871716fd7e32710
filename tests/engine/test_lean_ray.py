"""A Ray of raysim's own runs nothing but what it needs, and Ray itself is left as it was."""

import subprocess
import sys

import psutil
import ray._private.node
import ray._private.ray_constants
import ray._private.utils

from raysim.engine.lean_ray import _UNUSED, lean_ray


def test_no_dashboard_autoscaler_or_log_monitor_runs(ray_here: None):
    lines = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    assert any("raylet" in line for line in lines)
    for script in ("dashboard/dashboard.py", "autoscaler/_private/monitor.py", "log_monitor.py"):
        assert not [line for line in lines if line.partition(" --")[0].endswith(script)]


def test_what_is_replaced_exists_in_this_ray_and_is_put_back():
    parts = [(ray._private.node.Node, name) for name in _UNUSED]
    parts.append((ray._private.utils, "get_dashboard_dependency_error"))
    parts.append((ray._private.ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"))
    before = [getattr(*part) for part in parts]
    with lean_ray():
        assert all(getattr(*part) is not old for part, old in zip(parts, before, strict=True))
        assert isinstance(ray._private.utils.get_dashboard_dependency_error(), ImportError)
    assert [getattr(*part) for part in parts] == before


AFTER_A_SIGNAL = """
import os, signal, sys, time
from raysim.config import Resources
from raysim.engine.ray_start import BackgroundStart
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
