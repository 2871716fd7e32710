"""A disk that is full at any write of a run: the file and the remedy are named, and a resume ends as if it had room."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from full_disk import Disk, names_of

from raysim import Result
from raysim.commands.report.report import report
from raysim.core.errors import DiskError, UserError
from raysim.federation.server import Server
from raysim.federation.state import ServerState
from raysim.lifecycle import state_io
from raysim.lifecycle.directory import RunDirectory

Run = Callable[..., Result]
ROUNDS = 2


@pytest.fixture
def made(small: dict[str, Any]) -> dict[str, Any]:
    """The small run with images that are kept in a cache, and with an algorithm whose clients keep something."""
    return {
        **small,
        "rounds": ROUNDS,
        "data": {"name": "digits", "train_samples": 120, "test_samples": 40, "public_frac": 0.5},
        "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.3, "min_samples": 5},
        "clients_per_round": 1.0,
        "local": {**small["local"], "name": "scaffold"},
        "allocation": {"name": "fedeas", "beta": 2.0},
        "generator": {"name": "oracle"},
    }


def inside(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run with all its files in a folder."""
    places = {"dir": str(folder / "runs"), "cache": str(folder / "cache")}
    return {**config, "output": {**config["output"], **places}}


@pytest.mark.parametrize(
    "only_once", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["at one write", "from then on"]
)
def test_whatever_write_fails_is_named_with_its_remedy_and_a_resume_ends_with_the_same_model(
    run: Run, made: dict[str, Any], disk: Disk, tmp_path: Path, capfd: Any, only_once: bool
):
    """The disk is full at the first and at the last write of each file, or from each write of a run on."""
    (tmp_path / "plain").mkdir()
    disk.watch(tmp_path / "plain")
    expected = run(inside(made, tmp_path / "plain")).summary["model_sha256"]
    failed_at: list[str] = []
    assert len(disk.seen) > 20
    for n in disk.ends() if only_once else range(len(disk.seen)):
        folder = tmp_path / f"full-{n}"
        folder.mkdir()
        config = inside(made, folder)
        capfd.readouterr()
        disk.full_after(folder, n, only_once)
        said = ""
        try:
            result = run(config)
        except (DiskError, UserError) as error:
            said, result = str(error), None
        disk.emptied()
        failed_at.append(re.sub(r"[0-9a-f]{16,}", "*", Path(disk.refused[0]).name))
        printed = capfd.readouterr().out
        said = f"{said}\n{' '.join(printed.split())}"
        assert "No space left on device" in said and "free space there" in said, (disk.refused, said)
        assert any(name in said for name in names_of(disk.refused[0])), (disk.refused, said)
        if result is not None:
            assert result.summary["model_sha256"] == expected
            again = run(config, resume=True)
        else:
            begun = list((folder / "runs").glob("*/run.json"))
            assert len(begun) == len(list((folder / "runs").glob("*"))) <= 1  # what never began leaves no folder
            again = run(config, resume=bool(begun))
        assert again.summary["model_sha256"] == expected
        assert again.metrics["round"].tolist() == list(range(ROUNDS + 1))
        if result is None:
            assert len(list((folder / "runs").iterdir())) == 1
    for name in (
        "config.yaml", "run.json", "partition.npz", "status.json", "metrics.npy", "clients-000001.states",
        "round-000001.json", "metrics.parquet", "summary.json", "model.safetensors", "accuracy.png",
    ):  # fmt: skip
        assert name in failed_at, failed_at


def test_the_small_files_are_written_before_the_model_which_a_resume_writes_without_training(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    """The disk has room for all but the model; with more room, no round is trained again."""
    write = RunDirectory.write_model

    def full(self: RunDirectory, model: bytes) -> Path:
        raise DiskError(f"cannot write {self.path / 'model.safetensors'}: No space left on device")

    monkeypatch.setattr(RunDirectory, "write_model", full)
    with pytest.raises(DiskError, match=r"model\.safetensors: No space left"):
        run(small)
    assert "failed; the state after round 3 is kept in" in capfd.readouterr().out
    (folder,) = Path(small["output"]["dir"]).iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "UNFINISHED" and summary["final_accuracy"] > 0
    assert len(pd.read_parquet(folder / "metrics.parquet")) == 4
    with pytest.raises(UserError, match=r"has not finished \(FAILED: DiskError"):
        report(folder)
    monkeypatch.setattr(RunDirectory, "write_model", write)
    monkeypatch.setattr(Server, "train", None)  # nothing may be trained
    assert run(small, resume=True).summary["model_sha256"] == summary["model_sha256"]


def test_what_fails_in_a_round_leaves_the_rounds_before_it_behind(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    """A checkpoint is due after round 10; round 2 fails, and a resume trains only rounds 2 and 3."""
    config = {**small, "output": {**small["output"], "checkpoint_every": 10}}
    train, trained = Server.train, []

    def fails(self: Server, state: ServerState) -> Any:
        trained.append(state.round + 1)
        if trained == [1, 2]:
            raise ValueError("a plug-in's fault")
        return train(self, state)

    monkeypatch.setattr(Server, "train", fails)
    with pytest.raises(ValueError, match="a plug-in's fault"):
        run(config)
    assert "failed; the state after round 1 is kept in" in capfd.readouterr().out
    result = run(config, resume=True)
    assert trained == [1, 2, 2, 3] and result.metrics["round"].tolist() == [0, 1, 2, 3]


def test_an_error_while_the_state_is_saved_does_not_hide_the_first_one(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    config = {**small, "output": {**small["output"], "checkpoint_every": 10}}
    train = Server.train

    def fails(self: Server, state: ServerState) -> Any:
        if state.round == 1:
            raise ValueError("the first")
        return train(self, state)

    def fails_too(*_: object) -> None:
        raise RuntimeError("the second")

    monkeypatch.setattr(Server, "train", fails)
    monkeypatch.setattr(state_io, "save", fails_too)
    with pytest.raises(ValueError, match="the first"):
        run(config)
    said = capfd.readouterr().out
    assert "round 1 could not be saved: the second" in said and "the work after round 0 is lost" in said


@pytest.mark.parametrize("size", ["4k", "24k"])
def test_a_run_on_a_disk_of_some_kilobytes_says_so_and_leaves_what_fits(
    command: Callable[..., int], small: dict[str, Any], tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
):
    """4 kB have room for a folder and no more: the run is refused; 24 kB for its record, but for no state or model."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no rights to mount a small disk")
    try:
        output = {"dir": str(disk / "runs"), "cache": None, "checkpoint_every": 1}
        config = {**small, "resources": {"workers": 1}, "output": output}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.chdir(tmp_path)
        code = command("run", "job.yaml")
        left = list((disk / "runs").iterdir())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    said = capfd.readouterr()
    assert code == 1 and "Traceback" not in said.err
    assert f"error: cannot write {disk}/runs/job-" in said.err and "free space there" in said.err
    if size == "4k":
        assert left == [] and "round" not in said.out
    else:
        assert len(left) == 1 and "warning: checkpoint of round 1: cannot write" in said.out
        assert "the work after round 0 is lost, for it could not be saved" in said.out
