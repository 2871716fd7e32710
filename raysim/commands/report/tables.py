"""The tables of a report, laid out for people: accuracy, cost of a target, paired differences, ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from raysim.commands.report import statistics
from raysim.commands.report.results import VALIDATION, Results, axes_of, result_keys
from raysim.commands.report.statistics import CONFIDENCE, ENOUGH_PAIRS, TARGET, TARGET_COSTS
from raysim.core.plain import PlainDict
from raysim.ui.tables import MISSING, Table, mean_sd

if TYPE_CHECKING:
    import pandas as pd

ACCURACIES = ("final_accuracy", "best_accuracy", "accuracy_auc")
METRICS = (*ACCURACIES, "images", "seconds")
HEADINGS = {
    "final_accuracy": "final acc.", "best_accuracy": "best acc.", "accuracy_auc": "AUC acc.", "images": "images",
    "best_validation_accuracy": "validation acc.", "seconds": "seconds", "seconds_generate": "to make images",
    TARGET: "rounds to it", "images_to_target": "images to it", "seconds_to_target": "seconds to it",
}
MAIN = ACCURACIES[0]
_DIGITS = {"images": 0, "images_to_target": 0, "seconds": 1, "seconds_generate": 1, "seconds_to_target": 1, TARGET: 1}
_Best = Callable[[Iterable[float]], float]
_PERCENT = (*ACCURACIES, *VALIDATION)
_SD = "mean ± standard deviation over seeds (n - 1 in the denominator)"
_INTERVAL = f"{100 * CONFIDENCE:g} % interval"
_HOLE = f"{MISSING}: a run is missing, so there is no mean"


def accuracy_table(table: "pd.DataFrame", chosen_on: str = "") -> Table:
    """Accuracies and images, one row per group.

    table: from `statistics.means`, perhaps with `rank` and `share_of_gain`.  chosen_on: the split that the best round
    was read from.
    """
    names = [name for name in ("images", *ACCURACIES, VALIDATION[1]) if f"{name}_mean" in table]
    lines, headings, notes = _counted(table)
    columns = {HEADINGS[name]: [_cell(row, name) for row in _rows(table)] for name in names}
    notes.insert(0, f"accuracies in percent; {_SD}")
    if chosen_on:
        notes.append(f"best acc.: on the test split, in the round that was chosen on the {chosen_on} split")
    if "share_of_gain" in table and table["share_of_gain"].notna().any():
        columns["gain"] = [_number(row["share_of_gain"], 1, 100) for row in _rows(table)]
        notes.append(
            "gain: how much of what full balance gains on no images, (a - none) / (full - none), of mean final "
            "accuracies, in percent"
        )
    if "rank" in table and table["rank"].notna().any():
        columns["rank"] = [_number(row["rank"], 2) for row in _rows(table)]
        notes.append("rank: by final accuracy among the methods of a setting and seed, mean over seeds; 1 is best")
    best: dict[str, _Best] = dict.fromkeys((HEADINGS[name] for name in (*ACCURACIES, VALIDATION[1])), max)
    best["rank"] = min
    return _table("accuracy", "Accuracy over seeds", lines, headings, columns, notes, best)


def cost_table(table: "pd.DataFrame", target: float | None = None, chosen_on: str = "") -> Table:
    """Seconds, and rounds, images and seconds to a target accuracy, one row per group.

    table: from `statistics.means`; with `reached_target` and the means of `TARGET_COSTS` where there is a target, and
    with `target_unknown`, of how many runs it is not known, where there are such.  chosen_on: as in `accuracy_table`.
    """
    lines, headings, notes = _counted(table)
    columns = {HEADINGS[name]: [_cell(row, name) for row in _rows(table)] for name in ("seconds", "seconds_generate")
               if f"{name}_mean" in table}  # fmt: skip
    notes.insert(0, _SD)
    notes.append("seconds: of each run, if it was resumed since then; images from the cache cost none")
    title = "Cost"
    if target is not None:
        title = f"Cost, and what it took to reach an accuracy of {100 * target:g} %"
        columns["reached"] = [_reached(row) for row in _rows(table)]
        columns |= {HEADINGS[name]: [_cell(row, name) for row in _rows(table)] for name in TARGET_COSTS}
        on = f", on the {chosen_on} split" if chosen_on else ""
        notes.append(f"to it: until the first round with that accuracy{on}; images are made before the first round")
        if (table["reached_target"] < table["runs"]).any():
            notes.append(f"{MISSING} to it: not every run reached it, so there is no mean")
    return _table("cost", title, lines, headings, columns, notes, {HEADINGS[TARGET]: min})


def paired_table(table: "pd.DataFrame", label: str) -> Table:
    """Differences from the method `label`, seed by seed: a row for each group and accuracy.

    table: from `statistics.paired_differences`.
    """
    lines: list[list[str]] = []
    columns: dict[str, list[str]] = {
        name: [] for name in ("difference", _INTERVAL, "p (t)", "p (Wilcoxon)", "better")
    }
    for name in ACCURACIES:
        for row in _rows(table):
            lines.append([str(row["group"]), HEADINGS[name]])
            columns["difference"].append(_signed(row[f"{name}_mean"], row[f"{name}_sd"]))
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            columns[_INTERVAL].append(f"[{100 * low:+.2f}, {100 * high:+.2f}]" if low == low else MISSING)
            columns["p (t)"].append(_p(row[f"{name}_p_t"]))
            columns["p (Wilcoxon)"].append(_p(row[f"{name}_p_wilcoxon"]))
            is_whole = row["n"] == row["seeds"]
            better = f"{row[f'{name}_better']}/{row['n']}"
            columns["better"].append(better if is_whole else f"{row['n']} of {row['seeds']} pairs")
    notes = [
        "in percentage points, on the same setting and seed; mean ± standard deviation over the pairs (n - 1)",
        f"p (t): two-sided paired t-test, with its {_INTERVAL}",
        "p (Wilcoxon): two-sided signed-rank test; no p is corrected for the number of comparisons",
        "better: in how many pairs the difference is above 0",
    ]
    title = f"Paired differences from {label}"
    return _table("paired", title, lines, [f"less {label}", "metric"], columns, notes, {})


def rank_table(ranked: "pd.DataFrame") -> Table:
    """The mean rank of each method over all settings and seeds.  ranked: from `statistics.ranks`."""
    table = statistics.mean_ranks(ranked)
    settings, seeds = ranked["setting"].nunique(), ranked["seed"].nunique()
    lines = [[str(row["method"])] for row in _rows(table)]
    columns = {"mean rank": [_number(row["rank"], 2) for row in _rows(table)]}
    notes = [f"by final accuracy, 1 is best, ties share their rank; over {settings} settings and {seeds} seeds"]
    if table["rank"].isna().any():
        notes.append(f"{MISSING}: a run of some setting and seed is missing, so there is no mean")
    return _table("rank", "Rank over settings", lines, [""], columns, notes, {"mean rank": min})


def means_table(results: Results) -> "pd.DataFrame":
    """The means over seeds, with rank, share of the gain and, where there is a target, what it took to reach it."""
    target = results.target
    table = statistics.means(results.runs, metrics_of(results.runs, target))
    if results.runs["method"].nunique() > 1:
        ranked = statistics.ranks(results.runs, MAIN).assign(group=results.runs["group"])
        by_group = ranked.groupby("group", sort=False)["rank"].agg(lambda ranks: ranks.mean(skipna=False))
        table["rank"] = by_group.reindex(table["group"]).to_numpy()
    shares = statistics.share_of_gain(table, MAIN, _kinds(results.runs))
    table["share_of_gain"] = shares.reindex(table["group"]).to_numpy()
    if target is not None:
        reached = results.runs[TARGET].notna().groupby(results.runs["group"], sort=False).sum()
        table["reached_target"] = reached.reindex(table["group"]).to_numpy()
        unknown = (results.finished["target_known"] == False).groupby(results.finished["group"]).sum()  # noqa: E712
        table["target_unknown"] = unknown.reindex(table["group"]).fillna(0).astype(int).to_numpy()
    return table


def metrics_of(runs: "pd.DataFrame", target: float | None) -> list[str]:
    """The metrics that are averaged: those that runs always have, and others where they have them."""
    optional = [name for name in (*VALIDATION, "seconds_generate", "seconds_train") if name in runs]
    return [*METRICS, *optional, *(TARGET_COSTS if target is not None else [])]


def chosen_on(runs: "pd.DataFrame") -> str:
    """On which splits the best round of these runs was chosen: `validation`, `test` or both names."""
    return " or ".join(runs["best_chosen_on"].dropna().unique()) if "best_chosen_on" in runs else ""


def best_on_validation(runs: "pd.DataFrame") -> list[str]:
    """For each value of the first axis, those of the others with the highest validation accuracy (mean over seeds).

    One line for each, such as `none: lr 0.05 has the highest validation accuracy`; none for a single axis, or where
    there is no validation split.
    """
    axes = axes_of(runs)
    if len(axes) < 2 or VALIDATION[1] not in runs:
        return []
    means = runs.groupby(axes, sort=False)[VALIDATION[1]].agg(["mean", "count"]).dropna()
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


def few_seeds(table: "pd.DataFrame") -> str:
    """A warning where p-values and intervals are those of few pairs; else empty.  table: of paired differences."""
    whole = table[(table["n"] == table["seeds"]) & (table["n"] > 0)]
    fewest = int(whole["n"].min()) if len(whole) else ENOUGH_PAIRS
    if fewest >= ENOUGH_PAIRS:
        return ""
    pairs = f"{fewest} {'pair' if fewest == 1 else 'pairs'}"
    least = statistics.smallest_p_wilcoxon(fewest)
    return (
        f"only {pairs}: with fewer than {ENOUGH_PAIRS}, intervals and p-values say little (the signed-rank test can "
        f"give no p below {least:g}); add seeds to the sweep"
    )


def _kinds(runs: "pd.DataFrame") -> "pd.DataFrame":
    """By group: its allocation policy, and all its other keys but seeds, by the run.json of its first run."""
    import pandas as pd

    found = {}
    for group, members in runs.groupby("group", sort=False):
        keys = next((keys for keys in map(result_keys, members["folder"]) if keys), {})
        rest = {key: value for key, value in keys.items() if not key.startswith("allocation.") and "seed" not in key}
        found[group] = {"policy": keys.get("allocation.name"), "rest": repr(sorted(rest.items()))}
    return pd.DataFrame.from_dict(found, orient="index", columns=["policy", "rest"])


def _rows(table: "pd.DataFrame") -> list[PlainDict]:
    return list(table.to_dict("records"))


def _cell(row: PlainDict, name: str) -> str:
    factor = 100.0 if name in _PERCENT else 1.0
    return mean_sd(row[f"{name}_mean"], row[f"{name}_sd"], _DIGITS.get(name, 2), factor)


def _number(value: float, digits: int, factor: float = 1.0) -> str:
    return f"{factor * value:.{digits}f}" if value == value else MISSING


def _signed(mean: float, sd: float) -> str:
    cell = mean_sd(mean, sd, 2, 100.0)
    return cell if cell.startswith("-") or cell == MISSING else f"+{cell}"


def _p(value: float) -> str:
    return MISSING if value != value else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _count(row: PlainDict) -> str:
    """How many runs are finished: 5, or 3/5, or 3/5, 1 failed."""
    if row["n"] == row["runs"]:
        return str(row["n"])
    return f"{row['n']}/{row['runs']}" + (f", {row['failed']} failed" if row["failed"] else "")


def _reached(row: PlainDict) -> str:
    """How many runs reached the target; `never` where all have ended and none did."""
    done, unknown = row["reached_target"], row.get("target_unknown", 0)
    if unknown:
        return f"{done}/{row['runs']}, {unknown} unknown"
    return f"never (0/{row['runs']})" if not done and row["n"] == row["runs"] else f"{done}/{row['runs']}"


def _counted(table: "pd.DataFrame") -> tuple[list[list[str]], list[str], list[str]]:
    """(the first cells of each row, their headings, a note): the runs of each group, where they are not alike."""
    names = [str(row["group"]) for row in _rows(table)]
    if (table["n"] == table["runs"]).all() and table["runs"].nunique() == 1:
        runs = int(table["runs"].iloc[0])
        return [[name] for name in names], [""], [f"{runs} {'run' if runs == 1 else 'runs'} each"]
    notes = [_HOLE] if (table["n"] < table["runs"]).any() else []
    return [[name, _count(row)] for name, row in zip(names, _rows(table), strict=True)], ["", "runs"], notes


def _table(
    name: str,
    title: str,
    lines: list[list[str]],
    headings: list[str],
    columns: Mapping[str, list[str]],
    notes: Iterable[str],
    best: Mapping[str, _Best],
) -> Table:
    """Lay out a table; `best`: for some columns max or min, whose cells are marked, all those that read alike."""
    rows = [[*line, *(cells[i] for cells in columns.values())] for i, line in enumerate(lines)]
    marked: set[tuple[int, int]] = set()
    all_headings = [*headings, *columns]
    for heading, of in best.items():
        numbers = {i: _leading(cell) for i, cell in enumerate(columns.get(heading, [])) if cell != MISSING}
        if len(numbers) > 1:
            wanted = of(numbers.values())
            marked |= {(i, all_headings.index(heading)) for i, number in numbers.items() if number == wanted}
    return Table(name, title, [*headings, *columns], rows, list(notes), frozenset(marked))


def _leading(cell: str) -> float:
    """The mean that a cell begins with."""
    return float(cell.split(" ")[0].replace(",", ""))
