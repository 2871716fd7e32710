"""Turns the CSV files that run.py leaves into the tables of README.md: means, spreads, paired differences and tests.

    python experiments/papers/tables.py     # writes digits/results/TABLES.md and so on, from the files beside them

A group of which a seed is missing is shown as missing, never as a mean of fewer. Differences are taken seed by seed;
intervals are those of Student's t at 95 %, p that of the paired t test, two-sided.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from raysim.commands.sweep.grid import read_sweep

HERE = Path(__file__).resolve().parent
METRICS = {"final_accuracy": "final", "best_accuracy": "best, chosen on validation", "accuracy_auc": "AUC"}


@dataclass(frozen=True)
class Table:
    """One table.  sweeps: whose CSV files it takes; of one that is written as `sweep:group`, that group alone.

    against: the groups that the others are compared with.  ending: takes only groups whose names end so.
    """

    title: str
    sweeps: tuple[str, ...]
    against: tuple[str, ...] = ("none", "fedeas")
    ending: str = ""


TABLES = {
    "digits": [
        Table("Equal epochs (2), images of FedEAS but for none and full", ("epochs", "full_epochs")),
        Table("Equal local steps (20), images of FedEAS but for none and full", ("steps", "full_steps")),
    ],
    "small": [
        Table("Equal epochs (1), generated images", ("epochs",)),
        Table("Equal local steps (25), generated images", ("steps",)),
        Table("Equal epochs (1), real images in place of generated ones", ("oracle_epochs", "epochs:none")),
        Table("Equal local steps (25), real images in place of generated ones", ("oracle_steps", "steps:none")),
        Table("Budgets at equal local steps (25)", ("beta", "steps:none"), ("none",)),
        Table("Algorithms at equal local steps (25)", ("algorithms",), ("FedAvg", "FedAvg with fedeas")),
        Table("SCAFFOLD at equal local steps (25)", ("plain",), ("FedAvg, uniform weights",)),
        Table("Alpha 0.3, equal epochs (1)", ("alpha03_epochs",)),
        Table("Alpha 0.3, equal local steps (25)", ("alpha03_steps",)),
        Table("100 clients, 20 a round, equal local steps (25)", ("k100",)),
        Table("Full balance with generated images, equal epochs (1)", ("full_epochs", "epochs:none")),
        Table("Full balance with generated images, equal local steps (25)", ("full_steps", "steps:none")),
    ],
    "fedoui": [
        Table("With rare and noisy clients, alpha 0.1", ("faithful",), ("FedAvg, alpha 0.1",), ", alpha 0.1"),
        Table("With rare and noisy clients, alpha 0.3", ("faithful",), ("FedAvg, alpha 0.3",), ", alpha 0.3"),
        Table("Label skew alone, alpha 0.1", ("clean",), ("FedAvg, alpha 0.1",), ", alpha 0.1"),
        Table("Label skew alone, alpha 0.3", ("clean",), ("FedAvg, alpha 0.3",), ", alpha 0.3"),
    ],
}


def main() -> None:
    """Write the tables of each folder that has results."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for folder, tables in TABLES.items():
        results = root / folder / "results"
        if results.is_dir():
            texts = [f"## {table.title}\n\n{text(folder, table, results)}" for table in tables]
            content = "\n".join(["# Tables, written by ../../tables.py\n", *texts])
            (results / "TABLES.md").write_text(content, encoding="utf-8")
            print(results / "TABLES.md")


def text(folder: str, table: Table, results: Path) -> str:
    """The table in Markdown."""
    runs, seeds = gather(folder, table, results)
    if runs.empty:
        return f"Missing: no run of {' and '.join(table.sweeps)} yet.\n"
    against = [label for label in table.against if label in set(runs["group"])]
    heads = ["", "seeds", "images", *METRICS.values(), *(f"final less {label}" for label in against), "minutes"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for group, expected in seeds.items():
        members = runs[runs["group"] == group]
        if len(members) < expected:
            gone = f"missing: {len(members)} of {expected} seeds"
            lines.append(f"| {group} | {gone} |{' |' * (len(heads) - 2)}")
            continue
        cells = [spread(members[name].to_numpy()) for name in METRICS]
        cells += [difference(members, runs, label, seeds) if label != group else "" for label in against]
        minutes = members["seconds_train"].mean() / 60
        images = f"{members['images'].mean():,.0f}"
        lines.append(f"| {group} | {len(members)} | {images} | {' | '.join(cells)} | {minutes:.1f} |")
    return "\n".join([*lines, "", *recovered(runs, seeds)]) + "\n"


def gather(folder: str, table: Table, results: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """(the finished runs, how many seeds each group should have: those that all of the table's sweeps have)."""
    found = [pd.DataFrame({"group": [], "seed": []})]
    seeds: dict[str, set[int]] = {}
    for sweep in table.sweeps:
        name, _, label = sweep.partition(":")
        cells = read_sweep(HERE / folder / f"{name}.yaml").cells
        wanted = [c for c in cells if c.group.endswith(table.ending) and label in ("", c.group)]
        for cell in wanted:
            seeds.setdefault(cell.group, set()).add(cell.config.seed)
        if (results / f"{name}.csv").is_file():
            runs = pd.read_csv(results / f"{name}.csv", dtype={"group": str})
            is_wanted = runs["group"].isin([cell.group for cell in wanted])
            found.append(runs[is_wanted & (runs["status"] == "FINISHED")])
    shared = set.intersection(*seeds.values())
    runs = pd.concat([part for part in found if len(part)] or found).drop_duplicates(["group", "seed"])
    return runs[runs["seed"].isin(shared)], dict.fromkeys(seeds, len(shared))


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation, n - 1 in its denominator."""
    sd = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{sd}"


def difference(members: pd.DataFrame, runs: pd.DataFrame, label: str, seeds: dict[str, int]) -> str:
    """Mean paired difference of the final accuracy with its 95 % interval, p, and in how many seeds it is above 0."""
    reference = runs[runs["group"] == label].set_index("seed")["final_accuracy"]
    if len(reference) < seeds[label]:
        return "missing"
    values = (members.set_index("seed")["final_accuracy"] - reference).dropna().to_numpy()
    above = f"{int((values > 0).sum())}/{len(values)}"
    if len(values) < 2 or values.std() == 0:
        return f"{values.mean():+.3f} ({above})"
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval()
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}], p {test.pvalue:.3f} ({above})"


def recovered(runs: pd.DataFrame, seeds: dict[str, int]) -> list[str]:
    """How much of full balance's gain over no image each policy has, with which part of its images."""
    by_group = {str(group): members.set_index("seed") for group, members in runs.groupby("group", sort=False)}
    whole = {group for group, members in by_group.items() if len(members) == seeds[group]}
    if not {"none", "full"} <= whole:
        return []
    none, full = by_group["none"], by_group["full"]
    gain = (full["final_accuracy"] - none["final_accuracy"]).mean()
    lines = ["Of the gain of full balance, on average over seeds:"]
    for group in by_group:
        if group in whole - {"none", "full"}:
            part = (by_group[group]["final_accuracy"] - none["final_accuracy"]).mean() / gain
            share = by_group[group]["images"].sum() / full["images"].sum()
            lines.append(f"{group} has {part:.0%} with {share:.1%} of its images;")
    return [*lines, ""]


if __name__ == "__main__":
    main()
