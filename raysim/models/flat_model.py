"""A model as flat tensors, and images as a model takes them: what training and evaluation share."""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raysim.core import rng
from raysim.core.records import ModelState


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which a module is in evaluation mode and no gradient is kept; afterwards its mode is as before."""
    was_training = module.training
    module.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        module.train(was_training)


class FlatModel:
    """A module whose trainable parameters are views of one flat float32 tensor, and its gradients of another.

    Loading parameters is one copy, an update one subtraction, an optimiser step one call. With channels_last, weights
    of convolutions have that order inside the flat tensor; `state_dict` gives the ordinary order. Floating-point
    buffers share a third flat tensor, integer ones a fourth.

    tried: results of tests that are made once with this model, such as whether a faster way has the same bits.
    """

    def __init__(self, module: nn.Module, device: str = "cpu", channels_last: bool = True) -> None:
        self.module = module.to(device)
        self.device = device
        self.channels_last = channels_last and any(isinstance(m, nn.Conv2d) for m in module.modules())
        self.batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.params_P = torch.empty(sum(p.numel() for p in trainable), device=device)
        self.grad_P = torch.zeros_like(self.params_P)
        start = 0
        for p in trainable:
            view, grad = (self._view(flat, start, p.shape) for flat in (self.params_P, self.grad_P))
            view.copy_(p.detach())
            p.data = view
            p.grad = grad
            start += p.numel()
        self.buffers_F, self._floats = self._gather_buffers(floating=True)
        self.counters, self._ints = self._gather_buffers(floating=False)
        self.tried: dict[tuple[str, int], bool] = {}
        self._frozen: dict[str, FlatModel] = {}

    def _view(self, flat: Tensor, start: int, shape: torch.Size) -> Tensor:
        values = flat[start : start + shape.numel()]
        if self.channels_last and len(shape) == 4:
            out, channels, height, width = shape
            return values.view(out, height, width, channels).permute(0, 3, 1, 2)
        return values.view(shape)

    def named_views(self, params_P: Tensor) -> dict[str, Tensor]:
        """The trainable parameters by name, as views of any flat vector with the layout of `self.params_P`."""
        trainable = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        return {name: self._view(params_P, int(p.storage_offset()), p.shape) for name, p in trainable}

    def _gather_buffers(self, floating: bool) -> tuple[Tensor, list[tuple[nn.Module, str]]]:
        owners = [
            (m, name)
            for m in self.module.modules()
            for name, b in m.named_buffers(recurse=False)
            if b.is_floating_point() is floating
        ]
        dtype = torch.float32 if floating else torch.int64
        flat = torch.empty(sum(getattr(m, n).numel() for m, n in owners), dtype=dtype, device=self.device)
        start = 0
        for m, name in owners:
            buffer = getattr(m, name)
            view = flat[start : start + buffer.numel()].view(buffer.shape)
            view.copy_(buffer)
            setattr(m, name, view)
            start += buffer.numel()
        return flat, owners

    def load(self, state: ModelState) -> None:
        """Copy a state into the model; the arrays are not changed, and may be read-only shared memory."""
        _copy_in(self.params_P, state.params_P)
        _copy_in(self.buffers_F, state.buffers_F)
        _copy_in(self.counters, state.counters)

    def state(self) -> ModelState:
        """Return a copy of the present state as arrays."""
        params_P, buffers_F, counters = (
            t.detach().cpu().numpy().copy() for t in (self.params_P, self.buffers_F, self.counters)
        )
        return ModelState(params_P, buffers_F, counters)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the flat tensors, on the device, by name, without empty ones."""
        return {name: flat.detach().clone() for name, flat in self._flats().items() if flat.numel()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Copy a snapshot into the model."""
        flats = self._flats()
        for name, values in snapshot.items():
            flats[name].copy_(values)

    def frozen(self, name: str, snapshot: dict[str, Tensor]) -> nn.Module:
        """Return another module in the state of `snapshot`, in evaluation mode and without gradients.

        It is made once for each name and kept: a later call with the same name changes the module of the earlier one.
        """
        if name not in self._frozen:
            frozen = FlatModel(copy.deepcopy(self.module), self.device, self.channels_last)
            frozen.module.eval().requires_grad_(False).zero_grad(set_to_none=True)
            frozen.grad_P = frozen.grad_P.new_empty(0)
            self._frozen[name] = frozen
        self._frozen[name].restore(snapshot)
        return self._frozen[name].module

    def fixed_sha256(self) -> str:
        """Hex digest of the parameters that are not trained, which no state holds; empty if there are none."""
        fixed = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        digest = hashlib.sha256()
        for name, p in fixed:
            digest.update(f"{name} {p.dtype} {tuple(p.shape)}\n".encode())
            digest.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest() if fixed else ""

    def _flats(self) -> dict[str, Tensor]:
        return {"params": self.params_P, "buffers": self.buffers_F, "counters": self.counters}

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of parameters and buffers by name, contiguous, in the order of `nn.Module.state_dict`."""
        return {k: v.detach().cpu().contiguous().numpy().copy() for k, v in self.module.state_dict().items()}


def _copy_in(target: Tensor, array: NDArray[Any]) -> None:
    if target.device.type == "cpu":
        np.copyto(target.numpy(), array)
    else:
        target.copy_(torch.from_numpy(array.copy()))


def build_model(
    build: Callable[[int, tuple[int, int], int], nn.Module],
    channels: int,
    image_size: tuple[int, int],
    classes: int,
    seed: int,
) -> nn.Module:
    """Build a module with the initial parameters of this seed, which are the same for every method.

    build: a model plug-in with its own keys bound; takes (channels, (height, width), classes).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.integer(seed, rng.MODEL))
        return build(channels, image_size, classes)


@lru_cache
@torch.inference_mode(False)
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of bytes, to be broadcast over images."""
    mean_C, std_C = (torch.tensor(values, device=device).mul_(255).view(1, -1, 1, 1) for values in (mean, std))
    return mean_C, std_C


@dataclass(frozen=True)
class ImageScale:
    """Normalisation of uint8 images to zero mean and unit variance per channel; augmentation of training batches."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: bool = False
    flip: bool = False
    padding: int = 4

    def __call__(self, images: Tensor, channels_last: bool) -> Tensor:
        """Normalise uint8 images to new float32 ones, B x channels x height x width; the input is not changed."""
        mean, std = _constants(self.mean, self.std, images.device)
        x = images.to(torch.float32).sub_(mean).div_(std)
        # Only now: arithmetic along rows of pixels is ten times as fast as along the channels of one pixel.
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    def augment(self, images: Tensor, generator: np.random.Generator) -> Tensor:
        """Crop (after zero padding) and mirror each image at random, as `crop` and `flip` say; uint8, same shape."""
        count, _, height, width = images.shape
        if self.flip:
            mirror = torch.from_numpy(generator.random(count) < 0.5).to(images.device)
            images = torch.where(mirror[:, None, None, None], images.flip(3), images)
        if self.crop:
            offsets = torch.from_numpy(generator.integers(0, 2 * self.padding + 1, size=(2, count))).to(images.device)
            padded = nn.functional.pad(images, (self.padding,) * 4)
            rows = offsets[0][:, None] + torch.arange(height, device=images.device)
            cols = offsets[1][:, None] + torch.arange(width, device=images.device)
            each = torch.arange(count, device=images.device)[:, None, None]
            images = padded.permute(0, 2, 3, 1)[each, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
        return images
