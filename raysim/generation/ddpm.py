"""The `ddpm` generator: a class-conditional diffusion model sampled with classifier-free guidance.

Image i depends on its label and its seed alone: its noise comes from a generator of its own, every batch is padded to
one shape, and on a CPU sampling uses one thread, because loops that are split over threads may give the elements at the
borders between threads another last bit.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from raysim.config.protocols import ImageGenerator
from raysim.core.errors import UserError
from raysim.core.records import ByteArray, Dataset, IntArray
from raysim.generation import training_images
from raysim.generation.find_weights import AUTO, UnsuitableWeights, settled
from raysim.generation.samplers import Sampler, public_keys
from raysim.generation.sampling import LANES, check_labels, one_thread, to_uint8
from raysim.generation.weights_folder import CARD, find_folder, progress, read_json, read_unet

__all__ = ["ddpm"]

_NUMBER = re.compile(r"(class|label)?[ _-]?\d+")  # a name of a class that says nothing but its number
CODE_VERSION = 2  # increased with every change of this module that changes pixels


class ddpm(ImageGenerator):
    """Class-conditional diffusion model (DDPM, arXiv 2006.11239) with classifier-free guidance (arXiv 2207.12598).

    Guidance g predicts null + g (conditional - null): 1 is the plain conditional model, 0 ignores the label.
    Raises UserError for weights that are missing, damaged, unfinished, made for other images than the data set's, or
    trained on some of its test images.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: str,
        *,
        weights: Annotated[
            str, Field(description="folder of `raysim pretrain`, or shipped name; auto: those for these images")
        ] = AUTO,
        sampler: Literal["ddim", "ddpm", "dpmsolver++", "unipc"] = "ddim",
        steps: Annotated[int, Field(ge=1, description="denoising steps per image")] = 20,
        guidance: Annotated[float, Field(ge=0, allow_inf_nan=False, description="1: none, at half the cost")] = 1.0,
        batch_size: Annotated[int, Field(ge=1, description="images at once; rounded up to a multiple of 16")] = 64,
        spacing: Annotated[
            Literal["auto", "leading", "trailing", "linspace"], Field(description="of timesteps; auto: as trained")
        ] = "auto",
        precision: Annotated[Literal["float32", "bf16"], Field(description="arithmetic of the network")] = "float32",
        allow_seen_test: Annotated[
            bool, Field(description="go on though test images are among those that the weights were trained on")
        ] = False,
        allow_unfinished: Annotated[
            bool, Field(description="go on though the training of the weights was stopped before its end")
        ] = False,
    ) -> None:
        weights = settled(weights, dataset)
        folder = find_folder(weights)
        if not allow_unfinished:
            _refuse_unfinished(folder, weights)
        if not allow_seen_test:
            training_images.refuse_seen_test(_trained_on(folder), dataset, weights)
        self.device = torch.device(device)
        self.unet, self.weights_sha256 = read_unet(folder)
        self.classes, self.null_class = _check_unet(folder, self.unet.config, dataset, guidance)
        self.shape = (dataset.channels, *dataset.image_size)
        self.guidance = float(guidance)
        self.precision = precision
        self.batch_size = -(-batch_size // LANES) * LANES
        self.sampler = Sampler(folder, sampler, steps, spacing)
        self._is_on_device = False

    @staticmethod
    def settled(dataset: Dataset, **keys: Any) -> dict[str, Any]:
        """The keys with `weights: auto` replaced by the weights that this machine has for the data set."""
        return {**keys, "weights": settled(keys["weights"], dataset)}

    @staticmethod
    def notes(dataset: Dataset, quota_KC: IntArray, *, weights: str, **keys: object) -> list[str]:  # noqa: ARG004
        """Say what the weights were trained on, as far as is recorded, and whether their classes have other names.

        Trained on: the clients' images, or test images.
        """
        weights = settled(weights, dataset)
        folder = find_folder(weights)
        return [
            *training_images.notes_of(_trained_on(folder), dataset, weights, _clients(folder)),
            *_name_notes(_card(folder).get("class_names"), dataset.class_names, weights),
        ]

    def fingerprint(self) -> str:
        """Hex sha256 of everything that changes the pixels; equal on all machines of one kind."""
        described = {
            "weights": self.weights_sha256,
            "unet": public_keys(self.unet.config),
            "sampler": self.sampler.describe(),
            "sampling": [self.guidance, self.batch_size, self.precision, self.null_class],
            "code": [CODE_VERSION, torch.__version__, version("diffusers"), self.device.type],
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()

    def sample(self, labels_B: IntArray, seeds_B: IntArray) -> ByteArray:
        """Make one image per label and seed: uint8 B x channels x height x width, for any B.

        Image i is the same in any batch and at any position.  Raises UserError for labels that are not integers or not
        classes, ValueError if seeds_B is not of the same length.
        """
        labels_B = check_labels(np.asarray(labels_B), self.classes)
        seeds_B = np.asarray(seeds_B)
        if seeds_B.shape != labels_B.shape or seeds_B.dtype.kind not in "iu":
            raise ValueError(f"seeds_B must be {len(labels_B)} integers, not {seeds_B.dtype} of shape {seeds_B.shape}")
        if not self._is_on_device:
            # Not diffusers' own `to`, which imports a compiler first, for 1.5 s.
            nn.Module.to(self.unet, self.device)
            nn.Module.to(self.unet, memory_format=torch.channels_last)
            self._is_on_device = True
        images = np.empty((len(labels_B), *self.shape), np.uint8)
        with torch.inference_mode(), one_thread(self.device):
            for start in range(0, len(labels_B), self.batch_size):
                batch = slice(start, start + self.batch_size)
                images[batch] = self._sample_batch(labels_B[batch], seeds_B[batch])
        return images

    def _sample_batch(self, labels_B: IntArray, seeds_B: IntArray) -> ByteArray:
        """Make at most `batch_size` images, computed in the one padded shape; the padding is images of class 0."""
        padding = self.batch_size - len(labels_B)
        generators = [torch.Generator().manual_seed(int(seed)) for seed in [*seeds_B, *[0] * padding]]
        labels = torch.from_numpy(np.pad(labels_B, (0, padding))).to(self.device)
        # Noise from generators on the CPU, so that it is the same on every device.
        x = torch.stack([torch.randn(self.shape, generator=generator) for generator in generators]).to(self.device)
        self.sampler.start()
        for i, t in enumerate(self.sampler.timesteps):
            x = self.sampler.step(i, self._predict(x, t, labels), x, generators)
        return to_uint8(x[: len(labels_B)])

    def _predict(self, x: Tensor, t: int, labels: Tensor) -> Tensor:
        """The guided prediction for one timestep: null + g (conditional - null).

        Two passes rather than one of twice the size: on a CPU up to a seventh faster, and with half the memory.
        """
        if self.guidance == 1.0 or self.null_class is None:
            return self._forward(x, t, labels)
        unconditional = self._forward(x, t, torch.full_like(labels, self.null_class))
        if self.guidance == 0.0:
            return unconditional
        return unconditional + self.guidance * (self._forward(x, t, labels) - unconditional)

    def _forward(self, x: Tensor, t: int, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            x = x.contiguous(memory_format=torch.channels_last)
            predicted: Tensor = self.unet(x, t, labels, return_dict=False)[0]
        return predicted.float().contiguous()


def _card(folder: Path) -> dict[str, Any]:
    return read_json(folder / CARD) if (folder / CARD).is_file() else {}


def _clients(folder: Path) -> str:
    """Of weights that clients trained: who, and with what privacy; empty for others."""
    by = _card(folder).get("trained_by")
    if not isinstance(by, dict):
        return ""
    privacy = by.get("privacy")
    epsilon = f", epsilon {privacy['epsilon']:.3g}" if isinstance(privacy, dict) else ""
    return f"{by.get('who')}{epsilon}"


def _trained_on(folder: Path) -> training_images.Keys | None:
    return training_images.recorded(folder, _card(folder))


def _refuse_unfinished(folder: Path, weights: str) -> None:
    done, asked = progress(_card(folder))
    if done < asked:
        raise UserError(
            f"generator.weights = {weights}: their training was stopped after {done:,} of {asked:,} steps; go on with "
            "it by the same `raysim pretrain` command, or use them as they are with generator.allow_unfinished: true"
        )


def _name_notes(made_for: object, names: Sequence[str], weights: str) -> list[str]:
    """A note where the weights call the classes otherwise than the data set, or one of the two only numbers them.

    made_for: the names in the card of the weights, where there are some.
    """
    theirs = [str(name) for name in made_for] if isinstance(made_for, list) else []
    if [name.casefold() for name in theirs] == [name.casefold() for name in names]:
        return []
    where = f"generator.weights = {weights}"
    is_numbered = [all(_NUMBER.fullmatch(name.casefold()) for name in side) for side in (theirs, names)]
    if all(is_numbered):
        return []
    if any(is_numbered):
        side, shown = ("the weights", names) if is_numbered[0] else ("the data set", theirs)
        return [
            f"{where}: {side} only number the classes, so whether they are in one order cannot be checked; the others "
            f"are {_listed([f'{c} {name}' for c, name in enumerate(shown)])}"
        ]
    differ = [f"{c} {a} for {b}" for c, (a, b) in enumerate(zip(theirs, names, strict=False)) if a != b]
    return [f"{where}: their classes have other names than the data set's: images are made of class {_listed(differ)}"]


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:10]) + (f" and {len(items) - 10} more" if len(items) > 10 else "")


def _check_unet(  # Any: a configuration of diffusers, whose keys are attributes
    folder: Path, config: Any, dataset: Dataset, guidance: float
) -> tuple[int, int | None]:
    """(classes, null class or None) of the weights; UserError if they do not fit the data set or the guidance."""
    card = _card(folder)
    rows = config.num_class_embeds
    size = config.sample_size
    if not isinstance(rows, int) or config.class_embed_type is not None:
        raise UserError(f"generator.weights: {folder} takes no class labels (num_class_embeds is {rows!r})")
    # Without a card, one row more than the data set has classes is taken to be the null class.
    has_null = card["null_class"] is not None if "null_class" in card else rows == dataset.classes + 1
    classes = rows - int(has_null)
    size = [size, size] if isinstance(size, int) else list(size or dataset.image_size)
    made_for = {"channels": config.in_channels, "pixels": size, "classes": classes}
    needed = {"channels": dataset.channels, "pixels": list(dataset.image_size), "classes": dataset.classes}
    wrong = [
        f"{made_for[what]} {what} (height, width)" if what == "pixels" else f"{made_for[what]} {what}"
        for what in made_for
        if made_for[what] != needed[what]
    ]
    if wrong:
        raise UnsuitableWeights(
            f"generator.weights: {folder} makes images of {', '.join(wrong)}, but the data set {dataset.name!r} has "
            f"{dataset.channels} channels, {list(dataset.image_size)} pixels and {dataset.classes} classes"
        )
    names = card.get("class_names")
    if isinstance(names, list) and names != list(dataset.class_names) and sorted(names) == sorted(dataset.class_names):
        raise UserError(
            f"generator.weights: {folder} numbers its classes {', '.join(map(str, names[:5]))}, ... and the data set "
            f"{dataset.name!r} {', '.join(dataset.class_names[:5])}, ..., so images of one class would be made for "
            "another; bring the classes of the data set into the order of the weights"
        )
    if guidance != 1 and not has_null:
        raise UserError(
            f"generator.guidance = {guidance}: the weights in {folder} have no null class, which guidance needs; use "
            "1, or train with label_dropout above 0"
        )
    return classes, classes if has_null else None
