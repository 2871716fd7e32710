"""A sweep that says what it holds equal is refused, before Ray starts, where that is not so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raysim.commands.plan.training import local_steps
from raysim.commands.sweep.entry import sweep
from raysim.commands.sweep.grid import read_sweep
from raysim.config.load import load_config
from raysim.core.errors import ConfigError

MATCHED = [{"name": "uniform", "total": 60}, {"name": "size_proportional", "total": 60}]


class RayStartedError(Exception):
    """In place of the start of Ray: the sweep was not refused."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise RayStartedError

    monkeypatch.setattr("raysim.engine.background_start.BackgroundStart", started)


def written(folder: Path, base: dict[str, Any], allocation: list[Any], compare: Any, seeds: list[int]) -> Path:
    path = folder / "compare.yaml"
    plain = {"base": base, "compare": compare, "grid": {"allocation": allocation, "seed": seeds}}
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        sweep(path, overrides)
    (problem,) = error.value.problems
    return problem


def test_other_local_steps_are_refused_with_the_cells_and_equal_ones_are_not(tmp_path, small):
    """60 images for 6 clients of 300 digits add steps to some; with local.steps, all take the same."""
    path = written(tmp_path, small, ["none", *MATCHED], "equal_steps", [0, 1])
    said = refused(path)
    assert said.startswith("compare = equal_steps: cells on the same clients differ: 3 rounds of 4 of ")
    assert 'local steps: cell "none, seed 0"; ' in said and 'cell "uniform {total: 60}, seed 0"' in said
    assert said.endswith("(and so for 1 more seeds or partitions); set local.steps, and the same rounds, in the base")
    with pytest.raises(RayStartedError):
        sweep(path, ["local.steps=5"])
    with pytest.raises(RayStartedError):
        sweep(path, ["compare=null"])


def test_a_policy_that_leaves_samples_out_is_compared_on_the_clients_as_they_were_dealt(tmp_path, small):
    """fbl adds images and leaves out as many samples, so its clients take as many steps as without images."""
    with pytest.raises(RayStartedError):
        sweep(written(tmp_path, small, ["none", {"name": "fbl", "total": 20}], ["equal_images", "equal_steps"], [0]))
    uneven = [{"name": "fbl", "total": 20}, {"name": "server_pool", "per_class": 3}]
    assert '20 images: cell "fbl {total: 20}' in refused(written(tmp_path, small, uneven, ["equal_images"], [0]))


def test_other_totals_are_refused_and_a_policy_without_images_is_the_reference(tmp_path, small):
    with pytest.raises(RayStartedError):
        sweep(written(tmp_path, small, ["none", *MATCHED], ["equal_images", "equal_epochs"], [0]))
    other = {"name": "uniform", "total": 59, "label": "b"}
    said = refused(written(tmp_path, small, [*MATCHED, other], "equal_images", [0]))
    assert '60 images: cell "uniform {total: 60}" and 1 more; 59 images: cell "b"' in said


def test_epochs_beside_steps_are_not_equal(tmp_path, small):
    path = tmp_path / "compare.yaml"
    grid = {"method": [{"label": "a", "local.epochs": 2}, {"label": "b", "local.steps": 7}]}
    path.write_text(yaml.safe_dump({"base": small, "compare": "equal_epochs", "grid": grid}))
    assert '3 rounds of 2 local epochs: cell "a"; 3 rounds of 7 local steps: cell "b"' in refused(path)


def test_a_comparison_that_does_not_exist_is_refused_by_name(tmp_path, small):
    with pytest.raises(ConfigError, match=r"compare = equal_step: no such comparison; did you mean 'equal_steps'"):
        read_sweep(written(tmp_path, small, ["none"], "equal_step", [0]))


def test_the_steps_of_a_client_are_its_batches_or_what_is_asked_for(small):
    """Batches of 16: 1, 16 and 17 samples make 1, 1 and 2 steps an epoch."""
    sizes_K = np.array([1, 16, 17])
    assert local_steps(load_config(small, ["local.epochs=3"]), sizes_K).tolist() == [3, 3, 6]
    assert local_steps(load_config(small, ["local.steps=5"]), sizes_K).tolist() == [5, 5, 5]
