"""What a generator is worth by who trained it: its quality, and the accuracy of FedEAS with its images.

    python experiments/generators/table.py --seeds 0 1 2     # writes results/digits.csv and results/digits.md beside it

Each row is a training by a file of this folder with the seed, and a run of ../quickstart.yaml with its weights and the
same seed, evaluated on its last round. What is there already is not done again.
"""

import argparse
import json
from pathlib import Path

import pandas as pd

import raysim
from raysim.commands.pretrain import pretrain

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / "quickstart.yaml"
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "central": ("digits_small.yaml", ()),
    "federated, alpha 1.0": ("digits_federated.yaml", ()),
    "federated, alpha 0.1": ("digits_federated.yaml", ("federation.partition.alpha=0.1",)),
    "federated, private": ("digits_federated_private.yaml", ()),
}
NONE = "no images"
SHOWN = {
    "accuracy": "FedEAS accuracy", "from_synthetic": "classifier on its images alone", "recognised": "recognised",
    "denoising_error": "denoising error", "epsilon": "epsilon", "minutes": "minutes of training",
}


def measured(row: str, seed: int, work: Path) -> dict[str, object]:
    """Train the generator of a row with a seed, and run FedEAS with it."""
    accuracy = {"row": row, "seed": seed}
    keys = {"tracking": {"uri": "none"}, "output": {"dir": str(work / "runs")}, "seed": seed}
    if row == NONE:
        found = raysim.run(RUN, ["allocation=none"], **keys)
        return {**accuracy, "accuracy": found.summary["final_accuracy"], "images": 0}
    file, overrides = ROWS[row]
    folder = work / f"{Path(file).stem}-{'-'.join(overrides)}-{seed}"
    options = [f"seed={seed}", f"output={folder}", "tracking.uri=none", "sampling.every_minutes=0"]
    pretrain(HERE / file, [*overrides, *options])
    card = json.loads((folder / "card.json").read_text())
    quality = json.loads((folder / "quality.json").read_text())
    privacy = (card.get("trained_by") or {}).get("privacy") or {}
    found = raysim.run(RUN, [f"generator.weights={folder}"], **keys)
    return {
        **accuracy,
        "accuracy": found.summary["final_accuracy"],
        "images": found.summary["n_synthetic"],
        "from_synthetic": quality["accuracy"]["from_synthetic"],
        "recognised": quality["recognised"],
        "denoising_error": card["loss"]["test"],
        "epsilon": privacy.get("epsilon"),
        "minutes": round(card["seconds"] / 60, 1),
    }


def as_markdown(table: pd.DataFrame) -> str:
    """Mean and standard deviation (n - 1) over the seeds of each row; a row that lacks a seed says so."""
    seeds = sorted(table["seed"].unique())
    lines = [f"Seeds {', '.join(map(str, seeds))}.", "", "| generator | " + " | ".join(SHOWN.values()) + " |"]
    lines.append("|---" * (len(SHOWN) + 1) + "|")
    for row in (NONE, *ROWS):
        group = table[table["row"] == row]
        missing = "" if len(group) == len(seeds) else f" ({len(group)} of {len(seeds)} seeds)"
        cells = [_cell(group[name].dropna()) for name in SHOWN]
        lines.append(f"| {row}{missing} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: "pd.Series[float]") -> str:
    if not len(values):
        return "-"
    spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
    return f"{values.mean():.3f}{spread}"


def main() -> None:
    """Measure what is missing of the table, and write it after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, default=Path("weights/table"), help="folder for weights and runs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    path = options.results / "digits.csv"
    rows = pd.read_csv(path).to_dict("records") if path.is_file() else []
    options.results.mkdir(exist_ok=True)
    with raysim.session():
        for seed in options.seeds:
            for row in (NONE, *ROWS):
                if not any(r["row"] == row and r["seed"] == seed for r in rows):
                    rows.append(measured(row, seed, options.work.absolute()))
                table = pd.DataFrame(rows, columns=["row", "seed", "images", *SHOWN])
                table.to_csv(path, index=False)
                (options.results / "digits.md").write_text(as_markdown(table), encoding="utf-8")


if __name__ == "__main__":
    main()
