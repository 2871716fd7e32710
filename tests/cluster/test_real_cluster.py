"""The commands of docs/how-to/cluster.md, word for word, on three machines with real ssh (`pytest -m cluster`)."""

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hosts import PROJECT, Hosts, at, free_port, obstacle, readme_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

SHORT = ["experiments/quickstart.yaml", "rounds=4", "allocation.total=60"]
# More steps than in SHORT, whose images would otherwise be in the cache.
LONG = ["experiments/quickstart.yaml", "rounds=40", "allocation.total=400", "generator.steps=50", "local.epochs=4"]
# Rounds enough for workers to start in the meantime, and to work.
MANY = ["experiments/quickstart.yaml", "rounds=150", "allocation.name=none", "local.epochs=4"]
# Many clients of about the same size.
EVEN = [*MANY[:1], "rounds=40", *MANY[2:3], "local.epochs=40", "partition.clients=40", "partition.alpha=100"]
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


def assert_same_bits(hosts: Hosts, said: str, calm: dict[str, Any]) -> None:
    """The run that ended with this output has the images and the model of a run on one machine."""
    summary = json.loads(hosts.on(1, f"cat {last_path(said)}/summary.json"))
    print(f"{summary['seconds']['total']} s on the cluster, {calm['seconds']['total']} s on one machine, undisturbed")
    for key in ("model_sha256", "synthetic_sha256"):
        assert summary[key] == calm[key]


@dataclass
class WorkOf:
    """How much CPU time the workers on a host have used.  seconds: each time that one looked."""

    hosts: Hosts
    host: int
    seconds: list[int] = field(default_factory=list)

    def look(self) -> None:
        spent = re.findall(r"^ *(\d+) ray::Worker", self.hosts.on(self.host, "ps -eo cputimes,comm"), re.MULTILINE)
        self.seconds.append(sum(map(int, spent)))


def last_path(output: str) -> str:
    """The run's directory, the last line that a run prints."""
    return re.findall(r"^(/\S+/runs/\S+)\r?$", output, re.MULTILINE)[-1]


def test_a_host_has_accounts_of_its_own_whatever_the_machine_does_with_its(hosts: Hosts):
    assert ":/run/home:" in hosts.on(2, "mountpoint /etc && getent passwd root")


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


def test_metrics_and_nothing_else_are_read_without_the_token(hosts: Hosts):
    def status(port: int) -> int:
        try:
            with urllib.request.urlopen(f"http://{hosts.head}:{port}/metrics", timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    metrics = dict.fromkeys((6385, *ON_THE_HEAD), 200)
    assert {port: status(port) for port in (6382, 6384, *metrics)} == {6382: 401, 6384: 401} | metrics


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


def test_a_host_that_loses_its_power_in_mid_generation_costs_time_and_no_bit(hosts: Hosts, alone: Any):
    """Host 3 goes silent, and is switched on again when that was noticed."""
    hosts.wait_for_nodes(3)
    log, times = hosts.folder / "generation.log", list[float]()

    def kill() -> None:
        hosts.tool("kill", "3")
        times.append(time.monotonic())

    def switch_on() -> None:
        times.append(time.monotonic())
        hosts.start()

    lost = f"a worker on {hosts.workers[1]} is lost, its work is done again"
    watcher = at(log, (r"images \d+/400", kill), (lost, switch_on))
    said = hosts.submit("run", *LONG, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert "workers were lost and replaced" in said
    assert "round 1/" not in said[: said.index(lost)]
    print(f"killed while it made images, noticed {times[1] - times[0]:.0f} s later")
    assert_same_bits(hosts, said, alone(*LONG))


def test_a_host_that_loses_its_power_in_mid_round_gets_work_again_once_it_is_back(hosts: Hosts, alone: Any):
    hosts.wait_for_nodes(3)
    log, work = hosts.folder / "round.log", WorkOf(hosts, 3)
    lost, back = f"a worker on {hosts.workers[1]} is lost, its work is done again", f"{hosts.workers[1]}: 2"
    watcher = at(
        log, (r"round [3-9]/", lambda: hosts.tool("kill", "3")), (lost, lambda: hosts.switch_on_beside(2)),
        (rf"(?s){re.escape(lost)}.*{back}", lambda: hosts.go_on(2)), ("", work.look), (r"round 1[34]\d/", work.look),
    )
    said = hosts.submit("run", *MANY, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert re.search(r"round [3-9]/", said[: said.index(lost)])
    assert work.seconds[1] >= work.seconds[0] + 2
    assert_same_bits(hosts, said, alone(*MANY))


def test_a_host_that_joins_later_gets_work(hosts: Hosts, alone: Any):
    """The run begins on host 2 alone; host 3 is switched on in round 2 or later, and its workers then use its CPU."""
    hosts.wait_for_nodes(3)
    hosts.tool("kill", "3")
    hosts.wait_for_nodes(2, exactly=True)
    log, work, joined = hosts.folder / "late.log", WorkOf(hosts, 3), f"{hosts.workers[1]}: 2"
    watcher = at(
        log, (r"round [2-9]/", lambda: hosts.switch_on_beside(2)), (joined, lambda: hosts.go_on(2)), ("", work.look),
        (r"round 1[34]\d/", work.look),
    )
    said = hosts.submit("run", *MANY, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert said.index("round ") < said.index(joined)
    assert work.seconds[1] >= work.seconds[0] + 2
    assert_same_bits(hosts, said, alone(*MANY))


def test_a_head_without_cores_waits_for_the_first_host_that_joins(hosts: Hosts, alone: Any):
    """Both workers' hosts are switched on once the run says that it waits for them."""
    hosts.tool("kill", "2")
    hosts.tool("kill", "3")
    hosts.wait_for_nodes(1, exactly=True)
    log = hosts.folder / "cold.log"
    watcher = at(log, ("waiting since .* for the first of 2 nodes that are still to join", hosts.start))
    said = hosts.submit("run", *SHORT, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert_same_bits(hosts, said, alone(*SHORT))


def test_a_second_resume_from_another_host_is_refused_and_told_who_has_the_run(hosts: Hosts, alone: Any):
    """The folder of the runs is one that all hosts see, as on a shared disk; the first run ends as if alone."""
    hosts.wait_for_nodes(3)
    log, refused = hosts.folder / "first_of_two.log", list[str]()
    words = ["run", *MANY, f"output.dir={hosts.folder}/runs"]
    again = f"python -m raysim {shlex.join(words)} --resume tracking.uri=none; echo code $?"
    watcher = at(log, (r"round [2-9]/", lambda: refused.append(hosts.on(2, again, timeout_s=600))))
    said = hosts.submit(*words, timeout_s=1200, log=log)
    watcher.join(timeout=600)
    assert re.search(r"error: \S+ is in use by process \d+ on testhost-1 since .*; wait until that has", refused[0])
    assert "code 2" in refused[0] and "Traceback" not in refused[0]
    assert_same_bits(hosts, said, alone(*MANY))


@pytest.mark.skipif(not shutil.which("cpulimit"), reason="needs cpulimit (Debian: apt-get install cpulimit)")
def test_a_host_ten_times_slower_than_another_costs_less_than_half_as_much_again(hosts: Hosts, alone: Any):
    """Host 3 joins in mid-run; each of its workers has a tenth of a core as soon as it is up."""
    hosts.wait_for_nodes(3)
    hosts.tool("kill", "3")
    hosts.wait_for_nodes(2, exactly=True)
    log, work, at_round, times = hosts.folder / "slow.log", WorkOf(hosts, 3), list[int](), list[float]()

    def note() -> None:
        at_round.append(int(re.findall(r"^round (\d+)/", log.read_text(), re.MULTILINE)[-1]))

    def join() -> None:
        note()
        hosts.switch_on_beside(2)

    def slow_down() -> None:
        hosts.slow_down(3, 10)
        hosts.go_on(2)
        note()
        look()

    def look() -> None:
        work.look()
        times.append(time.monotonic())

    watcher = at(log, (r"round 1\d/", join), (f"{hosts.workers[1]}: 2", slow_down), (r"round 3\d/", look))
    said = hosts.submit("run", *EVEN, timeout_s=1200, log=log)
    watcher.join(timeout=60)
    assert work.seconds[1] - work.seconds[0] <= 0.3 * (times[1] - times[0]) + 2
    rows = csv.DictReader(io.StringIO(hosts.on(1, f"cat {last_path(said)}/metrics.csv")))
    seconds = {int(row["round"]): float(row["seconds_train"]) for row in rows if row["seconds_train"]}
    joined_in, slow_in = at_round
    without = median(seconds[number] for number in seconds if 1 < number <= joined_in)
    beside = median(seconds[number] for number in seconds if number > slow_in + 1)
    print(f"a round takes {without:.2f} s, {beside:.2f} s with a slow host (from round {slow_in} on)")
    assert beside < 1.5 * without
    assert_same_bits(hosts, said, alone(*EVEN))


def test_down_ends_the_cluster(hosts: Hosts):
    hosts.ray(*readme_command("ray down cluster.yaml"), "-y")
    assert "gcs_server" not in hosts.on(1, "ps -eo comm")
