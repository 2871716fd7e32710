"""Every file that a finished run or a sweep is read back from: damaged, it is named, or nothing needs it."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import raysim
from raysim import Result, cli
from raysim.commands.report.report import report
from raysim.commands.sweep import table as sweep_table
from raysim.core.errors import RunError, UserError

Run = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("unrendered")

TEXTS = ["run.json", "status.json", "summary.json", "config.yaml"]
BINARIES = ["metrics.parquet", "clients.parquet", "partition.npz", "model.safetensors"]
UNREAD = ["metrics.csv", "checkpoints/round-000003.json", "history/metrics.npy"]
"""Files that are not read again once a run has finished."""


def first_bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": first_bit_flipped,
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "a list": lambda path: path.write_text("[1, 2]"),
    "no keys": lambda path: path.write_text("{}"),
    "wrong types": lambda path: path.write_text(json.dumps({key: [None] for key in WRONG})),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
FOR_BINARIES = [name for name in DAMAGES if name not in ("a list", "no keys", "wrong types")]
"""The others are noise to a file that is not text."""
CASES = [
    *((name, damage) for name in TEXTS for damage in DAMAGES),
    *((name, damage) for name in BINARIES for damage in FOR_BINARIES),
    *((name, damage) for name in UNREAD for damage in ("missing", "noise", "a folder")),
]
WRONG = (
    "rounds", "status", "message", "config_hash", "data", "code", "versions", "generator", "device", "name",
    "mlflow_run_id", "accepted_changes", "result_keys", "final_accuracy", "seconds", "runs",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(session: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A finished run that the tests copy: its configuration, and the folder that its output lies in."""
    folder = tmp_path_factory.mktemp("finished")
    config = {
        "rounds": 3, "data": {"name": "digits", "train_samples": 120, "test_samples": 40},
        "partition": {"name": "iid", "clients": 3}, "model": {"name": "cnn", "width": 4, "hidden": 8},
        "resources": {"workers": 2}, "tracking": {"uri": "none"},
        "output": {"dir": str(folder / "runs"), "cache": None, "checkpoint_every": 1},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysim.lifecycle.figures.RunFigures.draw", lambda *_: None)
        raysim.run(config, session=session)
    return config, folder / "runs"


@pytest.fixture
def copied(finished: tuple[dict[str, Any], Path], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """(the configuration, the folder of the run), of a copy that a test may damage."""
    config, runs = finished
    shutil.copytree(runs, tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    return {**config, "output": {**config["output"], "dir": str(tmp_path / "runs")}}, folder


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_file_is_refused_by_name_or_changes_nothing(
    run: Run, copied: tuple[dict[str, Any], Path], name: str, damage: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    """`--resume` of the finished run, and `report`; neither trains anything."""
    monkeypatch.setattr("raysim.lifecycle.runner.begin", lambda *_: (_ for _ in ()).throw(RunError("it would train")))
    config, folder = copied
    DAMAGES[damage](folder / name)
    for read in (lambda: run(config, resume=True), lambda: report(folder)):
        capfd.readouterr()
        try:
            read()
        except (UserError, RunError) as error:
            said = f"{error} {capfd.readouterr().out}"
            named = name in said or (name == "run.json" and "not the folder of a run" in said)
            without_summary = name == "summary.json" and damage == "missing"
            assert named or (without_summary and ("would train" in said or "has not finished" in said)) or (
                name == "run.json" and "there is no run of this configuration" in said
            ), said


def test_a_model_that_was_changed_after_the_run_is_noticed_and_written_again(
    run: Run, copied: tuple[dict[str, Any], Path], capsys: Any
):
    """One bit of it; with the two files that are named out of the way, a resume writes them anew."""
    config, folder = copied
    before = (folder / "model.safetensors").read_bytes()
    first_bit_flipped(folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged .* its sha256 is not the one in summary\.json"):
        run(config, resume=True)
    report(folder)
    assert "warning: " in (said := capsys.readouterr().out) and "model.safetensors is damaged" in said
    for name in ("model.safetensors", "summary.json"):
        (folder / name).unlink()
    assert run(config, resume=True).summary["status"] == "FINISHED"
    assert (folder / "model.safetensors").read_bytes() == before
    (folder / "model.safetensors").unlink()  # to save room, which is no damage
    assert run(config, resume=True).summary["status"] == "FINISHED"


@pytest.mark.parametrize("name", ["round-x.json", "round-999999.json", "round-.json", "round-000007.json/"])
def test_stray_names_among_the_checkpoints_are_no_checkpoints(
    run: Run, copied: tuple[dict[str, Any], Path], name: str
):
    """A resume from the third round trains the fourth, and prunes around them."""
    config, folder = copied
    path = folder / "checkpoints" / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text("stray")
    result = run({**config, "rounds": 4}, resume=True)
    assert result.directory == folder and result.metrics["round"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("flipped", "wrong types")])
@pytest.mark.parametrize("name", ["runs.csv", "table.txt", "sweep.json", "../run-1/metrics.parquet"])
def test_a_damaged_file_of_a_sweep_is_refused_by_name_or_changes_nothing(tmp_path: Path, name: str, damage: str):
    sweep, run = tmp_path / "sweep-x-1", tmp_path / "run-1"
    sweep.mkdir()
    run.mkdir()
    row = {
        "group": "a", "seed": 0, "axis.local": "a", "status": "FINISHED", "final_accuracy": 0.5, "best_accuracy": 0.5,
        "accuracy_auc": 0.5, "images": 0, "seconds": 1.0, "run_directory": str(run),
    }  # fmt: skip
    sweep_table.write(sweep, [row], None)
    (sweep / "sweep.json").write_text('{"runs": 1}')
    pd.DataFrame({"round": [0, 1], "accuracy": [0.1, 0.5]}).to_parquet(run / "metrics.parquet")
    DAMAGES[damage](sweep / name)
    try:
        report(sweep)
    except UserError as error:
        assert Path(name).name in str(error) or "not the folder of a run" in str(error)


def test_no_traceback_reaches_a_user(
    copied: tuple[dict[str, Any], Path], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
):
    config, folder = copied
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    (folder / "summary.json").write_text("[")
    for arguments in (["run", str(tmp_path / "job.yaml"), "--resume"], ["report", str(folder)]):
        monkeypatch.setattr(sys, "argv", ["raysim", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capfd.readouterr().err
        assert ended.value.code == 2 and "summary.json is damaged" in said and "Traceback" not in said


def test_a_second_run_in_another_thread_is_refused_before_it_makes_anything(small: dict[str, Any], tmp_path: Path):
    """Refused while the first has not ended; after it, it may run."""
    from raysim.lifecycle.entry import only_one

    refused: list[BaseException] = []

    def second() -> None:
        try:
            raysim.run(small)
        except UserError as error:
            refused.append(error)

    with only_one():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "another run of this process has not ended" in str(refused[0])
    assert not (tmp_path / "runs").exists()
    with only_one():
        pass
