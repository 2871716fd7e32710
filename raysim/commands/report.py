"""`raysim report`: the results of a run or a sweep from its files: a summary, or means, paired differences, curves."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.sweep import table as sweep_table
from raysim.core.errors import DiskError, UserError
from raysim.core.files import disk_errors, write_file
from raysim.core.plain import PlainDict
from raysim.core.validation import nearest
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable
from raysim.ui import plots
from raysim.ui.display import Display

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("final_accuracy", "best_accuracy", "accuracy_auc")
_AXIS = "axis."


def report(path: str | Path, against: str | None = None, csv: str | None = None) -> list[Path]:
    """Print the results in the folder of a run or a sweep; returns its figures.

    against: the label of a sweep that the others are compared with, seed by seed; the first one of the first axis by
    default.  A sweep's differences and curves are also written to its folder.
    csv: a file for one row per run of a sweep, without what belongs to this machine, to be kept with the project.
    Raises UserError for a folder that is neither, or has nothing finished, and for a label that no run has.
    """
    folder = Path(path).expanduser()
    with Display() as display:
        if (folder / "runs.csv").is_file():
            if csv is not None:
                write_csv(folder, Path(csv).expanduser())
            return _sweep(folder, against, display)
        if not (folder / "run.json").is_file():
            raise UserError(f"{path}: not the folder of a run or a sweep; they lie in output.dir, `runs` by default")
        if csv is not None:
            raise UserError(f"--csv = {csv}: only the runs of a sweep make a table; {path} is one run")
        if against is not None:
            raise UserError(f"--against = {against}: only the runs of a sweep can be compared; {path} is one run")
        run = RunDirectory(folder)
        summary = run.summary()
        if summary is None:
            raise UserError(f"{path}: this run has not finished{_why_not(folder)}; `--resume` goes on with it")
        with readable(folder / SUMMARY):
            display.summary(summary)
        if problem := run.model_problem(summary):
            display.line(f"warning: {problem}")
        return sorted((folder / "figures").glob("*.png"))


def write_csv(folder: Path, path: Path) -> None:
    """Write a row per run of a sweep: its results, the hash of its configuration and that of the code that made it."""
    import pandas as pd

    with readable(folder / "runs.csv"):
        runs = pd.read_csv(folder / "runs.csv", dtype={"group": str})
        names = runs["run_directory"] if "run_directory" in runs else [""] * len(runs)
        runs["code"] = [_code(folder.parent / Path(str(name)).name) for name in names]
    mine = [name for name in ("run_directory", "mlflow_run_id", "error") if name in runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, runs.drop(columns=mine).to_csv(index=False).encode())


def _code(run: Path) -> str:
    """The hash of raysim's own code that made a run; empty where its folder is gone."""
    if not (run / "run.json").is_file():
        return ""
    return str(RunDirectory(run).read_json("run.json").get("code", {}).get("raysim", ""))


def _why_not(folder: Path) -> str:
    """The text, for a message, of how a run ended; empty if that is not known."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        status = RunDirectory(folder).read_json("status.json")
        return f" ({status['status']}{': ' if status['message'] else ''}{status['message']})"
    return ""


@contextlib.contextmanager
def _warned(display: Display) -> Iterator[None]:
    """A context in which a file that cannot be written costs that file alone: the report itself is on the terminal."""
    try:
        yield
    except DiskError as error:
        display.line(f"warning: {error}")


def _sweep(folder: Path, against: str | None, display: Display) -> list[Path]:
    import pandas as pd

    with readable(folder / "runs.csv"):
        runs = pd.read_csv(folder / "runs.csv", dtype={"group": str})
        runs[list(METRICS)] = runs[list(METRICS)].astype(float)
        finished = runs[runs["status"] == "FINISHED"]
        finished[["group", "seed", "run_directory"]]
    if finished.empty:
        raise UserError(f"{folder / 'runs.csv'}: no run of this sweep has finished; `raysim sweep` goes on with it")
    axis, label = _reference(finished, against)
    with readable(folder / "table.txt"):
        display.line((folder / "table.txt").read_text(encoding="utf-8"))
    asked = folder / "sweep.json"
    with readable(asked):
        left = json.loads(asked.read_text(encoding="utf-8"))["runs"] - len(finished) if asked.is_file() else 0
    if left:
        display.line(f"note: {left} of {left + len(finished)} runs have not finished; `raysim sweep` goes on with them")
    for line in best_on_validation(finished):
        display.line(line)
    if axis is not None:
        table = paired_differences(finished, axis, label)
        display.line(_text(table, label))
        with _warned(display):
            write_file(folder / "paired.csv", table.to_csv(index=False).encode())
    curves, missing = _curves(finished, axis, folder.parent)
    if missing:
        display.line(f"note: no curves of {missing} runs, whose metrics.parquet is not in {folder.parent} any more")
    path = folder / "figures" / "accuracy.png"
    with _warned(display), disk_errors(path):
        return [plots.accuracy_curves(curves, path)] if curves else []
    return []


def _axes(runs: "pd.DataFrame") -> list[str]:
    """The columns of all axes but the seed, in the order of the sweep file."""
    return [name for name in runs.columns if name.startswith(_AXIS) and name != f"{_AXIS}seed"]


def _reference(runs: "pd.DataFrame", against: str | None) -> tuple[str | None, str]:
    """(axis, its label that the others are compared with); no axis if there is nothing to compare."""
    labels = {axis: list(runs[axis].dropna().astype(str).unique()) for axis in _axes(runs)}
    if against is None:
        first = next(iter(labels), None)
        return (None, "") if first is None else (first, labels[first][0])
    for axis, values in labels.items():
        if against in values:
            return axis, against
    known = [value for values in labels.values() for value in values]
    raise UserError(
        f"--against = {against}: no finished run is called so{nearest(against, known)} (labels: {', '.join(known)})"
    )


def best_on_validation(runs: "pd.DataFrame") -> list[str]:
    """For each value of the first axis, those of the others with the highest validation accuracy (mean over seeds).

    One line for each, such as `none: lr 0.05 has the highest validation accuracy`; none for a single axis, or where
    there is no validation split.
    """
    axes = _axes(runs)
    column = sweep_table.VALIDATION[1]
    if len(axes) < 2 or column not in runs:
        return []
    means = runs.groupby(axes, sort=False)[column].agg(["mean", "count"]).dropna()
    lines = []
    for label, tried in means.groupby(level=0, sort=False):
        best = tried["mean"].idxmax()
        values = ", ".join(map(str, best[1:]))
        count = int(tried["count"][best])
        lines.append(
            f"{label}: {values} has the highest validation accuracy, {tried['mean'][best]:.4f} of {len(tried)} tried "
            f"({count} run{'s' if count > 1 else ''} each)"
        )
    return lines


def paired_differences(runs: "pd.DataFrame", axis: str, label: str) -> "pd.DataFrame":
    """Differences of each group from the runs of `label` on `axis` with the same seed and values of the other axes.

    runs: finished ones, as in runs.csv.  Returns one row per group: n pairs, and for each metric the mean difference,
    its standard deviation over pairs (n - 1 in the denominator) and in how many pairs it is above 0.
    """
    import pandas as pd

    keys = [other for other in _axes(runs) if other != axis] + ["seed"]
    reference = runs[runs[axis].astype(str) == label].set_index(keys)[list(METRICS)]
    lines = []
    for group, members in runs[runs[axis].astype(str) != label].groupby("group", sort=False):
        differences = (members.set_index(keys)[list(METRICS)] - reference).dropna()
        line: PlainDict = {"group": group, "n": len(differences)}
        for name, values in differences.items():
            line[f"{name}_mean"] = values.mean()
            line[f"{name}_sd"] = values.std(ddof=1)
            line[f"{name}_better"] = int((values > 0).sum())
        lines.append(line)
    return pd.DataFrame(lines)


def _text(table: "pd.DataFrame", label: str) -> str:
    lines = [[f"less {label}", "pairs", *(sweep_table.HEADINGS[name] for name in METRICS)]]
    for entry in table.to_dict("records"):
        cells = [
            f"{entry[f'{name}_mean']:+.4f} +- {entry[f'{name}_sd']:.4f} ({entry[f'{name}_better']}/{entry['n']})"
            for name in METRICS
        ]
        lines.append([str(entry["group"]), str(entry["n"]), *(cells if entry["n"] else ["-"] * len(cells))])
    note = "paired differences, seed by seed: mean +- standard deviation (pairs in which it is above 0 / all pairs)"
    return "\n".join([*sweep_table.aligned(lines), "", note]).replace("+- nan", "+- ?") + "\n"


def _curves(
    runs: "pd.DataFrame", axis: str | None, root: Path
) -> tuple[dict[str, dict[str, "list[pd.DataFrame]"]], int]:
    """(accuracy by round of every run, by panel and label, runs whose metrics are not in `root` any more).

    The labels are those of `axis`; every combination of the others has a panel.
    """
    import pandas as pd

    others = [other for other in _axes(runs) if other != axis]
    curves: dict[str, dict[str, list[pd.DataFrame]]] = {}
    missing = 0
    for entry in runs.to_dict("records"):
        path = root / Path(str(entry["run_directory"])).name / "metrics.parquet"
        if not path.is_file():
            missing += 1
            continue
        panel = ", ".join(str(entry[other]) for other in others)
        label = str(entry[axis]) if axis is not None else "all runs"
        metrics = RunDirectory(path.parent).metrics()[["round", "accuracy"]].dropna()
        curves.setdefault(panel, {}).setdefault(label, []).append(metrics)
    return curves, missing
