"""What each use of a private part of Ray, diffusers and torch saves: seconds to start Ray, and to import UNet2DModel.

    python benchmarks/private_parts.py [REPEATS]

Every row is the whole, without one part. Each measurement is a process of its own; the rows take turns, so that a
machine that gets slower meanwhile slows all of them. Medians, and the difference from the row with all parts.
"""

import os
import statistics
import subprocess
import sys
import time

RAY = """
import os, sys, time
without = sys.argv[1]
began = time.monotonic()
import raysim.engine.ray_private as private
from raysim.engine.session import Session
from raysim.config.schema import Resources
if without in private.ENVIRONMENT:
    del private.ENVIRONMENT[without]
    os.environ.pop(without, None)
elif without == "all":
    private.ENVIRONMENT.clear()
    private.REPLACED = ()
elif without:
    private.REPLACED = tuple(part for part in private.REPLACED if without not in (part.name, part.group))
imported = time.monotonic()
with Session(Resources(workers=2)) as session:
    started = time.monotonic()
    pool = session.pool(Resources(workers=2))
    while not all(member.ready for member in pool.members.values()):
        pool._wait()
    ready = time.monotonic()
ended = time.monotonic()
print("SECONDS", started - imported, ready - started, ended - ready, ended - imported)
"""

UNET = """
import sys, time
began = time.process_time()
import torch
loaded = time.process_time()
from raysim.generation import lean_unet
if sys.argv[1] == "all":
    from diffusers import UNet2DModel
else:
    lean_unet.PARTS = tuple(part for part in lean_unet.PARTS if part != sys.argv[1])
    lean_unet.unet_class()
print("SECONDS", time.process_time() - loaded)
"""


def measured(code: str, without: str) -> list[float]:
    """The seconds that a process prints."""
    command = [sys.executable, "-c", code, without]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    return [float(word) for word in printed.split("SECONDS")[1].split()]


def table(title: str, code: str, rows: list[str], repeats: int) -> None:
    """Print the medians of each row, and what the row costs against the first one."""
    found: dict[str, list[list[float]]] = {row: [] for row in rows}
    for _ in range(repeats):
        for row in rows:
            found[row].append(measured(code, row))
    print(f"\n{title}, median of {repeats}")
    whole = statistics.median(one[-1] for one in found[rows[0]])
    for row in rows:
        medians = [statistics.median(column) for column in zip(*found[row], strict=True)]
        saved = statistics.median(one[-1] for one in found[row]) - whole
        numbers = "  ".join(f"{value:6.2f}" for value in medians)
        print(f"  {('without ' + row) if row else 'with all':48} {numbers}   saves {saved:+.2f}", flush=True)


def main() -> None:
    """Measure everything."""
    from raysim.engine import ray_private
    from raysim.generation import lean_unet

    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    groups = list(dict.fromkeys(part.group for part in ray_private.REPLACED))
    began = time.monotonic()
    table(
        "Ray: start, two workers, end, sum (s)", RAY,
        ["", *groups, *ray_private.ENVIRONMENT, "all"], repeats,
    )
    table("UNet2DModel: CPU time of the import after torch (s)", UNET, ["", *lean_unet.PARTS, "all"], repeats)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
