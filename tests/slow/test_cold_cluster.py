"""A cluster without any machine yet is waited for, to the bits of a run on one. Run with `python -m pytest -m slow`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import raysim

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMISED = {
    "provider": {"type": "aws"}, "head_node_type": "head", "max_workers": 1,
    "available_node_types": {
        "head": {"resources": {"CPU": 0}, "max_workers": 0}, "worker": {"resources": {"CPU": 12}, "max_workers": 1},
    },
}


@pytest.fixture
def cold() -> Iterator[Any]:
    """A head without cores, alone."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray's Cluster writes its address
    with tempfile.TemporaryDirectory(prefix="raysim-cold-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        few = {"num_cpus": 0, "object_store_memory": 200_000_000, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=few)
        yield cluster
        cluster.shutdown()


def start(cluster: Any, config: dict[str, Any], home: Path) -> subprocess.Popen[str]:
    """`raysim run` on the head of the cluster, whose file promises a machine of 12 cores, so 12 workers."""
    (home / "job.yaml").write_text(yaml.safe_dump(config))
    (home / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(PROMISED))
    with (home / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "raysim", "run", "job.yaml"], cwd=home, stdout=output, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, "HOME": str(home), "RAY_ADDRESS": cluster.address},
        )


def test_workers_wait_for_the_machine_that_comes_late(cold: Any, small: dict[str, Any], tmp_path: Path):
    """More workers than starts may fail wait for four times start_timeout_s; then the promised machine joins."""
    config = {**small, "resources": {"start_timeout_s": 5.0}}
    process = start(cold, config, tmp_path)
    output = tmp_path / "output.txt"
    while "no machine has room for any of 12 workers since " not in output.read_text():
        assert process.poll() is None, output.read_text()
        time.sleep(0.2)
    time.sleep(10)  # nothing happens in this time, which is the claim
    assert process.poll() is None, output.read_text()
    cold.add_node(num_cpus=12, object_store_memory=200_000_000)
    assert process.wait(timeout=300) == 0, output.read_text()
    said = output.read_text()
    assert "(resources.cluster_timeout_s); autoscaler: no node is being started" in said and "did not start" not in said
    summary = json.loads((Path(said.splitlines()[-1]) / "summary.json").read_text())
    cold.shutdown()
    alone = raysim.run({**small, "resources": {"workers": 1}, "output": {**small["output"], "dir": f"{tmp_path}/one"}})
    assert summary["model_sha256"] == alone.summary["model_sha256"]


def test_a_machine_that_never_comes_ends_the_run_after_the_time_for_it(
    cold: Any, small: dict[str, Any], tmp_path: Path
):
    process = start(cold, {**small, "resources": {"start_timeout_s": 5.0, "cluster_timeout_s": 15.0}}, tmp_path)
    assert process.wait(timeout=300) == 1
    said = (tmp_path / "output.txt").read_text()
    assert "error: no machine had room for any of 12 workers for 15 s, since " in said and "Traceback" not in said
    assert "(resources.cluster_timeout_s); autoscaler: no node is being started, and no failure is" in said
