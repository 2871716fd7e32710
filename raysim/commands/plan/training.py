"""How long the rounds of a configuration take here, measured with a few local steps and a few test images."""

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.allocation.common import asks_for_clients
from raysim.allocation.schedule import AllocationSchedule
from raysim.config.plugin_guard import blaming
from raysim.config.schema import Config
from raysim.core.errors import RunError, UserError
from raysim.core.records import Dataset, FloatArray, IntArray
from raysim.federation.cohort import cohort, cohort_size

if TYPE_CHECKING:
    from raysim.models.flat_model import FlatModel, ImageScale

LEAST_S = 0.5  # seconds of measured steps: what a busy core loses evens out
MOST_STEPS = 200
_TEST_IMAGES = 200


@dataclass(frozen=True)
class TrainingSpeed:
    """How fast local training and evaluation are.

    per_image_s: seconds of one worker for an image of a local step; None where not measured, and `note` says why.
    per_test_image_s: the same for an image of an evaluation.  lanes: workers that run at full speed at the same time.
    """

    per_image_s: float | None
    per_test_image_s: float
    lanes: int
    note: str

    def seconds(
        self, config: Config, dataset: Dataset, sizes_K: IntArray, schedule: AllocationSchedule | None = None
    ) -> float | None:
        """The estimated seconds of all rounds with their evaluations, not counting images and starts; None if unknown.

        sizes_K: samples of each client, real and synthetic.  schedule: when a policy is asked again, for which models
        are measured, and clients trained if it asks for theirs.  A round lasts as long as its share for each worker,
        and at least as long as its largest client.
        """
        if self.per_image_s is None:
            return None
        cost_K = self.per_image_s * _images_trained(config, sizes_K)
        K = len(sizes_K)
        size = cohort_size(config.clients_per_round, K)
        if size == K:
            rounds_s = config.rounds * self._round_s(cost_K)
        else:
            drawn = (cohort(config.seed, number, K, size) for number in range(1, config.rounds + 1))
            rounds_s = sum(self._round_s(cost_K[clients]) for clients in drawn)
        validation = 0 if dataset.validation_labels_N is None else len(dataset.validation_labels_N)
        evaluations = 1 + math.ceil(config.rounds / config.evaluate_every)
        test_s = self.per_test_image_s * (len(dataset.test_labels_N) + validation) / self.lanes
        if schedule is not None and schedule.asks_measured:
            of_clients = asks_for_clients(schedule.asks_measured)
            models = 1 + K * of_clients
            measure_s = self.per_test_image_s * validation * models / self.lanes
            rounds_s += len(schedule.at) * (measure_s + of_clients * self._round_s(cost_K))
        return rounds_s + evaluations * test_s

    def _round_s(self, cost_K: FloatArray) -> float:
        return float(max(cost_K.sum() / self.lanes, cost_K.max()))


def local_steps(config: Config, sizes_K: IntArray) -> IntArray:
    """The local steps of each client in a round that it takes part in.  sizes_K: its samples, real and synthetic."""
    params = config.local.params
    if params.get("steps"):
        return np.full(len(sizes_K), params["steps"], dtype=np.int64)
    steps_K: IntArray = -(-sizes_K // params.get("batch_size", 1)) * params.get("epochs", 1)
    return steps_K


def _images_trained(config: Config, sizes_K: IntArray) -> FloatArray:
    """How many images each client passes through the network in a round."""
    params = config.local.params
    if not params.get("steps"):
        return np.asarray(params.get("epochs", 1) * sizes_K, dtype=np.float64)
    batches_K = np.maximum(1, -(-sizes_K // params["batch_size"]))
    return np.asarray(params["steps"] * sizes_K / batches_K, dtype=np.float64)  # the last batch of an epoch is small


def measure(config: Config, dataset: Dataset) -> TrainingSpeed:
    """Time local steps and an evaluation in this process, on the device that a worker would use.

    Never raises for a configuration that does not suit the data or the machine: the answer then says why.
    """
    if not dataset.image_bytes or not len(dataset.test_labels_N):
        return TrainingSpeed(None, 0.0, 1, f"training was not timed: the data set {dataset.name!r} has no images")
    try:
        with blaming({"local.name": config.local.name, "model.name": config.model.name}):
            return _timed(config, dataset)
    except (UserError, RunError) as error:
        return TrainingSpeed(None, 0.0, 1, f"training was not timed: {error}")


def _timed(config: Config, dataset: Dataset) -> TrainingSpeed:
    import torch

    from raysim.engine.placement import place_here
    from raysim.evaluation.accuracy import evaluate_chunks
    from raysim.lifecycle.build import plugin
    from raysim.models.flat_model import FlatModel, ImageScale, build_model

    placement = place_here(config.resources)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.resources.threads_per_worker)
    try:
        build = plugin("model", config.model).build
        module = build_model(build, dataset.channels, dataset.image_size, dataset.classes, config.model_seed)
        model = FlatModel(module, placement.device)
        augment = config.data.augment
        scale = ImageScale(dataset.mean, dataset.std, "crop" in augment, "flip" in augment)
        per_step_s, batch = _per_step(config, dataset, model, scale)
        tested = min(_TEST_IMAGES, len(dataset.test_labels_N))
        images, labels_N = dataset.test_images[:tested], dataset.test_labels_N[:tested]
        began = time.perf_counter()
        evaluate_chunks(model, images, labels_N, dataset.classes, scale, range(math.ceil(tested / 50)))
        per_test_image_s = (time.perf_counter() - began) / tested
    finally:
        torch.set_num_threads(threads)
    if placement.device == "cpu":
        lanes = max(1, min(placement.workers, len(os.sched_getaffinity(0)) // config.resources.threads_per_worker))
        where = f"{lanes} workers on this machine's CPU cores"
    else:
        lanes = placement.workers
        where = f"{lanes} workers on this machine's GPUs"
    note = (
        f"training: a local step of {batch} images took {1000 * per_step_s:.1f} ms; estimated for {config.rounds} "
        f"rounds on {where}, with evaluations"
    )
    return TrainingSpeed(per_step_s / batch, per_test_image_s, lanes, note)


def _per_step(config: Config, dataset: Dataset, model: "FlatModel", scale: "ImageScale") -> tuple[float, int]:
    """(seconds of a local step, images in it), over the steps of half a second, after some that load what they need."""
    import torch

    from raysim.lifecycle.build import plugin
    from raysim.local.contract import Job
    from raysim.local.loop import client_data, train_client

    params = config.local.params
    n = min(int(params.get("batch_size", 32)), len(dataset.train_labels_N))
    data = client_data(dataset.train_images, np.arange(n), dataset.train_labels_N[:n], None, None, 0.0, None)
    start = model.snapshot()["params"]

    def steps(count: int) -> float:
        section = config.local.model_copy(update={"steps": count})
        algorithm = plugin("local", section).build()
        vectors = {name: torch.zeros_like(start) for name in algorithm.broadcast}
        job = Job(model, start, algorithm.learning_rate(1), 1, 0, n, broadcast_vectors=vectors)
        bf16 = config.resources.precision == "bf16"
        return train_client(job, algorithm, data, scale, 0, bf16, config.aggregation.buffers == "global").seconds

    first_s = steps(3) / 3
    count = int(min(MOST_STEPS, max(5, LEAST_S / max(first_s, 1e-6))))
    return steps(count) / count, n
