"""The commands of docs/how-to/cluster.md, word for word, on three machines with real ssh (`pytest -m cluster`)."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import PROJECT, Hosts, at, free_port, obstacle, readme_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

SHORT = ["experiments/quickstart.yaml", "rounds=4", "allocation.total=60"]
# More steps than in SHORT, whose images would otherwise be in the cache.
LONG = ["experiments/quickstart.yaml", "rounds=40", "allocation.total=400", "generator.steps=50", "local.epochs=4"]
# What that page names: ssh, Ray's own services, clients and workers, metrics on the head.
NAMED = {22, *range(6379, 6386), *range(10001, 20000)}
ON_THE_HEAD = {44217, 44227}


Socket = tuple[int, str, int, str]  # host, address, port, program


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts with a cluster on them, and a home directory without a trace of it."""
    if reason := obstacle():
        pytest.skip(reason)
    base = Path(os.environ.get("RAYSIM_HOSTS_DIR", "/var/tmp"))
    made = Hosts(base / f"raysim-hosts-{os.getpid()}")
    try:
        made.start()
        made.ray(*readme_command("ray get-auth-token"))
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
            kept = [f"output.dir={folder}", f"output.cache={folder}/cache", "tracking.uri=none"]
            done = subprocess.run(
                [sys.executable, "-m", "raysim", "run", *arguments, *kept],
                cwd=PROJECT, capture_output=True, text=True, timeout=600,
                env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(PROJECT)},
            )
            assert done.returncode == 0, done.stdout + done.stderr
            found[key] = summary_of(folder)
        return found[key]

    return run


def last_path(output: str) -> str:
    """The run's directory, the last line that a run prints."""
    return re.findall(r"^(/\S+/runs/\S+)\r?$", output, re.MULTILINE)[-1]


@pytest.fixture(scope="module")
def submitted(hosts: Hosts) -> tuple[str, set[Socket]]:
    """What a run from a clean home says, and what listened on the hosts meanwhile: its driver and workers do, too."""
    log = hosts.folder / "first.log"
    listening: set[Socket] = set()
    watcher = at(log, ("workers are up", lambda: listening.update(hosts.listening())))
    said = hosts.submit("run", *SHORT, log=log)
    watcher.join(timeout=60)
    return said, listening


def test_submit_from_a_clean_home_gives_the_bits_of_one_machine_and_the_results_come_home(
    hosts: Hosts, submitted: tuple[str, Any], alone: Any
):
    said, _ = submitted
    assert f"Ray cluster {hosts.head}:6379 (from the environment variable RAY_ADDRESS)" in said
    runs = hosts.home / "runs"
    *command, there = readme_command("ray rsync-down cluster.yaml")
    hosts.ray(*command, f"{hosts.home}/{there}")
    there, here = summary_of(runs), alone(*SHORT)
    for key in ("model_sha256", "synthetic_sha256", "partition_sha256"):
        assert there[key] == here[key]
    assert (runs / Path(last_path(said)).name / "model.safetensors").is_file()


def test_nothing_listens_on_a_port_that_the_readme_does_not_name(
    hosts: Hosts, submitted: tuple[str, set[Socket]]
):
    _, listening = submitted
    assert any(program.startswith("ray::") for *_, program in listening)
    for host, address, port, program in sorted(listening):
        print(f"host {host}: {address}:{port} {program}")
        if not address.startswith("127.") and address != "[::1]":
            assert port in NAMED | (ON_THE_HEAD if host == 1 else set())
    assert {address for _, address, port, _ in listening if port == 8265} == {"127.0.0.1"}
    readme = (PROJECT / "docs/how-to/cluster.md").read_text()
    for port in ("6379", "6385", "10001", "19999", "44217", "44227"):
        assert port in readme


def test_a_path_that_exists_only_on_the_laptop_is_named_with_the_host_that_lacks_it(hosts: Hosts):
    said = hosts.submit("run", "experiments/only_here.yaml", fails=True)
    assert "/run/home/experiments/only_here.yaml does not exist on testhost-1" in said


def test_a_configuration_that_is_sent_later_can_be_used_and_a_shell_opened(hosts: Hosts):
    hosts.ray(*readme_command("ray rsync-up cluster.yaml"))
    said = hosts.ray(*readme_command("ray attach cluster.yaml"), types="ls experiments; hostname; exit\n")
    assert "quickstart.yaml" in said and "testhost-1" in said


def test_a_job_through_the_dashboard_s_tunnel_leaves_its_results_at_home(hosts: Hosts, alone: Any):
    """The project is sent as the working directory, without what .rayignore names; Ray deletes that copy."""
    port = free_port()
    with hosts.tunnel([*readme_command("ray dashboard cluster.yaml"), "--port", str(port)], port) as address:
        *job, configuration = readme_command("ray job submit --working-dir .")
        said = hosts.ray(*job, *SHORT, address=address)
    assert configuration == SHORT[0]
    assert "Ray deletes this job's working directory; results go to /run/home/runs/" in said
    model = json.loads(hosts.on(1, f"cat {last_path(said)}/summary.json"))["model_sha256"]
    assert model == alone(*SHORT)["model_sha256"]


def test_the_runs_are_in_mlflow_through_ssh(hosts: Hosts, submitted: tuple[str, Any]):
    port = free_port()
    command = [word.replace("5000", str(port)) for word in readme_command("ray exec cluster.yaml --port-forward")]
    command[-1] += f" --port {port}"
    with hosts.tunnel(command, port) as address:
        query = f"{address}/api/2.0/mlflow/experiments/get-by-name?experiment_name=quickstart"
        with urllib.request.urlopen(query, timeout=60) as answer:
            experiment = json.load(answer)["experiment"]
    assert experiment["name"] == "quickstart"


def test_the_doctor_sees_every_node(hosts: Hosts):
    hosts.wait_for_nodes(3)
    *submit, _ = readme_command("ray submit cluster.yaml raysim/__main__.py -- doctor")
    said = hosts.ray(*submit, "experiments/quickstart.yaml")
    for wanted in (hosts.head, *hosts.workers, "4 workers on CPU", "Wrong    nothing"):
        assert wanted in said


@pytest.mark.parametrize(("moment", "rounds_done"), [(r"images \d+/400", 0), (r"round [3-9]/", 3)])
def test_a_host_that_loses_its_power_costs_time_and_no_bit(hosts: Hosts, alone: Any, moment: str, rounds_done: int):
    """Host 3 goes silent in mid-generation or in mid-round, and is switched on again when that was noticed."""
    lost = f"a worker on {hosts.workers[1]} is lost, its work is done again"
    hosts.wait_for_nodes(3)
    log = hosts.folder / f"after-{rounds_done}.log"
    times: list[float] = []

    def kill() -> None:
        hosts.tool("kill", "3")
        times.append(time.monotonic())

    def switch_on() -> None:
        times.append(time.monotonic())
        hosts.start()

    watcher = at(log, (moment, kill), (lost, switch_on))
    said = hosts.submit("run", *LONG, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert "workers were lost and replaced" in said
    before = re.findall(r"^round (\d+)/", said[: said.index(lost)], re.MULTILINE)
    assert rounds_done <= int(before[-1] if before else 0) < (40 if rounds_done else 1)
    summary = json.loads(hosts.on(1, f"cat {last_path(said)}/summary.json"))
    calm = alone(*LONG)
    print(f"killed at {moment!r}, noticed {times[1] - times[0]:.0f} s later: {summary['seconds']['total']} s in all")
    assert summary["model_sha256"] == calm["model_sha256"]
    assert summary["synthetic_sha256"] == calm["synthetic_sha256"]


def test_a_host_that_joins_later_gets_work(hosts: Hosts):
    """The run begins on host 2 alone; host 3 is switched on in round 2 or later, and its workers then use its CPU."""
    hosts.wait_for_nodes(3)
    hosts.tool("kill", "3")
    hosts.wait_for_nodes(2, exactly=True)
    log, cpu_s = hosts.folder / "late.log", []

    def look() -> None:
        spent = re.findall(r"^ *(\d+) ray::Worker", hosts.on(3, "ps -eo cputimes,comm"), re.MULTILINE)
        cpu_s.append(sum(map(int, spent)))

    joined = f"{hosts.workers[1]}: 2"
    watcher = at(log, (r"round [2-9]/", hosts.start), (joined, look), (r"round 1[34]\d/", look))
    more = ["rounds=150", "allocation.name=none", "local.epochs=4"]
    said = hosts.submit("run", "experiments/quickstart.yaml", *more, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert said.index("round ") < said.index(joined)
    assert cpu_s[1] >= cpu_s[0] + 2


def test_down_ends_the_cluster(hosts: Hosts):
    hosts.ray(*readme_command("ray down cluster.yaml"), "-y")
    assert "gcs_server" not in hosts.on(1, "ps -eo comm")
