"""The batches of each client of a group, epoch by epoch, and the losses that they gave."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raysim.core import rng
from raysim.core.records import IntArray
from raysim.local.contract import ClientData, Job, LocalResult
from raysim.local.loop import batches
from raysim.local.sgd import sgd
from raysim.models.flat_model import FlatModel


@dataclass(frozen=True)
class BatchedClient:
    """A client that is trained in a group, with the arguments that `local.loop.train_client` takes for it."""

    job: Job
    data: ClientData


def trial_clients(model: FlatModel, lr: float, n: int, image_shape: Sequence[int], count: int) -> list[BatchedClient]:
    """Clients of n random samples of two classes, which start from the model's present parameters.

    image_shape: channels, height, width.
    """
    draw = np.random.default_rng(0)
    start_P = model.params_P.detach().clone()
    return [
        BatchedClient(
            Job(model, start_P, lr, 0, k, n),
            ClientData(draw.integers(0, 256, (n, *image_shape), np.uint8), draw.integers(0, 2, n), n),
        )
        for k in range(count)
    ]


@dataclass
class BatchSchedule:
    """One client's batches.

    epochs: the rows of each batch, by epoch.  losses: those of the last epoch, one for each batch.
    """

    epochs: list[list[IntArray]]
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, algorithm: sgd, seed: int) -> "BatchSchedule":
        """The schedule with the batches that this client has when it trains alone."""
        order = rng.stream(seed, rng.BATCHES, job.round, job.client)
        epochs: list[list[IntArray]] = [[]]
        for rows, last in batches(job.n, algorithm.batch_size, algorithm.epochs, algorithm.steps, order, norm=False):
            epochs[-1].append(rows)
            if last:
                epochs.append([])
        return cls(epochs[:-1])

    def rows(self, epoch: int, step: int) -> IntArray | None:
        """The rows of the samples of a step; None if the client has no such step."""
        exists = epoch < len(self.epochs) and step < len(self.epochs[epoch])
        return self.epochs[epoch][step] if exists else None

    @property
    def steps(self) -> int:
        """How many steps all epochs have together."""
        return sum(map(len, self.epochs))

    def result(self, seconds: float) -> LocalResult:
        """The result as `local.loop.train_client` would return it.  seconds: the wall time of this client."""
        sizes = torch.tensor([len(rows) for rows in self.epochs[-1]], device=self.losses[0].device)
        loss = float(torch.stack(self.losses).mul_(sizes).sum(dtype=torch.float64)) / int(sizes.sum())
        return LocalResult(loss, self.steps, seconds, None)


def packed(
    places: Sequence[int], sizes_K: Sequence[int], image_bytes: int, most: int, most_bytes: int, least: int = 1
) -> list[list[int]]:
    """Split clients into groups of at most `most` clients and `most_bytes` of images; returns lists of positions.

    places: positions of the clients in sizes_K, the largest first.  A client whose group would have fewer than `least`
    is a group of its own.
    """
    groups: list[list[int]] = []
    left = list(places)
    while left:
        count = min(most, len(left), most_bytes // (image_bytes * max(1, sizes_K[left[0]])))
        count = count if count >= least else 1
        groups.append(left[:count])
        left = left[count:]
    return groups
