"""What `report` says of folders, and what it leaves in them, from the files that are there alone."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysim import cli
from raysim.commands.report.report import report
from raysim.commands.report.results import measured, read_results
from raysim.commands.report.tables import best_on_validation, few_seeds
from raysim.commands.sweep import table as sweep_table
from raysim.core.errors import UserError
from raysim.lifecycle.directory import RunDirectory


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take most of the time; only tests marked `drawn` draw them."""
    if request.node.get_closest_marker("drawn") is None:
        for name in ("of_run", "of_results"):
            monkeypatch.setattr(f"raysim.commands.report.figures.{name}", lambda *_, **__: [])


def finished_run(folder: Path, keys: dict[str, Any], accuracy: float, images: int = 0, **summary: Any) -> Path:
    """The folder of a finished run of three rounds, with two clients and two classes.

    keys: of its configuration.  accuracy: the final one; in round 1 it was half of that.
    """
    folder.mkdir(parents=True)
    metrics = pd.DataFrame({
        "round": [0, 1, 2, 3], "accuracy": [0.1, accuracy / 2, None, accuracy], "steps": [None, 4, 4, 4],
        "seconds_train": [None, 1.0, 1.0, 1.0],
    })  # fmt: skip
    metrics.to_parquet(folder / "metrics.parquet")
    pd.DataFrame({"round": [1], "client": [0], "n_real": [4], "weight": [1.0]}).to_parquet(folder / "clients.parquet")
    np.savez(folder / "partition.npz", counts=np.array([[4, 1], [0, 5]]), quota=np.array([[0, images], [0, 0]]))
    (folder / "run.json").write_text(json.dumps({
        "config_hash": "x", "name": "job", "versions": {"torch": "2.9"}, "code": {"raysim": "abc"}, "result_keys": keys,
    }))  # fmt: skip
    (folder / "config.yaml").write_text("rounds: 3\n")
    (folder / "summary.json").write_text(json.dumps({
        "status": "FINISHED", "rounds": 3, "final_accuracy": accuracy, "best_accuracy": accuracy, "best_round": 3,
        "accuracy_auc": accuracy / 2, "n_synthetic": images, "n_synthetic_made": images,
        "seconds": {"total": 9.0, "generate": 2.0, "train": 3.0}, "accuracy_by_class": [accuracy, accuracy],
        "class_names": ["cat", "dog"], "dataset": "pets", "policy": keys.get("allocation.name", "none"), **summary,
    }))  # fmt: skip
    return folder


def a_sweep(
    root: Path, name: str, methods: dict[str, tuple[dict[str, Any], list[float | None]]], target: float | None = None,
    **keys: Any,
) -> Path:
    """The folder of a sweep over the axis `allocation` and seeds, beside its runs.

    methods: by label, keys of its own and the final accuracy of each seed; None: that run has failed.
    """
    rows, cells = [], []
    for label, (own, accuracies) in methods.items():
        for seed, accuracy in enumerate(accuracies):
            known = {"group": label, "seed": seed, "axis.allocation": label, "axis.seed": f"seed {seed}"}
            cells.append(known)
            if accuracy is None:
                rows.append({**known, "status": "FAILED", "error": "no memory"})
                continue
            run = finished_run(
                root / f"{name}-{label}-{seed}", {"seed": seed, "rounds": 3, **keys, **own}, accuracy,
                0 if own.get("allocation.name") == "none" else 6,
            )
            rows.append({**known, "status": "FINISHED", "error": "", **measured(RunDirectory(run), target)})
    folder = root / f"sweep-{name}"
    folder.mkdir()
    sweep_table.write(folder, rows, target)
    content = {"runs": len(cells), "target_accuracy": target, "cells": cells}
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


NONE, OURS, FULL = ({"allocation.name": name} for name in ("none", "fedeas", "full"))


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


def test_a_sweep_is_shown_with_its_differences_and_where_runs_are_missing_there_is_no_mean(folder, capsys):
    """alpha 0.1: +0.03 and -0.01, mean 1 point, sd 4 / sqrt 2; of B at alpha 0.3 one run has failed."""
    report(folder)
    said = capsys.readouterr().out
    assert "Paired differences from A" in said and "+1.00 +- 2.83" in said
    assert re.search(r"B, alpha 0.3 .* 1/2, 1 failed .* - .* -\n", said)
    assert re.search(r"B, alpha 0.3 +final acc. +- +- +- +- +1 of 2 pairs", said)
    assert "note: only 2 pairs" in said and "no p below 0.5" in said
    assert "note: 1 of 8 runs failed: B, alpha 0.3 seed 1" in said
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
    assert "best acc.: on the test split, in the round that was chosen on the validation split" in said
    assert "the first round with that accuracy, on the validation split" in said


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
    report(tmp_path)
    said = capsys.readouterr().out
    assert "less" not in said and "2 runs are not in their folder any more" in said


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
        (unfinished, "A", "--against = A: only several runs"),
        (damaged, None, "summary.json is damaged or was changed"),
        (failed, None, r"has not finished .FAILED: diverged in round 2."),
        (folder, "C", "--against = C: no run is called so.*labels: A, B, alpha 0.1, alpha 0.3"),
    ]
    for path, against, said in refusals:
        with pytest.raises(UserError, match=said):
            report(path, against)
    runs = pd.read_csv(folder / "runs.csv")
    runs.assign(status="FAILED").to_csv(folder / "runs.csv", index=False)
    with pytest.raises(UserError, match="no run of it has finished"):
        report(folder)
    for content in ("", "group,status\na,FINISHED\n", runs.replace(0.5, "high").to_csv(index=False)):
        (folder / "runs.csv").write_text(content)
        with pytest.raises(UserError, match=r"runs\.csv is damaged or was changed"):
            report(folder)


def test_runs_that_are_still_to_come_are_counted(folder, capsys):
    (folder / "sweep.json").write_text('{"runs": 10}')
    report(folder)
    assert "2 runs of sweep-x-1 are still to come" in capsys.readouterr().out


def test_every_format_has_the_tables_and_is_alone_on_the_terminal(tmp_path, capsys):
    """0.50 and 0.60: 55.00 +- 7.07; ours 0.70 and 0.80, full 0.90 and 0.90: ours recovers 20 of 35 points, 57.1 %."""
    methods = {"none": (NONE, [0.5, 0.6]), "ours": (OURS, [0.7, 0.8]), "full": (FULL, [0.9, 0.9])}
    sweep = a_sweep(tmp_path, "x", methods, target=0.45)
    written = report(sweep)
    assert written == [sweep / "report.html"] and "55.00 +- 7.07" in capsys.readouterr().out
    report(sweep, form="latex")
    latex = capsys.readouterr().out
    assert latex.startswith("\\begin{table}") and latex.rstrip().endswith("\\end{table}") and "57.1" in latex
    assert latex.rstrip() == (sweep / "table.tex").read_text().rstrip()
    assert latex.count("toprule") == latex.count("\\caption{") == 3 and "\\textbf{90.00 $\\pm$ 0.00}" in latex
    report(sweep, form="markdown")
    assert "| none | " in (said := capsys.readouterr().out) and said.startswith("**Accuracy over seeds**")
    report(sweep, form="csv")
    table = pd.read_csv(sweep / "table.csv")
    assert capsys.readouterr().out.splitlines()[0] == ",".join(table.columns)
    assert table["share_of_gain"].tolist() == pytest.approx([float("nan"), 20 / 35, float("nan")], nan_ok=True)
    assert table["rank"].tolist() == [3, 2, 1] and table["rounds_to_target_mean"].tolist() == [3, 3, 1]


def test_a_target_that_is_never_reached_is_said_to_be_and_one_that_some_reach_has_no_mean(tmp_path, capsys):
    sweep = a_sweep(tmp_path, "x", {"none": (NONE, [0.5, 0.6]), "ours": (OURS, [0.7, 0.8])})
    report(sweep, target=0.75)
    said = capsys.readouterr().out
    assert "an accuracy of 75 %" in said
    assert re.search(r"none .*never \(0/2\) +- +- +-\n", said) and re.search(r"ours .* 1/2 +- +- +-\n", said)
    (tmp_path / "x-none-0" / "metrics.parquet").write_text("damaged")
    report(sweep, target=0.75)
    said = capsys.readouterr().out
    assert "0/2, 1 unknown" in said and "note: " in said and "metrics.parquet is damaged" in said


def test_cells_that_are_still_to_come_are_rows_without_means(tmp_path, capsys):
    sweep = a_sweep(tmp_path, "x", {"none": (NONE, [0.5, 0.6]), "ours": (OURS, [0.7, None])})
    runs = pd.read_csv(sweep / "runs.csv")
    runs[runs["axis.allocation"] == "none"].to_csv(sweep / "runs.csv", index=False)
    report(sweep)
    said = capsys.readouterr().out
    assert re.search(r"ours +0/2 +- +- +-", said) and "2 of 4 runs not finished: ours seed 0, ours seed 1" in said
    assert "rank: by" not in said  # among methods that have not all run


def test_sweeps_that_differ_in_nothing_else_are_one_table(tmp_path, capsys):
    first = a_sweep(tmp_path, "a", {"none": (NONE, [0.5, 0.6])})
    second = a_sweep(tmp_path, "b", {"ours": (OURS, [0.7, 0.8])})
    written = report([first, second])
    said = capsys.readouterr().out
    assert "Paired differences from none" in said and "+20.00 +- 0.00" in said and "configurations differ" not in said
    assert written == [tmp_path / "report-sweep-a+sweep-b" / "report.html"]
    assert sorted(pd.read_csv(written[0].parent / "table.csv")["group"]) == ["none", "ours"]


def test_sweeps_of_other_configurations_are_settings_that_are_named_and_ranked_over(tmp_path, capsys):
    """On a, ours is ahead in both seeds, on b in one of two: mean rank (1 + 1 + 1 + 2) / 4 = 1.25."""
    first = a_sweep(tmp_path, "a", {"none": (NONE, [0.5, 0.6]), "ours": (OURS, [0.7, 0.8])}, lr=0.1)
    second = a_sweep(tmp_path, "b", {"none": (NONE, [0.5, 0.6]), "ours": (OURS, [0.4, 0.8])}, lr=0.2)
    report([first, second], output=tmp_path / "both")
    said = capsys.readouterr().out
    assert "note: configurations differ: lr is 0.1 in sweep-a, 0.2 in sweep-b" in said
    assert "ours, sweep-b" in said and re.search(r"Rank over settings\n.*\n.*\nnone +1.75\nours +1.25\*", said)


def test_runs_are_compared_by_the_keys_that_differ(tmp_path, capsys):
    runs = [finished_run(tmp_path / f"r{i}", {"seed": i % 2, "lr": lr}, 0.5 + i / 10)
            for i, lr in enumerate([0.1, 0.1, 0.2, 0.2])]  # fmt: skip
    report(runs)
    said = capsys.readouterr().out
    assert "lr 0.1" in said and "55.00 +- 7.07" in said and "+20.00" in said
    assert "differ in lr, which name the rows" in said


def test_rows_that_are_not_of_the_same_seeds_are_named(tmp_path, capsys):
    one = finished_run(tmp_path / "a", {"seed": 0, "lr": 0.1}, 0.5)
    other = finished_run(tmp_path / "b", {"seed": 1, "lr": 0.2}, 0.6)
    report([one, other])
    said = capsys.readouterr().out
    assert "the rows are not of the same seeds, and so differ by these, too (lr 0.1: 0; lr 0.2: 1)" in said
    report([one, finished_run(tmp_path / "c", {"seed": 0, "lr": 0.2}, 0.6)])
    assert "same seeds" not in capsys.readouterr().out


def test_runs_whose_partitions_have_other_seeds_are_not_one_and_the_same(tmp_path, capsys):
    runs = [finished_run(tmp_path / f"r{i}", {"seed": 0, "partition.seed": i}, 0.5) for i in (3, 4)]
    report(runs)
    said = capsys.readouterr().out
    assert "partition.seed 3" in said and "partition.seed 4" in said and "repeated" not in said


def test_versions_that_differ_are_named(tmp_path, capsys):
    sweep = a_sweep(tmp_path, "x", {"none": (NONE, [0.5, 0.6])})
    path = tmp_path / "x-none-1" / "run.json"
    path.write_text(path.read_text().replace("2.9", "2.8"))
    report(sweep)
    assert "made with different versions: torch 2.9 in 1 runs, 2.8 in 1 runs" in capsys.readouterr().out


def test_runs_that_trained_their_clients_in_different_ways_are_counted(tmp_path, capsys):
    sweep = a_sweep(tmp_path, "x", {"none": (NONE, [0.5, 0.6, 0.7])})
    for seed, at_once in ((0, True), (1, True), (2, False)):
        path = tmp_path / f"x-none-{seed}" / "run.json"
        choice = {"at_once": at_once, "why": "timed", "alone_s": 1.0, "at_once_s": 1.0}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"client_batching": choice}))
    report(sweep)
    told = "2 runs have trained several clients at once and 1 one after another, which differs by rounding"
    assert told in capsys.readouterr().out


def test_of_a_folder_of_runs_the_newest_is_shown_and_the_unfinished_are_named(tmp_path, capsys):
    finished_run(tmp_path / "runs" / "a", {"seed": 0}, 0.5)
    newest = finished_run(tmp_path / "runs" / "b", {"seed": 1}, 0.6)
    for name, content in (("c", None), ("d", "[")):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text("{}")
        if content:
            (tmp_path / "runs" / name / "summary.json").write_text(content)
    (tmp_path / "runs" / "c" / "status.json").write_text('{"status": "KILLED", "message": ""}')
    written = report(tmp_path / "runs")
    said = capsys.readouterr().out
    assert f"0 sweeps and 4 runs; the newest: {newest}" in said and "raysim: pets" in said
    assert "2 of 4 runs" in said and "c (KILLED), d" in said and "summary.json is damaged" in said
    assert written == [newest / "report.html"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"target": 90.0}, "--target = 90: must be greater than 0 and at most 1"),
        ({"form": "latx"}, "--format = latx: no such format; did you mean 'latex'?"),
        ({"csv": "x.csv"}, "--csv = x.csv: the runs of one sweep"),
    ],
)
def test_what_an_option_cannot_be_is_refused_by_name(tmp_path, keys, said):
    run = finished_run(tmp_path / "a", {"seed": 0}, 0.5)
    with pytest.raises(UserError, match=re.escape(said)):
        report(run, **keys)


def test_five_pairs_are_no_reason_to_warn():
    table = pd.DataFrame({"n": [5, 4, 0], "seeds": [5, 5, 5]})
    assert few_seeds(table) == "" and "only 1 pair:" in few_seeds(pd.DataFrame({"n": [1], "seeds": [1]}))


class Links(HTMLParser):
    """Collects what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]


@pytest.mark.drawn
def test_the_figures_and_the_page_of_a_sweep(tmp_path):
    """The page loads nothing: every image is in it; a label that looks like a tag is text."""
    methods = {"none": (NONE, [0.5, 0.6]), "<b>ours": (OURS, [0.7, 0.8])}
    sweep = a_sweep(tmp_path, "x", methods, target=0.45)
    *figures, page = report(sweep)
    names = ["accuracy", "accuracy_steps", "accuracy_images", "allocation", "lorenz", "class_gains", "time"]
    assert [path.stem for path in figures] == names
    assert all(path.is_file() and path.with_suffix(".pdf").is_file() for path in figures)
    seen = Links(page.read_text())
    assert len(seen.found) == len(names) and all(link.startswith("data:image/png;base64,") for link in seen.found)
    assert "script" not in seen.tags and "&lt;b&gt;ours" in page.read_text() and "rounds: 3" in page.read_text()


@pytest.mark.drawn
def test_the_gains_of_classes_are_over_the_seeds_that_the_reference_has_too(tmp_path, unrendered, capsys):
    methods = {"none": (NONE, [0.5, None, 0.6]), "ours": (OURS, [0.7, 0.8, 0.9]), "full": (FULL, [None, 0.8, None])}
    figures = report(a_sweep(tmp_path, "x", methods))
    assert "class_gains" in [path.stem for path in figures]
    shown = capsys.readouterr().out
    assert "note: gains of classes: 2 of the 3 seeds of ours are drawn, those of none too" in shown
    assert "seeds of full" not in shown


@pytest.mark.drawn
def test_each_setting_has_its_figures_and_one_stands_for_those_that_are_alike(
    tmp_path, unrendered, monkeypatch, capsys
):
    methods = {"none": (NONE, [0.5, 0.6]), "ours": (OURS, [0.7, 0.8])}
    sweeps = [a_sweep(tmp_path, name, methods, lr=lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    *figures, _ = report(sweeps)
    named = [path.stem for path in figures][3:-1]
    assert named == ["allocation", "lorenz", "class_gains", "class_gains-2"]
    other = {"counts": np.array([[4, 1], [0, 5]]), "quota": np.array([[0, 1], [9, 0]])}
    np.savez(tmp_path / "b-ours-0" / "partition.npz", **other)
    *figures, page = report(sweeps)
    named = [path.stem for path in figures][3:-1]
    assert named == ["allocation", "allocation-2", "lorenz", "lorenz-2", "class_gains", "class_gains-2"]
    assert page.read_text().count("Where each policy puts its images.</figcaption>") == 2
    monkeypatch.setattr("raysim.commands.report.figures.MOST_FIGURES", 1)
    capsys.readouterr()
    *figures, _ = report(sweeps)
    assert [path.stem for path in figures][3:-1] == ["allocation", "lorenz", "class_gains"]
    assert "note: gains of classes are drawn for the first 1 of 2 settings" in capsys.readouterr().out


@pytest.mark.drawn
def test_the_figures_and_the_page_of_a_run(tmp_path, capsys):
    run = finished_run(tmp_path / "a", {"seed": 0, "allocation.name": "fedeas"}, 0.5, 6)
    *figures, page = report(run)
    assert [path.stem for path in figures] == ["accuracy", "accuracy_steps", "client_counts", "lorenz", "time"]
    assert "rounds: 3" in page.read_text() and "6 synthetic" in page.read_text()
    (run / "clients.parquet").unlink()
    report(run)
    assert "clients.parquet is missing" in capsys.readouterr().out


@pytest.mark.drawn
def test_a_run_is_shown_as_at_its_end_and_its_figures_are_listed(run, small, monkeypatch, capsys):
    result = run(small)
    at_the_end = capsys.readouterr().out.split("raysim: digits")[1].splitlines()
    monkeypatch.setattr(sys, "argv", ["raysim", "report", str(result.directory)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out.split("raysim: digits")[1].splitlines()
    assert ended.value.code == 0 and Path(said[-1]).name == "report.html" and Path(said[-2]).is_file()
    assert said[1].startswith("Accuracy") and said[:4] == at_the_end[:4]
    results = read_results([result.directory])
    assert len(results.finished) == 1 and results.runs["final_accuracy"][0] == result.summary["final_accuracy"]
