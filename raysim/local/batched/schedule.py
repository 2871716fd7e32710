"""What the clients of a group go through: the batches of each, epoch by epoch, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raysim.core import rng
from raysim.core.records import IntArray
from raysim.local.contract import ClientData, Job, LocalResult
from raysim.local.loop import batches
from raysim.local.sgd import sgd


@dataclass(frozen=True)
class BatchedClient:
    """A client of a group.  job: as in `local.loop.train_client`."""

    job: Job
    data: ClientData


@dataclass
class BatchSchedule:
    """What a client goes through: the rows of each batch, by epoch; the losses of the last epoch."""

    epochs: list[list[IntArray]]
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, algorithm: sgd, seed: int) -> "BatchSchedule":
        """The batches that this client sees when it trains alone."""
        order = rng.stream(seed, rng.BATCHES, job.round, job.client)
        epochs: list[list[IntArray]] = [[]]
        for rows, last in batches(job.n, algorithm.batch_size, algorithm.epochs, algorithm.steps, order, norm=False):
            epochs[-1].append(rows)
            if last:
                epochs.append([])
        return cls(epochs[:-1])

    def rows(self, epoch: int, step: int) -> IntArray | None:
        """The samples of a step, if the client takes it."""
        there = epoch < len(self.epochs) and step < len(self.epochs[epoch])
        return self.epochs[epoch][step] if there else None

    @property
    def steps(self) -> int:
        """Steps of all epochs together."""
        return sum(map(len, self.epochs))

    def result(self, seconds: float) -> LocalResult:
        """The result as `local.loop.train_client` gives it."""
        sizes = torch.tensor([len(rows) for rows in self.epochs[-1]], device=self.losses[0].device)
        loss = float(torch.stack(self.losses).mul_(sizes).sum(dtype=torch.float64)) / int(sizes.sum())
        return LocalResult(loss, self.steps, seconds, None)


def packed(
    places: Sequence[int], sizes_K: Sequence[int], image_bytes: int, most: int, most_bytes: int, least: int = 1
) -> list[list[int]]:
    """Positions of clients, given the largest first, in groups of at most `most` clients and `most_bytes` of images.

    Those of a group that would have fewer than `least` are each alone.
    """
    groups: list[list[int]] = []
    left = list(places)
    while left:
        count = min(most, len(left), most_bytes // (image_bytes * max(1, sizes_K[left[0]])))
        count = count if count >= least else 1
        groups.append(left[:count])
        left = left[count:]
    return groups
