"""How many workers fit where: arithmetic, shown before it runs; what cannot be placed is refused, never waited for."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raysim.core.errors import UserError
from raysim.core.host import physical_bytes

WORKER_BYTES = 400_000_000  # private to a worker process with torch loaded, on CPU


@dataclass(frozen=True)
class Node:
    """What one machine offers: a name for messages, CPU cores, GPUs, and memory where it is known."""

    name: str
    cpus: int
    gpus: int
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Placement:
    """workers in all, each with a fraction of a GPU (0: CPU only)."""

    workers: int
    gpus_per_worker: float

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_worker > 0 else "cpu"

    def __str__(self) -> str:
        noun = "worker" if self.workers == 1 else "workers"
        if self.gpus_per_worker == 0:
            return f"{self.workers} {noun} on CPU"
        return f"{self.workers} {noun} with {self.gpus_per_worker:g} GPU each"


def local_node() -> Node:
    """This machine, as far as this process may use it."""
    import torch

    memory = min(physical_bytes(), _memory_limit())
    return Node("this machine", len(os.sched_getaffinity(0)), torch.cuda.device_count(), memory)


def _memory_limit() -> int:
    """What a container allows this process; more than any machine has, without a limit."""
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else sys.maxsize


def capacity(node: Node, fraction: float) -> int:
    """How many workers with this fraction of a GPU (0: none, but a CPU core) fit on a node."""
    if fraction == 0:
        return node.cpus
    return node.gpus * math.floor(1 / fraction + 1e-9) if fraction <= 1 else node.gpus // int(fraction)


def place(
    nodes: Sequence[Node],
    workers: Literal["auto"] | int,
    fraction: Literal["auto"] | float,
    more_than_cores: bool = False,
) -> Placement:
    """The workers that fit on `nodes`; UserError with the numbers where the request does not fit.

    A fraction below one packs floor(1 / fraction) workers on a GPU, never across GPUs; one above one must be whole and
    takes that many GPUs of one node. A CPU worker takes a core; more_than_cores: unless asked for by number, as long as
    the memory, where it is known, holds them.
    """
    gpus = sum(n.gpus for n in nodes)
    where = ", ".join(f"{n.name}: {n.gpus} GPU, {n.cpus} CPU" for n in nodes)
    if fraction == "auto":
        each = min(1.0, gpus / workers) if gpus and workers != "auto" else float(gpus > 0)
    else:
        each = float(fraction)
    return _place(nodes, workers, each, gpus, where, more_than_cores)


def _place(
    nodes: Sequence[Node], workers: Literal["auto"] | int, fraction: float, gpus: int, where: str, more_than_cores: bool
) -> Placement:
    if fraction == 0:
        cores = sum(n.cpus for n in nodes)
        if cores == 0:
            raise UserError(f"no node has a CPU core for a worker ({where}); add nodes, or leave out --num-cpus=0")
        if workers != "auto" and workers > cores and not more_than_cores:
            raise UserError(
                f"resources.workers = {workers}: each worker takes a CPU core, and there are {cores} ({where}); set it "
                f"to at most {cores}"
            )
        if workers != "auto":
            _check_memory(nodes, workers, cores)
        return Placement(cores if workers == "auto" else workers, 0.0)
    if gpus == 0:
        raise UserError(
            f"resources.gpus_per_worker = {fraction:g}: no GPU was found ({where}); set it to 0 to run on CPU"
        )
    if fraction > 1 and fraction != int(fraction):
        raise UserError(f"resources.gpus_per_worker = {fraction:g}: fractions above 1 must be whole numbers of GPUs")
    fit = sum(capacity(n, fraction) for n in nodes)
    if fit == 0:
        raise UserError(f"resources.gpus_per_worker = {fraction:g}: no node has that many GPUs ({where})")
    if workers == "auto":
        return Placement(fit, fraction)
    if workers > fit:
        per_gpu = capacity(Node("", 0, 1), fraction)
        one_gpu_holds = f"one GPU holds floor(1 / {fraction:g}) = {per_gpu}"
        packs = one_gpu_holds if fraction <= 1 else f"each takes {fraction:g} GPUs"
        raise UserError(
            f"resources.workers = {workers} with gpus_per_worker = {fraction:g} do not fit: {packs}, "
            f"so {fit} fit in all "
            f"({where}); set resources.workers to at most {fit}, or a smaller fraction"
        )
    return Placement(workers, fraction)


def _check_memory(nodes: Sequence[Node], workers: int, cores: int) -> None:
    """UserError for more workers than cores that the memory cannot hold."""
    memory = sum(n.memory_bytes or 0 for n in nodes)
    if workers > cores and memory and workers * WORKER_BYTES > memory:
        raise UserError(
            f"resources.workers = {workers}: a worker takes about {WORKER_BYTES / 1e9:g} GB of memory before any data, "
            f"so these take {workers * WORKER_BYTES / 1e9:,.0f} GB, and there are {memory / 1e9:,.0f} GB and {cores} "
            f"cores; set it to at most {memory // WORKER_BYTES}; `auto` takes {cores}, one per core"
        )
