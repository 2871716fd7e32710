"""A test that hangs in spite of its time-out ends with its stacks, and the tests after it are run."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = """
import hanging
hanging.GRACE_S = 1

def pytest_configure(config):
    config.pluginmanager.register(hanging.Hanging())
"""
TESTS = """
import signal, time

def test_before():
    pass

def test_that_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1000)

def test_after():
    pass
"""


def test_a_test_that_heeds_no_time_out_is_ended_and_the_others_go_on(tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    path = str(Path(__file__).parents[1])
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.path.append({path!r})\n{CONFTEST}")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "test_it.py\", line 9 in test_that_hangs" in done.stderr
    assert "crashed while running 'test_it.py::test_that_hangs'" in done.stdout
    assert "the process that ran this test has ended" in done.stdout
    assert "1 failed, 2 passed, 1 error" in done.stdout
