"""Does a round cost more, in time or memory, because more clients are registered? 1,000 against 1,000,000, in pairs.

    python benchmarks/scale.py [--clients 1000 1000000] [--rounds 30] [--cohort 100] [--json scale.json]

Two drivers, each with a Ray and workers of its own, run the same job but for the number of registered clients
(`dirichlet_client`; the cohort's samples are drawn when it trains). They take turns, round by round, so that both meet
the machine in the same state. Round time: from the cohort to the next global model, by the clock and by the CPU time of
all of a driver's processes, the first rounds left out. Memory: the peak PSS of those processes once both are up; pages
that both share, such as torch's code, count half in each.
"""

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from harness import opened, round_seconds
from memory import MB, Watch

from raysim.config.load import load_config

EXPERIMENT = Path(__file__).resolve().parent.parent / "experiments" / "speed" / "million.yaml"
WARM_UP = 3  # rounds


def child(clients: int, cohort: int, workers: int) -> None:
    """A driver: a round for each line on standard input, its seconds on standard output."""
    config = load_config(
        EXPERIMENT,
        [
            f"partition.clients={clients}", f"clients_per_round={cohort}", f"resources.workers={workers}",
            f"evaluate_every={10**9}", f"rounds={10**9}", "tracking.uri=none",
        ],
    )  # fmt: skip
    with opened(config) as (rounds, state, _):
        print("ready", flush=True)
        for _ in sys.stdin:
            result = rounds.next(state)
            state = result.state
            print(round_seconds(result.metrics), flush=True)


class Driver:
    """A child process that runs one round when asked."""

    def __init__(self, clients: int, options: argparse.Namespace) -> None:
        self.clients = clients
        self.round_s: list[float] = []
        self.cpu_s: list[float] = []
        command = [sys.executable, __file__, "--child", str(clients)]
        command += ["--cohort", str(options.cohort), "--workers", str(options.workers)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.watch = Watch(self.process.pid, options.interval)

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the driver with {self.clients} clients ended early")
        return line

    def round(self) -> None:
        """One round, its seconds and the CPU seconds of all processes kept."""
        assert self.process.stdin is not None
        before = self._cpu_s()
        print(file=self.process.stdin, flush=True)
        self.round_s.append(float(self.answer()))
        self.cpu_s.append(self._cpu_s() - before)

    def _cpu_s(self) -> float:
        root = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in [root, *root.children(recursive=True)]]
        return sum(t.user + t.system for t in times)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def measure(options: argparse.Namespace) -> list[Driver]:
    """Both drivers, after all rounds."""
    with ExitStack() as stack:
        drivers = []
        for clients in options.clients:
            drivers.append(Driver(clients, options))
            stack.callback(drivers[-1].close)
            drivers[-1].answer()  # ready
        for driver in drivers:  # only now, for a process that is alone has shared pages to itself
            stack.enter_context(driver.watch)
        for number in range(WARM_UP + options.rounds):
            for driver in drivers if number % 2 else drivers[::-1]:
                driver.round()
    return drivers


def summary(drivers: list[Driver]) -> dict[str, Any]:
    """Medians of both, and how they compare."""
    rows = [
        {
            "clients": d.clients,
            "round_ms": 1e3 * statistics.median(d.round_s[WARM_UP:]),
            "cpu_ms": 1e3 * statistics.median(d.cpu_s[WARM_UP:]),
            "peak_pss_mb": d.watch.peak_bytes / MB,
            "peak_pss_by_process_mb": {name: size / MB for name, size in d.watch.peak.items()},
        }
        for d in drivers
    ]
    few, many = drivers
    result: dict[str, Any] = {"rounds": len(few.round_s) - WARM_UP, "runs": rows}
    for key in ("round_s", "cpu_s"):
        pairs = zip(getattr(many, key)[WARM_UP:], getattr(few, key)[WARM_UP:], strict=True)
        ratios = sorted(a / b for a, b in pairs)
        quarter = len(ratios) // 4
        result[f"ratio_{key[:-2]}"] = statistics.median(ratios)
        result[f"ratio_{key[:-2]}_quartiles"] = [ratios[quarter], ratios[-1 - quarter]]
    result["memory_difference_mb"] = rows[1]["peak_pss_mb"] - rows[0]["peak_pss_mb"]
    return result


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    heads = f"{'clients':>12}{'round ms':>12}{'CPU ms':>12}{'peak PSS MB':>14}"
    lines = [f"{heads}   (medians of {result['rounds']} rounds)"]
    for row in result["runs"]:
        lines.append(f"{row['clients']:12,}{row['round_ms']:12.1f}{row['cpu_ms']:12.1f}{row['peak_pss_mb']:14,.0f}")
    for key, what in (("ratio_round", "round time"), ("ratio_cpu", "CPU time")):
        low, high = result[f"{key}_quartiles"]
        lines.append(f"{what}: median ratio {result[key]:.3f}, quartiles {low:.3f} and {high:.3f}")
    lines.append(f"memory: {result['memory_difference_mb']:+,.0f} MB")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs=2, type=int, default=[1000, 1_000_000], metavar=("FEW", "MANY"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples of the memory")
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.cohort, options.workers)
        return
    result = summary(measure(options))
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
