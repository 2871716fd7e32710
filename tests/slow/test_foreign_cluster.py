"""Another Ray on the same machine is left alone unless it is asked for. Run with `python -m pytest -m slow`."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysim.engine.session import _end_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DASHBOARD = 8265


def listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["token", "disabled"])
def foreign(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster that somebody else started here, its dashboard on the usual port.

    It asks for the token in the environment, or for none.
    """
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ab" * 32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="raysim-foreign-", dir="/tmp")
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
        "--node-ip-address=127.0.0.1", "--num-cpus=2", f"--temp-dir={folder}", "--object-store-memory=200000000",
        f"--dashboard-port={DASHBOARD}", "--disable-usage-stats",
    ]  # fmt: skip
    environment = os.environ | {"RAY_AUTH_MODE": request.param, "RAY_raylet_start_wait_time_s": "120"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (listens(port) and listens(DASHBOARD)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
        assert process.poll() is None, "the other cluster has died"
    finally:
        process.terminate()
        process.wait(timeout=60)
        _end_processes(folder)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_starts_a_ray_of_its_own_beside_another_and_joins_that_one_where_the_environment_says_so(
    foreign: str, small: dict[str, Any], tmp_path: Path
):
    """The dashboard's port is taken, too. Both runs have the same bits and say which Ray they use."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(small))
    plain = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    hashes, used = [], []
    for environment in (plain, plain | {"RAY_ADDRESS": foreign}):
        command = [sys.executable, "-m", "raysim", "run", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        hashes.append(json.loads((Path(lines[-1]) / "summary.json").read_text())["model_sha256"])
        used += [line for line in lines if line.startswith(("Ray started", "Ray cluster"))]
    assert hashes[0] == hashes[1]
    assert used[0].startswith("Ray started on this machine")
    assert f":{foreign.partition(':')[2]} (from the environment variable RAY_ADDRESS)" in used[1]
