"""How many workers fit on which nodes: pure arithmetic; what cannot be placed is refused, never waited for."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raysim.config.schema import Resources
from raysim.core.errors import UserError
from raysim.core.host import physical_bytes

WORKER_BYTES = 400_000_000  # private memory of a worker process on CPU, with torch loaded
GPU_WORKER_BYTES = 1_500_000_000  # the machine's memory that a worker with CUDA's libraries and context takes
LEAST_FRACTION = 0.0001  # Ray counts a GPU in units of this


@dataclass(frozen=True)
class Node:
    """What one machine offers: a name for messages, CPU cores, GPUs, and memory where it is known."""

    name: str
    cpus: int
    gpus: int
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Placement:
    """How many workers there are in all, and the fraction of a GPU that each has (0: CPU only)."""

    workers: int
    gpus_per_worker: float

    @property
    def device(self) -> str:
        """What torch calls the device of a worker: cuda or cpu."""
        return "cuda" if self.gpus_per_worker > 0 else "cpu"

    def __str__(self) -> str:
        noun = "worker" if self.workers == 1 else "workers"
        if self.gpus_per_worker == 0:
            return f"{self.workers} {noun} on CPU"
        return f"{self.workers} {noun} with {self.gpus_per_worker:g} GPU each"


def local_node() -> Node:
    """This machine, with the cores, GPUs and memory that this process may use."""
    import torch

    memory = min(physical_bytes(), _memory_limit())
    return Node("this machine", len(os.sched_getaffinity(0)), torch.cuda.device_count(), memory)


def _memory_limit() -> int:
    """The bytes of memory that a container allows this process; sys.maxsize where there is no limit."""
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else sys.maxsize


def capacity(node: Node, fraction: float, threads: int = 1) -> int:
    """How many workers with this fraction of a GPU (0: none) and this many CPU cores each fit on a node.

    Where a worker has a fraction of a GPU, the node's memory is a limit, too, if it is known.
    """
    by_cores = node.cpus // threads
    if fraction == 0:
        return by_cores
    by_memory = by_cores if node.memory_bytes is None else node.memory_bytes // GPU_WORKER_BYTES
    return min(_on_gpus(node, fraction), by_cores, by_memory)


def _on_gpus(node: Node, fraction: float) -> int:
    """How many workers the GPUs of a node have room for."""
    return node.gpus * math.floor(1 / fraction + 1e-9) if fraction <= 1 else node.gpus // int(fraction)


def place(
    nodes: Sequence[Node],
    workers: Literal["auto"] | int,
    fraction: Literal["auto"] | float,
    more_than_cores: bool = False,
    threads: int = 1,
) -> Placement:
    """Place workers on `nodes`; UserError with the numbers where the request does not fit.

    A fraction below one packs floor(1 / fraction) workers on a GPU, never across GPUs; one above one must be whole and
    takes that many GPUs of one node.  "auto" with a number of workers: the largest 1 / m that has room for them.
    threads: CPU cores that a worker takes, with or without a GPU.  more_than_cores: a number of workers may be larger
    than the cores allow, as long as the memory, where it is known, holds them.
    """
    gpus = sum(n.gpus for n in nodes)
    if fraction == "auto":
        each = 1.0 if gpus else 0.0
        if gpus and workers != "auto" and workers > gpus:
            each = 1 / math.ceil(workers / gpus)
    else:
        each = float(fraction)
    if each == 0:
        return _on_cpus(nodes, workers, threads, more_than_cores)
    return _with_gpus(nodes, workers, each, threads, more_than_cores)


def place_here(resources: Resources) -> Placement:
    """Place the workers of a Ray that is started on this machine; UserError where they do not fit."""
    return place(
        [local_node()], resources.workers, resources.gpus_per_worker, more_than_cores=True,
        threads=resources.threads_per_worker,
    )


def crowding(placement: Placement, resources: Resources, node: Node) -> list[str]:
    """A note, where the workers of a Ray on this node compute with more threads than it has cores; else none."""
    threads = placement.workers * resources.threads_per_worker
    if threads <= node.cpus:
        return []
    workers = min(placement.workers, node.cpus)
    return [
        f"resources: {placement.workers} workers of {resources.threads_per_worker} threads each share {node.cpus} "
        f"cores, which is slower than workers={workers} threads_per_worker={node.cpus // workers}"
    ]


def _on_cpus(
    nodes: Sequence[Node], workers: Literal["auto"] | int, threads: int, more_than_cores: bool
) -> Placement:
    where = _described(nodes)
    cores = sum(n.cpus for n in nodes)
    fit = sum(capacity(n, 0, threads) for n in nodes)
    if cores == 0:
        raise UserError(f"no node has a CPU core for a worker ({where}); add nodes, or leave out --num-cpus=0")
    if fit == 0 and (workers == "auto" or not more_than_cores):
        raise _too_many_threads(nodes, threads)
    if workers == "auto":
        return Placement(fit, 0.0)
    if workers > fit and not more_than_cores:
        raise UserError(
            f"resources.workers = {workers}: each worker takes {_cores(threads)}, and there are {cores} ({where}); set "
            f"it to at most {fit}"
        )
    _check_memory(nodes, workers, fit, WORKER_BYTES, "one per core" if threads == 1 else f"{threads} cores each")
    return Placement(workers, 0.0)


def _with_gpus(
    nodes: Sequence[Node], workers: Literal["auto"] | int, fraction: float, threads: int, more_than_cores: bool
) -> Placement:
    where = _described(nodes)
    if not any(n.gpus for n in nodes):
        raise UserError(
            f"resources.gpus_per_worker = {fraction:g}: no GPU was found ({where}); set it to 0 to run on CPU"
        )
    if fraction < LEAST_FRACTION:
        raise UserError(
            f"resources.gpus_per_worker = {fraction:g}: Ray counts a GPU in units of {LEAST_FRACTION:g}; give at least "
            "that, or 0 to run on CPU"
        )
    if fraction > 1 and fraction != int(fraction):
        raise UserError(f"resources.gpus_per_worker = {fraction:g}: fractions above 1 must be whole numbers of GPUs")
    fraction = math.floor(fraction / LEAST_FRACTION + 1e-6) / round(1 / LEAST_FRACTION)  # as Ray can count it: 1/6
    on_gpus = sum(_on_gpus(n, fraction) for n in nodes)
    if on_gpus == 0:
        raise UserError(f"resources.gpus_per_worker = {fraction:g}: no node has that many GPUs ({where})")
    fit = sum(capacity(n, fraction, threads) for n in nodes)
    if fit == 0 and (workers == "auto" or not more_than_cores):
        raise _too_many_threads([n for n in nodes if n.gpus], threads)
    if workers == "auto":
        return Placement(fit, fraction)
    if workers > on_gpus:
        per_gpu = _on_gpus(Node("", 0, 1), fraction)
        one_gpu_holds = f"one GPU holds floor(1 / {fraction:g}) = {per_gpu}"
        packs = one_gpu_holds if fraction <= 1 else f"each takes {fraction:g} GPUs"
        raise UserError(
            f"resources.workers = {workers} with gpus_per_worker = {fraction:g} do not fit: {packs}, "
            f"so {on_gpus} fit in all "
            f"({where}); set resources.workers to at most {on_gpus}, or a smaller fraction"
        )
    if workers > fit and not more_than_cores:
        raise UserError(
            f"resources.workers = {workers} with gpus_per_worker = {fraction:g} do not fit: the GPUs have room for "
            f"{on_gpus}, but each worker takes {_cores(threads)} too, so {fit} fit in all ({where}); set "
            f"resources.workers to at most {fit}"
        )
    _check_memory(nodes, workers, fit, GPU_WORKER_BYTES, "as many as cores, GPUs and memory hold")
    return Placement(workers, fraction)


def _described(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{n.name}: {n.gpus} GPU, {n.cpus} CPU" for n in nodes)


def _cores(threads: int) -> str:
    return "a CPU core" if threads == 1 else f"{threads} CPU cores (resources.threads_per_worker)"


def _too_many_threads(nodes: Sequence[Node], threads: int) -> UserError:
    """No worker fits anywhere for want of cores, or of memory."""
    most = max(n.cpus for n in nodes)
    where = _described(nodes)
    if most >= threads:
        return UserError(f"no node has {GPU_WORKER_BYTES / 1e9:g} GB of memory for a worker with a GPU ({where})")
    if most == 0:
        return UserError(f"no node has a CPU core for a worker ({where}); add nodes, or leave out --num-cpus=0")
    return UserError(
        f"resources.threads_per_worker = {threads}: no node has that many CPU cores ({where}); set it to at most {most}"
    )


def _check_memory(nodes: Sequence[Node], workers: int, fit: int, each: int, auto: str) -> None:
    """UserError for more workers than `fit` that the memory, where it is known, cannot hold; each: bytes of one."""
    memory = sum(n.memory_bytes or 0 for n in nodes)
    if workers > fit and memory and workers * each > memory:
        cores = sum(n.cpus for n in nodes)
        raise UserError(
            f"resources.workers = {workers}: a worker takes about {each / 1e9:g} GB of memory before any data, "
            f"so these take {workers * each / 1e9:,.0f} GB, and there are {memory / 1e9:,.0f} GB and {cores} "
            f"cores; set it to at most {memory // each}; `auto` takes {fit}, {auto}"
        )
