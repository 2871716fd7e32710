"""Runs the sweeps of this folder, most important first, each method with the learning rate that its tuning chose.

    python experiments/papers/run.py digits small --data FOLDER --out FOLDER

FOLDER of --data: CIFAR-10 as parquet files.  Runs go to --out, a CSV for each sweep to the folder `results` beside its
file, with the hash of the code that made each run; `results/code.csv` says which commit that is.  Stopped at any time,
the same command goes on, also on another machine: what has a row in the CSV is not run again, whether it finished or
failed; delete the row to run it again.  It runs at the lowest priority.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from raysim.commands.sweep.grid import Cell, read_sweep
from raysim.config.plugin_source import own_digest

HERE = Path(__file__).resolve().parent
TABLES = (("steps", "steps"), ("epochs", "epochs"), ("oracle_steps", "steps"), ("oracle_epochs", "epochs"))
UNTUNED = ("full", "fedeas without entropy", "fedeas with linear size")
INTERRUPTED = 130
Rows = dict[tuple[str, int], dict[str, str]]  # the rows of a CSV by group and seed
STAGES: list[tuple[str, str | None, int | None]] = [
    # sweep, the tuning whose learning rates it takes, how many of its seeds (None: all)
    ("digits/tune_epochs", None, None),
    ("digits/tune_steps", None, None),
    ("digits/epochs", "digits/tune_epochs", None),
    ("digits/steps", "digits/tune_steps", None),
    ("digits/full_epochs", "digits/tune_epochs", None),
    ("digits/full_steps", "digits/tune_steps", None),
    ("small/tune_steps", None, None),
    ("small/steps", "small/tune_steps", 1),
    ("small/oracle_steps", "small/tune_steps", 1),
    ("small/tune_epochs", None, None),
    *((f"small/{table}", f"small/tune_{ends}", seeds) for seeds in (1, 2, 3) for table, ends in TABLES),
    ("fedoui/faithful", None, None),
    ("fedoui/clean", None, None),
    ("small/beta", "small/tune_steps", None),
    ("small/tune_algorithms", None, None),
    ("small/tune_plain", None, None),
    ("small/algorithms", "small/tune_algorithms", None),
    ("small/plain", "small/tune_plain", None),
    ("small/alpha03_steps", "small/tune_steps", None),
    ("small/alpha03_epochs", "small/tune_epochs", None),
    *((f"small/{table}", f"small/tune_{ends}", 5) for table, ends in TABLES),
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
        table = results / f"{Path(sweep).name}.csv"
        rows = read_rows(table)
        try:
            rates = chosen(asked.results, tuned_by) if tuned_by else None
            cells = read_sweep(HERE / f"{sweep}.yaml", [*overrides, *changes(sweep, rates, seeds)]).cells
        except (FileNotFoundError, KeyError) as error:
            print(f"{sweep} waits for its tuning {tuned_by}: {error}", flush=True)
            continue
        for seed, methods in left(cells, rows).items():
            only = [f"grid.seed=[{seed}]", *changes(sweep, rates, None, methods)]
            made, code = raysim("sweep", str(HERE / f"{sweep}.yaml"), *overrides, *only)
            if made and (Path(made) / "runs.csv").is_file():
                raysim("report", made, "--csv", str(new := results / "new.csv"))
                rows |= named_by(cells, list(read_rows(new).values()))
                new.unlink()
                write_rows(table, rows)
                note_code(results / "code.csv")
            if code == INTERRUPTED:
                sys.exit(INTERRUPTED)


def read_rows(path: Path) -> Rows:
    """The rows of a CSV of runs; none where there is no such file."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["group"], int(row["seed"])): row for row in csv.DictReader(file)}


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows as a CSV with the columns that any of them has, by group in the order met, then by seed."""
    order = list(dict.fromkeys(group for group, _ in rows))
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1]))]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in ordered for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)


def left(cells: list[Cell], rows: Rows) -> dict[int, list[str]]:
    """What is left to run: by seed, the labels of the methods that lack a row (none in a grid without methods).

    A row that another configuration has made is kept, and said.
    """
    found: dict[int, list[str]] = {}
    for cell in cells:
        row = rows.get((cell.group, cell.config.seed))
        if row is None:
            methods = found.setdefault(cell.config.seed, [])
            methods += [label for label in [cell.labels.get("method")] if label and label not in methods]
        elif row["config_hash"] != cell.config_hash:
            made = f"kept, though made by configuration {row['config_hash']}, which is {cell.config_hash} now"
            print(f"{cell.group}, seed {cell.config.seed}: {made}; delete its row to run it again", flush=True)
    return found


def named_by(cells: list[Cell], made: list[dict[str, str]]) -> Rows:
    """Rows of a part of a sweep, with the group and the labels that the whole sweep gives them.

    A sweep does not name what has one value in it, such as the seed where only one is left.
    """
    of_hash = {cell.config_hash: cell for cell in cells}
    rows: Rows = {}
    for row in made:
        if row["status"] not in ("FINISHED", "FAILED"):
            continue  # not run yet
        cell = of_hash[row["config_hash"]]
        own = {key: value for key, value in row.items() if not key.startswith("axis.") and key not in ("group", "seed")}
        labels = {f"axis.{axis}": label for axis, label in cell.labels.items()}
        seed = cell.config.seed
        rows[cell.group, seed] = {"group": cell.group, "seed": str(seed), **labels, **own}
    return rows


def chosen(results: Path, tuning: str) -> dict[str, float]:
    """The learning rate of each method with the highest final validation accuracy in the results of a tuning.

    Of rates that are equally good, the lowest: it is the farthest from divergence.
    """
    folder, _, name = tuning.partition("/")
    best: dict[str, tuple[float, float]] = {}
    for row in read_rows(results / folder / "results" / f"{name}.csv").values():
        if row["status"] == "FINISHED":
            found = float(row["final_validation_accuracy"]), -float(row["axis.local.lr"].split()[-1])
            best[row["axis.method"]] = max(best.get(row["axis.method"], found), found)
    return {method: -negative for method, (_, negative) in best.items()}


def changes(
    sweep: str, rates: dict[str, float] | None, seeds: int | None, methods: list[str] | None = None
) -> list[str]:
    """The overrides that give each method its learning rate, and leave the first seeds, or some methods, of a sweep.

    Full balance and the ablations have the rate of fedeas where the tuning does not name them.
    """
    grid = yaml.safe_load((HERE / f"{sweep}.yaml").read_text(encoding="utf-8"))["grid"]
    texts = [] if seeds is None else [f"grid.seed={grid['seed'][:seeds]}"]
    if "method" not in grid:
        return texts if rates is None else [*texts, f"local.lr={rates['fedeas']}"]
    wanted = [method for method in grid["method"] if methods is None or method["label"] in methods]
    if rates is not None:
        rates = {label: rates["fedeas"] for label in UNTUNED if "fedeas" in rates} | rates
        wanted = [{**method, "local.lr": rates[method["label"]]} for method in wanted]
    return [*texts, f"grid.method={json.dumps(wanted)}"]


def raysim(*arguments: str) -> tuple[str, int]:
    """Run a command of raysim; returns the folder that it names, if it does, and its exit code."""
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
    return folder, process.returncode


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
