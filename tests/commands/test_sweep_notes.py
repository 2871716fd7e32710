"""A sweep names a key that no cell reads, and keeps quiet about one that some cell reads."""

from pathlib import Path

import yaml

from raysim.commands.sweep.grid import read_sweep


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
