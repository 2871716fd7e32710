"""The tables of experiments/papers, from the CSV files of sweeps: what is missing is never averaged over."""

import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

PAPERS = Path(__file__).parents[1] / "experiments" / "papers"


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return runpy.run_path(str(PAPERS / "tables.py"))


def write(folder: Path, name: str, accuracies: dict[str, list[float]], images: int = 100) -> None:
    rows = [
        {
            "group": group, "axis.method": group, "axis.local.lr": f"lr {0.01 * (1 + seed)}", "seed": seed,
            "status": "FINISHED", "final_accuracy": value, "best_accuracy": value, "final_validation_accuracy": value,
            "accuracy_auc": value, "images": images if group == "full" else images / 10, "seconds_train": 60.0,
        }
        for group, values in accuracies.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)


def test_differences_are_paired_and_a_group_without_all_of_its_seeds_is_missing(tables, tmp_path):
    """fedeas less none: .1, .2, .3, .2, .2, mean .2, sd .0707, so .2 +- 2.776 * .0707 / sqrt 5 = .112 to .288."""
    none, fedeas = [0.5, 0.5, 0.5, 0.5, 0.5], [0.6, 0.7, 0.8, 0.7, 0.7]
    write(tmp_path, "epochs", {"none": none, "fedeas": fedeas, "uniform": [0.9, 0.9, 0.9]})
    write(tmp_path, "full_epochs", {"full": [0.9] * 5})
    text = tables["text"]("digits", tables["TABLES"]["digits"][0], tmp_path)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "0.700 ± 0.071" in lines["fedeas"] and "+0.200 [+0.112, +0.288], p 0.003 (5/5)" in lines["fedeas"]
    assert "missing: 3 of 5 seeds" in lines["uniform"] and "0.9" not in lines["uniform"]
    assert "fedeas has 50% with 10.0% of its images" in text and "uniform has" not in text
    assert "missing: 0 of 5 seeds" in lines["missing-only"]
    assert "Missing: no run of steps" in tables["text"]("digits", tables["TABLES"]["digits"][1], tmp_path)


def test_a_reference_without_all_of_its_seeds_makes_differences_missing(tables, tmp_path):
    write(tmp_path, "epochs", {"none": [0.5], "fedeas": [0.6] * 5})
    text = tables["text"]("digits", tables["TABLES"]["digits"][0], tmp_path)
    assert "| missing |" in text and "+0.1" not in text


def test_the_learning_rate_of_each_method_is_the_best_on_validation_and_of_equal_ones_the_lowest(tmp_path):
    """Of 0.01, 0.02, 0.03 none is best at the second, fedeas at the first two; full balance, not tuned, has fedeas'."""
    run = runpy.run_path(str(PAPERS / "run.py"))
    write(tmp_path / "small" / "results", "tune_epochs", {"none": [0.1, 0.3, 0.2], "fedeas": [0.4, 0.4, 0.2]})
    rates = run["chosen"](tmp_path, "small/tune_epochs")
    assert rates == {"none": 0.02, "fedeas": 0.01}
    (method,) = run["changes"]("small/full_steps", rates, None, ["full"])
    assert '"label": "full"' in method and '"local.lr": 0.01' in method and '"fedeas"' not in method
    assert run["changes"]("small/beta", rates, 1) == ["grid.seed=[0]", "local.lr=0.01"]
    with pytest.raises(KeyError, match="uniform"):
        run["changes"]("small/epochs", rates, None)


def test_what_has_a_row_is_not_run_again_and_new_rows_have_the_names_of_the_whole_sweep(tmp_path, capsys):
    """5 seeds, 7 methods; seed 0 has a row of `none` and another configuration's of `uniform`, nothing else has one."""
    run = runpy.run_path(str(PAPERS / "run.py"))
    cells = run["read_sweep"](PAPERS / "digits" / "steps.yaml").cells
    of_seed_0 = {cell.group: cell for cell in cells if cell.config.seed == 0}
    part = [
        {"config_hash": of_seed_0["none"].config_hash, "group": "base", "seed": "0", "status": "FINISHED"},
        {"config_hash": "", "group": "fedeas", "seed": "0", "status": "MISSING"},
    ]
    rows = run["named_by"](cells, part)
    assert rows == {
        ("none", 0): {
            "group": "none", "seed": "0", "axis.seed": "seed 0", "axis.method": "none",
            "config_hash": of_seed_0["none"].config_hash, "status": "FINISHED",
        }
    }  # fmt: skip
    rows["uniform", 0] = {**rows["none", 0], "group": "uniform", "config_hash": "0123"}
    run["write_rows"](tmp_path / "steps.csv", rows)
    left = run["left"](cells, run["read_rows"](tmp_path / "steps.csv"))
    assert sorted(left) == [0, 1, 2, 3, 4]
    assert "none" not in left[0] and "uniform" not in left[0] and len(left[0]) == len(left[1]) - 2
    assert "uniform, seed 0: kept, though made by configuration 0123" in capsys.readouterr().out


def test_every_stage_and_every_table_names_a_sweep_that_is_there(tables):
    run = runpy.run_path(str(PAPERS / "run.py"))
    named = {name for sweep, tuned_by, _ in run["STAGES"] for name in (sweep, tuned_by) if name}
    for folder, of_folder in tables["TABLES"].items():
        named |= {f"{folder}/{sweep.partition(':')[0]}" for table in of_folder for sweep in table.sweeps}
    assert [name for name in sorted(named) if not (PAPERS / f"{name}.yaml").is_file()] == []


def test_the_folder_of_a_sweep_is_found_also_where_a_run_of_it_has_failed(tmp_path, monkeypatch):
    run = runpy.run_path(str(PAPERS / "run.py"))
    fake = tmp_path / "python"
    said = "2 runs, 0 of them finished before; 5 synthetic images in all; results in /a/sweep-x"
    fake.write_text(f"#!/bin/sh\necho '{said}'\necho error; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    assert run["raysim"]("sweep", "x.yaml") == ("/a/sweep-x", 1)
    fake.write_text(f"#!/bin/sh\necho '{said}'\nexit 130\n")
    assert run["raysim"]("sweep", "x.yaml") == ("/a/sweep-x", 130)
