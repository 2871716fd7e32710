"""Networks of the second simulator: plain functions of parameters by name, with arithmetic of their own."""

from typing import Any

import torch
from torch import Tensor

Vectors = dict[str, Tensor]
MOMENTUM, EPS = 0.1, 1e-5  # of running statistics; under the root of a variance


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log softmax at the label."""
    highest = logits.max(dim=1, keepdim=True).values
    log_total = (logits - highest).exp().sum(1).log() + highest[:, 0]
    return (log_total - logits[torch.arange(len(labels)), labels]).mean()


def relu(x: Tensor) -> Tensor:
    """max(0, x), with derivative 0 at 0."""
    return x * (x > 0)


def affine(p: Vectors, name: str, x: Tensor) -> Tensor:
    """x W^T + b"""
    return x @ p[f"{name}.weight"].t() + p[f"{name}.bias"]


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, padding: int, stride: int = 1) -> Tensor:
    """sum_{c,i,j} kernel[o, c, i, j] x[b, c, s h + i, s w + j], zeros around x."""
    batch, channels, height, width = x.shape
    side = kernel.shape[-1]
    room = x.new_zeros(batch, channels, height + 2 * padding, width + 2 * padding)
    room[:, :, padding : padding + height, padding : padding + width] = x
    patches = room.unfold(2, side, stride).unfold(3, side, stride)  # b c h w i j
    out = torch.einsum("bchwij,ocij->bohw", patches, kernel)
    return out if bias is None else out + bias[:, None, None]


def pool(x: Tensor) -> Tensor:
    """The largest of each 2 x 2; of equal ones the first gets the gradient; an odd last row or column is dropped."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    best = x[:, :, 0:height:2, 0:width:2]
    for i, j in ((0, 1), (1, 0), (1, 1)):
        other = x[:, :, i:height:2, j:width:2]
        best = torch.where(other > best, other, best)
    return best


def batch_norm(p: Vectors, buffers: Vectors, name: str, x: Tensor, mode: str) -> Tensor:
    """(x - mean) / sqrt(var + eps) weight + bias over batch and positions.

    train: statistics of the batch (variance over n), and running <- 0.9 running + 0.1 batch's (variance over n - 1).
    Other modes: the running statistics, as they are.
    """
    axes = (0, 2, 3)
    if mode == "train":
        n = x.numel() // x.shape[1]
        mean = x.mean(axes)
        var = ((x - mean[:, None, None]) ** 2).mean(axes)
        with torch.no_grad():
            for key, new in (("mean", mean), ("var", var * (n / (n - 1)))):
                running = buffers[f"{name}.running_{key}"]
                buffers[f"{name}.running_{key}"] = (1 - MOMENTUM) * running + MOMENTUM * new.detach()
            buffers[f"{name}.num_batches_tracked"] = buffers[f"{name}.num_batches_tracked"] + 1
    else:
        mean, var = buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"]
    normal = (x - mean[:, None, None]) / torch.sqrt(var + EPS)[:, None, None]
    return normal * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def group_norm(p: Vectors, name: str, x: Tensor, groups: int) -> Tensor:
    """As batch normalisation, but over the channels of a group and the positions of each image."""
    parts = x.reshape(len(x), groups, -1)
    centred = parts - parts.mean(2, keepdim=True)
    normal = (centred / torch.sqrt((centred**2).mean(2, keepdim=True) + EPS)).reshape(x.shape)
    return normal * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


class Network:
    """(features, logits) of images; `seen` gets the input of each ReLU by the name of the module that raysim has."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys = keys
        self.name = keys["name"].rpartition(":")[2]
        self.batch_norm = self.name == "small_resnet" or keys.get("norm") == "batch"
        self.stages = 2 if self.name == "small_resnet" else 4
        self.blocks = 1 if self.name == "small_resnet" else 2

    def __call__(
        self, p: Vectors, buffers: Vectors, x: Tensor, mode: str, seen: Vectors | None = None
    ) -> tuple[Tensor, Tensor]:
        seen = {} if seen is None else seen
        body = getattr(self, {"small_resnet": "resnet", "resnet18": "resnet"}.get(self.name, self.name))
        z = body(p, buffers, x, mode, seen)
        if self.keys.get("projection"):
            seen["projection.1"] = affine(p, "projection.0", z)
            z = affine(p, "projection.2", relu(seen["projection.1"]))
        return z, affine(p, "classifier", z)

    def linear(self, p: Vectors, buffers: Vectors, x: Tensor, mode: str, seen: Vectors) -> Tensor:
        return x.reshape(len(x), -1)

    def mlp(self, p: Vectors, buffers: Vectors, x: Tensor, mode: str, seen: Vectors) -> Tensor:
        h = x.reshape(len(x), -1)
        for i in range(len(self.keys["hidden"])):
            pre = seen[f"body.{2 * i + 2}"] = affine(p, f"body.{2 * i + 1}", h)
            h = relu(pre)
        return h

    def cnn(self, p: Vectors, buffers: Vectors, x: Tensor, mode: str, seen: Vectors) -> Tensor:
        """conv3x3-pool-conv3x3-pool-fc, ReLU after each."""
        for i in (0, 3):
            pre = seen[f"body.{i + 2}"] = pool(convolve(x, p[f"body.{i}.weight"], p[f"body.{i}.bias"], 1))
            x = relu(pre)
        pre = seen["body.8"] = affine(p, "body.7", x.reshape(len(x), -1))
        return relu(pre)

    def lenet(self, p: Vectors, buffers: Vectors, x: Tensor, mode: str, seen: Vectors) -> Tensor:
        """conv5x5(6)-pool-conv5x5(16)-pool-fc120-fc84, ReLU after each."""
        for i in (0, 3):
            pre = seen[f"body.{i + 1}"] = convolve(x, p[f"body.{i}.weight"], p[f"body.{i}.bias"], 0)
            x = pool(relu(pre))
        h = x.reshape(len(x), -1)
        for i in (7, 9):
            pre = seen[f"body.{i + 1}"] = affine(p, f"body.{i}", h)
            h = relu(pre)
        return h

    def resnet(self, p: Vectors, buffers: Vectors, x: Tensor, mode: str, seen: Vectors) -> Tensor:
        """Stem, basic blocks of two convolutions with a shortcut around them, mean over positions."""

        def norm(name: str, h: Tensor) -> Tensor:
            if self.batch_norm:
                return batch_norm(p, buffers, name, h, mode)
            return group_norm(p, name, h, self.keys.get("groups", 32))

        pre = seen["body.relu"] = norm("body.bn1", convolve(x, p["body.conv1.weight"], None, 1))
        h = relu(pre)
        for stage in range(1, self.stages + 1):
            for block in range(self.blocks):
                name, stride = f"body.layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
                inner = relu(norm(f"{name}.bn1", convolve(h, p[f"{name}.conv1.weight"], None, 1, stride)))
                inner = norm(f"{name}.bn2", convolve(inner, p[f"{name}.conv2.weight"], None, 1))
                if f"{name}.downsample.0.weight" in p:
                    h = norm(f"{name}.downsample.1", convolve(h, p[f"{name}.downsample.0.weight"], None, 0, stride))
                pre = seen[f"{name}.relu"] = inner + h
                h = relu(pre)
        return h.mean((2, 3))
