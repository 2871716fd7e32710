"""A run knows what it read: resume refuses by name what has changed since."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysim import Result
from raysim.config.load import load_config
from raysim.core.errors import UserError
from raysim.lifecycle.experiment import Experiment
from raysim.lifecycle.identity import Identity

Run = Callable[..., Result]


def identity(**changed: Any) -> Identity:
    keys: dict[str, Any] = {
        "config": "c", "partition": "p", "data": {"train_images": "1", "test_labels": "2"}, "generator": "g",
        "model": "m", "code": {"raysim": "r"}, "versions": {"torch": "2.0"}, "device": "cpu",
    }
    return Identity(**(keys | changed))


@pytest.mark.parametrize(
    ("now", "inputs", "code"),
    [
        ({}, [], []),
        ({"data": {"train_images": "1", "test_labels": "x"}}, ["the test labels"], []),
        ({"data": {"train_images": "x", "test_labels": "2"}, "partition": "x"}, ["the training images"], []),
        ({"partition": "x"}, ["the partition"], []),
        ({"generator": "x"}, ["the generator or its weights"], []),
        ({"model": "x"}, ["the parameters of the model that are not trained"], []),
        ({"code": {"raysim": "r", "mine": "m"}}, [], ["the code of mine"]),
        ({"versions": {"torch": "2.1"}}, [], ["torch 2.0 -> 2.1"]),
        ({"device": "cuda"}, [], ["device cpu -> cuda"]),
        ({"device": ""}, [], []),
    ],
)
def test_what_changed_is_named(now: dict[str, Any], inputs: list[str], code: list[str]):
    before = identity().as_json()
    assert (identity(**now).changed_inputs(before), identity(**now).changed_code(before)) == (inputs, code)


@pytest.fixture
def own_data(small: dict[str, Any], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The same small run on an npz file of random 8 x 8 images."""
    path, draw = tmp_path / "own.npz", np.random.default_rng(0)
    arrays = {
        "train_images": draw.integers(0, 256, (200, 1, 8, 8), dtype=np.uint8),
        "train_labels": np.arange(200) % 4,
        "test_images": draw.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8),
        "test_labels": np.arange(40) % 4,
    }
    np.savez(path, **arrays)
    return {**small, "rounds": 1, "data": {"name": "npz", "path": str(path)}}, path


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "test labels": (lambda a: {"test_labels": (a["test_labels"] + 1) % 4}, "the test labels changed since"),
    "pixels": (lambda a: {"train_images": 255 - a["train_images"]}, "the training images changed since"),
    "a shorter test split": (
        lambda a: {"test_images": a["test_images"][:20], "test_labels": a["test_labels"][:20]},
        "the test images and the test labels changed since",
    ),
    "another image size": (
        lambda a: {"train_images": a["train_images"][..., :6, :6], "test_images": a["test_images"][..., :6, :6]},
        "the test images and the training images changed since",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_on_other_data_is_refused_by_name(run: Run, own_data: tuple[dict[str, Any], Path], change: str):
    config, path = own_data
    run(config)
    made, said = CHANGES[change]
    arrays = dict(np.load(path))
    np.savez(path, **(arrays | made(arrays)))
    with pytest.raises(UserError, match=said):
        run(config, rounds=2, resume=True)
    np.savez(path, **arrays)
    assert run(config, rounds=2, resume=True).summary["rounds"] == 2


MODEL = """
import torch
from torch import nn
def head_on_fixed_features(channels, image_size, classes):
    features = nn.Linear(channels * image_size[0] * image_size[1], 16)
    features.load_state_dict(torch.load("{file}"))
    return nn.Sequential(nn.Flatten(), features.requires_grad_(False), nn.ReLU(), nn.Linear(16, classes))
"""


def test_weights_that_a_model_reads_from_a_file_and_does_not_train_are_part_of_the_identity(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "features.pt"
    (tmp_path / "my_head.py").write_text(MODEL.format(file=file))
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = nn.Linear(64, 16).state_dict()

    def found(given: dict[str, torch.Tensor], **keys: Any) -> Identity:
        torch.save(given, file)
        config = load_config({**small, "model": {"name": "my_head:head_on_fixed_features"}, **keys})
        return Experiment.prepare(config, "run").identity

    before = found(weights)
    assert found(weights, seed=1).model == before.model != ""
    assert found({name: -value for name, value in weights.items()}).changed_inputs(before.as_json()) == [
        "the parameters of the model that are not trained"
    ]


POLICY = """
import numpy as np
def none_at_all(counts_KC):
    return np.zeros_like(counts_KC) * {factor}
"""


def test_a_resume_with_edited_code_or_other_versions_goes_on_only_when_told_to(
    run: Run, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "my_policy.py"
    source.write_text(POLICY.format(factor=1))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {**small, "rounds": 1, "allocation": {"name": "my_policy:none_at_all"}}
    first = run(config)
    source.write_text(POLICY.format(factor=2))
    del sys.modules["my_policy"]
    with pytest.raises(UserError, match=r"the code of my_policy changed since .*--accept-changes"):
        run(config, rounds=2, resume=True)
    path = first.directory / "run.json"
    content = json.loads(path.read_text())
    content["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the code of my_policy and torch 1\.0 -> "):
        run(config, rounds=2, resume=True)
    resumed = run(config, rounds=2, resume=True, accept_changes=True)
    assert any("the code of my_policy" in note for note in resumed.summary["notes"])
    later = run(config, rounds=3, resume=True)
    assert later.summary["rounds"] == 3
    assert any("the code of my_policy" in note and "after round 1" in note for note in later.summary["notes"])
