"""A sweep runs every combination of a grid once, on one Ray, and says what came out over seeds."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from full_disk import names_of

from raysim import cli
from raysim.commands.sweep import sweep as sweep_module
from raysim.commands.sweep import table as sweep_table
from raysim.commands.sweep.entry import sweep
from raysim.commands.sweep.grid import read_sweep, running_order
from raysim.config.load import load_config
from raysim.core.errors import ConfigError, DiskError, RayLost, RunError, UserError
from raysim.core.records import Dataset
from raysim.core.signals import Interrupted
from raysim.data import datasets
from raysim.lifecycle import mirror


@pytest.fixture
def small(small: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with one worker: starting them is most of what these tests take."""
    return {**small, "resources": {"workers": 1}}


def written(folder: Path, base: Any, grid: dict[str, Any], **more: Any) -> Path:
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump({"base": base, "grid": grid, **more}, sort_keys=False))
    return path


def problems(folder: Path, base: Any, grid: dict[str, Any], *overrides: str, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read_sweep(written(folder, base, grid, **more), overrides)
    return refused.value.problems


POLICIES = ["none", {"name": "fedeas", "beta": 1}]


def test_a_grid_gives_every_combination_in_the_order_of_the_file(tmp_path, small):
    grid = read_sweep(written(tmp_path, small, {"allocation": POLICIES, "seed": [0, 1]}, target_accuracy=0.5))
    assert [cell.name for cell in grid.cells] == [
        "none, seed 0", "none, seed 1", "fedeas {beta: 1}, seed 0", "fedeas {beta: 1}, seed 1",
    ]
    assert [cell.group for cell in grid.cells] == ["none", "none", "fedeas {beta: 1}", "fedeas {beta: 1}"]
    assert [(c.config.allocation.name, c.config.seed) for c in grid.cells[1:3]] == [("none", 1), ("fedeas", 0)]
    assert (grid.name, grid.target_accuracy) == ("compare", 0.5)
    assert {cell.config.tracking.experiment for cell in grid.cells} == {"compare"}


def test_the_first_run_of_every_group_comes_before_the_second_of_any(tmp_path, small):
    """Whichever axis comes first in the file, and whatever the first seed is called."""
    for grid in ({"allocation": POLICIES, "seed": [7, 1]}, {"seed": [7, 1], "allocation": POLICIES}):
        cells = read_sweep(written(tmp_path, small, grid)).cells
        order = [(cells[i].config.seed, cells[i].config.allocation.name) for i in running_order(cells)]
        assert order == [(7, "none"), (7, "fedeas"), (1, "none"), (1, "fedeas")]


def test_a_mapping_changes_keys_of_its_section_as_overrides_would_and_a_label_names_it(tmp_path, small):
    """`local` of the base has epochs 1 and lr 0.1; fedprox keeps both, as `local.name=fedprox local.mu=0.5` would."""
    values = [{"name": "fedprox", "mu": 0.5, "label": "prox"}, {"lr": 0.2}]
    one, two = read_sweep(written(tmp_path, small, {"local": values})).cells
    assert one.config.hash() == load_config(small, ["local.name=fedprox", "local.mu=0.5"]).hash()
    assert two.config.hash() == load_config(small, ["local.lr=0.2"]).hash()
    assert (one.name, two.name) == ("prox", "{lr: 0.2}")


def test_the_base_is_found_beside_the_sweep_file(tmp_path, small, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text(yaml.safe_dump(small))
    path = written(tmp_path / "sub", "base.yaml", {"partition.alpha": [0.1, 1e6]})
    monkeypatch.chdir(tmp_path)
    cells = read_sweep(path.relative_to(tmp_path)).cells
    assert [cell.config.partition.params["alpha"] for cell in cells] == [0.1, 1e6]
    assert cells[0].name == "alpha 0.1"


def test_code_that_the_grid_names_is_told_before_it_is_imported(tmp_path, small):
    """Also where a value sets a whole section among others, or the code is to say how many images another makes."""
    methods = [{"label": "a", "allocation": {"name": "not_a:there"}}, {"label": "b", "local.name": "not_b:there"}]
    grid = {
        "allocation.total": [{"of": "not_c:there"}],
        "model": ["not_d:there", "cnn"],
        "method": [*methods, {"label": "c", "server": "not_e:there"}],
    }
    told: list[str] = []
    file = written(tmp_path, small, grid)
    with pytest.raises(ConfigError):
        read_sweep(file, say=told.append)
    assert told == [
        f"note: {file} names code of its own, which runs with your rights: allocation.total.of = not_c:there, "
        "model.name = not_d:there, allocation.name = not_a:there, local.name = not_b:there, server.name = not_e:there"
    ]


def test_overrides_change_the_base_an_axis_or_the_target(tmp_path, small):
    path = written(tmp_path, small, {"seed": [0, 1, 2], "allocation": POLICIES})
    grid = read_sweep(path, ["rounds=7", "grid.seed=[5]", "target_accuracy=0.25", "tracking.experiment=mine"])
    assert {(c.config.rounds, c.config.seed, c.config.tracking.experiment) for c in grid.cells} == {(7, 5, "mine")}
    assert len(grid.cells) == 2 and grid.target_accuracy == 0.25
    assert "the grid sets this key" in problems(tmp_path, small, {"seed": [0, 1]}, "seed=3")[0]


def test_every_problem_of_every_cell_is_refused_at_once_and_names_its_cells(tmp_path, small):
    grid = {"allocation": [{"name": "fedeas", "betta": 8}, {"name": "uniform", "total": -1}], "seed": [0, 1]}
    first, second = problems(tmp_path, small, grid)
    assert first.startswith("allocation.betta = 8: no such key; did you mean 'beta'?")
    assert first.endswith('[cell "fedeas {betta: 8}, seed 0" and 1 more]')
    assert second.startswith("allocation.total = -1") and "uniform {total: -1}, seed 0" in second


WRONG = {
    "key of the file": ({"target": 0.9}, {"seed": [0]}, "target = 0.9: no such key (valid keys here: base, grid"),
    "empty grid": ({}, {}, "grid = {}"),
    "no list": ({}, {"seed": 3}, "grid.seed = 3: must be a list"),
    "empty list": ({}, {"seed": []}, "grid.seed = []"),
    "value twice": ({}, {"seed": [1, 2, 1]}, "grid.seed: two values are called 'seed 1'"),
    "target": ({"target_accuracy": 90}, {"seed": [0]}, "target_accuracy = 90"),
    "axis": ({}, {"partition.aplha": [1.0]}, "partition.aplha = 1.0: no such key; did you mean 'alpha'?"),
    "section": ({}, {"alocation": ["none", "full"]}, "alocation = none: no such key; did you mean 'allocation'?"),
}


@pytest.mark.parametrize(("more", "grid", "said"), WRONG.values(), ids=WRONG)
def test_a_file_that_cannot_work_is_refused_by_name(tmp_path, small, more, grid, said):
    assert problems(tmp_path, small, grid, **more)[0].startswith(said)


def test_data_that_cannot_work_is_refused_for_all_cells_before_ray_starts(tmp_path, small, monkeypatch):
    monkeypatch.setattr("raysim.engine.background_start.BackgroundStart", lambda *_: pytest.fail("Ray was started"))
    path = written(tmp_path, small, {"partition.min_samples": [5, 60], "seed": [0, 1]})
    with pytest.raises(ConfigError) as refused:
        sweep(path)
    assert len(refused.value.problems) == 1 and "partition.min_samples = 60" in str(refused.value)
    assert 'cell "min_samples 60, seed 0" and 1 more' in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_a_second_sweep_of_the_same_cells_is_refused_while_the_first_runs(tmp_path, small, monkeypatch):
    """Tried in place of the start of Ray."""
    path = written(tmp_path, small, {"seed": [0, 1]})

    def again(*_: object) -> None:
        monkeypatch.setattr("raysim.engine.background_start.BackgroundStart", lambda *_: pytest.fail("Ray was started"))
        sweep(path)

    monkeypatch.setattr("raysim.engine.background_start.BackgroundStart", again)
    with pytest.raises(UserError, match=r"sweep-compare-\w+ is in use by process \d+ on \S+ since .*; wait until that"):
        sweep(path)


def test_an_output_folder_that_cannot_be_made_is_refused_by_name(tmp_path, small):
    (tmp_path / "occupied").write_text("a file, not a folder")
    path = written(tmp_path, {**small, "output": {"dir": str(tmp_path / "occupied" / "runs")}}, {"seed": [0]})
    with pytest.raises(UserError, match=r"output\.dir"):
        sweep(path)


def test_generator_weights_that_cannot_be_used_are_refused_with_the_cells_that_need_them(tmp_path, small):
    """Only one of the two policies makes images."""
    generator = {"name": "ddpm", "weights": "nowhere/at/all"}
    policies = ["none", {"name": "uniform", "total": 5, "label": "five"}]
    with pytest.raises(ConfigError, match=r"nowhere/at/all.*\[cell \"five\"\]"):
        sweep(written(tmp_path, {**small, "generator": generator}, {"allocation": policies}))


def test_a_sweep_runs_once_then_skips_and_tabulates_over_seeds(tmp_path, small, warm, monkeypatch, capsys):
    """Two policies, two seeds, two rounds. Of values a and b the mean is (a + b) / 2 and the sd |a - b| / sqrt 2."""
    loads: list[str] = []
    original = datasets.digits

    def digits(*, test_fraction: float = 0.2, split_seed: int = 0) -> Dataset:
        loads.append("digits")
        return original(test_fraction=test_fraction, split_seed=split_seed)

    monkeypatch.setattr(datasets, "digits", digits)
    grid = {"allocation": ["none", {"name": "uniform", "total": 12, "label": "twelve"}], "seed": [0, 1]}
    keys = {**small, "rounds": 2, "generator": {"name": "tiny_sweep:grey"}}
    path = written(tmp_path, keys, grid, target_accuracy=0.01)
    result = sweep(path)
    assert loads == ["digits"] and not result.failed
    runs, table = result.runs, result.table
    assert list(table["group"]) == ["none", "twelve"] and list(table["n"]) == [2, 2]
    assert list(table["images_mean"]) == [0, 12] and list(table["images_sd"]) == [0, 0]
    a, b = runs[runs["group"] == "twelve"]["final_accuracy"]
    assert table["final_accuracy_mean"][1] == pytest.approx((a + b) / 2)
    assert table["final_accuracy_sd"][1] == pytest.approx(abs(a - b) / math.sqrt(2))
    assert list(table["rounds_to_target_mean"]) == [1, 1] and list(table["reached_target"]) == [2, 2]
    written_runs = pd.read_csv(result.directory / "runs.csv")
    assert list(written_runs["run_directory"]) == list(runs["run_directory"])

    def unwanted(*_, **__):
        pytest.fail("a finished cell was run again")

    monkeypatch.setattr("raysim.lifecycle.runner.run_experiment", unwanted)
    capsys.readouterr()
    again = sweep(path)
    assert again.directory == result.directory and capsys.readouterr().out.count("finished before, in") == 4
    pd.testing.assert_frame_equal(again.runs, runs)


def test_a_cell_that_fails_is_recorded_the_others_go_on_and_the_exit_code_is_1(
    tmp_path, small, ray_here, undrawn, monkeypatch, capsys
):
    """The failing cell comes first, so that the other one starts after it; on workers of the sweep's own."""
    keys = {**small, "rounds": 1}
    keys["local"] = {**small["local"], "name": "tiny_sweep:refuses_nine"}
    path = written(tmp_path, keys, {"local.epochs": [9, 1]})
    monkeypatch.setattr(sys, "argv", ["raysim", "sweep", str(path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    output = capsys.readouterr()
    directory = Path(output.out.splitlines()[-1])
    assert stopped.value.code == 1
    assert "1 of 2 runs failed" in output.err and "epochs 9" in output.err and "nine epochs" in output.err
    runs = pd.read_csv(directory / "runs.csv")
    assert list(runs["status"]) == ["FAILED", "FINISHED"] and "nine epochs" in runs["error"][0]
    assert list(runs["config_hash"].str.len()) == [16, 16]
    assert "Traceback" in (directory / "cells" / "epochs-9.error.txt").read_text()
    assert "1 failed" in (directory / "table.txt").read_text()


def test_an_interrupted_cell_goes_on_from_its_checkpoint(run, tmp_path, small, warm, monkeypatch):
    """Stopped after round 1 of 3, the sweep ends; started again, it finishes the same run, as if nothing had been."""
    from raysim.federation import server

    path = written(tmp_path, small, {"seed": [4]})
    original = server.Server.train

    def stops(self: Any, state: Any) -> Any:
        if state.round == 1:
            raise Interrupted("by a test")
        return original(self, state)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(server.Server, "train", stops)
        sweep(path)
    (interrupted,) = (tmp_path / "runs").glob("base-*")
    assert json.loads((interrupted / "status.json").read_text())["status"] == "KILLED"
    result = sweep(path)
    assert result.runs["run_directory"].tolist() == [str(interrupted)]
    uninterrupted = run({**small, "seed": 4, "output": {**small["output"], "dir": str(tmp_path / "other")}})
    assert result.runs["model_sha256"][0] == uninterrupted.summary["model_sha256"]


def test_more_rounds_go_on_in_the_folders_that_are_there_and_it_says_so(tmp_path, small, warm, capsys):
    first = sweep(written(tmp_path, {**small, "rounds": 2}, {"seed": [4]}))
    capsys.readouterr()
    second = sweep(written(tmp_path, {**small, "rounds": 3}, {"seed": [4]}))
    (directory,) = second.runs["run_directory"]
    assert [directory] == list(first.runs["run_directory"])
    assert f"goes on with {Path(directory).name}, which has 2 rounds" in capsys.readouterr().out


def test_the_death_of_ray_ends_the_sweep_instead_of_failing_every_cell(tmp_path, small, ray_here, monkeypatch):
    """The first of two cells finds Ray dead; the second is not tried."""
    tried = []

    def dead(path: Path, **_: object) -> None:
        tried.append(path)
        raise RayLost("Ray on this machine has died")

    monkeypatch.setattr("raysim.lifecycle.runner.run_experiment", dead)
    with pytest.raises(RayLost):
        sweep(written(tmp_path, small, {"seed": [0, 1]}))
    assert len(tried) == 1


def test_one_seed_has_no_standard_deviation_and_what_lacks_a_run_or_the_target_no_mean():
    """Accuracies 0.5 and 0.7 give 60 +- 14.14 %; of their runs one did not reach the target; c has failed."""
    base = {"status": "FINISHED", "best_accuracy": 0.7, "accuracy_auc": 0.4, "images": 3, "seconds": 2.0}
    costs = {"rounds_to_target": 4, "images_to_target": 3, "seconds_to_target": 1.5}
    rows = [
        {**base, "group": "a", "final_accuracy": 0.5, **costs},
        {**base, "group": "a", "final_accuracy": 0.7, "rounds_to_target": None},
        {**base, "group": "b", "final_accuracy": 0.9, "rounds_to_target": None},
        {"group": "c", "status": "FAILED"},
        {**base, "group": "d", "final_accuracy": 0.9, **costs},
    ]
    _, table = sweep_table.frames(rows, 0.6, {"a": 2, "b": 1, "c": 1, "d": 2, "e": 2})
    lines = sweep_table.text(table, 0.6).splitlines()
    accuracy, cost = lines[3:8], lines[lines.index("Cost, and what it took to reach an accuracy of 60 %") + 3 :][:5]
    assert "60.00 +- 14.14" in accuracy[0] and accuracy[1].split()[:5] == ["b", "1", "3", "90.00*", "70.00*"]
    assert [line.split()[:4] for line in accuracy[2:]] == [
        ["c", "0/1,", "1", "failed"], ["d", "1/2", "-", "-"], ["e", "0/2", "-", "-"],
    ]
    assert [line.split()[-4:] for line in cost] == [
        ["1/2", "-", "-", "-"], ["(0/1)", "-", "-", "-"], ["0/1", "-", "-", "-"], ["1/2", "-", "-", "-"],
        ["0/2", "-", "-", "-"],
    ]
    assert "never (0/1)" in cost[1] and any("n - 1" in line for line in lines)


@pytest.mark.parametrize("name", ["digits_policies", "papers/fedeas/table"])
def test_the_sweeps_that_come_with_the_project_are_valid(name):
    grid = read_sweep(Path(__file__).parents[2] / "experiments" / f"{name}.yaml")
    assert len(grid.cells) == 18 and {cell.config.seed for cell in grid.cells} == {0, 1, 2}
    assert [cell.config.allocation.name for cell in grid.cells[::3]] == [
        "none", "fedeas", "uniform", "size_proportional", "missing_only", "full",
    ]


def test_a_result_with_failures_names_them():
    empty = pd.DataFrame({"group": ["a", "b"]})
    sweep_module.SweepResult(empty, empty, Path(), {}).check()
    with pytest.raises(RunError, match=r"1 of 2 runs failed.*\n  - b: no memory"):
        sweep_module.SweepResult(empty, empty, Path(), {"b": "no memory"}).check()


def test_a_finished_run_on_data_that_have_changed_since_is_made_again_and_it_says_so(
    tmp_path, small, warm, capsys
):
    """Test labels shift by one: the accuracy in the table is that of the labels that are there now."""
    draw = np.random.default_rng(0)
    labels_N = np.arange(200) % 4
    images = (labels_N[:, None, None, None] * 60 + draw.integers(0, 20, (200, 1, 8, 8))).astype(np.uint8)
    arrays = {"train_images": images, "train_labels": labels_N}
    arrays |= {"test_images": images[:40], "test_labels": labels_N[:40]}
    np.savez(tmp_path / "own.npz", **arrays)
    path = written(tmp_path, small | {"data": {"name": "npz", "path": str(tmp_path / "own.npz")}}, {"seed": [0]})
    first = sweep(path)
    np.savez(tmp_path / "own.npz", **(arrays | {"test_labels": (labels_N[:40] + 1) % 4}))
    capsys.readouterr()
    second = sweep(path)
    said = capsys.readouterr().out
    assert "note: the test labels changed since a finished run was made, which is therefore made again" in said
    assert second.runs["run_directory"][0] != first.runs["run_directory"][0]
    assert second.runs["final_accuracy"][0] < first.runs["final_accuracy"][0]


def test_a_sweep_whose_runs_are_all_finished_reads_the_index_of_runs_once(tmp_path, small, warm, monkeypatch):
    path = written(tmp_path, small | {"rounds": 1}, {"seed": [0, 1, 2]})
    sweep(path)
    read: list[Path] = []
    index = mirror.RunIndex

    def counted(root: Path, say: Any) -> Any:
        read.append(root)
        return index(root, say)

    monkeypatch.setattr(mirror, "RunIndex", counted)
    assert sweep(path).runs["status"].tolist() == ["FINISHED"] * 3
    assert len(read) == 1


def test_whatever_write_of_a_sweep_fails_is_named_with_its_remedy_and_it_goes_on_when_started_again(
    run, tmp_path, small, disk, monkeypatch
):
    """Its only cell is finished, so that it writes its tables and no more."""
    run(small)
    monkeypatch.setattr("raysim.engine.background_start.BackgroundStart", lambda *_: pytest.fail("Ray was started"))
    path = written(tmp_path, small, {"seed": [0]})
    failed_at = []
    for n in range(100):
        for folder in Path(small["output"]["dir"]).glob("sweep-*"):
            shutil.rmtree(folder)
        disk.full_after(Path(small["output"]["dir"]), n, only_once=True)
        try:
            sweep(path)
        except (DiskError, UserError) as error:
            said = str(error)
            assert any(name in said for name in names_of(disk.refused[0])), (disk.refused, said)
            assert "No space left on device" in said and "free space there" in said, said
        disk.emptied()
        if not disk.refused:
            break
        failed_at.append(Path(disk.refused[0]).name)
    assert {"sweep.json", "runs.csv", "table.csv", "table.txt"} <= {*failed_at}
    sweep(path).check()


def test_a_damaged_run_is_passed_over_by_name_and_made_again(run, warm, tmp_path, small, capsys, monkeypatch):
    """Once its summary, and once its run.json."""
    from raysim.lifecycle import runner

    folder = run(small).directory
    original = runner.run_experiment
    monkeypatch.setattr(runner, "run_experiment", lambda *_, **keys: original(small, session=keys["session"]))
    for name in ("summary.json", "run.json"):
        (folder / name).write_text("[")
        folder = Path(sweep(written(tmp_path, small, {"seed": [0]})).runs["run_directory"][0])
        said = capsys.readouterr().out
        assert f"{name} is damaged" in said and "is passed over" in said
