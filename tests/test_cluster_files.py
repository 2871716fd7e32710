"""The cluster files that come with raysim: Ray takes them, they open nothing, and they leave nothing behind."""

import fnmatch
import re
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = ["cluster.yaml", "experiments/cluster/local.yaml", "experiments/cluster/gcp.yaml"]


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


@pytest.fixture(scope="module")
def util() -> Any:
    """Ray's reader; loaded before any test's own capture, to whose stream Ray's log would be tied otherwise."""
    from ray.autoscaler._private import util

    return util


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_the_file_without_a_warning(
    name: str, util: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        util.validate_config(util.prepare_config(read(name)))
    said = capsys.readouterr()
    assert not re.search("warn|error|deprecated", said.out + said.err, re.IGNORECASE)
    assert all(record.levelname in ("DEBUG", "INFO") for record in caplog.records)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_open_to_the_world_and_the_token_reaches_every_node(name: str):
    cluster, text = read(name), (ROOT / name).read_text()
    assert "0.0.0.0" not in text
    assert "RAY_AUTH_MODE=disabled" not in text
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("RAY_AUTH_MODE=token" in command for command in cluster["setup_commands"])
    assert not re.search(r"(?i)(secret|password|aws_access)[a-z_]*:\s*\S", text)


@pytest.mark.parametrize("name", FILES)
def test_the_head_does_no_simulation_work(name: str):
    cluster = read(name)
    assert "--num-cpus=0 --num-gpus=0" in cluster["head_start_ray_commands"][-1]
    if "available_node_types" in cluster:
        assert cluster["available_node_types"][cluster["head_node_type"]]["resources"] == {"CPU": 0, "GPU": 0}


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_package_reaches_the_nodes_and_none_hides_it(name: str):
    """An exclude of `data` would leave raysim/data at home; a folder ~/raysim would hide the package."""
    cluster = read(name)
    mounts = cluster["file_mounts"]
    assert mounts["~/raysim-project/raysim"] == "raysim"
    assert mounts["~/experiments"] == "experiments"
    assert "~/raysim" not in mounts
    tracked = subprocess.run(["git", "ls-files", "raysim", "experiments"], cwd=ROOT, capture_output=True, text=True)
    files = tracked.stdout.split() or [str(p.relative_to(ROOT)) for p in (ROOT / "raysim").rglob("*.py")]
    assert files
    for file in files:
        assert not [p for p in cluster["rsync_exclude"] if fnmatch.fnmatch(f"x/{file}", p)]


@pytest.fixture
def aws(util: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """What `ray up` asks of AWS before it starts the head, done on a model of AWS; returns the cluster that is left."""
    import time

    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("HOME", str(tmp_path))  # for the key pair
    monkeypatch.setattr(time, "sleep", lambda _: None)  # until AWS knows of a new role everywhere
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        from ray.autoscaler._private.aws.config import bootstrap_aws

        yield lambda cluster: bootstrap_aws(util.prepare_config(cluster))


def groups() -> dict[str, Any]:
    """The firewall rules that there are on AWS, by the id of their group."""
    import boto3

    found = boto3.client("ec2").describe_security_groups()["SecurityGroups"]
    return {group["GroupId"]: group["IpPermissions"] for group in found}


def test_on_aws_ssh_is_open_to_the_address_of_the_user_alone(aws: Callable[[dict[str, Any]], Any]):
    """With a group as the commands in the file make it; Ray adds no group and no rule."""
    import boto3

    ec2 = boto3.client("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    mine = ec2.create_security_group(GroupName="raysim", Description="raysim", VpcId=vpc)["GroupId"]
    within = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": mine}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.7/32"}]}
    ec2.authorize_security_group_ingress(GroupId=mine, IpPermissions=[within, ssh])
    before = groups()
    cluster = read("cluster.yaml")
    for kind in cluster["available_node_types"].values():
        assert kind["node_config"]["SecurityGroupIds"] == ["sg-edit"]
        kind["node_config"]["SecurityGroupIds"] = [mine]
    made = aws(cluster)
    assert groups() == before
    assert all(k["node_config"]["SecurityGroupIds"] == [mine] for k in made["available_node_types"].values())


def test_on_aws_the_role_of_the_head_can_start_the_workers_with_their_image(aws: Callable[[dict[str, Any]], Any]):
    """Ray's role may use EC2 and S3, not read parameters of the Systems Manager, as `resolve:ssm:` would have to."""
    import boto3

    cluster = read("cluster.yaml")
    for kind in cluster["available_node_types"].values():
        kind["node_config"]["SecurityGroupIds"] = [next(iter(groups()))]
    made = aws(cluster)
    role = made["head_node"]["IamInstanceProfile"]["Arn"].rpartition("/")[2]
    policies = boto3.client("iam").list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    assert {policy["PolicyName"] for policy in policies} == {"AmazonEC2FullAccess", "AmazonS3FullAccess"}
    images = {kind["node_config"]["ImageId"] for kind in made["available_node_types"].values()}
    assert len(images) == 1  # one driver, the same bits
    assert images.pop().startswith("ami-")


def test_on_aws_a_file_that_was_not_edited_starts_no_machine_and_opens_nothing(
    aws: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]
):
    import boto3

    before = groups()
    with pytest.raises(AssertionError):  # a message and exit code 1 in `ray up`
        aws(read("cluster.yaml"))
    assert "id equal to any of the configured SecurityGroupIds" in capsys.readouterr().err
    assert groups() == before
    assert boto3.client("ec2").describe_instances()["Reservations"] == []


def test_what_reads_and_writes_buckets_on_the_head_fits_the_versions_on_all_nodes():
    """s3fs belongs to one version of fsspec; beside the newest boto3, pip would choose one that is years old."""
    lines = (ROOT / "experiments/cluster/requirements.txt").read_text().splitlines()
    [fsspec] = [line.partition("==")[2] for line in lines if line.startswith("fsspec==")]
    assert any(f"s3fs=={fsspec}" in command for command in read("cluster.yaml")["head_setup_commands"])
    assert any("gcsfs==" in command for command in read("experiments/cluster/gcp.yaml")["head_setup_commands"])


def test_every_package_that_raysim_needs_has_one_version_on_all_nodes():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "experiments/cluster/requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {re.split(r"[>=]", package)[0] for package in needed} <= set(pinned)
    for name in FILES:
        assert any("experiments/cluster/requirements.txt" in c for c in read(name)["setup_commands"])


def test_a_working_directory_with_a_gigabyte_of_data_makes_a_package_below_10_mb(tmp_path: Path):
    """What `ray job submit --working-dir .` would send, by Ray's own rules; the file has a hole, not a gigabyte."""
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    for name in (".gitignore", ".rayignore"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("data/big.bin", "runs/r/model.safetensors", "mlflow.db", ".git/x", ".venv/x", "raysim/data/splits.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with (tmp_path / "data/big.bin").open("wb") as big:
        big.truncate(1_000_000_000)
    left_out = get_excludes_from_ignore_files(tmp_path, include_gitignore=True)

    def is_sent(file: Path) -> bool:
        inside = [q for q in (file, *file.parents) if tmp_path in q.parents]
        return file.is_file() and not any(excludes(q) for excludes in left_out for q in inside)

    sent = [p for p in tmp_path.rglob("*") if is_sent(p)]
    assert tmp_path / "raysim/data/splits.py" in sent
    assert sum(p.stat().st_size for p in sent) < 10_000_000


def test_no_shipped_file_opens_a_dashboard_or_switches_authentication_off():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    shipped = [ROOT / name for name in listed if not name.startswith("tests/")] or [ROOT / name for name in FILES]
    unsafe = re.compile(r"dashboard[-_]host[=: ]+[\"']?0\.0\.0\.0|(?i:auth_mode)[=: ]+disabled")
    for path in shipped:
        assert not unsafe.search(path.read_bytes().decode(errors="ignore")), path


@pytest.mark.parametrize(("failures", "starts", "status"), [(0, 1, 0), (2, 3, 0), (3, 3, 1)])
def test_a_machine_at_hand_that_is_slow_to_start_is_started_again(failures: int, starts: int, status: int):
    """The worker's command with a `ray` whose first starts fail: 3 attempts, and a failure that is told after them."""
    command = read("experiments/cluster/local.yaml")["worker_start_ray_commands"][-1]
    ray = f'n=0; ray() {{ [ $1 = stop ] && return 0; n=$((n + 1)); echo started; [ $n -gt {failures} ]; }}; '
    done = subprocess.run(["bash", "-c", f"{ray} ({command})"], capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (["started"] * starts, status)
