"""Which sampler, step count and guidance give the best images for their cost: a table for one weights folder.

For each cell, the same labels and seeds are sampled on one CPU core; the images are then measured by
`raysim.generation.quality`: accuracy on real test images of a classifier trained on them alone, and the share whose
class a classifier trained on as many real images recognises. Rows are appended to a CSV file as they are done, and rows
that are there are not done again, so a long table can be made in pieces.

    python benchmarks/sampler_table.py --out table.csv [--weights digits] [--data FOLDER] [--images 1000]
        [--cells ddim/20/1.5,unipc/10/2] [--seeds 0,1,2]

--data: the parquet folder that the weights were trained on; by default the digits. --seeds: of images and classifiers.
Prints the table, means over the seeds, best accuracy first.
"""

import argparse
import csv
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
CELLS = "ddim/10/2,ddim/20/1,ddim/20/2,ddim/20/3,dpmsolver++/10/2,dpmsolver++/15/2,dpmsolver++/20/2,unipc/10/2"
COLUMNS = ("weights_sha256", "images", "seed", "sampler", "steps", "guidance", "images_per_s", "images_per_cpu_s",
           "from_synthetic", "from_real", "recognised", "synthetic_to_train", "nearer_than_99_of_test")
KEYS = COLUMNS[:6]


def measure_cell(dataset: Any, weights: str, cell: str, images: int, seed: int) -> dict[str, Any]:
    """One row of the table."""
    import numpy as np

    from raysim.core import rng
    from raysim.generation.ddpm import ddpm
    from raysim.generation.quality import measure

    sampler, steps, guidance = cell.split("/")
    generator = ddpm(dataset, "cpu", weights=weights, sampler=sampler, steps=int(steps), guidance=float(guidance))
    labels_M = np.arange(images, dtype=np.int64) % dataset.classes
    seeds_M = np.array([rng.integer(seed, rng.PRETRAIN, -1, i) for i in range(images)], dtype=np.int64)
    generator.sample(labels_M[:16], seeds_M[:16])  # the first batch prepares the kernels
    began, began_cpu = time.perf_counter(), time.process_time()
    made = generator.sample(labels_M, seeds_M)
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    quality = measure(dataset, made, labels_M, seed)
    return {
        "weights_sha256": generator.weights_sha256[:12], "images": images, "seed": seed, "sampler": sampler,
        "steps": int(steps), "guidance": float(guidance), "images_per_s": round(images / wall, 2),
        "images_per_cpu_s": round(images / cpu, 2), **quality["accuracy"], "recognised": quality["recognised"],
        "synthetic_to_train": quality["distance"]["synthetic_to_train"],
        "nearer_than_99_of_test": quality["distance"]["nearer_than_99_of_test"],
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows that are done."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add a row, below the names of the columns."""
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def show(rows: list[dict[str, str]]) -> None:
    """Means over the seeds, best accuracy first."""
    import pandas as pd

    table = pd.DataFrame(rows, columns=COLUMNS)
    numbers = [name for name in COLUMNS if name not in ("weights_sha256", "sampler")]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    groups = table.groupby(["weights_sha256", "images", "sampler", "steps", "guidance"])
    means = groups[list(COLUMNS[6:])].mean()
    means.insert(0, "seeds", groups.size())
    means["sd"] = groups["from_synthetic"].std()
    print(means.sort_values("from_synthetic", ascending=False).round(4).to_string())


def main() -> None:
    """Measure the cells that are not in the file yet, then print all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", default="digits")
    parser.add_argument("--data")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    import torch

    from raysim.data.datasets import digits
    from raysim.data.files import parquet
    from raysim.generation.weights_folder import find_folder, read_unet

    torch.set_num_threads(1)
    weights_sha256 = read_unet(find_folder(options.weights))[1][:12]
    dataset = None
    for seed in [int(seed) for seed in options.seeds.split(",")]:
        for cell in options.cells.split(","):
            sampler, steps, guidance = cell.split("/")
            key = [weights_sha256, str(options.images), str(seed), sampler, steps, str(float(guidance))]
            if any([row[name] for name in KEYS] == key for row in read_rows(options.out)):
                continue
            dataset = dataset or (digits() if options.data is None else parquet(path=options.data))
            row = measure_cell(dataset, options.weights, cell, options.images, seed)
            append_row(options.out, row)
            print(", ".join(f"{name} {row[name]}" for name in COLUMNS[2:]), flush=True)
    show(read_rows(options.out))


if __name__ == "__main__":
    main()
