"""A policy that is asked during training is shown what is so, and every run of a configuration has the same bits."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from raysim import Result
from raysim.config.load import load_config
from raysim.core.errors import RunError
from raysim.federation.synthesis import Synthesis
from raysim.lifecycle import runner
from raysim.lifecycle.prepare import prepare

Run = Callable[..., Result]


@pytest.fixture
def config(small: dict[str, Any]) -> dict[str, Any]:
    """4 rounds; 60 cheap images by `gap` after rounds 1 and 3, and a tenth of the data to validate on."""
    return {
        **small,
        "rounds": 4,
        "data": {**small["data"], "validation_fraction": 0.1},
        "allocation": {"name": "gap", "total": 60, "at": [1, 3]},
        "generator": {"name": "ddpm", "steps": 2, "batch_size": 16},
    }


def elsewhere(config: dict[str, Any], tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {**config, "output": {**config["output"], "dir": str(tmp_path / "elsewhere"), "cache": None}, **changes}


def timeless(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns=[c for c in frame if c.startswith("seconds")])


def same(one: Result, other: Result) -> None:
    for key in ("model_sha256", "synthetic_sha256", "allocations"):
        assert one.summary[key] == other.summary[key]
    pd.testing.assert_frame_equal(timeless(one.metrics), timeless(other.metrics), check_exact=True)
    with np.load(one.directory / "partition.npz") as a, np.load(other.directory / "partition.npz") as b:
        assert (a["quota"] == b["quota"]).all() and a["quota"].sum() == one.summary["n_synthetic"]


def test_images_come_at_their_dates_to_the_same_bits_for_any_number_of_workers_and_resumes(
    run: Run, config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """One worker and no cache; two workers; two workers, resumed after round 4, when all dates are past."""
    whole = run(config, rounds=5)
    said = capsys.readouterr().out
    assert "gap: 60 synthetic images, asked after rounds 1, 3" in said
    assert "after round 1: gap asks for 30 more images" in said and "after round 3: gap asks for 30 more images" in said
    assert whole.summary["allocations"] == [{"round": 1, "images": 30}, {"round": 3, "images": 60}]
    assert "60 synthetic" in said and "; in all 30 after round 1, 60 after round 3" in " ".join(said.split())
    assert whole.metrics["synthetic_images"].tolist()[1:] == [0, 30, 30, 60, 60]
    used = whole.clients.groupby("round")["n_synthetic"].sum()
    assert used[1] == 0 < used[2] and used[4] > 0
    one = run(elsewhere(config, tmp_path, resources={"workers": 1}), rounds=5)
    assert one.summary["n_synthetic_made"] == 60  # none of the first 30 was made again, without any cache
    same(one, whole)
    run(config)
    same(run(config, rounds=5, resume=True), whole)


def test_a_run_that_ends_while_the_images_of_a_date_are_made_goes_on_to_the_same_bits(
    run: Run, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once at the first date, once at the second; a checkpoint is kept there though none is due."""
    config["output"] = {**config["output"], "checkpoint_every": 100}
    whole = run(elsewhere(config, tmp_path))
    make, calls = Synthesis.make, []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) in (2, 5):  # the first call of a run makes what there is before round 1
            raise RunError("the power went")
        return make(*arguments)

    monkeypatch.setattr(Synthesis, "make", fails)
    for rounds_done, resume in ((1, False), (3, True)):
        with pytest.raises(RunError, match="the power went"):
            run(config, resume=resume)
        (folder,) = Path(config["output"]["dir"]).iterdir()
        assert [path.stem for path in (folder / "checkpoints").glob("*.json")][-1:] == [f"round-00000{rounds_done}"]
    same(run(config, resume=True), whole)


def test_what_a_kill_while_the_images_of_a_date_are_made_would_leave_is_resumed_to_the_same_bits(
    run: Run, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A copy of the folder and of the cache as they are when the images of the second date begin."""
    config["output"] = {**config["output"], "checkpoint_every": 100}
    left, make, calls = tmp_path / "left", Synthesis.make, []

    def copied(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:  # the first call makes what there is before round 1
            for name in ("runs", "cache"):
                shutil.copytree(tmp_path / name, left / name)
        return make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Synthesis, "make", copied)
        whole = run(config)
    (folder,) = (left / "runs").iterdir()
    assert [path.stem for path in (folder / "checkpoints").glob("*.json")][-1:] == ["round-000003"]
    places = {"dir": str(left / "runs"), "cache": str(left / "cache")}
    resumed = run({**config, "output": {**config["output"], **places}}, resume=True)
    assert resumed.directory == folder and resumed.summary["n_synthetic_made"] == 30
    same(resumed, whole)


@pytest.mark.slow
def test_a_driver_that_is_killed_while_the_images_of_a_date_are_made_is_resumed_to_the_same_bits(
    run: Run, config: dict[str, Any], tmp_path: Path
):
    """SIGKILL as soon as the second date is announced: half of the images were used, none of the others is there."""
    config["generator"] = {"name": "ddpm", "steps": 20, "batch_size": 4}
    whole = run(elsewhere(config, tmp_path))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**config, "resources": {"workers": 1}}))
    command = [sys.executable, "-m", "raysim", "run", "job.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert any("after round 3: gap asks for 30 more images" in line for line in process.stdout)
    process.kill()
    process.communicate()
    (folder,) = Path(config["output"]["dir"]).iterdir()
    assert not (folder / "summary.json").exists()
    assert max(path.stem for path in (folder / "checkpoints").glob("*.json")) == "round-000003"
    same(run(config, resume=True), whole)


def test_what_a_policy_is_shown_is_the_accuracy_and_the_loss_on_the_validation_split(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """One client, so the model that it sends in round 2 is the global model after round 2.

    It is asked after rounds 1 and 2, and gets no image, so nothing else changes: what it is shown of the client after
    round 1 is what it is shown of the global model after round 2, and that is what the metrics say.
    """
    seen: list[dict[str, np.ndarray]] = []
    measure = runner.measure

    def shown(*arguments: Any) -> Any:
        seen.append(measure(*arguments))
        return seen[-1]

    monkeypatch.setattr(runner, "measure", shown)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = {
        **config, "clients_per_round": 1.0, "partition": {"name": "iid", "clients": 1},
        "allocation": {"name": f"{Path(__file__).stem}:watches", "at": [1, 2]},
    }
    result = run(config, rounds=3)
    first, second = seen
    labels_N = prepare(load_config(config)).dataset.validation_labels_N
    assert labels_N is not None
    n_C = np.bincount(labels_N)
    for what, metric in (("accuracy", "validation_accuracy"), ("loss", "validation_loss")):
        assert first[f"local_{what}_KC"] == pytest.approx(second[f"global_{what}_KC"], rel=1e-6)
        assert not np.allclose(first[f"local_{what}_KC"], first[f"global_{what}_KC"])
        by_class = [second[f"global_{what}_KC"][0], first[f"global_{what}_KC"][0]]
        measured = [float(result.metrics[metric][number]) for number in (2, 1)]
        assert [values @ n_C / n_C.sum() for values in by_class] == pytest.approx(measured, rel=1e-5)
    assert result.summary["allocations"] == [{"round": 1, "images": 0}, {"round": 2, "images": 0}]


def watches(counts_KC, global_accuracy_KC, global_loss_KC, local_accuracy_KC, local_loss_KC, round, spent):
    """Looks, and asks for nothing."""
    assert global_accuracy_KC.shape == local_loss_KC.shape == counts_KC.shape and spent == 0 and round in (1, 2)
    return np.zeros_like(counts_KC)


def test_a_policy_of_counts_may_be_asked_once_later_and_a_pool_may_grow(run: Run, config: dict[str, Any]):
    """`random` before round 1 and after round 2; a pool that grows from 20 to 40 images."""
    drawn = run({**config, "allocation": {"name": "random", "total": 40, "at": [0, 2]}})
    assert drawn.summary["allocations"] == [{"round": 0, "images": 20}, {"round": 2, "images": 40}]
    later = run({**config, "allocation": {"name": "server_pool", "total": 40, "at": [2]}})
    assert later.summary["allocations"] == [{"round": 2, "images": 40}] and later.summary["n_synthetic_held"] == 240
    assert later.metrics["synthetic_images"].tolist()[1:] == [0, 0, 40, 40]
