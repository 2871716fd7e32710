"""A sweep names a key that no cell reads, and keeps quiet about one that some cell reads."""

from pathlib import Path

import yaml

from raysim.commands.sweep.grid import read_sweep
from raysim.commands.sweep.sweep import _plain
from raysim.config.load import load_config
from raysim.lifecycle.prepare import prepare


def notes(folder: Path, base: dict, grid: dict) -> list[str]:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"base": {"data": {"name": "digits"}, "rounds": 1, **base}, "grid": grid}))
    return read_sweep(path).notes


def test_a_key_that_some_cell_reads_is_not_named(tmp_path):
    nesterov = {"local": {"nesterov": True}}
    assert notes(tmp_path, nesterov, {"local.momentum": [0.0, 0.9]}) == []
    [note] = notes(tmp_path, nesterov, {"seed": [0, 1]})
    assert note.startswith("local.nesterov = true has no effect")


def test_what_a_changed_name_leaves_out_is_named_once(tmp_path):
    base, grid = {"allocation": {"name": "fedeas", "beta": 8}}, {"allocation": ["none", "fedeas"], "seed": [0, 1]}
    found = notes(tmp_path, base, grid)
    assert found == ["allocation.name=none leaves out allocation.beta, which 'none' does not take"]


def test_keys_that_nobody_set_are_not_named_neither_by_the_sweep_nor_by_its_cells(tmp_path):
    """The sweep names an MLflow experiment itself, and a cell's configuration is written out in full."""
    path = tmp_path / "grid.yaml"
    base = {"data": {"name": "digits"}, "rounds": 1, "tracking": {"uri": "none"}}
    path.write_text(yaml.safe_dump({"base": base, "grid": {"seed": [0]}}))
    grid = read_sweep(path)
    assert grid.notes == []
    cell = load_config(_plain(grid.cells[0]))
    assert prepare(cell).notes == [] == cell.notes
    base["tracking"] = {"uri": "none", "experiment": "mine"}
    path.write_text(yaml.safe_dump({"base": base, "grid": {"seed": [0]}}))
    assert read_sweep(path).notes[0].startswith("tracking.experiment = mine has no effect")


def test_a_sweep_with_tracking_is_an_experiment_of_its_own(tmp_path):
    path = tmp_path / "grid.yaml"
    base = {"data": {"name": "digits"}, "rounds": 1}
    path.write_text(yaml.safe_dump({"base": base, "grid": {"seed": [0]}}))
    assert read_sweep(path).cells[0].config.tracking.experiment == "grid"
    assert read_sweep(path, ["tracking.experiment=mine"]).cells[0].config.tracking.experiment == "mine"
