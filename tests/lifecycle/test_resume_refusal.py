"""What `--resume` says where no run has the configuration asked for: the closest run, its keys, both values."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysim.config.load import load_config
from raysim.config.schema import Config
from raysim.core.errors import UserError
from raysim.lifecycle.resume import find

BASE = {"data": {"name": "digits"}, "rounds": 3}


def config(folder: Path, *overrides: str) -> Config:
    return load_config(BASE, [f"output.dir={folder}", *overrides])


def run_of(made: Config, name: str, *, with_keys: bool = True) -> None:
    """What a run leaves that a resume reads."""
    path = Path(made.output.dir) / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(made.resolved()))
    identity: dict[str, Any] = {"config_hash": made.hash(), "name": name.partition("-")[0]}
    if with_keys:
        identity["result_keys"] = made.result_keys()
    (path / "run.json").write_text(json.dumps(identity))


def refusal(asked: Config, name: str = "job") -> str:
    with pytest.raises(UserError) as caught:
        find(asked, name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("resources.precision=bf16", 'resources.precision: "float32" -> "bf16"'),
        ("resources.threads_per_worker=2", "resources.threads_per_worker: 1 -> 2"),
        ("resources.on_client_failure=drop", 'resources.on_client_failure: "raise" -> "drop"'),
        ("resources.gpus_per_worker=1", 'resources.gpus_per_worker: "cpu" -> "gpu"'),
        ("partition.seed=4", "partition.seed: 0 -> 4"),
        ("seed=4", "seed: 0 -> 4, partition.seed: 0 -> 4, model.seed: 0 -> 4"),
        ("partition.rare.fraction=0.3", 'partition.rare: null -> {"fraction": 0.3, "max_samples": 120}'),
        ("local.schedule.kind=step", 'local.schedule.kind: "constant" -> "step"'),
        ("local.name=fedprox", 'local.name: "sgd" -> "fedprox", local.mu: unset -> 0.01'),
    ],
)
@pytest.mark.parametrize("with_keys", [True, False], ids=["with its keys", "from config.yaml alone"])
def test_each_key_that_changes_results_is_named_with_both_values(tmp_path, override, said, with_keys):
    run_of(config(tmp_path, "resources.gpus_per_worker=0"), "job-1", with_keys=with_keys)
    gpus = [] if override.startswith("resources.gpus") else ["resources.gpus_per_worker=0"]
    text = refusal(config(tmp_path, *gpus, override))
    found = text.partition("(")[2].partition("); only ")[0].split(", client")[0]
    batching = ', resources.client_batching: unset -> "auto"' if not gpus else ""
    assert found in (said, said + batching) and "job-1" in text


@pytest.mark.parametrize(
    "override",
    ["rounds=9", "resources.workers=7", "resources.max_retries=0", "resources.task_timeout_s=5", "tracking.uri=none",
     "resources.address=10.0.0.1:6379", "output.quality=true", "output.cache=null"],
)
def test_what_changes_no_result_resumes(tmp_path, override):
    run_of(config(tmp_path, "resources.gpus_per_worker=0"), "job-1")
    assert find(config(tmp_path, "resources.gpus_per_worker=0", override), "job").path.name == "job-1"


def test_the_closest_run_is_named_not_the_last_of_that_name(tmp_path):
    """job-1 differs in one key, the newer job-2 in four, and other-1 in one: the one of this name is shown."""
    far = ("local.lr=0.5", "local.momentum=0.5", "partition.alpha=9", "evaluate_every=2")
    run_of(config(tmp_path, "evaluate_every=3"), "other-1")
    run_of(config(tmp_path, "local.lr=0.2"), "job-1")
    run_of(config(tmp_path, *far), "job-2")
    text = refusal(config(tmp_path, "local.lr=0.3"))
    assert "the closest, job-1, was made with other values (local.lr: 0.2 -> 0.3)" in text
    assert "other-1" in refusal(config(tmp_path, "evaluate_every=4"))


def test_many_differences_are_cut_and_counted(tmp_path):
    """14 keys differ; ten are shown."""
    run_of(config(tmp_path), "job-1")
    numbers = [f"fine_tuning.{k}=7" for k in ("every", "clients", "epochs", "batch_size", "lr", "test_images")]
    numbers += [f"local.{k}=3" for k in ("epochs", "batch_size", "lr", "weight_decay", "clip")]
    numbers += ["evaluate_every=2", "model.width=4", "model.hidden=4"]
    assert refusal(config(tmp_path, *numbers)).count(" -> ") == 10
    assert "and 4 more" in refusal(config(tmp_path, *numbers))


def test_a_damaged_run_is_passed_over(tmp_path):
    run_of(config(tmp_path), "job-1")
    for content in ("{", "[]", '{"config_hash": "x", "result_keys": 3}'):
        folder = tmp_path / f"job-{len(list(tmp_path.iterdir())) + 1}"
        folder.mkdir()
        (folder / "run.json").write_text(content)
    assert "job-1" in refusal(config(tmp_path, "local.lr=0.3"))


def test_a_folder_is_resumed_wherever_it_is_and_although_newer_runs_are_there(tmp_path):
    asked = config(tmp_path / "elsewhere")
    for name in ("job-1", "job-2"):
        run_of(config(tmp_path), name)
    assert find(asked, "job", folder=tmp_path / "job-1").path == tmp_path / "job-1"


def test_a_folder_that_computes_something_else_or_holds_no_run_is_refused(tmp_path):
    run_of(config(tmp_path), "job-1")
    with pytest.raises(UserError, match=r"seed: 0 -> 4") as caught:
        find(config(tmp_path, "seed=4"), "job", folder=tmp_path / "job-1")
    assert "job-1" in str(caught.value)
    with pytest.raises(UserError, match="no folder of a run"):
        find(config(tmp_path), "job", folder=tmp_path)
