"""The README's cluster commands, word for word, on three machines with real ssh. Run with `pytest -m cluster`."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import PROJECT, Hosts, obstacle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

SHORT = ["experiments/quickstart.yaml", "rounds=4", "allocation.total=60"]
LONG = ["experiments/quickstart.yaml", "rounds=40", "allocation.total=400", "output.cache=null", "local.epochs=4"]
# What the README names: ssh, Ray's own services, clients and workers, metrics on the head.
NAMED = {22, *range(6379, 6386), 44217, 44227, *range(10001, 20000)}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts with a cluster on them, and a home directory without a trace of it."""
    if reason := obstacle():
        pytest.skip(reason)
    base = Path(os.environ.get("RAYSIM_HOSTS_DIR", "/var/tmp"))
    made = Hosts(base / f"raysim-hosts-{os.getpid()}")
    try:
        made.start()
        made.up()
        yield made
    finally:
        for command, wall_s in made.walls:
            print(f"{wall_s:7.1f} s  {command}")
        made.close()


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of the newest run in a folder of runs."""
    newest = max(folder.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    content: dict[str, Any] = json.loads(newest.read_text())
    return content


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that runs the same on one machine, without a cluster, and gives its summary."""
    folder = tmp_path_factory.mktemp("alone")
    found: dict[str, dict[str, Any]] = {}

    def run(*arguments: str) -> dict[str, Any]:
        key = " ".join(arguments)
        if key not in found:
            command = [sys.executable, "-m", "raysim", "run", *arguments, f"output.dir={folder}", "tracking.uri=none"]
            done = subprocess.run(
                command, cwd=PROJECT, capture_output=True, text=True, timeout=600,
                env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(PROJECT)},
            )
            assert done.returncode == 0, done.stdout + done.stderr
            found[key] = summary_of(folder)
        return found[key]

    return run


def last_path(output: str) -> str:
    """The run's directory, the last line that a run prints."""
    return re.findall(r"^(/\S+/runs/\S+)\r?$", output, re.MULTILINE)[-1]


def test_submit_from_a_clean_home_gives_the_bits_of_one_machine_and_the_results_come_home(hosts: Hosts, alone: Any):
    said = hosts.submit("run", *SHORT)
    assert f"Ray cluster {hosts.head}:6379 (from the environment variable RAY_ADDRESS)" in said
    runs = hosts.folder / "home" / "runs"
    hosts.ray("rsync-down", str(hosts.file), "~/runs/", f"{runs}/")
    there, here = summary_of(runs), alone(*SHORT)
    for key in ("model_sha256", "synthetic_sha256", "partition_sha256"):
        assert there[key] == here[key]
    assert (runs / Path(last_path(said)).name / "model.safetensors").is_file()


def test_nothing_listens_on_a_port_that_the_readme_does_not_name(hosts: Hosts):
    """Also while a run is on: its driver and workers listen too."""
    lines = [line for host in (1, 2, 3) for line in hosts.on(host, "ss -ltnH").splitlines()]
    addresses = [line.split()[3].rpartition(":")[::2] for line in lines]
    outside = {int(port) for address, port in addresses if "127.0.0.1" not in address and address != "[::1]"}
    assert not outside - NAMED, sorted(outside - NAMED)
    assert not any(port == "8265" and "127.0.0.1" not in address for address, port in addresses)
    readme = (PROJECT / "README.md").read_text()
    for port in ("6379", "6385", "10001", "19999", "44217", "44227"):
        assert port in readme


def test_a_path_that_exists_only_on_the_laptop_is_named_with_the_host_that_lacks_it(hosts: Hosts):
    said = hosts.submit("run", "experiments/only_here.yaml", fails=True)
    assert "/run/home/experiments/only_here.yaml does not exist on testhost-1" in said


def test_a_job_leaves_its_results_at_home(hosts: Hosts, alone: Any):
    """`ray job submit` with the project as working directory, on the head; Ray deletes that directory's copy."""
    hosts.on(1, f"mkdir -p ~/job && cp -r {PROJECT}/raysim {PROJECT}/experiments {PROJECT}/.rayignore ~/job/")
    command = "cd ~/job && ray job submit --working-dir . -- python -m raysim run " + " ".join(SHORT)
    said = hosts.on(1, f"RAY_ADDRESS=http://127.0.0.1:8265 bash -c '{command}'", timeout_s=600)
    assert "Ray deletes this job's working directory; results go to /run/home/runs/" in said
    model = json.loads(hosts.on(1, f"cat {last_path(said)}/summary.json"))["model_sha256"]
    assert model == alone(*SHORT)["model_sha256"]


def test_the_doctor_sees_every_node(hosts: Hosts):
    said = hosts.submit("doctor", "experiments/quickstart.yaml")
    for wanted in (hosts.head, *hosts.workers, "4 workers on CPU", "Wrong    nothing"):
        assert wanted in said


@pytest.mark.parametrize("moment", [r"images \d+/400", r"round [3-9]/"])
def test_a_host_that_loses_its_power_costs_time_and_no_bit(hosts: Hosts, alone: Any, moment: str):
    """Host 3 goes silent in mid-generation or in mid-round, and is switched on again when that was noticed."""
    log = hosts.folder / f"{moment.split()[0]}.log"

    def wait_for(text: str) -> None:
        while not log.exists() or not re.search(text, log.read_text()):
            time.sleep(0.1)

    def watch() -> None:
        wait_for(moment)
        hosts.tool("kill", "3")
        wait_for(f"a worker on {hosts.workers[1]} is lost")
        hosts.start()

    killer = threading.Thread(target=watch, daemon=True)
    killer.start()
    began = time.monotonic()
    said = hosts.submit("run", *LONG, timeout_s=1200, log=log)
    wall_s = time.monotonic() - began
    killer.join(timeout=60)
    assert "workers were lost and replaced" in said
    assert f"a worker on {hosts.workers[1]} is lost, its work is done again" in said
    summary = json.loads(hosts.on(1, f"cat {last_path(said)}/summary.json"))
    calm = alone(*LONG)
    print(f"killed at {moment!r}: {wall_s:.0f} s; one machine, undisturbed: {calm['seconds']['total']} s")
    assert summary["model_sha256"] == calm["model_sha256"]
    assert summary["synthetic_sha256"] == calm["synthetic_sha256"]
    hosts.wait_for_nodes(3)


def test_a_host_that_joins_later_gets_work(hosts: Hosts):
    """The run begins on host 2 alone; host 3 is switched on in round 2 or later."""
    hosts.tool("kill", "3")
    hosts.wait_for_nodes(2, exactly=True)
    log = hosts.folder / "late.log"

    def watch() -> None:
        while not log.exists() or not re.search(r"round [2-9]/", log.read_text()):
            time.sleep(0.1)
        hosts.start()

    starter = threading.Thread(target=watch, daemon=True)
    starter.start()
    more = ["rounds=150", "allocation.name=none", "local.epochs=4"]
    said = hosts.submit("run", "experiments/quickstart.yaml", *more, timeout_s=1200, log=log)
    starter.join(timeout=60)
    assert said.index("round ") < said.index(f"{hosts.workers[1]}: 2")


def test_down_ends_the_cluster(hosts: Hosts):
    hosts.ray("down", "-y", str(hosts.file))
    assert "gcs_server" not in hosts.on(1, "ps -eo comm")
