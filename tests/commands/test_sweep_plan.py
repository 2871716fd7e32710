"""`raysim plan` of a sweep's file: what all runs take together, each image counted once."""

import json
import sys
from pathlib import Path

import pytest

from raysim import cli
from raysim.commands.plan.sweep_plan import plan_sweep
from raysim.core.errors import ConfigError

BASE = """
base:
  rounds: 2
  data: {name: digits, train_samples: 300, test_samples: 100}
  partition: {name: dirichlet, clients: 4, alpha: 0.5, min_samples: 5}
  local: {name: sgd, batch_size: 50, epochs: 1}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two budgets, none and a repeated one, two seeds."""
    file = tmp_path / "budgets.yaml"
    budgets = "{name: none}, {name: uniform, total: 40}, {name: uniform, total: 80}"
    again = "{label: again, name: uniform, total: 40}"
    file.write_text(f"{BASE}grid:\n  seed: [0, 1]\n  allocation: [{budgets}, {again}]\n")
    return file


def test_images_that_a_run_before_it_has_made_are_not_made_again(sweep):
    """40 are one image a cell of 4 clients and 10 classes, 80 are two: 40 of them are new, repeated ones are not."""
    planned = plan_sweep(sweep, measure_speed=False)
    assert [cell.images for cell in planned.cells] == [0, 40, 80, 40] * 2
    assert [cell.new_images for cell in planned.cells] == [0, 40, 40, 0] * 2
    assert planned.new_images == 160 and planned.image_bytes == 8 * 8 + 24
    assert planned.generation_s is None and planned.training_s is None


def test_another_generator_makes_its_own_images(sweep):
    planned = plan_sweep(sweep, ["grid.generator.guidance=[1.0, 2.0]", "grid.seed=[0]"], measure_speed=False)
    assert planned.new_images == 160


def test_steps_are_those_of_a_round(sweep):
    """With `local.steps` each of the 2 clients of a round takes 3."""
    planned = plan_sweep(sweep, ["local.steps=3", "clients_per_round=2"], measure_speed=False)
    assert {cell.steps for cell in planned.cells} == {6.0}


def test_times_add_up_to_those_of_the_runs(sweep):
    planned = plan_sweep(sweep, ["grid.seed=[0]", "generator=oracle", "data.public_frac=0.2"])
    assert planned.training_s == pytest.approx(sum(cell.training_s or 0 for cell in planned.cells))
    assert planned.training_s and planned.generation_s and planned.cells[0].generation_s == 0
    assert planned.total_s == pytest.approx(planned.training_s + planned.generation_s + 10.0 + 4 * (0.5 + 2 * 0.02))


def test_the_command_shows_it_and_gives_it_as_json(sweep, monkeypatch, capsys):
    for options in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["raysim", "plan", str(sweep), "--no-measure", *options])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code
    table, _, data = capsys.readouterr().out.partition("{\n")
    assert "8 runs" in table and "160" in table
    assert json.loads("{" + data)["new_images"] == 160


def test_options_for_a_single_run_and_wrong_cells_are_refused(sweep, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["raysim", "plan", str(sweep), "--seeds", "0-3"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and "--json and --no-measure alone" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="alpha"):
        plan_sweep(sweep, ["partition.alpha=-1"])
