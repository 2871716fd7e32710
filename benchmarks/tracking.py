"""What MLflow costs a run: 100 clients, 50 rounds, a linear model, with and without a sqlite store, in turn.

    python benchmarks/tracking.py [--runs 5] [--rounds 50]

All runs are of one process on warm workers, and MLflow is loaded before the first, so that the difference is what the
tracking itself takes, from the start of a run to its end: in the driver, which asks, and in MLflow's own process, which
shares the machine with the workers. `track` is the phase of that name in summary.json: the time the driver waits, and
draws the figures. `CPU` is what MLflow's process used of the processors, which other work on the machine does not
stretch.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from raysim.config.schema import Resources
from raysim.engine.session import Session
from raysim.lifecycle.runner import run_experiment
from raysim.tracking.process import MlflowProcess


def configuration(folder: Path, rounds: int, tracked: bool) -> dict[str, Any]:
    """100 clients of some 14 digits each, all of them in every round."""
    return {
        "rounds": rounds,
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "clients": 100, "alpha": 1.0, "min_samples": 2},
        "model": {"name": "linear"},
        "local": {"name": "sgd", "epochs": 1, "batch_size": 16, "lr": 0.1},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db" if tracked else "none"},
        "output": {"dir": str(folder / "runs"), "checkpoint_every": rounds},
    }


def _cpu_s(mlflow: MlflowProcess) -> float:
    times = psutil.Process(mlflow._process.pid).cpu_times()
    return times.user + times.system


def main() -> None:
    """Print the seconds of each run, and medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    waited: dict[bool, list[float]] = {False: [], True: []}
    used: list[float] = []
    with tempfile.TemporaryDirectory() as name, MlflowProcess() as mlflow, Session(Resources()) as session:
        for i in range(-1, options.runs):  # the first pair warms up: workers, MLflow, the tables of the store
            for tracked in (False, True):
                config = configuration(Path(name), options.rounds, tracked)
                began, cpu_s = time.monotonic(), _cpu_s(mlflow)
                result = run_experiment(config, session=session, mlflow=mlflow if tracked else None)
                took = time.monotonic() - began
                if i >= 0:
                    found[tracked].append(took)
                    waited[tracked].append(result.summary["seconds"].get("track", 0.0))
                    used += [_cpu_s(mlflow) - cpu_s] if tracked else []
    without, with_store = (statistics.median(found[tracked]) for tracked in (False, True))
    for tracked, name in ((False, "without"), (True, "sqlite")):
        print(f"{name:8} {' '.join(f'{s:.2f}' for s in found[tracked])} s")
    for tracked, name in ((False, "without"), (True, "sqlite")):
        print(f"track, {name:8} {' '.join(f'{s:.2f}' for s in waited[tracked])} s")
    print(f"CPU      {' '.join(f'{s:.2f}' for s in used)} s")
    print(f"median   {without:.2f} s without, {with_store:.2f} s with the store: {with_store / without - 1:+.1%}")


if __name__ == "__main__":
    main()
