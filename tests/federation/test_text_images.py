"""A run whose images a text-to-image pipeline makes: real diffusers and transformers classes, untrained."""

import sys
from pathlib import Path
from typing import Any

import pytest

import raysim
from raysim.core.errors import UserError
from raysim.core.host import physical_bytes
from raysim.engine.placement import Node
from raysim.lifecycle import build

pytest.importorskip("transformers", reason="pip install 'raysim[text]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))
import toy_pipelines


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return toy_pipelines.save_stable_diffusion(tmp_path_factory.mktemp("text") / "sd")


@pytest.fixture
def config(small: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A dozen images of digits for 6 clients, of a prompt for each class, one round."""
    generator = {
        "name": "pipeline", "folder": str(folder), "prompts": "a photo of the digit {class}", "steps": 2,
        "guidance": 4.0,
    }
    return {**small, "rounds": 1, "allocation": {"name": "uniform", "total": 12}, "generator": generator}


def test_a_stable_diffusion_gives_the_same_run_with_one_and_two_workers(run, config):
    first = run(config).summary
    assert first["n_synthetic_made"] == first["n_synthetic"] == 12
    assert any("generator.prompts: 0 'a photo of the digit 0'" in note for note in first["notes"])
    assert any("16 x 16 pixels, which are averaged over areas to 8 x 8" in note for note in first["notes"])
    other = run({**config, "resources": {"workers": 1}, "output": {**config["output"], "cache": None}}).summary
    assert other["synthetic_sha256"] == first["synthetic_sha256"] and other["model_sha256"] == first["model_sha256"]
    again = run(config).summary
    assert again["n_synthetic_made"] == 0 and again["synthetic_sha256"] == first["synthetic_sha256"]


def test_more_workers_than_the_memory_holds_are_refused_with_the_number_that_fits(config, monkeypatch):
    """A generator of 40 % of the memory, of which two workers can each hold one."""
    from raysim.generation.pipeline import pipeline

    monkeypatch.setattr(pipeline, "memory_bytes", lambda _: physical_bytes() * 2 // 5)
    monkeypatch.setattr(build, "local_node", lambda: Node("here", 8, 0, physical_bytes()))
    with pytest.raises(UserError, match=r"in each of 3 workers, .* set resources.workers to at most 2"):
        raysim.run({**config, "resources": {"workers": 3}})
