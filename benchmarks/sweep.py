"""Seconds of a whole sweep, from an empty cache and again from a full one, against what its runs had to do.

    python benchmarks/sweep.py [--experiment experiments/digits_policies.yaml] [--json sweep.json] ['grid.seed=[0]' ...]

The work is what the runs' summaries say that training, generation and evaluation took (`train`, `generate`,
`evaluate`). The rest of the wall time is what the sweep adds: what comes before the first run and after the last one,
and of each run the other phases of its summary, and what no phase names (`unnamed`, which may be negative where a
phase goes on while the next run has begun). Results, cache and MLflow store lie in a temporary folder. CPU seconds are
those of the sweep's processes, as they were when its last run began, and of everything else until then, which says how
far the times can be trusted.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu import busy_s, cpu_s

ROOT = Path(__file__).resolve().parent.parent
WORK = ("train", "generate", "evaluate")
BEGINS = re.compile(r"\[\d+/\d+\] ")


def measure(options: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Run the sweep once; its wall time and where that went.  name: of the folder of its results."""
    command = [sys.executable, "-m", "raysim", "sweep", str(Path(options.experiment).resolve()), *options.overrides]
    command += [f"output.cache={folder / 'cache'}", f"output.dir={name}", f"tracking.uri=sqlite:///{name}.db"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    before, began, begins, used_s, others_s = busy_s(), time.monotonic(), [], 0.0, 0.0
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if BEGINS.match(line):
                begins.append(time.monotonic() - began)
                used_s = cpu_s(process.pid)
                others_s = busy_s() - before - used_s
    if process.returncode:
        raise RuntimeError(f"the sweep failed: {''.join(said[-20:])}")
    wall_s = time.monotonic() - began
    summaries = [json.loads(path.read_text()) for path in sorted((folder / name).glob("*/summary.json"))]
    seconds: dict[str, float] = {}
    for summary in summaries:
        for phase, took in summary["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + took
    after_s = time.time() - max(path.stat().st_mtime for path in (folder / name).glob("*/summary.json"))
    total = seconds.pop("total")
    work_s = sum(seconds.pop(phase, 0.0) for phase in WORK)
    rest = {"before": begins[0], "after": after_s, **seconds}
    rest["unnamed"] = wall_s - work_s - sum(rest.values())
    return {
        "runs": len(summaries), "images": sum(s["n_synthetic_made"] for s in summaries), "wall_s": wall_s,
        "work_s": work_s, "ratio": wall_s / work_s, "totals_s": total, "rest_s": rest, "cpu_s": used_s,
        "others_s": others_s,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default=str(ROOT / "experiments" / "digits_policies.yaml"))
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("overrides", nargs="*", help="dotted keys, such as rounds=3 or 'grid.seed=[0]'")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty", "full"):
            found[name] = result = measure(options, Path(folder), name)
            print(
                f"{name} cache: {result['runs']} runs, {result['images']:,} images made, {result['wall_s']:.1f} s, "
                f"work {result['work_s']:.1f} s, ratio {result['ratio']:.3f}; CPU {result['cpu_s']:.0f} s, "
                f"others {result['others_s']:.0f} s"
            )
            for part, took in sorted(result["rest_s"].items(), key=lambda item: -item[1]):
                print(f"  {part:12} {took:7.2f} s  {took / result['work_s']:6.1%}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
