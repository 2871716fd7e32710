"""raysim, the bare PyTorch loop and other simulators on the same workloads, in turn: ratios of their round times.

    python benchmarks/compare.py W1 W2 W3 --data FOLDER/data --bare PEERS/bare.py --pairs 5 --json speed.json
        [--bf16] [--pfl VENV --flower VENV] [--rounds 6]

PEERS: the folder with the other drivers (`bare.py`, `pfl_run.py`, `flower_run.py`); FOLDER: what its `prepare.py`
wrote, in `data`. VENV: an environment with that simulator. In each pair every engine runs once, one after the other,
and a ratio is that of two runs of one pair: a machine is faster at one time than at another. Time counts from the
cohort to the next global model (`train_s`), evaluation and start-up left out. Run it on a machine that does nothing
else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BARE = "bare-c"
Results = dict[str, dict[str, list[dict[str, Any]]]]
"""Results by workload and engine, one a pair."""


def commands(options: argparse.Namespace, workload: str) -> dict[str, list[str]]:
    """The command of each engine, by name."""
    ours = [sys.executable, str(HERE / "peers.py"), workload, "--data", options.data]
    folder = Path(options.bare).parent
    found = {BARE: [sys.executable, options.bare, workload, "c"], "raysim": ours}
    if options.bf16:
        found["raysim-bf16"] = [*ours, "--bf16"]
    if options.pfl:
        found["pfl"] = [f"{options.pfl}/bin/torchrun", "--nproc_per_node=2", str(folder / "pfl_run.py"), workload]
    if options.flower:
        found["flower"] = [f"{options.flower}/bin/python", str(folder / "flower_run.py"), workload]
    return found


def run(command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The result line of one run; raises RuntimeError with its last words where there is none."""
    environment = {**os.environ, "PEERS_DIR": str(Path(options.data).parent), "FLWR_TELEMETRY_ENABLED": "0"}
    environment.pop("RESULT", None)
    if options.rounds:
        environment["ROUNDS"] = str(options.rounds)
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.timeout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} printed no result: {(done.stderr or done.stdout)[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return {**result, "wall_s": round(time.monotonic() - began, 2)}


def ratios(results: dict[str, list[dict[str, Any]]], engine: str) -> list[float]:
    """Round time over that of the bare loop, pair by pair."""
    pairs = zip(results[engine], results[BARE], strict=True)
    return [run["train_s"] / bare["train_s"] for run, bare in pairs]


def table(results: Results) -> str:
    """Median, least and largest ratio of each engine, and the median of its seconds and its last accuracy."""
    lines = [f"{'':4}{'engine':14}{'ratio':>7}{'min':>7}{'max':>7}{'train s':>9}{'start s':>9}{'accuracy':>10}"]
    for workload, engines in results.items():
        for engine, runs in engines.items():
            r = ratios(engines, engine)
            train, start = (statistics.median(run[key] for run in runs) for key in ("train_s", "startup_s"))
            accuracies = [run["final_acc"] for run in runs if run["final_acc"] is not None]
            accuracy = f"{statistics.median(accuracies):10.4f}" if accuracies else f"{'-':>10}"
            middle = f"{statistics.median(r):7.2f}{min(r):7.2f}{max(r):7.2f}"
            lines.append(f"{workload:4}{engine:14}{middle}{train:9.2f}{start:9.2f}{accuracy}")
    return "\n".join(lines)


def main() -> None:
    """Run all pairs; print the table after each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=["W1", "W2", "W3"])
    parser.add_argument("--data", required=True, help="folder with the prepared arrays")
    parser.add_argument("--bare", required=True, help="path of bare.py")
    parser.add_argument("--pfl", help="environment with pfl-research")
    parser.add_argument("--flower", help="environment with Flower")
    parser.add_argument("--bf16", action="store_true", help="also raysim with bf16 autocast")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="instead of each workload's own number")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one run may take")
    parser.add_argument("--json", help="file for all results")
    options = parser.parse_args()
    options.data = str(Path(options.data).resolve())
    results: Results = {}
    for workload in options.workloads:
        engines = commands(options, workload)
        results[workload] = {engine: [] for engine in engines}
        for pair in range(options.pairs):
            names = list(engines)
            for name in names[pair % len(names) :] + names[: pair % len(names)]:  # no engine is always the first
                results[workload][name].append(run(engines[name], options))
            print(table(results), flush=True)
            if options.json:
                every = {w: {e: ratios(r, e) for e in r} for w, r in results.items()}
                Path(options.json).write_text(json.dumps({"ratios": every, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
