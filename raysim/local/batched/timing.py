"""How long a local step takes on this machine: of one client alone, and of a group of clients at once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from raysim.local.batched.on_gpu import VmapTrainer
from raysim.local.batched.schedule import trial_clients
from raysim.local.contract import Job
from raysim.local.loop import train_client
from raysim.local.sgd import sgd

MOST_STEPS = 10  # of one client that is timed: enough to spread what a client costs besides its steps
Clock = Callable[[], float]
"""Returns the time in seconds."""


def steps_of(algorithm: sgd, n: int) -> int:
    """The local steps of a client of n samples in a round."""
    return algorithm.steps or algorithm.epochs * -(-n // algorithm.batch_size)


def step_s(
    trainer: VmapTrainer, n: int, image_shape: Sequence[int], seconds: float, *, at_once: bool,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of a local step with what a client of n samples costs besides, such as copying its images.

    The network, the algorithm, the precision and the size of a batch are those of the trainer; the client's steps are
    cut to MOST_STEPS.  image_shape: channels, height, width.  seconds: how long to time, at least.  at_once: of a full
    group, which takes a step together; else of one client alone, as `local.loop.train_client` trains it.

    The model ends with the parameters that it had.
    """
    steps = min(MOST_STEPS, steps_of(trainer.algorithm, n))
    n = min(n, steps * trainer.algorithm.batch_size)
    algorithm = replace(trainer.algorithm, epochs=1, steps=steps)
    model, scale, bf16 = trainer.model, trainer.scale, trainer.bf16
    clients = trial_clients(model, algorithm.lr, n, image_shape, trainer.width if at_once else 1)
    start_P = clients[0].job.start_P
    group = VmapTrainer(model, algorithm, scale, bf16, trainer.width)

    def train() -> None:
        if at_once:
            group.train(clients, 0)
        else:
            train_client(Job(model, start_P, algorithm.lr, 0, 0, n), algorithm, clients[0].data, scale, 0, bf16)
            model.restore({"params": start_P})

    return median_s(train, seconds, clock) / steps


def median_s(work: Callable[[], object], seconds: float, clock: Clock) -> float:
    """The median time of one `work`, done again and again for so many seconds.

    A third of that time goes before, in which what is needed is loaded and the device comes up to speed.
    """
    began = clock()
    work()
    while clock() - began < seconds / 3:
        work()
    looked = [clock()]
    while len(looked) < 2 or looked[-1] - looked[0] < seconds:
        work()
        looked.append(clock())
    return median(after - before for before, after in pairwise(looked))
