"""The tables of a sweep: one row per run, and mean and standard deviation over seeds, as CSV and text."""

from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.sweep.grid import Cell
from raysim.core.files import write_file
from raysim.core.plain import PlainDict
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("final_accuracy", "best_accuracy", "accuracy_auc", "images", "seconds")
TARGET = "rounds_to_target"
VALIDATION = ("final_validation_accuracy", "best_validation_accuracy")
HEADINGS = {
    "best_validation_accuracy": "validation acc.",
    "final_accuracy": "final acc.", "best_accuracy": "best acc.", "accuracy_auc": "AUC acc.", "images": "images",
    "seconds": "seconds",
}
_DECIMALS = {"images": 0, "seconds": 1, TARGET: 1}


def row(cell: Cell, finished: RunDirectory | None, cause: str, target: float | None) -> PlainDict:
    """The values of one run that comparisons need; for a failed run its cause.

    finished: the folder of the run, or None if it failed.  target: the accuracy whose first round is wanted, or None.
    """
    known = {
        "group": cell.group, "seed": cell.config.seed, **{f"axis.{axis}": label for axis, label in cell.labels.items()},
        "status": "FAILED" if finished is None else "FINISHED", "error": cause,
    }
    if finished is None:
        return known
    with readable(finished.path / SUMMARY):
        return {**known, **_measured(finished, target)}


def _measured(finished: RunDirectory, target: float | None) -> PlainDict:
    """The values of a finished run, by its summary.json."""
    summary = finished.read_json(SUMMARY)
    values = {
        "best_chosen_on": summary.get("best_chosen_on", "test"),
        **{key: summary[key] for key in VALIDATION if key in summary},
        **{key: summary[key] for key in ("final_accuracy", "best_accuracy", "best_round", "accuracy_auc", "rounds")},
        "images": summary["n_synthetic"],
        "images_made": summary["n_synthetic_made"],
        "seconds": summary["seconds"]["total"],
        "seconds_generate": summary["seconds"].get("generate"),
        "seconds_train": summary["seconds"].get("train"),
    }
    if target is not None:
        values[TARGET] = rounds_to(finished, target)
    keys = ("config_hash", "partition_sha256", "model_sha256", "mlflow_run_id")
    return {**values, **{key: summary[key] for key in keys}, "run_directory": str(finished.path)}


def rounds_to(finished: RunDirectory, target: float) -> int | None:
    """The first evaluated round whose accuracy is at least `target`; None if there is none.

    The accuracy is that on the validation split, or where there is none, on the test split.
    """
    metrics = finished.metrics()
    accuracy = metrics["validation_accuracy" if "validation_accuracy" in metrics else "accuracy"]
    reached = metrics[(metrics["round"] > 0) & (accuracy >= target)]
    return int(reached["round"].iloc[0]) if len(reached) else None


def frames(rows: list[PlainDict], target: float | None) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Make the two tables: (one row per run, one row per group with n, and mean and sd of each metric).

    sd has n - 1 in its denominator (ddof 1), so it is NaN for one run.  Rounds to the target are averaged over the runs
    that reached it; the column `reached_target` has their number.
    """
    import pandas as pd

    runs = pd.DataFrame(rows)
    names = [*METRICS, *(name for name in VALIDATION[1:] if name in runs), *([TARGET] if target is not None else [])]
    runs = runs.reindex(columns=[*runs.columns, *(name for name in names if name not in runs.columns)])
    lines = []
    for group, members in runs.groupby("group", sort=False):
        line: PlainDict = {"group": group, "n": int((members["status"] == "FINISHED").sum())}
        line["failed"] = len(members) - line["n"]
        for name in names:
            values = pd.to_numeric(members[name])
            line[f"{name}_mean"] = values.mean()
            line[f"{name}_sd"] = values.std(ddof=1)
        if target is not None:
            line["reached_target"] = int(members[TARGET].notna().sum())
        lines.append(line)
    return runs, pd.DataFrame(lines)


def write(directory: Path, rows: list[PlainDict], target: float | None) -> None:
    """Write runs.csv, table.csv and table.txt, each complete or not at all."""
    runs, table = frames(rows, target)
    write_file(directory / "runs.csv", runs.to_csv(index=False).encode())
    write_file(directory / "table.csv", table.to_csv(index=False).encode())
    write_file(directory / "table.txt", text(table, target, chosen_on(runs)).encode())


def chosen_on(runs: "pd.DataFrame") -> str:
    """On which splits the best round of these runs was chosen: `validation`, `test` or both names."""
    return " or ".join(runs["best_chosen_on"].dropna().unique()) if "best_chosen_on" in runs else ""


def text(table: "pd.DataFrame", target: float | None, chosen_on: str = "") -> str:
    """Format the table for people: one line per group, columns aligned.

    chosen_on: the split that the best round, and the rounds to the target, were read from.
    """
    shown = [name for name in (*METRICS, *VALIDATION) if f"{name}_mean" in table]
    headings = ["", "runs", *(HEADINGS[name] for name in shown)]
    headings += [f"rounds to {target:g}"] if target is not None else []
    lines = [headings]
    for _, entry in table.iterrows():
        runs = f"{entry['n']}" + (f", {entry['failed']} failed" if entry["failed"] else "")
        cells = [str(entry["group"]), runs, *(_cell(entry, name) for name in shown)]
        if target is not None:
            cells.append(f"{_cell(entry, TARGET)} ({entry['reached_target']}/{entry['n']})")
        lines.append(cells)
    notes = ["mean +- standard deviation over seeds (n - 1 in the denominator)"]
    if chosen_on:
        where = "the best round" + (f" and the rounds to {target:g}" if target is not None else "")
        notes.append(f"best acc.: on the test split; {where} were chosen on the {chosen_on} split")
    notes.append("seconds: of each run, if it was resumed since then; images from the cache of earlier runs cost none")
    if target is not None:
        notes.append(f"rounds to {target:g}: over the runs that reached it (how many of all)")
    return "\n".join([*aligned(lines), "", *notes]) + "\n"


def aligned(lines: list[list[str]]) -> list[str]:
    """Format lines of cells as text: all cells of a column have one width, and a rule is below the first line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return [drawn[0], "-" * max(map(len, drawn)), *drawn[1:]]


def _cell(entry: "pd.Series", name: str) -> str:
    """`0.9123 +- 0.0045`; the mean alone where there is one run, a dash where there is none."""
    mean = entry[f"{name}_mean"]
    sd = entry[f"{name}_sd"]
    digits = _DECIMALS.get(name, 4)
    if mean != mean:
        return "-"
    return f"{mean:,.{digits}f}" + ("" if sd != sd else f" +- {sd:,.{digits}f}")
