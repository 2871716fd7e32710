"""The axis `method` of a sweep changes several sections at once; the published comparisons are written with it."""

from pathlib import Path

import pytest

from raysim.commands.sweep.grid import read_sweep

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_a_method_changes_keys_of_several_sections_that_go_together(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "base: {rounds: 1, data: {name: digits}, local: {name: sgd, lr: 0.05}}\n"
        "grid:\n  method:\n    - {label: plain, aggregation.name: fedavg}\n"
        "    - {local.name: fedprox, local.mu: 0.5, aggregation.name: uniform}\n"
    )
    plain, both = read_sweep(file).cells
    assert (plain.name, plain.config.local.name, plain.config.aggregation.name) == ("plain", "sgd", "fedavg")
    assert (both.config.local.name, both.config.aggregation.name) == ("fedprox", "uniform")
    assert both.config.local.params["mu"] == 0.5
    assert both.config.local.params["lr"] == 0.05
    assert "fedprox" in both.name


@pytest.mark.parametrize(("file", "dirty"), [("faithful", True), ("clean", False)])
def test_the_published_set_up_is_five_methods_on_the_same_partitions(file, dirty):
    grid = read_sweep(EXPERIMENTS / "papers" / "fedoui" / f"{file}.yaml")
    assert len(grid.cells) == 5 * 2 * 5
    assert {cell.labels["method"] for cell in grid.cells} == {"FedAvg", "FedProx", "FedAlign", "FedOUI", "FedOUI-Align"}
    for cell in grid.cells:
        config = cell.config
        assert (config.rounds, config.clients_per_round, config.data.train_samples) == (60, 5, 3000)
        assert (config.partition.rare is not None, config.partition.label_noise is not None) == (dirty, dirty)
    partitions = {cell.config.partition.model_dump_json() for cell in grid.cells}
    assert len(partitions) == 2  # one for each alpha, whatever the method


@pytest.mark.parametrize(("file", "methods", "runs"), [("baselines_cifar10", 14, 84), ("scaffold_cifar10", 5, 5)])
def test_the_comparisons_of_baselines_are_valid_and_differ_in_their_method_alone(file, methods, runs):
    grid = read_sweep(EXPERIMENTS / f"{file}.yaml")
    assert len(grid.cells) == runs and len({cell.labels["method"] for cell in grid.cells}) == methods
    assert len({(cell.config.partition.model_dump_json(), cell.config.seed) for cell in grid.cells}) == runs // methods
