"""Ends a test that hangs and does not heed the signal of pytest-timeout, as in a call into Ray's own code."""

import faulthandler
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_HAS_ENDED_ONE = pytest.StashKey[bool]()
GRACE_S = 30  # beyond the time-out of a test


class Hanging:
    """A plug-in of pytest: the process ends and shows what its threads do; pytest-xdist goes on with another one.

    That one gets the same test again, which fails at once.
    """

    def __init__(self) -> None:
        self._stderr = os.dup(2)  # before pytest takes the output of tests
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._running = Path(tempfile.gettempdir(), f"raysim-tests-{run}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch over a test, and keep a file on disk for as long as it runs."""
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
        self._running.mkdir(exist_ok=True)
        file = self._running / hashlib.sha1(item.nodeid.encode()).hexdigest()
        item.stash[_HAS_ENDED_ONE] = file.exists()
        file.touch()
        faulthandler.dump_traceback_later(limit_s + GRACE_S, file=self._stderr, exit=True)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            file.unlink()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a test in which an earlier process has ended."""
        if item.stash[_HAS_ENDED_ONE]:
            pytest.fail("the process that ran this test has ended; what it did then is shown above", pytrace=False)

    def pytest_unconfigure(self) -> None:
        """Leave no folder behind."""
        if self._running.is_dir() and not any(self._running.iterdir()):
            self._running.rmdir()
