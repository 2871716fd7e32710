"""What one GPU can do: local training of several clients at once or in several processes, evaluation, and sampling.

    python benchmarks/gpu.py [--device cuda] [--seconds 2] [--processes 1 2 4 8] [--clients 8 16 32] [--json gpu.json]
    python benchmarks/gpu.py --smoke                 # on the CPU, tiny: does it run

Needs torch, but no Ray. Training: clients of 50 images of 3 x 32 x 32 pixels in batches of 10, each from the same
start, as a worker does it (copy in, train, subtract), in float32 and in bf16. Several processes share the GPU as Ray
workers would with `resources.gpus_per_worker` 1/2, 1/4, 1/8; the rate is that of all of them. Together: one process
trains so many clients at once, as `resources.client_batching` does on a GPU; it pays where that beats one at a time.
Evaluation: images a second of one process. Sampling: images a second of the shipped diffusion model (8 x 8 pixels, 20
steps) by batch size. Each measurement takes --seconds after a warm-up; with the defaults, all of it takes under five
minutes.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIENT, BATCH, CLIENTS = 50, 10, 20
SHAPE, CLASSES = (3, 32, 32), 10
WAIT_S = 240.0


def repeat(work: Callable[[], int], seconds: float, device: str) -> float:
    """Units of work a second: `work` does some and says how many."""
    import torch

    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        done += work()
    if device != "cpu":
        torch.cuda.synchronize()
    return done / (time.perf_counter() - began)


def make_model(name: str, device: str) -> Any:
    """A raysim network for the benchmark's images, flat, on the device."""
    import torch

    from raysim.models import architectures
    from raysim.models.flat_model import FlatModel

    torch.manual_seed(0)
    return FlatModel(getattr(architectures, name)(SHAPE[0], SHAPE[1:], CLASSES), device)


def make_clients(count: int) -> list[Any]:
    """The data of so many clients."""
    import numpy as np

    from raysim.local.contract import ClientData

    draw = np.random.default_rng(0)
    return [
        ClientData(draw.integers(0, 256, (CLIENT, *SHAPE), np.uint8), draw.integers(0, CLASSES, CLIENT), CLIENT)
        for _ in range(count)
    ]


def trainer(name: str, precision: str, device: str) -> Callable[[], int]:
    """Trains the next of 20 clients and says how many images that were."""
    from raysim.local.contract import Job
    from raysim.local.loop import train_client
    from raysim.local.sgd import sgd
    from raysim.models.flat_model import ImageScale

    model, local, scale = make_model(name, device), sgd(batch_size=BATCH, lr=0.01), ImageScale((0.5,) * 3, (0.25,) * 3)
    start, clients = model.snapshot(), make_clients(CLIENTS)
    number = 0

    def work() -> int:
        nonlocal number
        number += 1
        model.restore(start)
        job = Job(model, start["params"], 0.01, number, number % CLIENTS, CLIENT)
        train_client(job, local, clients[number % CLIENTS], scale, 0, precision == "bf16")
        return CLIENT

    return work


def together(name: str, precision: str, device: str, count: int, seconds: float) -> float:
    """Images a second of one process that trains so many clients at once."""
    from raysim.local.batched.on_gpu import VmapTrainer
    from raysim.local.batched.schedule import BatchedClient
    from raysim.local.contract import Job
    from raysim.local.sgd import sgd
    from raysim.models.flat_model import ImageScale

    model, scale = make_model(name, device), ImageScale((0.5,) * 3, (0.25,) * 3)
    batch = VmapTrainer(model, sgd(batch_size=BATCH, lr=0.01), scale, precision == "bf16", count)
    start_P, clients = model.snapshot()["params"], make_clients(count)

    def work() -> int:
        jobs = [Job(model, start_P, 0.01, 1, k, CLIENT) for k in range(count)]
        batch.train([BatchedClient(job, data) for job, data in zip(jobs, clients, strict=True)], 0)
        return count * CLIENT

    work()
    return repeat(work, seconds, device)


def share_of_gpu(options: dict[str, Any], barrier: Any, answers: Any) -> None:
    """One of several processes: warms up, waits for the others, answers with its images a second."""
    import torch

    torch.set_num_threads(1)
    work = trainer(options["model"], options["precision"], options["device"])
    repeat(work, options["seconds"] / 5, options["device"])
    barrier.wait(WAIT_S)
    answers.put(repeat(work, options["seconds"], options["device"]))


def training(options: dict[str, Any], processes: int) -> float:
    """Images a second of so many processes together."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(processes), context.Queue()
    started = [context.Process(target=share_of_gpu, args=(options, barrier, answers)) for _ in range(processes)]
    for process in started:
        process.start()
    try:
        return sum(answers.get(timeout=WAIT_S) for _ in started)
    finally:
        for process in started:
            process.join(10)
            if process.is_alive():
                process.kill()


def evaluation(name: str, device: str, seconds: float) -> float:
    """Test images a second of one process."""
    import numpy as np

    from raysim.evaluation.accuracy import chunks, evaluate_chunks
    from raysim.models.flat_model import ImageScale

    images = np.random.default_rng(0).integers(0, 256, (1000, *SHAPE), np.uint8)
    labels_N, model, scale = np.arange(1000) % CLASSES, make_model(name, device), ImageScale((0.5,) * 3, (0.25,) * 3)

    def work() -> int:
        results = evaluate_chunks(model, images, labels_N, CLASSES, scale, range(chunks(1000)))
        return sum(int(result.total_C.sum()) for result in results)

    work()
    return repeat(work, seconds, device)


def sampling(device: str, batch: int, precision: str, seconds: float) -> float:
    """Images a second of the shipped diffusion model."""
    import numpy as np

    from raysim.data.datasets import digits
    from raysim.generation.ddpm import ddpm

    generator = ddpm(digits(), device, batch_size=batch, precision=precision)  # type: ignore[arg-type]

    def work() -> int:
        return len(generator.sample(np.arange(batch) % CLASSES, np.arange(batch)))

    work()
    return repeat(work, seconds, device)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every measurement, printed as it is made."""
    found: list[dict[str, Any]] = []

    def note(what: str, rate: float, **keys: Any) -> None:
        found.append({"what": what, **keys, "images_per_s": round(rate, 1)})
        print(f"{what:12}" + "".join(f"{key} {value!s:10}" for key, value in keys.items()) + f"{rate:12,.0f} images/s",
              flush=True)  # fmt: skip

    for name in options.models:
        for precision in ("float32", "bf16"):
            for processes in options.processes:
                keys = {"model": name, "precision": precision, "device": options.device, "seconds": options.seconds}
                note("training", training(keys, processes), model=name, precision=precision, processes=processes)
            for count in options.clients:
                rate = together(name, precision, options.device, count, options.seconds)
                note("together", rate, model=name, precision=precision, clients=count)
        note("evaluation", evaluation(name, options.device, options.seconds), model=name)
    for precision in ("float32", "bf16"):
        for batch in options.batches:
            rate = sampling(options.device, batch, precision, options.seconds)
            note("sampling", rate, precision=precision, batch=batch)
    return found


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--clients", nargs="+", type=int, default=[8, 16, 32], help="trained at once by one process")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if options.smoke:
        options.device, options.seconds = "cpu", 0.1
        options.models, options.processes, options.batches, options.clients = ["cnn"], [1, 2], [16], [2, 8]
    result = json.dumps(measure(options))
    if options.json:
        Path(options.json).write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
