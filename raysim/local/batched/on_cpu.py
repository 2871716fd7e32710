"""Many clients of one small fully connected network trained at once, to the bits of one client after the other.

A step of a small network costs mostly what torch does around its products. Here G clients take a step together: their
parameters are the rows of one matrix, and one call serves all of them.

Only batches of the same number of samples are multiplied together (see `batched.dense_stack`), the others taken alone.
Whether the bits are the same on a machine is tried out there, for each size of a batch before it is used.
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

LEAST, MOST = 3, 16  # clients at a time: fewer gain nothing
MOST_PARAMETERS = 800_000  # of a group's clients together: more do not stay in a core's cache
LARGEST = 100_000  # parameters of one client: what is larger is computed no faster in a stack
MOST_IMAGE_BYTES = 1 << 26  # of a group's clients together
_aten = torch.ops.aten


_Run = list[tuple[int, IntArray]]
"""(position in its group, rows of its samples) of each client of a step."""
_Losses = dict[int, list[Tensor]]
"""Where the losses go, of those clients whose losses are asked for, by position."""


class CpuBatchTrainer:
    """Trains groups of clients with plain SGD; `of` says for which models and settings."""

    least = LEAST  # clients of a group: fewer have the same bits outside

    def __init__(self, dense: DenseGradient, model: FlatModel, algorithm: sgd, scale: ImageScale) -> None:
        self.dense, self.model, self.algorithm, self.scale = dense, model, algorithm, scale
        self.most = min(MOST, MOST_PARAMETERS // len(model.params_P))
        smallest = min(layer.weight.numel() for layer in dense.linear)
        self.least_rows = max(2, -(-LEAST_PRODUCT // smallest))
        self._tried: dict[int, bool] = {}

    @classmethod
    def of(cls, model: FlatModel, algorithm: object, scale: ImageScale) -> "CpuBatchTrainer | None":
        """For a small network of linear layers and ReLUs under plain SGD on a CPU, without augmentation; else None.

        Momentum and weight decay may be on; a gradient is clipped one client at a time. Several threads would share out
        a single product, but not one of a stack. What a GPU trains together is another matter (`on_gpu`).
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
        """Positions of clients with these numbers of samples, put together by size, the largest first.

        Those of few batches have too little in common with others than those of the very same size: each last batch
        that is not full is taken alone.
        """
        few = 2 * self.algorithm.batch_size
        by_size = sorted(range(len(sizes_K)), key=lambda i: -sizes_K[i])
        return [
            group
            for _, alike in groupby(by_size, key=lambda i: min(sizes_K[i], few))
            for group in packed(list(alike), sizes_K, image_bytes, self.most, MOST_IMAGE_BYTES, LEAST)
        ]

    @torch.no_grad()
    def train(self, members: Sequence[BatchedClient], seed: int) -> list[tuple[LocalResult, Tensor]]:
        """(result, trained parameters: P) of each client; most is gained where neighbours are of similar size.

        The model ends with the parameters at which the clients start.
        """
        began = time.perf_counter()
        schedules = [BatchSchedule.of(m.job, self.algorithm, seed) for m in members]
        stack = DenseStack(self.dense, members[0].job.start_P, len(members), self.algorithm)
        for epoch in range(max(len(c.epochs) for c in schedules)):
            due = {k: schedule.losses for k, schedule in enumerate(schedules) if epoch == len(schedule.epochs) - 1}
            for step in range(max(len(c.epochs[epoch]) for c in schedules if epoch < len(c.epochs))):
                for run in self._runs([c.rows(epoch, step) for c in schedules]):
                    take = self._step_together if len(run) > 1 else self._step_alone
                    take(stack, members, run, due)
        self.model.params_P.copy_(members[0].job.start_P)
        each_s = (time.perf_counter() - began) / sum(m.job.n for m in members)
        found = []
        for member, schedule, params_P in zip(members, schedules, stack.params_GP, strict=True):
            member.job.steps = schedule.steps
            found.append((schedule.result(each_s * member.job.n), params_P))
        return found

    def _runs(self, rows_G: Sequence[IntArray | None]) -> list[_Run]:
        """Neighbours whose batches have the same size, so that they can step together, and single clients."""
        runs: list[_Run] = []
        there = [(k, rows) for k, rows in enumerate(rows_G) if rows is not None]
        for (size, _), run in groupby(enumerate(there), key=lambda item: (len(item[1][1]), item[1][0] - item[0])):
            pairs = [pair for _, pair in run]
            if len(pairs) >= LEAST and self._stackable(size):
                runs.append(pairs)
            else:
                runs += [[pair] for pair in pairs]
        return runs

    def _step_together(self, stack: DenseStack, members: Sequence[BatchedClient], run: _Run, due: _Losses) -> None:
        """One step of neighbours."""
        device, first = stack.params_GP.device, run[0][0]
        images = np.concatenate([members[k].data.images[rows] for k, rows in run])
        labels_N = np.concatenate([members[k].data.labels_N[rows] for k, rows in run])
        labels_GB = torch.from_numpy(labels_N).to(device).view(len(run), -1)
        x = self.scale(torch.from_numpy(images).to(device), channels_last=False).view(*labels_GB.shape, -1)
        log_p = stack.step(first, x, labels_GB, members[0].job.lr)
        for (k, _), slice_, labels_B in zip(run, log_p.unbind(), labels_GB.unbind(), strict=True):
            if k in due:
                due[k].append(_aten.nll_loss_forward(slice_, labels_B, None, 1, -100)[0])

    def _step_alone(self, stack: DenseStack, members: Sequence[BatchedClient], run: _Run, due: _Losses) -> None:
        """One step of one client, on the model itself."""
        k, rows = run[0]
        job, data, model = members[k].job, members[k].data, self.model
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
        """Whether steps of so many samples have the same bits in a stack; tried out once, on this machine."""
        if rows not in self._tried:
            self._tried[rows] = rows >= self.least_rows and self._same_bits(rows)
        return self._tried[rows]

    @torch.no_grad()
    def _same_bits(self, rows: int) -> bool:
        """Two steps of random samples, together and one client after the other, from the present model."""
        count, start_P, lr = self.most, self.model.params_P.detach().clone(), 100.0  # in long steps, a last bit shows
        first, last = self.dense.linear[0], self.dense.linear[-1]
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
