"""Throughput of the synthesis phase against the bare sampling loop on the same cores, in one run.

The bare loop is what a careful user would write by hand: the network and the scheduler step, nothing around them, in
one process a core, for several batch sizes; the best one counts, measured before and after the phase. The synthesis
phase is a whole phase 1: keyed noise, queue, object store, checksums and the cache on disk. Both are run at the same
priority (Ray's workers would otherwise give way to whatever else runs), and, with a number of images that is a multiple
of 3,200, in whole batches. It takes about five times as long as the phase alone.

    python benchmarks/generation.py [--weights digits] [--images 6400] [--workers N] [--steps 20] [--guidance 1.0]

Prints a table, and a JSON object on the last line. Images per CPU second count the time of all processes, Ray's too: on
a machine that also does other work they say more than the clock.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update({"RAY_worker_niceness": "0"})
BATCHES = (16, 32, 64, 128)
WARM_UP = 16
Rate = tuple[float, float]  # images a second, images a CPU second


def bare(barrier: Any, answers: Any, options: dict[str, Any]) -> None:
    """One process of the bare loop: waits for the others, samples its share, answers with its seconds."""
    import torch
    from diffusers import DDIMScheduler, UNet2DModel

    torch.set_num_threads(1)
    unet = UNet2DModel.from_pretrained(options["folder"]).float().eval().to(memory_format=torch.channels_last)
    scheduler = DDIMScheduler.from_pretrained(options["folder"])
    size = unet.config.sample_size
    shape = (unet.config.in_channels, *((size, size) if isinstance(size, int) else size))
    null = unet.config.num_class_embeds - 1
    batch, guidance = options["batch"], options["guidance"]

    def sample(count: int) -> None:
        for start in range(0, count, batch):
            b = min(batch, count - start)
            labels = torch.arange(b) % null
            x = torch.randn(b, *shape).contiguous(memory_format=torch.channels_last)
            scheduler.set_timesteps(options["steps"])
            for t in scheduler.timesteps:
                predicted = unet(x, t, labels, return_dict=False)[0]
                if guidance != 1:
                    unconditional = unet(x, t, torch.full_like(labels, null), return_dict=False)[0]
                    predicted = unconditional + guidance * (predicted - unconditional)
                x = scheduler.step(predicted, t, x, return_dict=False)[0]
            ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()

    with torch.inference_mode():
        sample(WARM_UP)
        barrier.wait()
        began, began_cpu = time.perf_counter(), time.process_time()
        sample(options["images"])
        answers.put((time.perf_counter() - began, time.process_time() - began_cpu))


def bare_rate(options: dict[str, Any], workers: int) -> Rate:
    """`workers` processes that each make their share."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(workers), context.Queue()
    share = options["images"] // workers
    processes = [context.Process(target=bare, args=(barrier, answers, {**options, "images": share}))
                 for _ in range(workers)]
    for process in processes:
        process.start()
    seconds, cpu_s = zip(*[answers.get(timeout=3600) for _ in processes], strict=True)
    for process in processes:
        process.join()
    return share * workers / max(seconds), share * workers / sum(cpu_s)


def cpu_s() -> float:
    """CPU time so far of this process and all below it, such as Ray's."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def phase_rate(options: dict[str, Any], workers: int, batch: int) -> Rate:
    """Phase 1, with the cache, in a Ray of its own; everything is imported before the clock runs."""
    import numpy as np

    from raysim.config.schema import Resources
    from raysim.core.records import Allocation
    from raysim.data.datasets import digits
    from raysim.engine.messages import Plugin
    from raysim.engine.session import Session
    from raysim.federation.synthesis import Synthesis
    from raysim.ui.display import Display

    dataset = digits() if options["data"] is None else _parquet(options["data"])
    keys = {"weights": options["weights"], "steps": options["steps"], "guidance": options["guidance"]}
    generator = Plugin("generator", "ddpm", {**keys, "batch_size": batch})
    clients = 10
    quota_KC = np.full((clients, dataset.classes), options["images"] // (clients * dataset.classes), dtype=np.int64)
    resources = Resources(workers=workers)
    with Session(resources) as session, tempfile.TemporaryDirectory() as cache, Display(live=False) as display:
        pool = session.pool(resources)
        pool.configure(*_setup(dataset))
        Synthesis(pool, generator, dataset, 1, None, display).make(Allocation(quota_KC * 0 + 1))
        display.phase("images")
        began, began_cpu = time.perf_counter(), cpu_s()
        made = Synthesis(pool, generator, dataset, 0, cache, display).make(Allocation(quota_KC))
        seconds, used_cpu_s = time.perf_counter() - began, cpu_s() - began_cpu
    assert made.made == quota_KC.sum()
    return made.made / seconds, made.made / used_cpu_s


def _setup(dataset: Any) -> tuple[Any, Any, Any]:
    """What workers are configured with; the model and the clients are of no account here."""
    from raysim.aggregation.mean import fedavg
    from raysim.config.load import load_config
    from raysim.engine.object_store import put
    from raysim.lifecycle.build import worker_setup
    from raysim.lifecycle.prepare import make_partition

    config = load_config({"rounds": 1, "data": {"name": "digits"}, "partition": {"name": "iid", "clients": 2}})
    return worker_setup(config, fedavg()), put(dataset), put(make_partition(config, dataset))


def _parquet(path: str) -> Any:
    from raysim.data.files import parquet

    return parquet(path=path)


def main() -> None:
    """Measure both, print the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="digits")
    parser.add_argument("--data", help="parquet folder that the weights were trained on; by default the digits")
    parser.add_argument("--images", type=int, default=6400)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=1.0)
    options = vars(parser.parse_args())
    from raysim.generation.weights_folder import find_folder

    options["folder"] = str(find_folder(options["weights"]))
    workers = options.pop("workers")
    rates = {batch: bare_rate({**options, "batch": batch}, workers) for batch in BATCHES}
    best = max(rates, key=lambda batch: rates[batch])
    phase = phase_rate(options, workers, best)
    rates[best] = max(rates[best], bare_rate({**options, "batch": best}, workers))  # before and after: a fair best
    ratio, cpu_ratio = phase[0] / rates[best][0], phase[1] / rates[best][1]
    print(f"\n{Path(options['folder']).name}: {options['images']:,} images, {workers} processes of 1 thread, "
          f"DDIM {options['steps']} steps, guidance {options['guidance']}")
    for batch, (a_s, a_cpu_s) in rates.items():
        mark = "  (best)" if batch == best else ""
        print(f"  bare loop, batch {batch:>3}   {a_s:>9.1f} images/s   {a_cpu_s:>9.1f} per CPU second{mark}")
    print(f"  synthesis phase, {best:>3}   {phase[0]:>9.1f} images/s   {phase[1]:>9.1f} per CPU second")
    print(f"  the phase has {ratio:.3f} of the best bare loop by the clock, {cpu_ratio:.3f} by CPU time")
    print(json.dumps({
        **options, "workers": workers, "bare_images_per_s": {str(b): round(r[0], 2) for b, r in rates.items()},
        "bare_images_per_cpu_s": {str(b): round(r[1], 2) for b, r in rates.items()}, "best_batch": best,
        "phase_images_per_s": round(phase[0], 2), "phase_images_per_cpu_s": round(phase[1], 2),
        "ratio": round(ratio, 4), "cpu_ratio": round(cpu_ratio, 4),
    }))


if __name__ == "__main__":
    main()
