"""What `report` says of a folder, from the files in it alone."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from raysim import cli
from raysim.commands.report import best_on_validation, paired_differences, report
from raysim.commands.sweep import table as sweep_table
from raysim.core.errors import UserError


def runs_of(accuracies: dict[tuple[str, float, int], float]) -> pd.DataFrame:
    """Finished runs by (method, alpha, seed), with this final accuracy; the best is 0.1 above, the mean 0.2 below."""
    return pd.DataFrame(
        {
            "group": f"{method}, alpha {alpha}", "seed": seed, "axis.method": method, "axis.alpha": f"alpha {alpha}",
            "axis.seed": f"seed {seed}", "status": "FINISHED", "final_accuracy": value, "best_accuracy": value + 0.1,
            "accuracy_auc": value - 0.2, "run_directory": f"/elsewhere/{method}-{alpha}-{seed}",
        }
        for (method, alpha, seed), value in accuracies.items()
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep of two methods, two values of alpha and two seeds, one run of which has failed, beside its runs."""
    runs = runs_of({
        ("A", 0.1, 0): 0.50, ("A", 0.1, 1): 0.60, ("A", 0.3, 0): 0.70, ("A", 0.3, 1): 0.80,
        ("B", 0.1, 0): 0.53, ("B", 0.1, 1): 0.59, ("B", 0.3, 0): 0.75, ("B", 0.3, 1): 0.99,
    })  # fmt: skip
    runs.loc[7, "status"] = "FAILED"
    path = tmp_path / "sweep-x-1"
    path.mkdir()
    sweep_table.write(path, runs.assign(images=0, seconds=1.0).to_dict("records"), None)
    for run in runs["run_directory"]:
        (tmp_path / Path(run).name).mkdir()
        metrics = pd.DataFrame({"round": [1, 2, 3], "accuracy": [0.1, None, 0.4]})
        metrics.to_parquet(tmp_path / Path(run).name / "metrics.parquet")
    return path


def test_differences_are_taken_seed_by_seed_and_on_the_same_place_of_the_other_axes(folder):
    """alpha 0.1: 0.53 - 0.50 = 0.03, 0.59 - 0.60 = -0.01, mean 0.01, sd 0.04 / sqrt 2; alpha 0.3: one seed, 0.05."""
    runs = pd.read_csv(folder / "runs.csv")
    table = paired_differences(runs[runs["status"] == "FINISHED"], "axis.method", "A")
    assert list(table["group"]) == ["B, alpha 0.1", "B, alpha 0.3"] and list(table["n"]) == [2, 1]
    assert list(table["final_accuracy_mean"]) == pytest.approx([0.01, 0.05])
    assert table["final_accuracy_sd"][0] == pytest.approx(0.04 / 2**0.5) and pd.isna(table["final_accuracy_sd"][1])
    assert list(table["accuracy_auc_better"]) == [1, 1]


def test_a_sweep_is_shown_with_its_differences_and_curves(folder, capsys):
    (figure,) = report(folder)
    said = capsys.readouterr().out
    assert figure == folder / "figures" / "accuracy.png" and figure.stat().st_size > 10_000
    assert "less A" in said and "+0.0100 +- 0.0283 (1/2)" in said and "+0.0500 +- ? (1/1)" in said
    assert len(pd.read_csv(folder / "paired.csv")) == 2


def test_of_several_values_tried_the_one_with_the_highest_validation_accuracy_is_named(folder):
    """A: 0.40 and 0.60 on validation for alpha 0.1, 0.55 for alpha 0.3 (one seed has no run): 0.55 wins."""
    runs = pd.read_csv(folder / "runs.csv").iloc[[0, 1, 2, 4, 6]]
    assert best_on_validation(runs) == []
    found = best_on_validation(runs.assign(best_validation_accuracy=[0.4, 0.6, 0.55, 0.3, 0.2]))
    assert found == [
        "A: alpha 0.3 has the highest validation accuracy, 0.5500 of 2 tried (1 run each)",
        "B: alpha 0.1 has the highest validation accuracy, 0.3000 of 2 tried (1 run each)",
    ]


def test_the_table_says_on_which_split_the_best_round_was_chosen(folder):
    rows = pd.read_csv(folder / "runs.csv").assign(best_chosen_on="validation", rounds_to_target=3).to_dict("records")
    sweep_table.write(folder, rows, 0.5)
    said = (folder / "table.txt").read_text()
    assert "the best round and the rounds to 0.5 were chosen on the validation split" in said


def test_a_row_per_run_is_written_with_the_hash_of_its_code_and_nothing_of_this_machine(folder, tmp_path):
    (tmp_path / "A-0.1-0" / "run.json").write_text('{"code": {"raysim": "abc"}}')
    report(folder, csv=str(tmp_path / "new" / "x.csv"))
    rows = pd.read_csv(tmp_path / "new" / "x.csv", keep_default_na=False)
    assert len(rows) == 8 and list(rows["code"][:2]) == ["abc", ""] and "run_directory" not in rows
    assert list(rows["status"]).count("FAILED") == 1


@pytest.mark.parametrize(
    ("against", "expected"),
    [("B", ["A, alpha 0.1", "A, alpha 0.3"]), ("alpha 0.3", ["A, alpha 0.1", "B, alpha 0.1"])],
)
def test_another_label_of_any_axis_can_be_what_the_others_are_compared_with(folder, against, expected):
    report(folder, against)
    assert list(pd.read_csv(folder / "paired.csv")["group"]) == expected


def test_a_sweep_over_seeds_alone_has_nothing_to_compare(tmp_path, capsys):
    runs = runs_of({("A", 0.1, 0): 0.5, ("A", 0.1, 1): 0.6}).drop(columns=["axis.method", "axis.alpha"])
    sweep_table.write(tmp_path, runs.assign(images=0, seconds=1.0).to_dict("records"), None)
    assert report(tmp_path) == []
    said = capsys.readouterr().out
    assert "less" not in said and "no curves of 2 runs" in said


def test_what_cannot_be_shown_is_refused_by_name(folder, tmp_path):
    empty, unfinished, failed, damaged = (tmp_path / name for name in ("empty", "unfinished", "failed", "damaged"))
    for path in (empty, unfinished, failed, damaged):
        path.mkdir()
    for path in (unfinished, failed, damaged):
        (path / "run.json").write_text("{}")
    (failed / "status.json").write_text('{"status": "FAILED", "message": "diverged in round 2"}')
    (damaged / "summary.json").write_text("{")
    refusals: list[tuple[Path, str | None, str]] = [
        (tmp_path / "nowhere", None, "nowhere: not the folder of a run or a sweep"),
        (empty, None, "empty: not the folder of a run or a sweep"),
        (unfinished, None, "has not finished.*--resume"),
        (unfinished, "A", "--against = A: only the runs of a sweep"),
        (damaged, None, "summary.json is damaged or was changed"),
        (failed, None, r"has not finished .FAILED: diverged in round 2."),
        (folder, "C", "--against = C: no finished run is called so.*labels: A, B, alpha 0.1, alpha 0.3"),
    ]
    for path, against, said in refusals:
        with pytest.raises(UserError, match=said):
            report(path, against)
    runs = pd.read_csv(folder / "runs.csv")
    runs.assign(status="FAILED").to_csv(folder / "runs.csv", index=False)
    with pytest.raises(UserError, match="no run of this sweep has finished"):
        report(folder)
    for content in ("", "group,status\na,FINISHED\n", runs.replace(0.5, "high").to_csv(index=False)):
        (folder / "runs.csv").write_text(content)
        with pytest.raises(UserError, match=r"runs\.csv is damaged or was changed"):
            report(folder)


def test_runs_that_are_still_to_come_are_counted(folder, capsys):
    (folder / "sweep.json").write_text('{"runs": 10}')
    report(folder)
    assert "note: 3 of 10 runs have not finished" in capsys.readouterr().out


@pytest.mark.drawn
def test_a_run_is_shown_as_at_its_end_and_its_figures_are_listed(run, small, monkeypatch, capsys):
    result = run(small)
    at_the_end = capsys.readouterr().out.split("raysim: digits")[1].splitlines()
    monkeypatch.setattr(sys, "argv", ["raysim", "report", str(result.directory)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out.split("raysim: digits")[1].splitlines()
    assert ended.value.code == 0 and Path(said[-1]).is_file()
    assert said[1].startswith("Accuracy") and said[:4] == at_the_end[:4]
