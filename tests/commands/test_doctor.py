"""The doctor says what there is, what would run where, and what is wrong."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from warm_session import CORES

from raysim.commands import doctor
from raysim.commands.doctor import Report, examine
from raysim.engine.inventory import Inventory, Machine
from raysim.engine.placement import Node

VERSIONS = (("python", "3.11.7"), ("torch", "2.14.1"))


def machine(name: str, cpus: int = 4, gpus: int = 0, **more: Any) -> Machine:
    plenty = {"memory_bytes": 64 * 10**9, "shm_free_bytes": 32 * 10**9, "disk_free_bytes": 10**11, "disk_bytes": 10**11}
    return Machine(Node(name, cpus, gpus), name, versions=VERSIONS, **(plenty | {"store_bytes": 10**9} | more))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    """Let the doctor find these machines."""

    def found(*machines: Machine, to_come: tuple[Node, ...] = (), unknown: int = 0) -> None:
        inventory = Inventory("Ray cluster 10.0.0.1:6379", list(machines), list(to_come), unknown)
        monkeypatch.setattr(doctor, "take_inventory", lambda _: inventory)

    return found


def text(report: Report) -> str:
    return "\n".join(report.lines())


def test_a_configuration_on_a_real_ray_in_one_screen(ray_here: None, small: dict[str, Any], tmp_path: Path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(small))
    report = examine(file)
    assert report.wrong == []
    said = text(report)
    cores = f"{CORES} CPU, 0 GPU"
    for wanted in (cores, "object store 0.4 GB", "/dev/shm", "disk", "ray ", "torch ", "2 workers on CPU"):
        assert wanted in said
    assert "300 training images" in said
    assert "6 clients" in said
    assert len(report.lines()) < 24


def test_what_fits_where_is_said_by_node(cluster: Any):
    cluster(machine("head", cpus=0), machine("a", gpus=2), machine("b", gpus=1), to_come=(Node("gpu, to come", 4, 1),))
    report = examine(None, ["resources.gpus_per_worker=0.5"])
    assert "8 workers with 0.5 GPU each; room: a 4, b 2, gpu, to come 2" in text(report)
    assert report.wrong == []


@pytest.mark.parametrize("workers", ["auto", "6"])
def test_nodes_that_are_still_joining_are_not_wrong(cluster: Any, workers: str):
    """A head without cores, and 2 nodes of which only the cluster file tells: as in the first minute after `ray up`."""
    cluster(machine("head", cpus=0), unknown=2)
    report = examine(None, [f"resources.workers={workers}"])
    assert report.wrong == []
    assert "2 more in the cluster file, not joined yet" in text(report)
    assert "Workers  not known before the 2 other nodes have joined: " in text(report)


def test_a_home_that_cannot_be_written_and_a_token_that_others_can_read_are_named(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    cluster(machine("a"))
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    report = examine(None, [f"output.dir={tmp_path}/file/runs"])
    (runs,) = report.wrong
    cache = (
        f"output.cache = ~/.cache/raysim/images: {tmp_path}/file is not a folder; a run goes on without the cache and "
        "makes its images anew; name another folder, or null"
    )
    assert report.notes == [cache] and f"Note     {cache}" in report.lines()
    assert runs.startswith(f"output.dir = {tmp_path}/file/runs: {tmp_path}/file is not a folder; name")
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch()
    tmp_path.chmod(0o755)
    token.chmod(0o644)
    assert examine().wrong == [
        f"other users of this machine can read {token}, the key to your clusters: chmod 600 {token}"
    ]
    token.chmod(0o600)
    assert examine().wrong == []
    token.chmod(0o644)
    token.parent.chmod(0o700)
    assert examine().wrong == []


def test_what_is_wrong_is_all_named(cluster: Any, tmp_path: Path):
    odd = machine("b", shm_free_bytes=64 * 10**6, disk_free_bytes=10**9)
    odd = Machine(**{**odd.__dict__, "versions": (("python", "3.11.7"), ("torch", "2.13.0"))})
    cluster(machine("a"), odd, machine("c", problem="no answer within 60 s"))
    report = examine(None, ["resources.workers=99", f"tracking.uri=sqlite:///{tmp_path}/nowhere/mlflow.db"])
    wrong = "\n".join(report.wrong)
    for cause in (
        "b: /dev/shm has 0.1 GB", "b: the disk of /tmp is more than 95 % full", "b has torch 2.13.0, unlike a",
        "c: no answer within 60 s", "resources.workers = 99", "nowhere/mlflow.db cannot be written",
    ):
        assert cause in wrong
    assert text(report).count("Wrong") == 1


def test_a_broken_configuration_and_a_dead_server_are_reported_beside_the_machine(cluster: Any, tmp_path: Path):
    cluster(machine("a"))
    file = tmp_path / "broken.yaml"
    file.write_text("rounds: 0\ndata: {name: digits}\n")
    assert any("rounds" in problem for problem in examine(file).wrong)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        report = examine(None, [f"tracking.uri={address}"])
    assert any("no MLflow server answers there" in problem for problem in report.wrong)
    assert "a: 4 CPU" in text(report)


def test_keys_that_nothing_would_read_are_named(cluster: Any, small: dict[str, Any], tmp_path: Path):
    cluster(machine("a"))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    report = examine(tmp_path / "small.yaml", ["tracking.experiment=mine"])
    assert report.wrong == [] and any("tracking.experiment = mine has no effect" in note for note in report.notes)


def test_a_mirror_is_tried_out(cluster: Any, tmp_path: Path):
    cluster(machine("a"))
    assert f"Mirror   {tmp_path}/there" in text(examine(None, [f"output.mirror={tmp_path}/there"]))
    [wrong] = examine(None, ["output.mirror=nosuch://bucket"]).wrong
    assert wrong.startswith("output.mirror = nosuch://bucket: cannot be written (")
