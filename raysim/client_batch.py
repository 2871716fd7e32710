"""Many clients of one small fully connected network trained at once, to the bits of one client after the other.

A step of a small network costs mostly what torch does around its products. Here G clients take a step together: their
parameters are the rows of one matrix, and one call serves all of them.

A product of a stack of matrices gives each slice the bits that it has alone, as long as its shape and the alignment of
its memory are the same. So only batches of the same number of samples are multiplied together, a client's parameters
lie in its row as they lie in the model, and everything else begins at multiples of 64 bytes. Whether this is enough on
a machine is tried out there, for each size of a batch before it is used.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from raysim import rng
from raysim.dense import DenseGradient
from raysim.flat_model import FlatModel, ImageScale
from raysim.local.sgd import sgd
from raysim.models import Classifier
from raysim.records import IntArray
from raysim.training import ClientData, Job, LocalResult, batches

ALIGNED = 16  # floats, 64 bytes
LEAST, MOST = 4, 16  # clients at a time: fewer gain nothing
MOST_PARAMETERS = 1 << 20  # of a group's clients together: more do not stay in a core's cache
MOST_IMAGE_BYTES = 1 << 26  # of a group's clients together
LEAST_PRODUCT = 400  # rows x inputs x outputs: torch computes a stack of smaller products in a way of its own
_aten = torch.ops.aten


@dataclass(frozen=True)
class Member:
    """A client of a group.  job: as in `training.train_client`, but for the model, which is not touched."""

    job: Job
    data: ClientData


@dataclass(frozen=True)
class _Layer:
    """A linear layer of n clients: views of their parameters and room for a step of r samples each.

    w: n x out x in.  b: n x out.  gradient: of w.  out: n x r x out.  below: gradient of the input, n x r x in.
    """

    relu: bool
    w: Tensor
    b: Tensor | None
    w_velocity: Tensor
    b_velocity: Tensor
    gradient: Tensor
    out: Tensor
    below: Tensor


@dataclass
class _Course:
    """What a client goes through: the rows of each batch, by epoch; the losses of the last epoch."""

    epochs: list[list[IntArray]]
    losses: list[Tensor] = field(default_factory=list)

    def rows(self, epoch: int, step: int) -> IntArray | None:
        """The samples of a step, if the client takes it."""
        there = epoch < len(self.epochs) and step < len(self.epochs[epoch])
        return self.epochs[epoch][step] if there else None

    def result(self, seconds: float) -> LocalResult:
        """As `training.train_client` gives it."""
        sizes = torch.tensor([len(rows) for rows in self.epochs[-1]], device=self.losses[0].device)
        loss = float(torch.stack(self.losses).mul_(sizes).sum(dtype=torch.float64)) / int(sizes.sum())
        return LocalResult(loss, sum(map(len, self.epochs)), seconds, None)


class ClientBatch:
    """Trains groups of clients with plain SGD; `of` says for which models and settings."""

    def __init__(self, dense: DenseGradient, model: FlatModel, algorithm: sgd, scale: ImageScale) -> None:
        self.dense, self.model, self.algorithm, self.scale = dense, model, algorithm, scale
        self.most = min(MOST, MOST_PARAMETERS // len(model.params_P))
        smallest = min(layer.weight.numel() for layer in dense.linear)
        self.least_rows = max(2, -(-LEAST_PRODUCT // smallest))
        self._tried: dict[int, bool] = {}

    @classmethod
    def of(cls, model: FlatModel, algorithm: object, scale: ImageScale) -> "ClientBatch | None":
        """For a small network of linear layers and ReLUs under plain SGD on a CPU, without augmentation; else None.

        Momentum and weight decay may be on; a gradient is clipped one client at a time. Several threads would share out
        a single product, but not one of a stack. A GPU is left out because nobody has measured it there.
        """
        if model.device != "cpu" or type(model.module) is not Classifier or type(algorithm) is not sgd:
            return None
        dense = DenseGradient.of(model.module.chain())
        if dense is None or algorithm.clip or scale.crop or scale.flip or torch.get_num_threads() > 1:
            return None
        held = sum(p.numel() for layer in dense.linear for p in layer.parameters())
        batch = cls(dense, model, algorithm, scale)
        fits = held == len(model.params_P) and dense.linear[0].in_features % ALIGNED == 0
        return batch if fits and batch.most >= LEAST and batch._stackable(algorithm.batch_size) else None

    def groups(self, sizes_K: Sequence[int], image_bytes: int) -> list[list[int]]:
        """Positions of clients with these numbers of samples, put together by size, the largest first."""
        places = sorted(range(len(sizes_K)), key=lambda i: -sizes_K[i])
        groups: list[list[int]] = []
        while places:
            fit = MOST_IMAGE_BYTES // (image_bytes * max(1, sizes_K[places[0]]))
            count = max(1, min(self.most, fit))
            groups.append(places[:count])
            places = places[count:]
        return groups

    @torch.no_grad()
    def train(self, members: Sequence[Member], seed: int) -> list[tuple[LocalResult, Tensor]]:
        """(result, trained parameters: P) of each client; the fewest products are made if the largest come first."""
        began = time.perf_counter()
        courses = [self._course(m.job, seed) for m in members]
        stack = _Stack(self.dense, members[0].job.start_P, len(members), self.algorithm)
        for epoch in range(max(len(c.epochs) for c in courses)):
            steps = max(len(c.epochs[epoch]) for c in courses if epoch < len(c.epochs))
            for step in range(steps):
                for first, rows in self._runs([c.rows(epoch, step) for c in courses]):
                    last = [c if epoch == len(c.epochs) - 1 else None for c in courses[first : first + len(rows)]]
                    self._step(stack, members, first, rows, last)
        each_s = (time.perf_counter() - began) / sum(m.job.n for m in members)
        found = []
        for member, course, params_P in zip(members, courses, stack.params_GP, strict=True):
            result = course.result(each_s * member.job.n)
            member.job.steps = result.steps
            found.append((result, params_P))
        return found

    def _course(self, job: Job, seed: int) -> _Course:
        local, order = self.algorithm, rng.stream(seed, rng.BATCHES, job.round, job.client)
        epochs: list[list[IntArray]] = [[]]
        for rows, last in batches(job.n, local.batch_size, local.epochs, local.steps, order, norm=False):
            epochs[-1].append(rows)
            if last:
                epochs.append([])
        return _Course(epochs[:-1])

    def _runs(self, rows_G: Sequence[IntArray | None]) -> Iterator[tuple[int, list[IntArray]]]:
        """(first position, samples) of neighbours whose batches have the same size; small batches stay alone."""
        sizes = [0 if rows is None else len(rows) for rows in rows_G]
        for size, group in groupby(range(len(sizes)), key=sizes.__getitem__):
            places = list(group)
            if len(places) > 1 and self._stackable(size):
                yield places[0], [rows_G[k] for k in places]  # type: ignore[misc]
            elif size:
                yield from ((k, [rows_G[k]]) for k in places)  # type: ignore[misc]

    def _step(
        self, stack: "_Stack", members: Sequence[Member], first: int, rows: list[IntArray], last: list[_Course | None]
    ) -> None:
        """One step of these clients."""
        data = [m.data for m in members[first : first + len(rows)]]
        device, count, size = stack.params_GP.device, len(rows), len(rows[0])
        images = np.concatenate([d.images[r] for d, r in zip(data, rows, strict=True)])
        labels_GB = torch.from_numpy(np.stack([d.labels_N[r] for d, r in zip(data, rows, strict=True)])).to(device)
        x = self.scale(torch.from_numpy(images).to(device), channels_last=False).view(count, size, -1)
        log_p = stack.step(first, x, labels_GB, members[0].job.lr)
        for course, slice_, labels_B in zip(last, log_p.unbind(), labels_GB.unbind(), strict=True):
            if course is not None:
                course.losses.append(_aten.nll_loss_forward(slice_, labels_B, None, 1, -100)[0])

    def _stackable(self, rows: int) -> bool:
        """Whether steps of so many samples have the same bits in a stack; tried out once, on this machine."""
        if rows not in self._tried:
            self._tried[rows] = rows >= self.least_rows and self._same_bits(rows)
        return self._tried[rows]

    @torch.no_grad()
    def _same_bits(self, rows: int) -> bool:
        """Two steps of random samples, together and one client after the other, from the present model."""
        count, start_P = self.most, self.model.params_P.detach().clone()
        lr = 100.0  # steps so long that a last bit of the gradient shows
        first, last = self.dense.linear[0], self.dense.linear[-1]
        draw = torch.Generator().manual_seed(rows)
        x = torch.randn(2, count, rows, first.in_features, generator=draw).to(start_P.device)
        labels = torch.randint(last.out_features, (2, count, rows), generator=draw).to(start_P.device)
        stack = _Stack(self.dense, start_P, count, self.algorithm)
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


class _Stack:
    """The parameters of G clients, and one step of some of them."""

    def __init__(self, dense: DenseGradient, start_P: Tensor, count: int, algorithm: sgd) -> None:
        self.dense, self.algorithm, self.count = dense, algorithm, count
        self.padded_GP = _room(start_P, count, len(start_P))
        self.params_GP = self.padded_GP[:, : len(start_P)].copy_(start_P)
        self.velocity_GP = torch.zeros_like(self.padded_GP) if algorithm.momentum else self.padded_GP
        self._views: dict[tuple[int, int, int], list[_Layer]] = {}
        self._rooms: dict[tuple[int, ...], Tensor] = {}

    def step(self, first: int, x: Tensor, labels_GB: Tensor, lr: float) -> Tensor:
        """Train on pixels x, n x r x features; the logarithms of what the networks gave each class: n x r x C.

        The arithmetic of `dense.DenseGradient` and of `sgd.step`.
        """
        layers = self._layers(first, *labels_GB.shape)
        seen: list[Tensor] = []
        h = x
        for layer in layers:
            if layer.relu:
                h.relu_()
            seen.append(h)
            h = _affine(h, layer)
        log_p = torch.log_softmax(h, 2)
        target = torch.zeros_like(log_p).scatter_(2, labels_GB[..., None], -1.0 / labels_GB.shape[1])
        g = h.copy_(_aten._log_softmax_backward_data(target, log_p, 2, log_p.dtype))
        for i in range(len(layers) - 1, -1, -1):
            layer = layers[i]
            gradient = _product(g.transpose(1, 2), seen[i], layer.gradient)
            below = _product(g, layer.w, layer.below) if i else g
            self.algorithm.descend(layer.w, gradient, layer.w_velocity, lr)
            if layer.b is not None:
                self.algorithm.descend(layer.b, g.sum(1), layer.b_velocity, lr)
            g = _aten.threshold_backward(below, seen[i], 0, grad_input=below) if layer.relu else below
        return log_p

    def _layers(self, first: int, count: int, rows: int) -> list[_Layer]:
        """The layers of these clients, with room for that many samples each."""
        key = (first, count, rows)
        if key not in self._views:
            self._views[key] = [self._layer(i, first, count, rows) for i in range(len(self.dense.linear))]
        return self._views[key]

    def _layer(self, i: int, first: int, count: int, rows: int) -> _Layer:
        linear, part = self.dense.linear[i], slice(first, first + count)
        outputs, inputs = linear.weight.shape
        w, w_velocity = (self._view(flat, linear.weight)[part] for flat in (self.padded_GP, self.velocity_GP))
        b, b_velocity = None, w_velocity
        if linear.bias is not None:
            b, b_velocity = (self._view(flat, linear.bias)[part] for flat in (self.padded_GP, self.velocity_GP))
        below = self._room(i, 0, count, rows, inputs if i else 0)
        gradient, out = self._room(i, 1, count, outputs, inputs), self._room(i, 2, count, rows, outputs)
        return _Layer(self.dense.after_relu[i], w, b, w_velocity, b_velocity, gradient, out, below)

    def _view(self, flat_GP: Tensor, parameter: Tensor) -> Tensor:
        """A parameter of all clients: where it lies in the model's flat vector, it lies in each row."""
        start = parameter.storage_offset()
        return flat_GP[:, start : start + parameter.numel()].unflatten(1, parameter.shape)

    def _room(self, i: int, use: int, count: int, rows: int, columns: int) -> Tensor:
        key = (i, use, rows)
        if key not in self._rooms:
            self._rooms[key] = _room(self.padded_GP, self.count, rows, columns)
        return self._rooms[key][:count]


def _room(like: Tensor, count: int, *shape: int) -> Tensor:
    """An empty stack of `count` arrays, each aligned and none next to another.

    Were they without gaps, torch would compute products of the stack as one.
    """
    stride = (-(-math.prod(shape) // (2 * ALIGNED)) + 1) * 2 * ALIGNED
    inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return like.new_empty(count * stride).as_strided((count, *shape), (stride, *inner))


def _affine(h: Tensor, layer: _Layer) -> Tensor:
    """h W^T + b of each client; of a single one as `functional.linear` computes it."""
    if layer.b is None:
        return _product(h, layer.w.transpose(1, 2), layer.out)
    if len(h) == 1:
        torch.addmm(layer.b[0], h[0], layer.w[0].t(), out=layer.out[0])
    else:
        torch.baddbmm(layer.b[:, None], h, layer.w.transpose(1, 2), out=layer.out)
    return layer.out


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    if len(a) == 1:
        torch.mm(a[0], b[0], out=out[0])
        return out
    return torch.bmm(a, b, out=out)
