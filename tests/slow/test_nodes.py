"""Two nodes are as good as one, and the loss of one costs no bit. Run with `python -m pytest -m slow`."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import raysim

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head with one core and a second node with two, each with a raylet and an object store of its own."""
    import ray
    from ray.cluster_utils import Cluster

    # A node whose raylet is killed is noticed by its closed connection; these make silence be noticed soon, too.
    for key, value in {"period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3, "initial_delay_ms": 1000}.items():
        monkeypatch.setenv(f"RAY_health_check_{key}", str(value))
    ray.shutdown()
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray's Cluster writes its address
    with tempfile.TemporaryDirectory(prefix="raysim-nodes-", dir="/tmp") as folder:
        small = {"object_store_memory": 200_000_000, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
        cluster.second = cluster.add_node(num_cpus=2, object_store_memory=200_000_000)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def job(small: dict[str, Any], rule: str) -> dict[str, Any]:
    return small | {
        "rounds": 12,
        "clients_per_round": 1.0,
        "allocation": {"name": "fedeas", "total": 60},
        "generator": {"name": "ddpm", "steps": 4, "batch_size": 16},
        "local": {"name": "sgd", "epochs": 4, "batch_size": 16, "lr": 0.05},
        "aggregation": {"name": rule},
        "resources": {"workers": 3, "start_timeout_s": 30.0},
        "output": {**small["output"], "cache": None},
    }


@pytest.mark.parametrize("rule", ["fedavg", "fedoui"])
def test_two_nodes_give_the_bits_of_one_also_when_one_is_lost_in_mid_run(
    two_nodes: Any, small: dict[str, Any], rule: str
):
    """The raylet of the second node, with two of the three workers, is killed while round 3 or a later one runs."""
    config = job(small, rule)
    calm = raysim.run(config)
    runs = Path(config["output"]["dir"])
    raylet = two_nodes.second.all_processes["raylet"][0].process.pid

    def in_round_4() -> bool:
        saved = runs.glob("run-*/checkpoints/round-000003*")
        return any(calm.directory not in path.parents for path in saved)

    def kill() -> None:
        while not in_round_4():
            time.sleep(0.02)
        for child in psutil.Process(raylet).children(recursive=True):
            os.kill(child.pid, signal.SIGKILL)
        os.kill(raylet, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    began = time.monotonic()
    disturbed = raysim.run(config)
    killer.join(timeout=5)
    assert not killer.is_alive()
    print(f"{rule}: {calm.summary['seconds']['total']} s calm, {time.monotonic() - began:.1f} s with a node lost")
    assert any("workers were lost" in note for note in disturbed.summary["notes"])
    for key in ("model_sha256", "synthetic_sha256"):
        assert disturbed.summary[key] == calm.summary[key]
    local = {**config, "resources": {"workers": 1}}
    assert raysim.run(local).summary["model_sha256"] == calm.summary["model_sha256"]
