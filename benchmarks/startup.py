"""Seconds from `python -m raysim run` to the first trained round, and where they go: cold and warm, in turn.

    python benchmarks/startup.py --data FOLDER [--runs 3] [--experiment experiments/speed/w2.yaml] [--json startup.json]

Cold: no decoded images in the cache and no MLflow store. Warm: both are there, as for every later run. The files
themselves may be in the system's memory in both. Times are by the clock of lines on standard output; CPU seconds are
those of all processes of the run until the first round, and of everything else on the machine meanwhile, which says
how far the times can be trusted.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu import busy_s, cpu_s

ROOT = Path(__file__).resolve().parent.parent
MARKS = {"first line": "raysim:", "data read": "parquet:", "Ray and workers": "Ray started", "round 1": "round 1/"}


def start(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds until each of MARKS in one run, and CPU seconds; the run is interrupted after its first round."""
    command = [sys.executable, "-m", "raysim", "run", str(Path(options.experiment).resolve())]
    command += [f"data.path={Path(options.data).resolve()}", f"output.cache={folder / 'cache'}", "output.dir=runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    before, began, found = busy_s(), time.monotonic(), {}
    with subprocess.Popen(
        [*command, *options.overrides], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            found |= {mark: time.monotonic() - began for mark, text in MARKS.items() if line.startswith(text)}
            if "round 1" in found:
                break
        else:
            raise RuntimeError(f"the run ended before its first round: {''.join(said)}")
        found["CPU"] = cpu_s(process.pid)
        found["CPU of others"] = busy_s() - before - found["CPU"]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    return found


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Median, least and most of each column, a line for cold and for warm."""
    columns = [*MARKS, "CPU", "CPU of others"]
    lines = ["".join([f"{'':8}", *(f"{name:>22}" for name in columns)])]
    for kind, found in runs.items():
        cells = []
        for name in columns:
            values = [run[name] for run in found]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f}) s")
        lines.append("".join([f"{kind:8}", *(f"{cell:>22}" for cell in cells)]))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10 as parquet files")
    parser.add_argument("--experiment", default=str(ROOT / "experiments" / "speed" / "w2.yaml"))
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("overrides", nargs="*", help="dotted keys, such as resources.workers=2")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            for kind, found in runs.items():
                found.append(start(options, Path(folder)))
                print(f"{kind}: {json.dumps({name: round(s, 2) for name, s in found[-1].items()})}", flush=True)
    print(table(runs))
    if options.json:
        Path(options.json).write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
