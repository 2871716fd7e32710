"""Every open question about one GPU, in at most six minutes: what pays there, and how fast it is.

    python benchmarks/gpu.py [--device cuda] [--sections batching workers ...] [--json gpu.json]
    python benchmarks/gpu.py --dry-run               # on the CPU, tiny: does every section run

Needs torch, but neither Ray nor MLflow: what several workers do is done by processes of its own. Sections:

- batching: a local step of one client alone and of a group at once (`resources.client_batching`), in float32 and bf16
  (`resources.precision`); whether the trial that decides on batching passes; how far both ways are from each other.
- workers: 1, 2, 4 and 8 processes that train on the GPU at the same time (`resources.gpus_per_worker`), both ways.
- task: 1,000 clients of 50 images of 3 x 32 x 32 pixels, 50 of them a round in batches of 10, a test of 10,000 images
  every tenth round, 1,500 rounds: expected for each way and number of processes, then done with the fastest.
- generation: images a second of the shipped diffusion models, by batch size and precision.
- evaluation: test images a second.

Images are random: there is no accuracy. Each section runs in a process of its own with a time limit; one that fails
or is late keeps what it has measured until then, and the others go on. The last line is everything as JSON.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOTAL_S = 345.0  # for all sections together
LIMIT_S = {"batching": 70.0, "workers": 75.0, "task": 110.0, "generation": 60.0, "evaluation": 25.0}
DRY_S = 600.0  # for each section of a dry run, which shows whether it runs and not how fast
AIM_S = 30.0  # for the 1,500 rounds of the task
RAY_ROUND_S = 0.013  # what a run with Ray adds to a round, as measured on two CPU cores
SHAPE, CLASSES = (3, 32, 32), 10
Row = dict[str, Any]
Note = Callable[[Row], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    seconds: of each measurement.  clients, images: of the task, and the images of each.  cohort: its clients a round.
    test: its test images.  rounds: of the task.  try_s: for each way of doing it.  network: keys of the small CNN.
    """

    device: str = "cuda"
    seconds: float = 1.0
    models: tuple[str, ...] = ("cnn", "mlp", "resnet18")
    widths: tuple[int, ...] = (8, 16)
    processes: tuple[int, ...] = (1, 2, 4, 8)
    clients: int = 1000
    images: int = 50
    cohort: int = 50
    batch: int = 10
    test: int = 10_000
    rounds: int = 1500
    try_s: float = 3.0
    generated: tuple[tuple[str, tuple[int, ...]], ...] = (("cifar10", (64, 256, 1024)), ("digits", (1024,)))
    network: tuple[tuple[str, int], ...] = ()


DRY = Sizes(
    "cpu", 0.02, ("cnn", "linear"), (2,), (1, 2), 12, 8, 4, 4, 100, 3, 0.05, (("digits", (16,)),),
    (("width", 4), ("hidden", 8)),
)
PRECISIONS = ("float32", "bf16")
WAYS = (False, True)


# What every process needs


def prepare_torch(device: str) -> None:
    """As in a worker: one thread, deterministic kernels."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def make_model(sizes: Sizes, name: str) -> Any:
    """A raysim network for the benchmark's images, flat, on the device."""
    import torch

    from raysim.models import architectures
    from raysim.models.flat_model import FlatModel

    torch.manual_seed(0)
    keys = dict(sizes.network) if name == "cnn" else {}
    return FlatModel(getattr(architectures, name)(SHAPE[0], SHAPE[1:], CLASSES, **keys), sizes.device)


def make_scale() -> Any:
    """The scaling of images."""
    from raysim.models.flat_model import ImageScale

    return ImageScale((0.5,) * 3, (0.25,) * 3)


def make_trainer(sizes: Sizes, model: Any, precision: str) -> tuple[Any, str]:
    """(the trainer of several clients at once, "") or (None, why there is none)."""
    from raysim.local.batched.on_gpu import VmapTrainer
    from raysim.local.sgd import sgd

    local, scale = sgd(batch_size=sizes.batch, lr=0.01), make_scale()
    found = VmapTrainer.of(model, local, scale, precision == "bf16", SHAPE)
    return found, "" if found else VmapTrainer.obstacle(model, local, scale) or "the trial of its bits failed"


def named(at_once: bool) -> str:
    return "at once" if at_once else "alone"


def repeat(work: Callable[[], int], seconds: float, device: str) -> float:
    """Units of work a second, after one that loads: `work` does some and says how many."""
    import torch

    work()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        done += work()
    if device != "cpu":
        torch.cuda.synchronize()
    return done / (time.perf_counter() - began)


# Batched or not, bf16


def batching(sizes: Sizes, note: Note) -> None:
    """Local steps alone and at once."""
    for name in sizes.models:
        for precision in PRECISIONS:
            for row in steps_of_model(sizes, name, precision):
                note({"model": name, "precision": precision, **row})


def steps_of_model(sizes: Sizes, name: str, precision: str) -> Iterator[Row]:
    """Milliseconds of a client's step: alone, and its share of a group's, for groups of several sizes."""
    from raysim.local.batched.on_gpu import VmapTrainer
    from raysim.local.batched.timing import step_s
    from raysim.local.sgd import sgd

    model, scale, bf16 = make_model(sizes, name), make_scale(), precision == "bf16"
    trainer, why = make_trainer(sizes, model, precision)
    any_trainer = trainer or VmapTrainer(model, sgd(batch_size=sizes.batch, lr=0.01), scale, bf16, 1)
    alone_s = step_s(any_trainer, sizes.images, SHAPE, sizes.seconds, at_once=False)
    yield {"way": "alone", "ms_per_step": 1000 * alone_s}
    if trainer is None:
        yield {"way": "at once", "why_not": why}
        return
    for width in (*sizes.widths, trainer.width):
        group = VmapTrainer(model, trainer.algorithm, scale, bf16, width)
        each_s = step_s(group, sizes.images, SHAPE, sizes.seconds, at_once=True) / width
        yield {"way": "at once", "group": width, "ms_per_step": 1000 * each_s, "times_as_fast": alone_s / each_s}
    yield {"way": "difference of both, of the largest change", "fraction": difference(sizes, model, trainer)}


def difference(sizes: Sizes, model: Any, trainer: Any) -> float:
    """The largest difference of a client's trained parameters between both ways, over their largest change."""
    from raysim.local.batched.schedule import trial_clients
    from raysim.local.contract import Job
    from raysim.local.loop import train_client

    clients = trial_clients(model, trainer.algorithm.lr, sizes.images, SHAPE, 3)
    start_P = clients[0].job.start_P
    _, at_once_P = trainer.train(clients, 0)[1]
    job = Job(model, start_P, trainer.algorithm.lr, 0, 1, sizes.images)
    train_client(job, trainer.algorithm, clients[1].data, trainer.scale, 0, trainer.bf16)
    alone_P = model.params_P.detach().clone()
    model.restore({"params": start_P})
    return float((at_once_P - alone_P).abs().max() / (alone_P - start_P).abs().max())


# Processes that share the GPU


class Helper:
    """A process that trains as a worker does; answers one command after another through a pipe."""

    def __init__(self, sizes: Sizes) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(sizes, other), daemon=True)
        self.process.start()
        other.close()  # so that the end of the process is the end of the pipe

    def tell(self, *command: Any) -> None:
        self.pipe.send(command)


@contextlib.contextmanager
def helpers(sizes: Sizes) -> Iterator[list[Helper]]:
    """As many processes as are needed at most; ended afterwards."""
    started = [Helper(sizes) for _ in range(max(sizes.processes))]
    try:
        yield started
    finally:
        for helper in started:
            helper.process.kill()


def ask(chosen: Sequence[Helper], *command: Any) -> list[Any]:
    """The answers of these processes, which work at the same time."""
    for helper in chosen:
        helper.tell(*command)
    return gather(chosen)


def gather(chosen: Sequence[Helper]) -> list[Any]:
    """The answer of each to its oldest command; when all have answered, RuntimeError with the first that failed."""
    found = [helper.pipe.recv() for helper in chosen]
    for answer in found:
        if isinstance(answer, RuntimeError):
            raise answer
    return found


def serve(sizes: Sizes, pipe: Any) -> None:
    """The loop of a Helper."""
    prepare_torch(sizes.device)
    client_trainer = ClientTrainer(sizes)
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(getattr(client_trainer, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - sent on to the section, which ends with it
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


class ClientTrainer:
    """What a worker does in a round, without Ray: train its clients, add up their updates, test its chunks."""

    def __init__(self, sizes: Sizes) -> None:
        import numpy as np

        draw = np.random.default_rng(0)
        self.sizes = sizes
        self.images = draw.integers(0, 256, (sizes.clients, sizes.images, *SHAPE), np.uint8)
        self.labels = draw.integers(0, CLASSES, (sizes.clients, sizes.images))
        self.test = draw.integers(0, 256, (sizes.test, *SHAPE), np.uint8)
        self.scale = make_scale()

    def begin(self, precision: str, at_once: bool) -> Any:
        """Build the network; returns its state.  RuntimeError where clients cannot be trained at once."""
        from raysim.local.sgd import sgd

        self.model = make_model(self.sizes, "cnn")
        self.algorithm = sgd(batch_size=self.sizes.batch, lr=0.01)
        self.bf16 = precision == "bf16"
        self.group, why = make_trainer(self.sizes, self.model, precision) if at_once else (None, "")
        if why:
            raise RuntimeError(why)
        return self.model.state()

    def rate(self, seconds: float) -> float:
        """Images a second of training: as much of a cohort as a call of a worker has."""
        state = self.model.state()
        chosen = list(range(min(self.sizes.cohort, self.sizes.clients)))

        def work() -> int:
            self.round(1, state, chosen)
            return len(chosen) * self.sizes.images

        return repeat(work, seconds, self.sizes.device)

    def round(self, number: int, state: Any, chosen: list[int]) -> Any:
        """The exact sum of the updates of these clients, in grid units."""
        from raysim.engine.messages import SumWeights
        from raysim.engine.reduce import UpdateSums, checked_norm

        self.model.load(state)
        start_P = self.model.params_P.detach().clone()
        weights, sums = SumWeights(1 / self.sizes.cohort, 0.0, 0.0), None
        for loss, params_P in self._trained(number, start_P, chosen):
            update = {
                "delta": params_P - start_P, "buffers": self.model.buffers_F.clone(),
                "counters": self.model.counters.clone(),
            }
            checked_norm(loss, update)
            sums = sums or UpdateSums(update)
            sums.add(update, weights)
        return None if sums is None else sums.result()

    def _trained(self, number: int, start_P: Any, chosen: list[int]) -> Iterator[tuple[float, Any]]:
        """(loss, parameters) of each client after its training."""
        from raysim.local.batched.schedule import BatchedClient
        from raysim.local.contract import ClientData, Job
        from raysim.local.loop import train_client

        n = self.sizes.images
        clients = [
            BatchedClient(Job(self.model, start_P, 0.01, number, k, n), ClientData(self.images[k], self.labels[k], n))
            for k in chosen
        ]
        if self.group is not None:
            for places in self.group.groups([n] * len(clients), self.images[0, 0].size):
                for result, params_P in self.group.train([clients[i] for i in places], 0):
                    yield result.loss, params_P
            return
        for client in clients:
            self.model.restore({"params": start_P})
            result = train_client(client.job, self.algorithm, client.data, self.scale, 0, self.bf16)
            yield result.loss, self.model.params_P.detach()

    def evaluate(self, state: Any, which: Sequence[int]) -> int:
        """Right answers on these chunks of the test images."""
        import numpy as np

        from raysim.evaluation.accuracy import evaluate_chunks

        self.model.load(state)
        labels_N = np.arange(len(self.test)) % CLASSES
        results = evaluate_chunks(self.model, self.test, labels_N, CLASSES, self.scale, which)
        return sum(int(result.correct_C.sum()) for result in results)


def workers(sizes: Sizes, note: Note) -> None:
    """Images a second of several processes on one GPU."""
    with helpers(sizes) as started:
        for at_once in WAYS:
            for precision in PRECISIONS:
                for count in sizes.processes:
                    row = {"model": "cnn", "way": named(at_once), "precision": precision, "processes": count}
                    try:
                        ask(started[:count], "begin", precision, at_once)
                        rates = ask(started[:count], "rate", sizes.seconds)
                        note({**row, "images_per_s": sum(rates)})
                    except RuntimeError as error:
                        note({**row, "why_not": str(error)})


def task(sizes: Sizes, note: Note) -> None:
    """Rounds of the task by way, precision and number of processes, and all of them with the fastest in float32."""
    expected: list[tuple[float, bool, int]] = []
    with helpers(sizes) as started:
        for precision in PRECISIONS:
            for at_once in WAYS:
                for count in (count for count in sizes.processes if count <= 4):
                    row = {"way": named(at_once), "precision": precision, "processes": count}
                    try:
                        done, round_s, test_s = rounds(sizes, started[:count], precision, at_once, sizes.try_s)
                    except RuntimeError as error:
                        note({**row, "why_not": str(error)})
                        continue
                    all_s = round_s * sizes.rounds + test_s * (sizes.rounds // 10)
                    note({**row, "rounds": done, "ms_per_round": 1000 * round_s, "ms_per_test": 1000 * test_s,
                          "expected_s": all_s})
                    if precision == "float32":
                        expected.append((all_s, at_once, count))
        _, at_once, count = min(expected)
        began = time.perf_counter()
        done, *_ = rounds(sizes, started[:count], "float32", at_once, 1.5 * AIM_S)
        seconds = time.perf_counter() - began
        note({"way": named(at_once), "precision": "float32", "processes": count, "rounds": done, "seconds": seconds,
              "aim_s": AIM_S, "with_ray_s": seconds + done * RAY_ROUND_S, "all_rounds": done == sizes.rounds})


def rounds(
    sizes: Sizes, chosen: Sequence[Helper], precision: str, at_once: bool, seconds: float
) -> tuple[int, float, float]:
    """Rounds of federated averaging, and a test every tenth: (how many, median seconds of a round, of a test).

    They end when all are done, or `seconds` are over.
    """
    from dataclasses import replace

    import numpy as np

    from raysim.engine.reduce import PARAM_BITS, add_sums, from_units
    from raysim.evaluation.accuracy import chunks
    from raysim.federation.cohort import cohort

    state = ask(chosen, "begin", precision, at_once)[0]
    count, parts = len(chosen), chunks(sizes.test)
    rounds_s: list[float] = []
    tests_s: list[float] = []
    began = time.perf_counter()
    number = 0
    while number < sizes.rounds and (before := time.perf_counter()) - began < seconds:
        number += 1
        drawn = cohort(0, number, sizes.clients, sizes.cohort)
        for place, helper in enumerate(chosen):
            helper.tell("round", number, state, drawn[place::count])
        total = add_sums([found for found in gather(chosen) if found is not None])
        step_P = from_units(total.params_P, PARAM_BITS)
        state = replace(state, params_P=(state.params_P + step_P).astype(np.float32))
        rounds_s.append(time.perf_counter() - before)
        if number % 10 == 1:
            before = time.perf_counter()
            for place, helper in enumerate(chosen):
                helper.tell("evaluate", state, range(place, parts, count))
            gather(chosen)
            tests_s.append(time.perf_counter() - before)
    return number, float(np.median(rounds_s[1:] or rounds_s)), float(np.median(tests_s[1:] or tests_s))


# Generation, evaluation


def generation(sizes: Sizes, note: Note) -> None:
    """Images a second of the shipped diffusion models."""
    for weights, batches in sizes.generated:
        for precision in PRECISIONS:
            for batch in batches:
                rate = sampling(sizes, weights, batch, precision)
                note({"weights": weights, "batch": batch, "precision": precision, "images_per_s": rate})


def sampling(sizes: Sizes, weights: str, batch: int, precision: str) -> float:
    """Images a second of 20 steps each."""
    import numpy as np

    from raysim.core.records import Dataset
    from raysim.data.datasets import digits
    from raysim.generation.ddpm import ddpm

    dataset = digits()
    if weights == "cifar10":
        none, labels_N = np.zeros((CLASSES, *SHAPE), np.uint8), np.arange(CLASSES)
        names = tuple(map(str, range(CLASSES)))
        dataset = Dataset("cifar10", none, labels_N, none, labels_N, names, (0.5,) * 3, (0.25,) * 3)
    generator = ddpm(dataset, sizes.device, weights=weights, batch_size=batch, precision=precision)  # type: ignore[arg-type]

    def work() -> int:
        return len(generator.sample(np.arange(batch) % CLASSES, np.arange(batch)))

    return repeat(work, sizes.seconds, sizes.device)


def evaluation(sizes: Sizes, note: Note) -> None:
    """Test images a second of one process."""
    import numpy as np

    from raysim.evaluation.accuracy import chunks, evaluate_chunks

    images = np.random.default_rng(0).integers(0, 256, (1000, *SHAPE), np.uint8)
    labels_N, scale = np.arange(1000) % CLASSES, make_scale()
    for name in sizes.models:
        model = make_model(sizes, name)

        def work(model: Any = model) -> int:
            results = evaluate_chunks(model, images, labels_N, CLASSES, scale, range(chunks(1000)))
            return sum(int(result.total_C.sum()) for result in results)

        note({"model": name, "images_per_s": repeat(work, sizes.seconds, sizes.device)})


SECTIONS: dict[str, Callable[[Sizes, Note], None]] = {
    "batching": batching, "workers": workers, "task": task, "generation": generation, "evaluation": evaluation,
}


# All of it


def in_own_process(command: Sequence[str], limit_s: float) -> tuple[list[Row], str]:
    """(the rows that a command has written, why it did not end well, or nothing).

    The command gets the name of a file for its rows, one in JSON a line, as its last argument.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows, told = Path(folder) / "rows", Path(folder) / "told"
        rows.touch()
        with told.open("wb") as out:
            process = subprocess.Popen(
                [*command, str(rows)], stdout=out, stderr=out, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
                problem = ""
            except subprocess.TimeoutExpired:
                code, problem = 0, f"stopped after {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
                process.wait()
        if code:
            lines = told.read_text(errors="replace").strip().splitlines()
            problem = lines[-1][:300] if lines else f"exit status {code}"
        whole = [line for line in rows.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole], problem


def shown(row: Row) -> str:
    """A row as text."""
    texts = [
        f"{key} {value:,.4g}" if isinstance(value, float) and value < 1000 else
        f"{key} {value:,.0f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items() if key != "section"
    ]  # fmt: skip
    return f"{row['section']:12}" + "  ".join(texts)


def answers(rows: Sequence[Row], problems: dict[str, str]) -> dict[str, str]:
    """The questions that were open, each with its answer in a line."""
    found = {
        "batched or not": _batched(rows), "bf16": _bf16(rows), "workers per GPU": _workers(rows),
        "generation": _generation(rows), "1,500 rounds": _task(rows),
    }
    sections = dict(zip(found, ("batching", "batching", "workers", "generation", "task"), strict=True))
    return {
        question: answer or f"not answered: {problems.get(sections[question], 'its section was not asked for')}"
        for question, answer in found.items()
    }


def _of(rows: Sequence[Row], section: str, **keys: Any) -> list[Row]:
    return [row for row in rows if {"section": section, **keys}.items() <= row.items()]


def _batched(rows: Sequence[Row]) -> str:
    told = []
    for row in _of(rows, "batching", way="at once"):
        what = f"{row['model']} in {row['precision']}"
        if "why_not" in row:
            told.append(f"{what}: alone, {row['why_not']}")
        else:
            told.append(f"{what}, {row['group']} at once: {row['times_as_fast']:.2f} times as fast as alone")
    return "; ".join(told)


def _bf16(rows: Sequence[Row]) -> str:
    told = []
    for row in _of(rows, "batching", precision="bf16"):
        same = {key: row.get(key) for key in ("model", "way", "group") if key in row}
        for other in _of(rows, "batching", precision="float32", **same):
            if "ms_per_step" in row and "ms_per_step" in other:
                group = f" ({row['group']})" if "group" in row else ""
                ratio = other["ms_per_step"] / row["ms_per_step"]
                told.append(f"{row['model']} {row['way']}{group}: {ratio:.2f} times as fast as float32")
    return "; ".join(told)


def _workers(rows: Sequence[Row]) -> str:
    told = []
    for way in map(named, WAYS):
        measured = [row for row in _of(rows, "workers", way=way, precision="float32") if "images_per_s" in row]
        if measured:
            best = max(measured, key=lambda row: row["images_per_s"])
            one = measured[0]["images_per_s"]
            told.append(
                f"{way}: most with {best['processes']}, {best['images_per_s']:,.0f} images a second, "
                f"{best['images_per_s'] / one:.2f} times those with {measured[0]['processes']}"
            )
    return "; ".join(told)


def _generation(rows: Sequence[Row]) -> str:
    told = []
    for weights in dict.fromkeys(row["weights"] for row in _of(rows, "generation")):
        best = max(_of(rows, "generation", weights=weights), key=lambda row: row["images_per_s"])
        told.append(
            f"{weights}: {best['images_per_s']:,.0f} images a second, in batches of {best['batch']} in "
            f"{best['precision']}"
        )
    return "; ".join(told)


def _task(rows: Sequence[Row]) -> str:
    done = [row for row in _of(rows, "task") if "seconds" in row]
    if not done:
        return ""
    (row,) = done
    met = "within" if row["all_rounds"] and row["seconds"] <= AIM_S else "not within"
    return (
        f"{row['rounds']:,} rounds took {row['seconds']:.1f} s (processes: {row['processes']}; {row['way']}): {met} "
        f"{AIM_S:.0f} s; about {row['with_ray_s']:.1f} s with what Ray adds"
    )


def skipped(device: str) -> list[str]:
    """What this machine cannot answer, and why."""
    missing = [name for name in ("ray", "mlflow", "diffusers") if importlib.util.find_spec(name) is None]
    found = [f"whole runs with Ray, for which {1000 * RAY_ROUND_S:.0f} ms a round are added (benchmarks/rounds.py)"]
    if missing:
        found.append(f"not installed here: {', '.join(missing)}")
    if device == "cpu":
        found.append("no GPU: nothing here says anything about one")
    return found


def machine(device: str) -> Row:
    """What was measured on."""
    import torch

    name = platform.processor() if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}


def section_process(name: str, sizes: Sizes, file: Path) -> None:
    """Run a section in this process, its rows into a file as they come."""
    prepare_torch(sizes.device)
    with file.open("a") as out:

        def note(row: Row) -> None:
            out.write(json.dumps({"section": name, **row}) + "\n")
            out.flush()

        SECTIONS[name](sizes, note)


def main() -> None:
    """Run the sections and print what they found; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--in-process", nargs=2, metavar=("SECTION", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = DRY if options.dry_run else Sizes(options.device)
    if options.in_process:
        section_process(options.in_process[0], sizes, Path(options.in_process[1]))
        return
    began = time.monotonic()
    rows: list[Row] = []
    problems: dict[str, str] = {}
    flags = ["--dry-run"] if options.dry_run else ["--device", options.device]
    for name in options.sections:
        limit_s = DRY_S if options.dry_run else min(LIMIT_S[name], TOTAL_S - (time.monotonic() - began))
        command = [sys.executable, str(Path(__file__).resolve()), *flags, "--in-process", name]
        found, problem = in_own_process(command, max(1.0, limit_s))
        for row in found:
            print(shown(row), flush=True)
        if problem:
            problems[name] = problem
            print(f"{name:12}FAILED: {problem}", flush=True)
        rows += found
    about = machine(sizes.device)
    told = answers(rows, problems)
    print("\n" + "\n".join(f"{question}: {answer}" for question, answer in told.items()))
    print("\n".join(f"skipped: {text}" for text in skipped(sizes.device)))
    result = {**about, "answers": told, "failed": problems, "skipped": skipped(sizes.device), "rows": rows,
              "seconds": round(time.monotonic() - began, 1)}
    text = json.dumps(result)
    if options.json:
        Path(options.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
