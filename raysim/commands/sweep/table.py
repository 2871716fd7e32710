"""The tables of a sweep while it runs: one row per run, and mean and standard deviation over seeds, as CSV and text."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.report.results import measured
from raysim.commands.report.statistics import TARGET, means
from raysim.commands.report.tables import accuracy_table, chosen_on, cost_table, metrics_of
from raysim.commands.sweep.grid import Cell
from raysim.core.files import write_file
from raysim.core.plain import PlainDict
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable
from raysim.ui.tables import Table

if TYPE_CHECKING:
    import pandas as pd


def row(cell: Cell, finished: RunDirectory | None, cause: str, target: float | None) -> PlainDict:
    """The values of one run that comparisons need; for a failed run its cause.

    finished: the folder of the run, or None if it failed.  target: the accuracy whose first round is wanted, or None.
    """
    status = "FAILED" if finished is None else "FINISHED"
    known = {**labels(cell), "status": status, "error": cause, "config_hash": cell.config_hash}
    if finished is None:
        return known
    with readable(finished.path / SUMMARY):
        return {**known, **measured(finished, target)}


def labels(cell: Cell) -> PlainDict:
    """What a cell is called: its group, its seed, and its label on each axis."""
    on_axes = {f"axis.{axis}": label for axis, label in cell.labels.items()}
    return {"group": cell.group, "seed": cell.config.seed, **on_axes}


def frames(
    rows: list[PlainDict], target: float | None, cells: Mapping[str, int] | None = None
) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Make the two tables: (one row per run, one row per group with mean and sd of each metric).

    cells: how many runs there are to be by group; by default, as many as there are rows.  A group that lacks a run, or
    in which one did not reach the target, has no mean (`statistics.means`); `reached_target` is how many reached it.
    """
    import pandas as pd

    runs = pd.DataFrame(rows)
    names = metrics_of(runs, target)
    runs = runs.reindex(columns=[*runs.columns, *(name for name in names if name not in runs.columns)])
    there = runs["group"].value_counts()
    to_come = [group for group, n in (cells or {}).items() for _ in range(n - there.get(group, 0))]
    table = means(pd.concat([runs, pd.DataFrame({"group": to_come, "status": ""})]), names)
    if target is not None:
        table["reached_target"] = [int(runs[runs["group"] == group][TARGET].notna().sum()) for group in table["group"]]
    return runs, table


def write(
    directory: Path, rows: list[PlainDict], target: float | None, cells: Mapping[str, int] | None = None
) -> None:
    """Write runs.csv, table.csv and table.txt, each complete or not at all; arguments are those of `frames`."""
    runs, table = frames(rows, target, cells)
    write_file(directory / "runs.csv", runs.to_csv(index=False).encode())
    write_file(directory / "table.csv", table.to_csv(index=False).encode())
    write_file(directory / "table.txt", text(table, target, chosen_on(runs)).encode())


def text(table: "pd.DataFrame", target: float | None, chosen_on: str = "") -> str:
    """Format the second table of `frames` for people.  chosen_on: the split that the best round was read from."""
    return "\n".join(part.text() for part in _parts(table, target, chosen_on))


def markdown(table: "pd.DataFrame", target: float | None, chosen_on: str = "") -> str:
    """As `text`, in Markdown."""
    return "\n".join(part.markdown() for part in _parts(table, target, chosen_on))


def _parts(table: "pd.DataFrame", target: float | None, chosen_on: str) -> tuple[Table, Table]:
    return accuracy_table(table, chosen_on), cost_table(table, target, chosen_on)
