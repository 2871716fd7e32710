"""Many clients with one small fully connected network trained at once, with the same bits as one after the other.

In a step of a small network, most of the time is torch's overhead around the products. Here G clients take a step
together: their parameters are the rows of one matrix, and one call computes a product for all of them.

Only batches with the same number of samples are multiplied together (see `batched.dense_stack`), others one by one.
Whether the bits are the same on a machine is tested on that machine, for each size of a batch before it is used.
"""

import time
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from raysim.core.records import IntArray
from raysim.local.batched.dense_stack import ALIGNED, LEAST_PRODUCT, DenseStack
from raysim.local.batched.schedule import BatchedClient, BatchSchedule, packed
from raysim.local.contract import Job, LocalResult
from raysim.local.dense_gradient import DenseGradient
from raysim.local.sgd import sgd
from raysim.models.architectures import Classifier
from raysim.models.flat_model import FlatModel, ImageScale

LEAST = 3  # clients in a group: fewer are not faster
MOST = 16  # clients in a group: more are not faster
MOST_PARAMETERS = 800_000  # of all clients of a group together: more do not fit into a core's cache
LARGEST = 100_000  # parameters of one client: a larger network is not faster in a stack
MOST_IMAGE_BYTES = 1 << 26  # of all clients of a group together
_aten = torch.ops.aten


_Run = list[tuple[int, IntArray]]
"""(position in its group, rows of its samples) of each client of a step."""
_Losses = dict[int, list[Tensor]]
"""The lists that collect the losses, by position, of those clients whose losses are needed."""


class CpuBatchTrainer:
    """Trains groups of clients with plain SGD on a CPU; `of` says for which models and settings."""

    least = LEAST  # clients in a group: fewer are trained one by one, with the same bits

    def __init__(self, dense: DenseGradient, model: FlatModel, algorithm: sgd, scale: ImageScale) -> None:
        self.dense = dense
        self.model = model
        self.algorithm = algorithm
        self.scale = scale
        self.most = min(MOST, MOST_PARAMETERS // len(model.params_P))
        smallest = min(layer.weight.numel() for layer in dense.linear)
        self.least_rows = max(2, -(-LEAST_PRODUCT // smallest))
        self._tried: dict[int, bool] = {}

    @classmethod
    def of(cls, model: FlatModel, algorithm: object, scale: ImageScale) -> "CpuBatchTrainer | None":
        """The trainer for a small network of linear layers and ReLUs under plain SGD without augmentation; else None.

        Momentum and weight decay may be on, gradient clipping may not. None, too, where torch has several threads,
        which split a single product in another way than one of a stack. On a GPU see `on_gpu`.
        """
        if model.device != "cpu" or torch.get_num_threads() > 1 or len(model.params_P) > LARGEST:
            return None
        if type(model.module) is not Classifier or type(algorithm) is not sgd or algorithm.clip:
            return None
        dense = DenseGradient.of(model.module.chain())
        if dense is None or scale.crop or scale.flip or dense.linear[0].in_features % ALIGNED:
            return None
        if not dense.agrees(algorithm.batch_size):
            return None
        held = sum(p.numel() for layer in dense.linear for p in layer.parameters())
        batch = cls(dense, model, algorithm, scale)
        return batch if held == len(model.params_P) and batch._stackable(algorithm.batch_size) else None

    def groups(self, sizes_K: Sequence[int], image_bytes: int) -> list[list[int]]:
        """Group clients with these numbers of samples by size, the largest first; returns lists of their positions.

        Clients with few batches are grouped only with those of exactly the same size: a last batch that is not full is
        computed alone, and for them that would be a large fraction of the work.
        """
        few = 2 * self.algorithm.batch_size
        by_size = sorted(range(len(sizes_K)), key=lambda i: -sizes_K[i])
        return [
            group
            for _, alike in groupby(by_size, key=lambda i: min(sizes_K[i], few))
            for group in packed(list(alike), sizes_K, image_bytes, self.most, MOST_IMAGE_BYTES, LEAST)
        ]

    @torch.no_grad()
    def train(self, clients: Sequence[BatchedClient], seed: int) -> list[tuple[LocalResult, Tensor]]:
        """Train a group; returns (result, trained parameters: P) of each client.

        It is fastest where neighbours have similar numbers of samples. The model ends with the parameters at which the
        clients start.
        """
        began = time.perf_counter()
        schedules = [BatchSchedule.of(c.job, self.algorithm, seed) for c in clients]
        stack = DenseStack(self.dense, clients[0].job.start_P, len(clients), self.algorithm)
        for epoch in range(max(len(s.epochs) for s in schedules)):
            due = {k: schedule.losses for k, schedule in enumerate(schedules) if epoch == len(schedule.epochs) - 1}
            for step in range(max(len(s.epochs[epoch]) for s in schedules if epoch < len(s.epochs))):
                for run in self._runs([s.rows(epoch, step) for s in schedules]):
                    take_step = self._step_together if len(run) > 1 else self._step_alone
                    take_step(stack, clients, run, due)
        self.model.params_P.copy_(clients[0].job.start_P)
        each_s = (time.perf_counter() - began) / sum(c.job.n for c in clients)
        found = []
        for client, schedule, params_P in zip(clients, schedules, stack.params_GP, strict=True):
            client.job.steps = schedule.steps
            found.append((schedule.result(each_s * client.job.n), params_P))
        return found

    def _runs(self, rows_G: Sequence[IntArray | None]) -> list[_Run]:
        """Split clients into runs of neighbours whose batches have the same size, which step together, and single ones.

        rows_G: the samples of each client in this step; None for one that takes no step.
        """
        runs: list[_Run] = []
        there = [(k, rows) for k, rows in enumerate(rows_G) if rows is not None]
        for (size, _), run in groupby(enumerate(there), key=lambda item: (len(item[1][1]), item[1][0] - item[0])):
            pairs = [pair for _, pair in run]
            if len(pairs) >= LEAST and self._stackable(size):
                runs.append(pairs)
            else:
                runs += [[pair] for pair in pairs]
        return runs

    def _step_together(self, stack: DenseStack, clients: Sequence[BatchedClient], run: _Run, due: _Losses) -> None:
        """Take one step of neighbouring clients."""
        device = stack.params_GP.device
        first = run[0][0]
        images = np.concatenate([clients[k].data.images[rows] for k, rows in run])
        labels_N = np.concatenate([clients[k].data.labels_N[rows] for k, rows in run])
        labels_GB = torch.from_numpy(labels_N).to(device).view(len(run), -1)
        x = self.scale(torch.from_numpy(images).to(device), channels_last=False).view(*labels_GB.shape, -1)
        log_p = stack.step(first, x, labels_GB, clients[0].job.lr)
        for (k, _), slice_, labels_B in zip(run, log_p.unbind(), labels_GB.unbind(), strict=True):
            if k in due:
                due[k].append(_aten.nll_loss_forward(slice_, labels_B, None, 1, -100)[0])

    def _step_alone(self, stack: DenseStack, clients: Sequence[BatchedClient], run: _Run, due: _Losses) -> None:
        """Take one step of one client, on the model itself."""
        k, rows = run[0]
        job = clients[k].job
        data = clients[k].data
        model = self.model
        x = self.scale(torch.from_numpy(data.images[rows]).to(model.device), channels_last=False)
        labels_B = torch.from_numpy(data.labels_N[rows]).to(model.device)
        model.params_P.copy_(stack.params_GP[k])
        loss = self.dense(x, labels_B)
        if self.algorithm.momentum:
            job.scratch["velocity"] = stack.velocity_GP[k]
        self.algorithm.step(job)
        stack.params_GP[k].copy_(model.params_P)
        if k in due:
            due[k].append(loss)

    def _stackable(self, rows: int) -> bool:
        """Whether steps of so many samples have the same bits in a stack; tested once, on this machine."""
        if rows not in self._tried:
            self._tried[rows] = rows >= self.least_rows and self._same_bits(rows)
        return self._tried[rows]

    @torch.no_grad()
    def _same_bits(self, rows: int) -> bool:
        """Whether two steps of random samples from the present model have the same bits together and one by one."""
        count = self.most
        start_P = self.model.params_P.detach().clone()
        lr = 100.0  # in long steps a difference in the last bit becomes visible
        first = self.dense.linear[0]
        last = self.dense.linear[-1]
        draw = torch.Generator().manual_seed(rows)
        x = torch.randn(2, count, rows, first.in_features, generator=draw).to(start_P.device)
        labels = torch.randint(last.out_features, (2, count, rows), generator=draw).to(start_P.device)
        stack = DenseStack(self.dense, start_P, count, self.algorithm)
        for step in range(2):
            stack.step(0, x[step], labels[step], lr)
        same = True
        for k in range(count):
            job = Job(self.model, start_P, lr, 0, k, rows)
            self.model.params_P.copy_(start_P)
            for step in range(2):
                self.dense(x[step, k], labels[step, k])
                self.algorithm.step(job)
            same = same and torch.equal(self.model.params_P, stack.params_GP[k])
        self.model.params_P.copy_(start_P)
        return same
