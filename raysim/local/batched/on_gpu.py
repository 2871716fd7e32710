"""Many clients with one network trained at once on a GPU, which a step of one small network would leave mostly idle.

G clients take a step together: one call computes the gradients of G sets of parameters (`torch.func.vmap`), each on
its own batch. A group is always padded to G clients and a batch to its full size, with samples of weight 0, so what is
computed for a client depends neither on the others nor on how many there are; that this holds to the bit on a machine
is tested on that machine before it is used. Compared with a client trained alone, sums are added in another order: the
trained parameters differ by rounding.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from raysim.core.records import Float32Array, IntArray
from raysim.local.batched.schedule import BatchedClient, BatchSchedule, packed, trial_clients
from raysim.local.contract import LocalResult
from raysim.local.sgd import sgd
from raysim.models.flat_model import FlatModel, ImageScale

LEAST = 8  # a group must have room for this many clients
MOST = 32  # clients in a group
MOST_PARAMETERS = 64_000_000  # of all clients of a group together, for each of parameters, gradients and momentum
LARGEST_BATCH = 256  # samples of one client in a step: larger batches use a whole GPU by themselves
MOST_IMAGE_BYTES = 1 << 30  # of all clients of a group together


class VmapTrainer:
    """Trains groups of clients with plain SGD on a GPU; `of` says for which models and settings."""

    least = 1  # clients in a group: even one client is padded to a group, so that its bits never depend on the grouping

    def __init__(self, model: FlatModel, algorithm: sgd, scale: ImageScale, bf16: bool, width: int) -> None:
        self.model = model
        self.algorithm = algorithm
        self.scale = scale
        self.bf16 = bf16
        self.width = width
        self._gradient = vmap(grad_and_value(self._loss), randomness="error")

    @classmethod
    def of(
        cls, model: FlatModel, algorithm: object, scale: ImageScale, bf16: bool, image_shape: tuple[int, int, int]
    ) -> "VmapTrainer | None":
        """The trainer for a network without running statistics and dropout, under plain SGD, without augmentation.

        None for others: a network that draws random numbers, or that cannot be computed for several sets of parameters
        at once, fails a trial.  image_shape: channels, height, width.
        """
        if type(algorithm) is not sgd or cls.obstacle(model, algorithm, scale):
            return None
        width = _room(model)
        trial = cls(model, replace(algorithm, epochs=1, steps=None), scale, bf16, width)
        return cls(model, algorithm, scale, bf16, width) if trial._independent(image_shape) else None

    @staticmethod
    def obstacle(model: FlatModel, algorithm: object, scale: ImageScale) -> str:
        """Why such clients cannot be trained at once, for people; empty where a trial decides that."""
        if type(algorithm) is not sgd:
            return "of the local algorithms only sgd trains several clients at once"
        if algorithm.batch_size > LARGEST_BATCH:
            return f"batches of {algorithm.batch_size:,} images, more than {LARGEST_BATCH}, keep a GPU busy one by one"
        if scale.crop or scale.flip:
            return "images are augmented (data.augment)"
        if len(model.buffers_F) or len(model.counters):
            return "the network has running statistics (batch normalisation)"
        if _room(model) < LEAST:
            return f"the network has more than {MOST_PARAMETERS // LEAST:,} parameters"
        return ""

    def groups(self, sizes_K: Sequence[int], image_bytes: int) -> list[list[int]]:
        """Group clients with these numbers of samples by size, the largest first; returns lists of their positions."""
        by_size = sorted(range(len(sizes_K)), key=lambda i: -sizes_K[i])
        return packed(by_size, sizes_K, image_bytes, self.width, MOST_IMAGE_BYTES)

    @torch.no_grad()
    def train(self, clients: Sequence[BatchedClient], seed: int) -> list[tuple[LocalResult, Tensor]]:
        """Train a group of at most `width` clients; returns (result, trained parameters: P) of each.

        The model ends with the parameters at which the clients start.
        """
        began = time.perf_counter()
        self.model.module.train()
        schedules = [BatchSchedule.of(c.job, self.algorithm, seed) for c in clients]
        order = sorted(range(len(clients)), key=lambda k: -schedules[k].steps)
        params_GP, losses_TG = self._train([clients[k] for k in order], [schedules[k] for k in order])
        each_s = (time.perf_counter() - began) / sum(c.job.n for c in clients)
        found: dict[int, tuple[LocalResult, Tensor]] = {}
        for place, k in enumerate(order):
            client = clients[k]
            schedule = schedules[k]
            client.job.steps = schedule.steps
            schedule.losses = list(losses_TG[schedule.steps - len(schedule.epochs[-1]) : schedule.steps, place])
            found[k] = schedule.result(each_s * client.job.n), params_GP[place]
        return [found[k] for k in range(len(clients))]

    def _train(self, clients: Sequence[BatchedClient], schedules: Sequence[BatchSchedule]) -> tuple[Tensor, Tensor]:
        """Train clients sorted by their number of steps, most first; returns (params_GP, losses_TG on the CPU)."""
        device = self.model.params_P.device
        start_P = clients[0].job.start_P
        images = torch.from_numpy(np.concatenate([c.data.images for c in clients])).to(device)
        labels_N = torch.from_numpy(np.concatenate([c.data.labels_N for c in clients])).to(device)
        index_TGB, weight_TGB = (torch.from_numpy(a).to(device) for a in self._batches(clients, schedules))
        params_GP = start_P.repeat(self.width, 1)
        velocity_GP = torch.zeros_like(params_GP) if self.algorithm.momentum else params_GP
        steps_G = [schedule.steps for schedule in schedules]
        losses = []
        for t, (index_GB, weight_GB) in enumerate(zip(index_TGB, weight_TGB, strict=True)):
            x = self.scale(images[index_GB.flatten()], channels_last=False).unflatten(0, index_GB.shape)
            gradient_GP, loss_G = self._gradient(params_GP, x, labels_N[index_GB], weight_GB)
            active = sum(steps > t for steps in steps_G)
            self.algorithm.clip_norm(gradient_GP[:active])
            self.algorithm.descend(params_GP[:active], gradient_GP[:active], velocity_GP[:active], clients[0].job.lr)
            losses.append(loss_G)
        return params_GP, torch.stack(losses).cpu()  # read once: reading waits for everything before it

    def _batches(
        self, clients: Sequence[BatchedClient], schedules: Sequence[BatchSchedule]
    ) -> tuple[IntArray, Float32Array]:
        """(rows of every step, the weight of each: 1 / samples in its batch, 0 for padding), T x G x B."""
        shape = schedules[0].steps, self.width, self.algorithm.batch_size
        index_TGB = np.zeros(shape, dtype=np.int64)
        weight_TGB = np.zeros(shape, dtype=np.float32)
        start = 0
        for k, (client, schedule) in enumerate(zip(clients, schedules, strict=True)):
            for t, rows in enumerate(rows for epoch in schedule.epochs for rows in epoch):
                index_TGB[t, k, : len(rows)] = start + rows
                weight_TGB[t, k, : len(rows)] = 1 / len(rows)
            start += client.job.n
        return index_TGB, weight_TGB

    def _loss(self, params_P: Tensor, x: Tensor, labels_B: Tensor, weight_B: Tensor) -> Tensor:
        """Weighted cross-entropy of one client's batch."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            logits = functional_call(self.model.module, self.model.named_views(params_P), (x,))
            loss_B = nn.functional.cross_entropy(logits, labels_B, reduction="none")
        return (loss_B * weight_B).sum()

    def _independent(self, image_shape: tuple[int, int, int]) -> bool:
        """Whether a client has the same bits alone and as the last of a full group; tested on this machine."""
        n = self.algorithm.batch_size + 1
        clients = trial_clients(self.model, self.algorithm.lr, n, image_shape, self.width)
        try:
            alone, alone_P = self.train(clients[-1:], 0)[0]
            grouped, grouped_P = self.train(clients, 0)[-1]
        except RuntimeError:  # the network has an operation that cannot be computed for several at once
            return False
        return alone.loss == grouped.loss and torch.equal(alone_P, grouped_P)


def _room(model: FlatModel) -> int:
    """How many clients of this model a group has room for."""
    return min(MOST, MOST_PARAMETERS // max(1, len(model.params_P)))
