"""raysim on the three fixed workloads that the drivers of other simulators and a bare PyTorch loop run too.

    PEERS_DIR=FOLDER python benchmarks/peers.py W1|W2|W3 [--bf16] [--workers 2] [--data FOLDER/data]

Every engine trains the same clients on the same samples in the same rounds, from the same initial parameters: arrays,
partitions and cohorts are read from files (`x_train_f32.npy`, `y_train.npy`, `x_test_f32.npy`, `y_test.npy`,
`partitions.npz`). ROUNDS=6 shortens a run. Prints one line, `RESULT {json}`: `train_s` is the sum of the round times,
from the cohort to the next global model, without evaluation; RESULT=FILE writes it to a file, too, with every round.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers would otherwise give way to whatever else runs

import numpy as np  # noqa: E402

from raysim.core.records import Dataset, IntArray, Partition  # noqa: E402

WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": {"model": "cnn", "part": "w1", "rounds": 20, "batch_size": 32, "lr": 0.05, "evaluate_every": 5},
    "W2": {"model": "cnn", "part": "w2", "rounds": 40, "batch_size": 10, "lr": 0.1, "evaluate_every": 10},
    "W3": {"model": "linear", "part": "w2", "rounds": 40, "batch_size": 10, "lr": 0.1, "evaluate_every": 0},
}
NEVER = 10**9
BLOCK = 1000  # images turned back into bytes at a time


def cifar10(*, folder: str) -> Dataset:
    """The prepared CIFAR-10 as bytes, normalised to [-1, 1] as the other drivers have it."""
    half = (0.5, 0.5, 0.5)
    names = tuple(str(c) for c in range(10))
    train, test = (_bytes(Path(folder) / f"x_{part}_f32.npy") for part in ("train", "test"))
    train_labels_N, test_labels_N = (np.load(Path(folder) / f"y_{part}.npy") for part in ("train", "test"))
    return Dataset("cifar10", train, train_labels_N, test, test_labels_N, names, half, half)


def _bytes(path: Path) -> Any:
    """uint8 images from float32 ones in [-1, 1]: u = 127.5 (x + 1), exact to rounding."""
    x = np.load(path, mmap_mode="r")
    images = np.empty(x.shape, np.uint8)
    for start in range(0, len(x), BLOCK):
        images[start : start + BLOCK] = np.rint((x[start : start + BLOCK] + 1) * 127.5)
    return images


def fixed(labels_N: IntArray, classes: int, rng: Any, *, folder: str, part: str) -> Partition:  # noqa: ARG001
    """The prepared partition of this name."""
    with np.load(Path(folder) / "partitions.npz") as arrays:
        indices, offsets_K1 = arrays[f"{part}_idx"], arrays[f"{part}_off"]
    clients = len(offsets_K1) - 1
    none_K = np.zeros(clients, dtype=bool)
    return Partition(indices, offsets_K1, labels_N[indices], classes, none_K, none_K, np.zeros(clients))


def configuration(workload: dict[str, Any], folder: str, precision: str, workers: int) -> dict[str, Any]:
    """A workload as a raysim configuration."""
    return {
        "rounds": workload["rounds"],
        "evaluate_every": workload["evaluate_every"] or NEVER,
        "data": {"name": "peers:cifar10", "folder": folder},
        "partition": {"name": "peers:fixed", "folder": folder, "part": workload["part"]},
        "model": {"name": workload["model"]},
        "local": {"name": "sgd", "batch_size": workload["batch_size"], "lr": workload["lr"]},
        "resources": {"workers": workers, "gpus_per_worker": 0, "precision": precision},
        "tracking": {"uri": "none"},
    }


@dataclass
class Times:
    """Seconds of each round without its evaluation, of each evaluation, and the accuracies."""

    round_s: list[float] = field(default_factory=list)
    evaluate_s: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def run(workload: dict[str, Any], folder: str, precision: str, workers: int) -> tuple[float, Times]:
    """(seconds of start-up, times) of a workload."""
    from harness import opened

    from raysim.config.load import load_config
    from raysim.federation.server import Server

    with np.load(Path(folder) / "partitions.npz") as arrays:
        cohorts = arrays[f"{workload['part']}_cohorts"]

    class FixedCohorts(Server):
        def participants(self, number: int) -> list[int]:
            return sorted(cohorts[number - 1].tolist())

    began = time.perf_counter()
    config = load_config(configuration(workload, folder, precision, workers))
    with opened(config, FixedCohorts) as (rounds, _, model):
        _initialise(model, workload["model"])
        state = rounds.server.initial(model.state())
        rounds.next(state)  # thrown away: as in the other drivers, what torch costs once is part of the start-up
        started, times = time.perf_counter() - began, Times()
        for number in range(1, workload["rounds"] + 1):
            began = time.perf_counter()
            result = rounds.next(state)
            taken, row, state = time.perf_counter() - began, result.metrics, result.state
            times.round_s.append(taken - row["seconds_evaluate"])
            if workload["evaluate_every"] and number % workload["evaluate_every"] == 0:
                times.evaluate_s.append(row["seconds_evaluate"])
                times.accuracies.append(row["accuracy"])
    return started, times


def _initialise(model: Any, name: str) -> None:
    """The initial parameters of the other drivers: torch's own, layer by layer, from seed 0."""
    import torch

    from raysim.models import architectures
    from raysim.models.flat_model import FlatModel

    torch.manual_seed(0)
    model.load(FlatModel(getattr(architectures, name)(3, (32, 32), 10)).state())


def main() -> None:
    """Run one workload and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast instead of float32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", default=os.environ.get("PEERS_DIR", "peers-work") + "/data")
    options = parser.parse_args()
    workload = dict(WORKLOADS[options.workload])
    workload["rounds"] = int(os.environ.get("ROUNDS", workload["rounds"]))
    precision = "bf16" if options.bf16 else "float32"
    imported = time.perf_counter() - STARTED
    started, times = run(workload, str(Path(options.data).resolve()), precision, options.workers)
    result = {
        "peer": "raysim-bf16" if options.bf16 else "raysim",
        "workload": options.workload,
        "rounds": workload["rounds"],
        "startup_s": round(started, 3),
        "train_s": round(sum(times.round_s), 3),
        "eval_s": round(sum(times.evaluate_s), 3),
        "round_ms_min_med_max": [round(1e3 * float(f(times.round_s)), 1) for f in (min, np.median, max)],
        "first_round_s": round(times.round_s[0], 3),
        "final_acc": times.accuracies[-1] if times.accuracies else None,
        "accs": times.accuracies,
        "import_s": round(imported, 2),
    }
    if "RESULT" in os.environ:
        Path(os.environ["RESULT"]).write_text(json.dumps({**result, "round_times": times.round_s}) + "\n")
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
