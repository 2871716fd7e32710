"""One training step of several clients with one fully connected network at once, with the same bits as one by one.

A product of a stack of matrices gives each slice the bits that it has alone, as long as its shape and the alignment of
its memory are the same. So all batches have the same number of samples, a client's row of the parameter matrix has the
layout of the model's parameters, and everything else begins at multiples of 64 bytes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.local.dense_gradient import DenseGradient
from raysim.local.sgd import sgd

ALIGNED = 16  # floats, 64 bytes
LEAST_PRODUCT = 400  # rows x inputs x outputs: torch computes a stack of smaller products by other code
_aten = torch.ops.aten


@dataclass(frozen=True)
class _Layer:
    """A linear layer of n clients: views of their parameters and memory for a step of r samples each.

    w: n x out x in.  b: n x out.  gradient: that of w.  out: n x r x out.  below: gradient of the input, n x r x in.
    """

    relu: bool
    w: Tensor
    b: Tensor | None
    w_velocity: Tensor
    b_velocity: Tensor
    gradient: Tensor
    out: Tensor
    below: Tensor


class DenseStack:
    """The parameters of G clients, params_GP, which all start at the same values, and a step of some of the clients.

    velocity_GP: their momentum, where the algorithm has any.
    """

    def __init__(self, dense: DenseGradient, start_P: Tensor, count: int, algorithm: sgd) -> None:
        self.dense = dense
        self.algorithm = algorithm
        self.count = count
        self.padded_GP = _room(start_P, count, len(start_P))
        self.params_GP = self.padded_GP[:, : len(start_P)].copy_(start_P)
        self.padded_velocity_GP = torch.zeros_like(self.padded_GP) if algorithm.momentum else self.padded_GP
        self.velocity_GP = self.padded_velocity_GP[:, : len(start_P)]
        self._views: dict[tuple[int, ...], list[_Layer]] = {}
        self._rooms: dict[tuple[int, ...], Tensor] = {}

    def step(self, first: int, x: Tensor, labels_GB: Tensor, lr: float) -> Tensor:
        """Take one step of n neighbouring clients; returns the logarithms of the class probabilities: n x r x C.

        first: position of the first client.  x: pixels, n x r x features.  The arithmetic is that of
        `dense_gradient.DenseGradient` and of `sgd.step`.
        """
        layers = self._layers(first, *labels_GB.shape)
        seen: list[Tensor] = []
        h = x
        for layer in layers:
            if layer.relu:
                h.relu_()
            seen.append(h)
            w_t = layer.w.transpose(1, 2)
            if layer.b is None:
                h = torch.bmm(h, w_t, out=layer.out)
            else:
                h = torch.baddbmm(layer.b[:, None], h, w_t, out=layer.out)
        log_p = torch.log_softmax(h, 2)
        target = torch.zeros_like(log_p).scatter_(2, labels_GB[..., None], -1.0 / labels_GB.shape[1])
        g = h.copy_(_aten._log_softmax_backward_data(target, log_p, 2, log_p.dtype))
        for i in range(len(layers) - 1, -1, -1):
            layer = layers[i]
            gradient = torch.bmm(g.transpose(1, 2), seen[i], out=layer.gradient)
            below = torch.bmm(g, layer.w, out=layer.below) if i else g
            self.algorithm.descend(layer.w, gradient, layer.w_velocity, lr)
            if layer.b is not None:
                self.algorithm.descend(layer.b, g.sum(1), layer.b_velocity, lr)
            g = _aten.threshold_backward(below, seen[i], 0, grad_input=below) if layer.relu else below
        return log_p

    def _layers(self, *key: int) -> list[_Layer]:
        """The layers of some clients.  key: position of the first, how many clients, samples of each in a step."""
        if key not in self._views:
            self._views[key] = [self._layer(i, *key) for i in range(len(self.dense.linear))]
        return self._views[key]

    def _layer(self, i: int, first: int, count: int, rows: int) -> _Layer:
        linear = self.dense.linear[i]
        chosen = slice(first, first + count)
        outputs, inputs = linear.weight.shape
        w = self._view(self.padded_GP, linear.weight)[chosen]
        w_velocity = self._view(self.padded_velocity_GP, linear.weight)[chosen]
        b = None
        b_velocity = w_velocity
        if linear.bias is not None:
            b = self._view(self.padded_GP, linear.bias)[chosen]
            b_velocity = self._view(self.padded_velocity_GP, linear.bias)[chosen]
        below = self._room(i, 0, count, rows, inputs if i else 0)
        gradient = self._room(i, 1, count, outputs, inputs)
        out = self._room(i, 2, count, rows, outputs)
        return _Layer(self.dense.after_relu[i], w, b, w_velocity, b_velocity, gradient, out, below)

    def _view(self, flat_GP: Tensor, parameter: Tensor) -> Tensor:
        """A view of one parameter of all clients: it has the same place in each row as in the model's flat vector."""
        start = parameter.storage_offset()
        view: Tensor = flat_GP[:, start : start + parameter.numel()].unflatten(1, parameter.shape)
        return view

    def _room(self, i: int, use: int, count: int, rows: int, columns: int) -> Tensor:
        key = (i, use, rows)
        if key not in self._rooms:
            self._rooms[key] = _room(self.padded_GP, self.count, rows, columns)
        return self._rooms[key][:count]


def _room(like: Tensor, count: int, *shape: int) -> Tensor:
    """An uninitialised stack of `count` arrays, each aligned, with a gap after each.

    Without the gaps torch would compute the products of the stack as one large product.
    """
    stride = (-(-math.prod(shape) // (2 * ALIGNED)) + 1) * 2 * ALIGNED
    inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return like.new_empty(count * stride).as_strided((count, *shape), (stride, *inner))
