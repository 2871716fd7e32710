"""The public surface for plug-ins: light to import, complete, and enough for the README's own examples."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import raysim.plugins_api
from raysim.config.load import load_config
from raysim.config.registry import resolve
from raysim.core.records import RoundTable
from raysim.lifecycle.prepare import prepare
from raysim.local.contract import ClientData, Job
from raysim.local.loop import train_client
from raysim.models.architectures import linear
from raysim.models.flat_model import FlatModel, ImageScale

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "README.md").read_text().split("## Plug-ins of your own")[1].split("\n## ")[0]
COMMANDS = [line.split()[5:] for line in SECTION.splitlines() if line.startswith("    python -m raysim run ")]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The module of the README's section on plug-ins, as its reader would save it."""
    [code] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "my_plugins.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield code
    sys.modules.pop("my_plugins", None)


def test_every_public_name_is_there():
    for name in raysim.plugins_api.__all__:
        assert getattr(raysim.plugins_api, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Split'; it has AggregationRule, "):
        raysim.plugins_api.Split  # noqa: B018


def test_importing_the_surface_loads_neither_torch_nor_ray():
    script = (
        "import sys; import raysim.plugins_api;"
        "print([m for m in ('torch', 'ray', 'mlflow', 'matplotlib', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_readme_names_nothing_of_raysim_but_the_public_surface(page):
    imported = [node.module for node in ast.walk(ast.parse(page)) if isinstance(node, ast.ImportFrom)]
    assert [module for module in imported if module.startswith("raysim")] == ["raysim.plugins_api"]
    assert set(re.findall(r"raysim\.\w+", SECTION)) == {"raysim.plugins_api"}
    kinds = re.findall(r"`([A-Z]\w+|from_owners)`", SECTION)
    assert kinds and not [name for name in kinds if name not in raysim.plugins_api.__all__]


def test_the_commands_of_the_readme_find_the_examples_of_the_readme(page):
    assert len(COMMANDS) == 2
    first, second = (load_config(ROOT / "experiments" / "quickstart.yaml", overrides) for overrides in COMMANDS)
    assert first.allocation.params == {"factor": 0.5}
    assert second.aggregation.params == {"power": 0.5}
    assert (second.local.params["lr"], second.local.params["threshold"]) == (0.002, 0.0)


def test_the_policy_of_the_readme_fills_classes_to_the_mean(page):
    """A client of 6 images in 3 classes has a mean of 2: a class of which it has 5 gets none, one of 0 gets 2."""
    policy = resolve("allocation", "my_plugins:fill_to_mean")
    assert policy(np.array([[5, 1, 0]])).tolist() == [[0, 1, 2]]
    quota_KC = prepare(load_config({"rounds": 1, "data": {"name": "digits"}}, COMMANDS[0])).quota_KC
    assert quota_KC.shape == (10, 10) and quota_KC.any()


def test_the_algorithm_of_the_readme_moves_by_the_sign_of_the_gradient(page):
    """One step at learning rate 1/4 moves each parameter by -1/4, 0 or 1/4; a threshold above every slope, by 0."""
    kind = resolve("local", "my_plugins:sign_sgd")
    generator = np.random.default_rng(0)
    data = ClientData(generator.integers(0, 256, (6, 1, 4, 4), dtype=np.uint8), np.array([0, 1, 2, 0, 1, 2]), 6)
    for threshold, steps in ((0.0, {-0.25, 0.25}), (1e9, {0.0})):
        torch.manual_seed(0)
        model = FlatModel(linear(1, (4, 4), 3))
        model.params_P.detach().zero_()
        job = Job(model, model.params_P.detach().clone(), 0.25, 1, 0, 6)
        train_client(job, kind(lr=0.25, threshold=threshold), data, ImageScale((0.5,), (0.25,)), seed=0)
        assert set(model.params_P.tolist()) == steps


def test_the_rule_of_the_readme_weighs_a_run_by_the_root_of_the_sizes(page, run, small):
    """A client of 4 samples and one of 16 weigh 2 : 4."""
    rule = resolve("aggregation", "my_plugins:by_power")(power=0.5)
    assert rule.weights(RoundTable(1, np.array([0, 1]), np.array([4, 16])), None).w_K.tolist() == [1 / 3, 2 / 3]
    result = run({**small, "rounds": 1, "aggregation": {"name": "my_plugins:by_power"}})
    clients = pd.read_parquet(result.directory / "clients.parquet")
    root_K = np.sqrt(clients["n_real"])
    assert np.allclose(clients["weight"], root_K / root_K.sum(), rtol=1e-12) and len(clients) == 4
