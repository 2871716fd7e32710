"""What a round costs: its time against the number of clients in it, and against the number of workers.

    python benchmarks/cost_curve.py --data FOLDER [--cohorts 10 30 100 300 1000] [--workers 1 2 4] [--rounds 5]
                                    [--out cost_curve]

The clients of experiments/speed/w2.yaml (1,000 of 50 images, batches of 10, small CNN). Round time: from the cohort to
the next global model, by the clock, and the CPU time of all processes of the run. Cohorts take turns, round by round,
so that all meet the machine in the same state; the first round of each is left out. Writes OUT.csv with every round and
OUT.png, and prints medians with a straight line for each number of workers, fitted to relative errors: its slope is
the cost of a client, its intercept what a round costs however few there are.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers would otherwise give way to whatever else runs

import numpy as np
import psutil
from harness import opened, round_seconds

from raysim.config.load import load_config
from raysim.federation.server import Server, cohort

ROOT = Path(__file__).resolve().parent.parent
Rows = list[dict[str, float]]


class Cohorts(Server):
    """A server whose next cohort has the size that it is told."""

    size = 1

    def participants(self, number: int) -> list[int]:
        return cohort(self.config.seed, number, len(self.sizes_K), self.size)


def measure(options: argparse.Namespace, workers: int) -> Rows:
    """Every round with this number of workers."""
    overrides = [
        f"data.path={Path(options.data).resolve()}", f"resources.workers={workers}", f"evaluate_every={10**9}",
        f"rounds={10**9}", "tracking.uri=none",
    ]  # fmt: skip
    rows: Rows = []
    with opened(load_config(ROOT / "experiments" / "speed" / "w2.yaml", overrides), Cohorts) as (rounds, state, _):
        server = rounds.server
        assert isinstance(server, Cohorts)
        for number in range(1 + options.rounds):
            for size in options.cohorts:
                server.size, before = size, cpu_seconds()
                result = rounds.next(state)
                used, row, state = cpu_seconds() - before, result.metrics, result.state
                if number:
                    found = {"workers": workers, "cohort": size, "round_s": round_seconds(row), "cpu_s": used}
                    rows.append(found | {f"{name}_s": row[f"seconds_{name}"] for name in ("dispatch", "idle")})
    return rows


def cpu_seconds() -> float:
    """CPU time of this process and all that it started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def medians(rows: Rows, workers: int, column: str) -> tuple[list[float], list[float]]:
    """(cohort sizes, median of a column at each)."""
    sizes = sorted({row["cohort"] for row in rows})
    return sizes, [
        statistics.median(row[column] for row in rows if (row["workers"], row["cohort"]) == (workers, size))
        for size in sizes
    ]


def fit(sizes: list[float], seconds: list[float]) -> dict[str, float]:
    """The line seconds = intercept + slope * size with the least squared relative error, and the largest such error."""
    x, y = np.array(sizes), np.array(seconds)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    return {
        "slope_ms": 1e3 * float(slope),
        "intercept_ms": 1e3 * float(intercept),
        "worst_frac": float(np.abs((intercept + slope * x) / y - 1).max()),
    }


def table(rows: Rows, workers: list[int]) -> str:
    """Medians and lines for people."""
    lines = []
    for column, what in (("round_s", "round time"), ("cpu_s", "CPU time")):
        for n in workers:
            sizes, seconds = medians(rows, n, column)
            line = fit(sizes, seconds)
            points = ", ".join(f"{size:g}: {1e3 * s:,.0f}" for size, s in zip(sizes, seconds, strict=True))
            lines.append(
                f"{what}, {n} worker(s), ms by cohort: {points}; {line['slope_ms']:.1f} ms a client + "
                f"{line['intercept_ms']:.0f} ms a round, within {line['worst_frac']:.0%}"
            )
    return "\n".join(lines)


def draw(rows: Rows, workers: list[int], path: Path) -> None:
    """Round time against cohort size, both logarithmic, with the fitted lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=120)
    axes: Any = figure.add_subplot()
    for i, n in enumerate(workers):
        sizes, seconds = medians(rows, n, "round_s")
        line = fit(sizes, seconds)
        x = np.geomspace(min(sizes), max(sizes), 100)
        label = f"{n} worker(s): {line['slope_ms']:.1f} ms a client + {line['intercept_ms']:.0f} ms"
        axes.plot(x, (line["intercept_ms"] + line["slope_ms"] * x) / 1e3, color=f"C{i}", linewidth=1, label=label)
        axes.plot(sizes, seconds, "o", color=f"C{i}", markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="clients in the round", ylabel="seconds a round (median)")
    axes.set_title("Round time on the data of w2.yaml")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Measure, print, write."""
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10 as parquet files")
    parser.add_argument("--cohorts", nargs="+", type=int, default=[10, 30, 100, 300, 1000])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="of each cohort and number of workers")
    parser.add_argument("--out", default="cost_curve", help="where the .csv and the .png go")
    options = parser.parse_args()
    rows: Rows = []
    for workers in options.workers:
        rows += measure(options, workers)
        print(table(rows, sorted({int(row["workers"]) for row in rows})), file=sys.stderr, flush=True)
    print(table(rows, options.workers))
    pd.DataFrame(rows).to_csv(f"{options.out}.csv", index=False)
    draw(rows, options.workers, Path(f"{options.out}.png"))


if __name__ == "__main__":
    main()
