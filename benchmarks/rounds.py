"""Does a round cost the same late in a run as early? Time, driver memory and checkpoints at round 50 and at the end.

Runs digits with a linear model, 200 of 300 clients a round, tracked in a sqlite file, through `raysim.run`.

    python benchmarks/rounds.py [--rounds 2000] [--window 200] [--clients-per-round 200]

Prints, for the rounds around each of the two: the median wall time of a round, the memory of the driver (USS), and the
bytes and seconds of the newest checkpoint; and the ratio of the times.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import raysim
from raysim.federation.server import RoundResult
from raysim.lifecycle.record import Record


class Watch:
    """Takes the time of every round, and of every checkpoint with its size."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.uss_mb: dict[int, float] = {}
        self.checkpoints: dict[int, tuple[int, float]] = {}

    def install(self) -> None:
        """Look over the shoulder of the run's record."""
        append, checkpoint = Record.append, Record.checkpoint

        def watched_append(record: Record, result: RoundResult) -> None:
            append(record, result)
            self.at_s.append(time.monotonic())
            if result.state.round % 10 == 0:
                self.uss_mb[result.state.round] = psutil.Process().memory_full_info().uss / 1e6

        def watched_checkpoint(record: Record) -> None:
            began = time.monotonic()
            checkpoint(record)
            folder = record.directory.checkpoints
            newest = sorted(folder.glob("round-*"))[-2:]
            size = sum(path.stat().st_size for path in newest)
            self.checkpoints[len(self.at_s)] = size, time.monotonic() - began

        Record.append, Record.checkpoint = watched_append, watched_checkpoint  # type: ignore[method-assign]

    def round_ms(self, around: int, window: int) -> float:
        """Median wall time of the rounds around one, with evaluation and tracking."""
        last = min(around + window // 2, len(self.at_s) - 1)
        first = max(last - window, 0)
        gaps = [b - a for a, b in itertools.pairwise(self.at_s[first : last + 1])]
        return 1000 * statistics.median(gaps)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--window", type=int, default=200)
    parser.add_argument("--clients-per-round", type=int, default=200)
    options = parser.parse_args()
    watch = Watch()
    watch.install()
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "rounds": options.rounds,
            "clients_per_round": options.clients_per_round,
            "evaluate_every": 1,
            "data": {"name": "digits"},
            "partition": {"name": "iid", "clients": options.clients_per_round * 3 // 2},
            "model": {"name": "linear"},
            "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
            "output": {"dir": f"{folder}/runs", "cache": None},
        }
        result = raysim.run(config)
        history = sum(path.stat().st_size for path in (Path(result.directory) / "history").iterdir())
    early, late = 50, options.rounds
    times = [watch.round_ms(at, options.window) for at in (early, late)]
    print(f"{'round':>8} {'ms a round':>11} {'driver MB':>10} {'checkpoint bytes':>17} {'checkpoint ms':>14}")
    for at, ms in zip((early, late), times, strict=True):
        nearest = min(watch.checkpoints, key=lambda round_, at=at: abs(round_ - at))
        size, seconds = watch.checkpoints[nearest]
        memory = watch.uss_mb[min(watch.uss_mb, key=lambda round_, at=at: abs(round_ - at))]
        print(f"{at:>8} {ms:>11.2f} {memory:>10.1f} {size:>17,} {seconds * 1000:>14.1f}")
    print(f"time of a round, late / early: {times[1] / times[0]:.3f}; history {history / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
