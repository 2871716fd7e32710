"""Every file in experiments/ still works: its smallest instance runs a round or two; one of counts alone is planned.

Cells of sweeps that differ in nothing but numbers are run once: each plug-in that a file names, with its keys, is run
somewhere.  Generators, and the files of clusters and of generators, have tests of their own.
"""

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from raysim import Result
from raysim.commands.plan.plan import plan
from raysim.commands.sweep.grid import read_sweep
from raysim.config.load import load_config
from raysim.config.schema import Config
from raysim.generation.weights_folder import shipped_names

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FILES = [
    path for path in sorted(EXPERIMENTS.glob("**/*.yaml")) if path.parent.name not in ("cluster", "generators")
]
CLIENTS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty random training images of each of ten classes, and ten test images, as CIFAR-10 comes from the hub."""
    folder = tmp_path_factory.mktemp("tiny")
    draw = np.random.default_rng(0)
    for split, count in (("train", 200), ("test", 10)):
        blobs = []
        for pixels in draw.integers(0, 256, size=(count, 32, 32, 3), dtype=np.uint8):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            blobs.append({"bytes": buffer.getvalue(), "path": None})
        table = pa.table({"image": blobs, "label": pa.array(np.arange(count) % 10)})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """What has been run so far, each section with its keys."""
    return set()


@functools.cache
def configurations(path: Path) -> list[Config]:
    if "grid" in yaml.safe_load(path.read_text(encoding="utf-8")):
        return [cell.config for cell in read_sweep(path).cells]
    return [load_config(path)]


def smallest(config: Config, tiny: Path, folder: Path) -> dict[str, Any]:
    """A configuration with one round of a step or an epoch on a few clients with a few images, all else as it is."""
    plain = config.resolved()
    data, partition, local = plain["data"], plain["partition"], plain["local"]
    if data["name"] == "parquet":
        data["path"] = str(tiny)
    data |= {"train_samples": 30, "test_samples": 10}
    if data["validation_fraction"]:
        data["validation_fraction"] = 0.1
    partition["clients"] = CLIENTS
    partition |= {key: value for key, value in (("alpha", 1.0), ("min_samples", 3)) if key in partition}
    if "samples_per_client" in partition:
        partition["samples_per_client"] = 5
    local |= {"epochs": 1, "batch_size": 20, "lr": 0.01}
    if "beta" in plain["allocation"]:
        plain["allocation"]["beta"] = 12.0
    if isinstance(plain["allocation"].get("total"), int):
        plain["allocation"]["total"] = 4
    is_later = plain["allocation"]["at"] != [0]
    if is_later:
        plain["allocation"]["at"] = [1]
    if local["steps"]:
        local["steps"] = 1
    if plain["generator"]["name"] == "ddpm":
        plain["generator"] = {"name": "tiny_sweep:grey"}
    cohort = 2 if isinstance(config.clients_per_round, int) else config.clients_per_round
    return plain | {
        "seed": 0, "rounds": 2 if is_later else 1, "evaluate_every": 1, "clients_per_round": cohort,
        "resources": {"workers": 1, "precision": plain["resources"]["precision"]}, "tracking": {"uri": "none"},
        "output": {"dir": str(folder / "runs"), "cache": None},
    }


def parts(plain: dict[str, Any]) -> set[str]:
    return {json.dumps([name, section], sort_keys=True) for name, section in plain.items() if name != "output"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXPERIMENTS).with_suffix("")))
def test_the_smallest_instance_of_every_experiment_runs(
    path: Path, tiny: Path, seen: set[str], run: Callable[..., Result], tmp_path: Path
):
    for config in configurations(path):
        if config.data.name == "labels":
            plan(path, measure_speed=False).check()
            continue
        plain = smallest(config, tiny, tmp_path)
        if parts(plain) <= seen:
            continue
        result = run(plain)
        seen |= parts(plain)
        assert result.summary["rounds"] == plain["rounds"] and 0 <= result.summary["final_accuracy"] <= 1
        wanted = "test" if not config.data.validation_fraction else "validation"
        assert result.summary["best_chosen_on"] == wanted


def test_the_weights_that_experiments_name_come_with_raysim_or_are_a_folder_of_the_users():
    named = {c.generator.params.get("weights") for path in FILES for c in configurations(path)} - {None, "auto"}
    assert named - set(shipped_names()) == {"weights/cifar100"}
