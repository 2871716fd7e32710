"""What training several clients at once gains on a CPU core, by network and by clients at a time. Needs no Ray.

    python benchmarks/client_batching.py [--groups 3 4 8 16] [--repeat 5] [--json batching.json]

48 clients, each from the same start: CPU time of one after the other (`training.train_client`) and of groups
(`CpuBatchTrainer`), the fastest of --repeat rounds of turns each. Sizes are all 50, or spread from 12 to 88.
Also checks that parameters and losses are the same bits.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim.local.batched.on_cpu import CpuBatchTrainer
from raysim.local.batched.schedule import BatchedClient
from raysim.local.contract import ClientData, Job
from raysim.local.loop import train_client
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

CLIENTS, BATCH, CLASSES, LR = 48, 10, 10, 0.01
CASES: list[tuple[str, tuple[int, int, int], Callable[..., Any]]] = [
    ("linear", (1, 28, 28), architectures.linear),
    ("linear", (3, 32, 32), architectures.linear),
    ("mlp 64", (1, 8, 8), partial(architectures.mlp, hidden=[64])),
    ("mlp 100", (1, 28, 28), partial(architectures.mlp, hidden=[100])),
]
Trained = dict[int, tuple[float, torch.Tensor]]
"""(loss, update) by client."""


def batched_clients(model: FlatModel, start_P: torch.Tensor, datas: list[ClientData]) -> list[BatchedClient]:
    """The clients before their first step."""
    return [BatchedClient(Job(model, start_P, LR, 1, k, data.n_real), data) for k, data in enumerate(datas)]


def alone(model: FlatModel, local: sgd, scale: ImageScale, datas: list[ClientData]) -> Trained:
    """One client after the other."""
    start, found = model.snapshot(), {}
    for k, client in enumerate(batched_clients(model, start["params"], datas)):
        model.restore(start)
        result = train_client(client.job, local, client.data, scale, seed=0)
        found[k] = result.loss, model.params_P.detach() - start["params"]
    model.restore(start)
    return found


def together(batch: CpuBatchTrainer, model: FlatModel, datas: list[ClientData], count: int) -> Trained:
    """In groups of `count`."""
    start_P = model.params_P.detach().clone()
    batch.most, found = count, {}
    clients = batched_clients(model, start_P, datas)
    for group in batch.groups([data.n_real for data in datas], 1):
        results = batch.train([clients[k] for k in group], seed=0)
        found.update({k: (r.loss, params_P - start_P) for k, (r, params_P) in zip(group, results, strict=True)})
    return found


def same(a: Trained, b: Trained) -> bool:
    """Whether all losses and updates agree to the last bit."""
    return all(a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1]) for k in a)


def measure(build: Callable[..., Any], shape: tuple[int, int, int], spread: bool, options: Any) -> dict[str, Any]:
    """CPU milliseconds a client of each way, by its name."""
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    sizes = draw.integers(12, 89, CLIENTS).tolist() if spread else [50] * CLIENTS
    datas = [ClientData(draw.integers(0, 256, (n, *shape), np.uint8), draw.integers(0, CLASSES, n), n) for n in sizes]
    model, local = FlatModel(build(shape[0], shape[1:], CLASSES)), sgd(batch_size=BATCH, lr=LR)
    scale = ImageScale((0.5,) * shape[0], (0.25,) * shape[0])
    batch = CpuBatchTrainer.of(model, local, scale)
    if batch is None:
        raise SystemExit("this machine computes stacks of products to other bits than single ones: no client batching")
    used = batch.most
    ways: dict[str, Callable[[], Trained]] = {"alone": lambda: alone(model, local, scale, datas)}
    for count in options.groups:
        ways[str(count)] = partial(together, batch, model, datas, count)
    expected = ways["alone"]()
    if not all(same(expected, way()) for way in ways.values()):
        raise SystemExit("client batching changed bits")
    best_ms = dict.fromkeys(ways, float("inf"))
    for _ in range(options.repeat):
        for name, way in ways.items():
            began = time.process_time()
            way()
            best_ms[name] = min(best_ms[name], 1e3 * (time.process_time() - began) / CLIENTS)
    return {"parameters": len(model.params_P), "used": used, "ms": best_ms}


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[3, 4, 8, 16])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", help="file for all results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print(f"{'network':14}{'images':>9}{'sizes':>7}{'weights':>9}{'alone ms':>10}  time by clients at a time, alone: 1")
    for name, shape, build in CASES:
        for spread in (False, True):
            case = measure(build, shape, spread, options)
            found.append({"network": name, "shape": shape, "spread": spread, **case})
            ms = case["ms"]
            ratios = "  ".join(f"{n}: {ms[str(n)] / ms['alone']:.2f}" for n in options.groups)
            print(
                f"{name:14}{'x'.join(map(str, shape)):>9}{'12-88' if spread else '50':>7}{case['parameters']:9,}"
                f"{ms['alone']:10.2f}  {ratios}  (a run takes {case['used']})", flush=True,
            )  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
