"""Memory of a run's processes while it makes very many images, by a generator that costs nothing.

    python benchmarks/images.py [--images 255490] [--side 32] [--channels 3] [--clients 100] [--no-cache]

The run is `raysim.run` with one round of a small model, in a process of its own that is watched; the images are filled
with numbers from their seeds. Prints the peak of each kind of process, of PSS (in which a page that n processes share
counts 1/n in each) and of RSS (in which it counts in full), beside the same run without images, and a JSON object on
the last line. Linux only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
CLASSES = 10


def noise(reader: Any = None, *, train: int, side: int, channels: int) -> Any:
    """A data set of random images, which are kept in the cache of decoded images."""
    from raysim.plugins_api import Dataset

    def decode(count: int = train) -> Any:
        shape = (count, channels, side, side)
        images = reader.room(shape) if hasattr(reader, "room") else np.empty(shape, np.uint8)
        for start in range(0, count, 10_000):
            part = images[start : start + 10_000]
            part[:] = np.random.default_rng(start).integers(0, 256, part.shape, dtype=np.uint8)
        return images

    images = reader.decoded(lambda: [f"noise/{train}/{channels}/{side}".encode()], decode)
    labels_N = np.random.default_rng(1).integers(0, CLASSES, train + 1000)
    names, half = tuple(map(str, range(CLASSES))), (0.5,) * channels
    return Dataset("noise", images, labels_N[:train], decode(count=1000), labels_N[train:], names, half, half)


class Filled:
    """A generator whose image is its seed's bytes, over and over."""

    def __init__(self, dataset: Any, device: str, *, batch_size: int = 64) -> None:  # noqa: ARG002
        self.shape = (dataset.channels, *dataset.image_size)

    @staticmethod
    def images_per_call(*_: Any, **keys: Any) -> int:
        return int(keys.get("batch_size") or 64)

    @staticmethod
    def image_seed(seed: int, client: int, class_: int, index: int) -> int:
        return ((seed * 10007 + client) * CLASSES + class_) * 10_000_019 + index

    @staticmethod
    def notes(*_: Any, **__: Any) -> list[str]:
        return []

    def fingerprint(self) -> str:
        return f"filled/{self.shape}"

    def sample(self, labels_B: Any, seeds_B: Any) -> Any:  # noqa: ARG002
        size = int(np.prod(self.shape))
        repeated = np.tile(seeds_B.astype("<i8").view(np.uint8).reshape(len(seeds_B), 8), -(-size // 8))
        return np.ascontiguousarray(repeated[:, :size]).reshape(len(seeds_B), *self.shape)


def run(options: dict[str, Any]) -> None:
    """One run, in this process."""
    import raysim

    folder = options["folder"]
    result = raysim.run({
        "rounds": 1,
        "clients_per_round": min(options["clients"], 4),
        "data": {"name": f"{Path(__file__).stem}:noise", **{k: options[k] for k in ("train", "side", "channels")}},
        "partition": {"name": "dirichlet", "clients": options["clients"], "alpha": 0.3, "min_samples": 1},
        "allocation": {"name": "uniform", "total": options["images"]} if options["images"] else {"name": "none"},
        "generator": {"name": f"{Path(__file__).stem}:Filled", "batch_size": options["batch"]},
        "model": {"name": "cnn", "width": 8, "hidden": 32},
        "local": {"name": "sgd", "epochs": 1, "batch_size": 64, "lr": 0.01},
        "resources": {"workers": options["workers"], "object_store_bytes": options["store"]},
        "tracking": {"uri": "none"},
        "output": {"dir": f"{folder}/runs", "cache": None if options["no_cache"] else f"{folder}/cache"},
    })
    print(json.dumps({key: result.summary[key] for key in ("synthetic_sha256", "model_sha256", "n_synthetic_made")}))


def watched(options: dict[str, Any]) -> dict[str, Any]:
    """The run in a process of its own: the peaks by kind of process, seconds, hashes."""
    from memory import Watch

    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--run", json.dumps(options)], stdout=subprocess.PIPE, text=True
    )
    with Watch(process.pid, 0.2) as watch:
        out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the run has failed:\n{out}")
    return {
        "seconds": round(time.monotonic() - began, 1), "peak_pss_bytes": watch.peak_bytes, "pss_bytes": watch.pss,
        "rss_bytes": watch.rss, **json.loads(out.strip().splitlines()[-1]),
    }


def main() -> None:
    """Run with and without images, print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 255_490), ("side", 32), ("channels", 3), ("clients", 100), ("train", 50_000),
                          ("batch", 64), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store", type=int, help="bytes of the object store")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    described = options.pop("run")
    if described:
        run(json.loads(described))
        return
    found = {}
    for images in (0, options["images"]):
        with tempfile.TemporaryDirectory(prefix="raysim-images-") as folder:
            found[images] = watched({**options, "images": images, "folder": folder})
    without, made = found.values()
    print(f"{options['images']:,} images of {options['channels']} x {options['side']} x {options['side']}: "
          f"{options['images'] * options['channels'] * options['side'] ** 2 / 1e6:,.0f} MB; "
          f"{made['seconds']} s, without images {without['seconds']} s")
    print(f"{'peak of':28}{'PSS without':>14}{'PSS':>10}{'RSS without':>14}{'RSS':>10}   MB")
    for name in sorted(made["pss_bytes"], key=lambda name: -made["pss_bytes"][name]):
        row = [of[kind].get(name, 0) / 1e6 for kind in ("pss_bytes", "rss_bytes") for of in (without, made)]
        print(f"{name:28}{row[0]:14,.0f}{row[1]:10,.0f}{row[2]:14,.0f}{row[3]:10,.0f}")
    print(f"{'all at once':28}{without['peak_pss_bytes'] / 1e6:14,.0f}{made['peak_pss_bytes'] / 1e6:10,.0f}")
    print(json.dumps({**options, "without": without, "with": made}))


if __name__ == "__main__":
    main()
