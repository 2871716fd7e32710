"""Runs the sweeps of this folder, most important first, each method with the learning rate that its tuning chose.

    python experiments/papers/run.py digits small --data FOLDER --out FOLDER

FOLDER of --data: CIFAR-10 as parquet files.  Runs go to --out, a CSV for each sweep to the folder `results` beside its
file, with the hash of the code that made each run; `results/code.csv` says which commit that is.  Stopped at any time,
the same command goes on: sweeps skip what is finished.  It runs at the lowest priority.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from raysim.config.plugin_source import own_digest

HERE = Path(__file__).resolve().parent
TABLES = ("small/steps", "small/epochs")
STAGES: list[tuple[str, str | None, int | None]] = [
    # sweep, the tuning whose learning rates it takes, how many of its seeds (None: all)
    ("digits/tune_epochs", None, None),
    ("digits/tune_steps", None, None),
    ("digits/epochs", "digits/tune_epochs", None),
    ("digits/steps", "digits/tune_steps", None),
    ("digits/full_epochs", "digits/tune_epochs", None),
    ("digits/full_steps", "digits/tune_steps", None),
    ("small/tune_steps", None, None),
    ("small/tune_epochs", None, None),
    *((table, table.replace("/", "/tune_"), seeds) for seeds in (1, 2, 3, 4, 5) for table in TABLES),
    ("small/oracle_steps", "small/tune_steps", 3),
    ("small/oracle_epochs", "small/tune_epochs", 3),
    ("fedoui/faithful", None, None),
    ("fedoui/clean", None, None),
    ("small/beta", "small/tune_steps", None),
    ("small/tune_algorithms", None, None),
    ("small/tune_plain", None, None),
    ("small/algorithms", "small/tune_algorithms", None),
    ("small/plain", "small/tune_plain", None),
    ("small/alpha03_steps", "small/tune_steps", None),
    ("small/alpha03_epochs", "small/tune_epochs", None),
    ("small/oracle_steps", "small/tune_steps", 5),
    ("small/oracle_epochs", "small/tune_epochs", 5),
    ("small/k100", "small/tune_steps", None),
    ("small/full_steps", "small/tune_steps", None),
    ("small/full_epochs", "small/tune_epochs", None),
]


def main() -> None:
    """Run every stage of the named folders; a stage that fails is reported, and the next ones go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", choices=["digits", "small", "fedoui"])
    parser.add_argument("--data", type=Path, help="CIFAR-10 as parquet files")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs")
    parser.add_argument("--results", type=Path, default=HERE, help="where NAME/results/*.csv go")
    asked = parser.parse_args()
    os.nice(19 - os.nice(0))
    for sweep, tuned_by, seeds in STAGES:
        folder = sweep.partition("/")[0]
        if folder not in asked.folders:
            continue
        results = asked.results / folder / "results"
        results.mkdir(parents=True, exist_ok=True)
        overrides = [f"output.dir={asked.out}", "tracking.uri=none", "resources.start_timeout_s=900"]
        overrides += ["resources.task_timeout_s=3600", *([f"data.path={asked.data}"] if folder != "digits" else [])]
        try:
            overrides += changes(sweep, chosen(asked.results, tuned_by) if tuned_by else None, seeds)
        except (FileNotFoundError, KeyError) as error:
            print(f"{sweep} waits for its tuning {tuned_by}: {error}", flush=True)
            continue
        if made := raysim("sweep", str(HERE / f"{sweep}.yaml"), *overrides):
            raysim("report", made, "--csv", str(results / f"{Path(sweep).name}.csv"))
            note_code(results / "code.csv")


def chosen(results: Path, tuning: str) -> dict[str, float]:
    """The learning rate of each method with the highest validation accuracy in the results of a tuning."""
    folder, _, name = tuning.partition("/")
    best: dict[str, tuple[float, float]] = {}
    with (results / folder / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] == "FINISHED":
                found = float(row["best_validation_accuracy"]), float(row["axis.local.lr"].split()[-1])
                best[row["axis.method"]] = max(best.get(row["axis.method"], (0.0, 0.0)), found)
    return {method: lr for method, (_, lr) in best.items()}


def changes(sweep: str, rates: dict[str, float] | None, seeds: int | None) -> list[str]:
    """The overrides that give each method its learning rate (full balance: that of fedeas), and cut the seeds."""
    grid = yaml.safe_load((HERE / f"{sweep}.yaml").read_text(encoding="utf-8"))["grid"]
    texts = [] if seeds is None else [f"grid.seed={grid['seed'][:seeds]}"]
    if rates is None:
        return texts
    if "method" not in grid:
        return [*texts, f"local.lr={rates['fedeas']}"]
    if "full" in (method["label"] for method in grid["method"]):
        rates = {"full": rates["fedeas"], **rates}
    methods = [{**method, "local.lr": rates[method["label"]]} for method in grid["method"]]
    return [*texts, f"grid.method={json.dumps(methods)}"]


def raysim(*arguments: str) -> str:
    """Run a command of raysim; returns the folder that it names, also where some runs have failed; else nothing.

    Ends this program where the command was interrupted.
    """
    folder = ""
    with subprocess.Popen(
        [sys.executable, "-m", "raysim", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            folder = line.rpartition("; results in ")[2].strip() if "; results in " in line else folder
    if process.returncode not in (0, 1):
        print(f"raysim {arguments[0]} ended with {process.returncode}", flush=True)
    if process.returncode == 130:
        sys.exit(130)
    return folder


def note_code(path: Path) -> None:
    """Write down which commit the code of this machine is, by its hash, which each row of a CSV has."""
    known = dict(csv.reader(path.open(encoding="utf-8"))) if path.is_file() else {"code": "commit"}
    asked = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    known[own_digest()] = commit
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(known.items())


if __name__ == "__main__":
    main()
