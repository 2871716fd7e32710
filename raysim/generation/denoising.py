"""Training of a diffusion model as a task of the engine: the network, its loss, and its error on held-out images."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.records import ByteArray, Dataset, IntArray
from raysim.evaluation.accuracy import CHUNK
from raysim.evaluation.task import Task
from raysim.generation.diffusion import Diffusion, denoising_error
from raysim.generation.weights_folder import build_unet
from raysim.local.contract import Loss
from raysim.models.flat_model import FlatModel, ImageScale, evaluating

NETWORK = f"{__name__}:denoiser"  # the network's name in the configuration of a run
HALF = 0.5  # mean and standard deviation that take [0, 1] to [-1, 1]


class Denoiser(nn.Module):
    """A class-conditional UNet with the noise that it learns to take off.

    null_class: the label that stands for none, of which guidance makes use; None without.  label_dropout: fraction of
    labels that training replaces by it.
    """

    def __init__(self, unet: nn.Module, diffusion: Diffusion, null_class: int | None, label_dropout: float) -> None:
        super().__init__()
        self.unet = unet
        self.diffusion = diffusion
        self.null_class = null_class
        self.label_dropout = label_dropout

    def forward(self, x: Tensor, labels_B: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The denoising error, a scalar, of images x in [-1, 1] under noise from `generator` (None: the global one)."""
        return denoising_error(self.unet, self.diffusion.add_noise(x, generator), labels_B)


def denoiser(
    channels: int,
    image_size: tuple[int, int],
    classes: int,
    *,
    widths: list[int],
    layers_per_block: int = 1,
    attention: bool = False,
    prediction: Literal["epsilon", "v"] = "v",
    schedule: Literal["cosine", "linear"] = "cosine",
    train_steps: int = 1000,
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
) -> Denoiser:
    """A class-conditional diffusers UNet2DModel and its noise; the keys are those of `raysim pretrain`.

    Raises UserError for images that cannot be halved as often as there are widths.
    """
    check_halvings(image_size, widths)
    null_class = classes if label_dropout > 0 else None
    rows = classes + (null_class is not None)
    unet = build_unet(channels, image_size, rows, widths, layers_per_block, attention)
    return Denoiser(unet, Diffusion(prediction, schedule, train_steps), null_class, label_dropout)


def check_halvings(image_size: tuple[int, int], widths: Sequence[int]) -> None:
    """Raise UserError for images that a network with one resolution for each width cannot halve so often."""
    height, width = image_size
    factor = 2 ** (len(widths) - 1)
    if height % factor or width % factor:
        raise UserError(
            f"unet.channels: {len(widths)} resolutions halve the image {len(widths) - 1} times, but "
            f"{height} x {width} pixels cannot be divided by {factor}; give fewer widths"
        )


def _training_error(module: nn.Module, x: Tensor, y_B: Tensor) -> Tensor:
    assert isinstance(module, Denoiser)  # `Denoising.check` has seen to it
    drop_B = (torch.rand(len(x)) < module.label_dropout).to(y_B.device)
    error: Tensor = module(x, y_B.masked_fill(drop_B, module.null_class or 0))
    return error


@dataclass(frozen=True)
class DenoisingResult:
    """The error of a model on one chunk of images.  error_sum: summed over its images."""

    chunk: int
    images: int
    error_sum: float


@dataclass(frozen=True)
class Denoising(Task):
    """Take noise off images of a known class: the mean squared error of what the network predicts (`Diffusion`)."""

    shown = ("denoising_error", "train_loss")

    def scale(self, dataset: Dataset, augment: Sequence[str]) -> ImageScale:
        """To [-1, 1], whatever the images, so that nothing of the clients' pixels is needed."""
        half = (HALF,) * dataset.channels
        return ImageScale(half, half, "crop" in augment, "flip" in augment)

    def check(self, model: FlatModel, dataset: Dataset, name: str) -> None:  # noqa: ARG002
        """Refuse a network that is no Denoiser."""
        if not isinstance(model.module, Denoiser):
            raise UserError(f"model.name = {name}: {type(model.module).__name__} takes no noise off images")

    @property
    def loss(self) -> Loss:
        """The denoising error of a batch, some of whose labels are dropped."""
        return _training_error

    def evaluate(
        self, model: FlatModel, images: ByteArray, labels_N: IntArray, classes: int, scale: ImageScale,  # noqa: ARG002
        which: Iterable[int],
    ) -> list[DenoisingResult]:
        """The denoising error on each chunk, under noise that is the same in every round and run."""
        found = []
        with evaluating(model.module):
            for chunk in which:
                rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                x = scale(torch.from_numpy(images[rows].copy()).to(model.device), model.channels_last)
                y_B = torch.from_numpy(labels_N[rows].copy()).to(model.device)
                error = float(model.module(x, y_B, rng.torch_stream(0, rng.PRETRAIN, 0, chunk)))
                found.append(DenoisingResult(chunk, len(x), error * len(x)))
        return found

    def metrics(self, results: Sequence[Any], split: str, counts_KC: IntArray) -> dict[str, float]:  # noqa: ARG002
        """The mean denoising error of the split."""
        prefix = "validation_" if split == "validation" else ""
        total = math.fsum(result.error_sum for result in sorted(results, key=lambda r: r.chunk))
        return {f"{prefix}denoising_error": total / sum(result.images for result in results)}


DENOISING = Denoising()
