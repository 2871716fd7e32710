"""The public surface for plug-ins: light to import, complete, and enough for the examples of the documentation."""

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
from raysim.config.registry import KINDS, resolve
from raysim.core.records import RoundTable
from raysim.lifecycle.prepare import prepare
from raysim.local.contract import ClientData, Job
from raysim.local.loop import train_client
from raysim.models.architectures import linear
from raysim.models.flat_model import FlatModel, ImageScale

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/plugins.md").read_text()
COMMANDS = [line.split()[3:] for line in PAGE.splitlines() if line.startswith("    raysim run quickstart ")]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The module of the page on plug-ins, as its reader would save it."""
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
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


def test_the_page_names_nothing_of_raysim_but_the_public_surface(page):
    imported = [node.module for node in ast.walk(ast.parse(page)) if isinstance(node, ast.ImportFrom)]
    assert [module for module in imported if module.startswith("raysim")] == ["raysim.plugins_api"]


def test_the_page_has_an_example_of_each_kind_in_under_15_lines_and_its_command(page):
    kinds = [command[0].partition("=")[0] for command in COMMANDS]
    assert sorted(kinds) == sorted([*({*KINDS} - {"modifier"}), "allocation"])  # one looks at counts, one at training
    examples = [node for node in ast.parse(page).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert len(examples) == len(kinds)
    for node in examples:
        code = (ast.get_source_segment(page, node) or "").splitlines()
        assert len([line for line in code if line.strip()]) < 15


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0].rpartition(":")[2])
def test_every_command_of_the_page_runs(command, page, run, tmp_path):
    """With the generator of the page in place of the diffusion model, which would take longer."""
    generator = [] if command[0].startswith("generator") else ["generator=my_plugins:moved"]
    rounds = [] if any(change.startswith("rounds=") for change in command) else ["rounds=1"]
    result = run(
        ROOT / "experiments/quickstart.yaml", [*command, *generator, *rounds],
        tracking={"uri": "none"}, resources={"workers": 2},
        output={"dir": str(tmp_path / "runs"), "cache": str(tmp_path / "cache")},
    )
    assert result.summary["status"] == "FINISHED" and 0 <= result.summary["final_accuracy"] <= 1


def test_the_policy_of_the_page_fills_classes_to_the_mean(page):
    """A client of 6 images in 3 classes has a mean of 2: a class of which it has 5 gets none, one of 0 gets 2."""
    policy = resolve("allocation", "my_plugins:fill_to_mean")
    assert policy(np.array([[5, 1, 0]])).tolist() == [[0, 1, 2]]
    quota_KC = prepare(load_config({"rounds": 1, "data": {"name": "digits"}}, COMMANDS[0])).quota_KC
    assert quota_KC.shape == (10, 10) and quota_KC.any()


def test_the_policy_of_the_page_that_looks_at_the_loss_takes_12_lines_and_meets_its_total(page):
    """Losses (1, 3) over 1 + (0, 2) and 1 + (1 + 2, 0): weights (1, 1) and (1/4, 3), so of 21 images 4, 4, 1 and 12."""
    policy = resolve("allocation", "my_plugins:hard_and_rare")
    counts_KC, images_KC = np.array([[0, 2], [1, 0]]), np.array([[0, 0], [2, 0]])
    loss_KC = np.array([[1.0, 3.0], [1.0, 3.0]])
    assert policy(counts_KC, images_KC, loss_KC, total=21).tolist() == [[4, 4], [1, 12]]
    assert policy(counts_KC, images_KC, loss_KC, total=22).sum() == 22
    (node,) = (node for node in ast.parse(page).body if getattr(node, "name", "") == "hard_and_rare")
    assert len((ast.get_source_segment(page, node) or "").splitlines()) <= 12


def test_the_algorithm_of_the_page_moves_by_the_sign_of_the_gradient(page):
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


def test_the_rule_of_the_page_weighs_a_run_by_the_root_of_the_sizes(page, run, small):
    """A client of 4 samples and one of 16 weigh 2 : 4."""
    rule = resolve("aggregation", "my_plugins:by_power")(power=0.5)
    assert rule.weights(RoundTable(1, np.array([0, 1]), np.array([4, 16])), None).w_K.tolist() == [1 / 3, 2 / 3]
    result = run({**small, "rounds": 1, "aggregation": {"name": "my_plugins:by_power"}})
    clients = pd.read_parquet(result.directory / "clients.parquet")
    root_K = np.sqrt(clients["n_real"])
    assert np.allclose(clients["weight"], root_K / root_K.sum(), rtol=1e-12) and len(clients) == 4
