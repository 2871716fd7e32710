"""How fast the configured generator makes images on this machine, measured with one small batch."""

import math
import os
import time
from dataclasses import dataclass

import numpy as np

from raysim.config.plugin_guard import ask_generator
from raysim.config.protocols import ImageGenerator
from raysim.config.registry import resolve
from raysim.config.schema import Config
from raysim.core import rng
from raysim.core.errors import RunError, UserError
from raysim.core.records import Dataset

SMALL_BATCH = 16
_CACHE_KEY_BYTES = 24  # client, class and index beside each image in the cache


@dataclass(frozen=True)
class Speed:
    """How fast the generator is.

    images_per_s: images per second of one worker; None where it was not measured, and `note` says why.
    lanes: workers that run at full speed at the same time (those that share a GPU or a core count as one).
    """

    images_per_s: float | None
    lanes: int
    note: str

    def seconds(self, images: int) -> float | None:
        """The estimated seconds to make so many images, not counting the start of Ray and loading; None if unknown."""
        return None if self.images_per_s is None else images / (self.images_per_s * self.lanes)


def bytes_per_image(dataset: Dataset) -> int | None:
    """The bytes of one image in the cache, with its key; None for data without images."""
    height, width = dataset.image_size
    return dataset.channels * height * width + _CACHE_KEY_BYTES if height and width else None


def measure(config: Config, dataset: Dataset) -> Speed:
    """Time one small batch of the configured generator in this process, on the device that a worker would use.

    Never raises for a generator that does not suit the data or the machine: the answer then says why.
    """
    if bytes_per_image(dataset) is None:
        return Speed(None, 1, f"generation was not timed: the data set {dataset.name!r} has no images")
    try:
        return _timed(config, dataset)
    except (UserError, RunError) as error:
        return Speed(None, 1, f"generation was not timed: {error}")


def _timed(config: Config, dataset: Dataset) -> Speed:
    import torch

    from raysim.engine.placement import place_here

    placement = place_here(config.resources)
    name = config.generator.name
    device = placement.device
    params = dict(config.generator.params)
    kind = resolve("generator", name)
    batch = kind.images_per_call(**params)
    if device == "cpu":
        batch = min(SMALL_BATCH, batch)
        if isinstance(params.get("batch_size"), int):
            params["batch_size"] = batch  # others are padded to their full batch
    threads = torch.get_num_threads()
    torch.set_num_threads(config.resources.threads_per_worker)
    try:
        generator = kind(dataset, device, **params)
        if device != "cpu" or generator.memory_bytes():
            # The first batch on a GPU chooses and loads its kernels; one of a large generator reads its weights.
            _sample(name, generator, dataset, batch)
        rate = batch / _sample(name, generator, dataset, batch)
    finally:
        torch.set_num_threads(threads)
    if device == "cpu":
        lanes = min(placement.workers, len(os.sched_getaffinity(0)))
        where = f"{lanes} of this machine's CPU cores"
    else:
        lanes = max(1, math.ceil(placement.workers * placement.gpus_per_worker - 1e-9))
        where = f"{lanes} of this machine's GPUs"
    return Speed(rate, lanes, f"time: one batch of {batch} gave {rate:,.2f} images/s; estimated for {where}")


def _sample(name: str, generator: ImageGenerator, dataset: Dataset, batch: int) -> float:
    """Seconds for one batch, its labels spread over the classes."""
    labels_B = np.arange(batch, dtype=np.int64) % dataset.classes
    seeds_B = np.array([rng.integer(0, rng.SYNTHETIC, -1, i) for i in range(batch)], dtype=np.int64)
    began = time.perf_counter()
    ask_generator(name, generator, labels_B, seeds_B, dataset)
    return time.perf_counter() - began
