"""The `pipeline` generator: any diffusers pipeline in a local folder that takes class labels.

A pipeline around a UNet2DModel (diffusers' DDPMPipeline, DDIMPipeline and others) is sampled by a loop of raysim's own,
because those pipelines take no labels; its batches are padded to one shape. Others, such as DiTPipeline, are called as
they are, one image at a time, because the random numbers of one image could otherwise depend on the rest of its batch.
"""

import hashlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from raysim.config.protocols import ImageGenerator
from raysim.core.errors import UserError
from raysim.core.plain import PlainDict
from raysim.core.records import ByteArray, Dataset, IntArray
from raysim.generation.sampling import LANES, check_labels, one_thread, to_uint8
from raysim.generation.weights_folder import PICKLES, pickle_refusal, read_json

__all__ = ["pipeline"]

INDEX = "model_index.json"
KEY = "generator.folder"
CODE_VERSION = 1
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601


class pipeline(ImageGenerator):
    """Any local diffusers pipeline that takes class labels, resized and recoloured to the data set's images.

    Larger images are averaged over areas, smaller ones enlarged (bicubic); RGB becomes grey by luminance, grey is
    repeated.  Image i depends on its label and seed alone.  Raises UserError for a folder that cannot be used.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: str,
        *,
        folder: Annotated[str, Field(description="folder of `DiffusionPipeline.save_pretrained`, safetensors only")],
        steps: Annotated[int, Field(ge=1, description="denoising steps per image")] = 50,
        guidance: Annotated[float, Field(ge=1, allow_inf_nan=False, description="1: none, at half the cost")] = 1.0,
        class_map: Annotated[
            list[Annotated[int, Field(ge=0)]] | None,
            Field(description="the pipeline's class for each class of the data set; null: the same numbers"),
        ] = None,
        null_class: Annotated[
            int | None, Field(ge=0, description="row of a UNet's class table that stands for no label; for guidance")
        ] = None,
        value_range: Annotated[
            list[float], Field(min_length=2, max_length=2, description="values of black and white in a UNet's output")
        ] = [-1.0, 1.0],  # noqa: B006 - never changed
        batch_size: Annotated[int, Field(ge=1, description="images at once of a UNet; a multiple of 16 is used")] = 16,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.device = torch.device(device)
        self.shape = (dataset.channels, *dataset.image_size)
        self.steps = steps
        self.guidance = float(guidance)
        self.null_class = null_class
        self.value_range = _check_range(value_range)
        self.batch_size = -(-batch_size // LANES) * LANES
        self.pipe = _load(self.folder)
        self.is_unet = not _takes_labels(self.pipe)
        rows = _class_rows(self.folder, self.pipe)
        self.class_map = _check_map(class_map, dataset, rows)
        self._check(rows)
        self.pipe.to(self.device, torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def _check(self, rows: int) -> None:
        trained = self.pipe.scheduler.config.num_train_timesteps
        if self.steps > trained:
            raise UserError(f"generator.steps = {self.steps}: {self.folder} was trained on {trained}; use at most that")
        if self.is_unet and self.guidance != 1 and (self.null_class is None or self.null_class >= rows):
            raise UserError(
                f"generator.guidance = {self.guidance}: guidance needs generator.null_class, the row (0 to {rows - 1}) "
                f"of the class table in {self.folder} that stands for no label, not {self.null_class}; or use 1"
            )
        channels = self.pipe.unet.config.in_channels if self.is_unet else self.pipe.vae.config.out_channels
        if channels != self.shape[0] and (channels, self.shape[0]) not in ((3, 1), (1, 3)):
            raise UserError(
                f"generator.folder: {self.folder} makes images of {channels} channels and the data set has "
                f"{self.shape[0]}; only grey and RGB are converted into each other"
            )

    @staticmethod
    def notes(dataset: Dataset, quota_KC: IntArray, *, folder: str, **keys: object) -> list[str]:  # noqa: ARG004
        """Say that a pipeline does not record which images it was trained on."""
        return [f"generator.folder = {folder} does not say which images it was trained on, so test images among them "
                "cannot be found"]

    def fingerprint(self) -> str:
        """Hex sha256 of every file of the folder and of everything else that changes the pixels."""
        described = {
            "files": {str(p.relative_to(self.folder)): _sha256(p) for p in _files(self.folder)},
            "sampling": [self.steps, self.guidance, self.null_class, self.value_range, self.class_map, self.shape],
            "batch": self.batch_size if self.is_unet else 1,
            "code": [CODE_VERSION, torch.__version__, version("diffusers"), self.device.type],
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def sample(self, labels_B: IntArray, seeds_B: IntArray) -> ByteArray:
        """Make one image per label and seed: uint8 B x channels x height x width, for any B.

        Raises UserError for labels that are not integers or not classes.
        """
        labels_B = check_labels(np.asarray(labels_B), len(self.class_map))
        classes = [self.class_map[label] for label in labels_B.tolist()]
        seeds = [int(seed) for seed in np.asarray(seeds_B)]
        images = np.empty((len(classes), *self.shape), np.uint8)
        size = self.batch_size if self.is_unet else 1
        make = self._unet_batch if self.is_unet else self._called
        with torch.inference_mode(), one_thread(self.device), torch.random.fork_rng():
            for start in range(0, len(classes), size):
                batch = slice(start, start + size)
                images[batch] = to_uint8(fit(make(classes[batch], seeds[batch]), self.shape))
        return images

    def _unet_batch(self, classes: list[int], seeds: list[int]) -> Tensor:
        """Make at most `batch_size` images in [-1, 1], computed in the one padded shape; the padding is dropped."""
        padding = self.batch_size - len(seeds)
        unet = self.pipe.unet
        scheduler = self.pipe.scheduler
        generators = [torch.Generator().manual_seed(seed) for seed in seeds + [0] * padding]
        labels = torch.tensor(classes + classes[:1] * padding, device=self.device)
        size = unet.config.sample_size
        shape = (unet.config.in_channels, *((size, size) if isinstance(size, int) else size))
        scheduler.set_timesteps(self.steps)
        noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
        x = noise.to(self.device) * scheduler.init_noise_sigma
        own = {"generator": generators} if _takes(scheduler.step, "generator") else {}
        for t in scheduler.timesteps:
            scaled = scheduler.scale_model_input(x, t)
            predicted = unet(scaled, t, labels, return_dict=False)[0]
            if self.guidance != 1:
                null = torch.full_like(labels, self.null_class or 0)
                unconditional = unet(scaled, t, null, return_dict=False)[0]
                predicted = unconditional + self.guidance * (predicted - unconditional)
            x = scheduler.step(predicted, t, x, return_dict=False, **own)[0]
        black, white = self.value_range
        scaled_to_one: Tensor = (x[: len(seeds)].float() - black) * (2 / (white - black)) - 1
        return scaled_to_one

    def _called(self, classes: list[int], seeds: list[int]) -> Tensor:
        """Make one image in [-1, 1] by the pipeline's own call; all its random numbers come from the image's seed."""
        torch.manual_seed(seeds[0])
        keys: PlainDict = {"num_inference_steps": self.steps, "output_type": "np", "return_dict": False}
        if _takes(self.pipe.__call__, "generator"):
            keys["generator"] = torch.Generator().manual_seed(seeds[0])
        if _takes(self.pipe.__call__, "guidance_scale"):
            keys["guidance_scale"] = self.guidance
        (made,) = self.pipe(class_labels=classes, **keys)
        return torch.from_numpy(np.asarray(made, dtype=np.float32)).permute(0, 3, 1, 2) * 2 - 1


def fit(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Convert images, B x channels x height x width in any range of values, to `shape` (channels, height, width)."""
    channels, height, width = shape
    if x.shape[1] == 3 and channels == 1:
        x = (x * torch.tensor(LUMINANCE, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
    elif x.shape[1] == 1 and channels == 3:
        x = x.expand(-1, 3, -1, -1)
    if x.shape[2] >= height and x.shape[3] >= width:
        return x if x.shape[2:] == (height, width) else F.adaptive_avg_pool2d(x, (height, width))
    return F.interpolate(x, (height, width), mode="bicubic", align_corners=False, antialias=True)


def _load(folder: Path) -> Any:  # diffusers has no types
    """Load the pipeline in a folder, only from safetensors and only with diffusers' own classes; else UserError."""
    if not (folder / INDEX).is_file():
        raise UserError(f"generator.folder: {folder} holds no {INDEX}; give one that a diffusers pipeline was saved in")
    for file in _files(folder):
        has_safe = any(file.parent.glob("*.safetensors"))
        if file.suffix.lower() in PICKLES and not has_safe:
            raise UserError(pickle_refusal(file, KEY))
    import diffusers

    name = read_json(folder / INDEX, KEY).get("_class_name")
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise UserError(
            f"generator.folder: {folder / INDEX} names {name!r}, which is no pipeline of diffusers "
            f"{diffusers.__version__}; code that comes with weights is not run"
        )
    try:
        return kind.from_pretrained(str(folder), use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, ImportError, AttributeError) as error:
        raise UserError(f"generator.folder: the pipeline in {folder} cannot be loaded: {error}") from None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _takes(call: Callable[..., object], parameter: str) -> bool:
    return parameter in inspect.signature(call).parameters


def _takes_labels(pipe: Any) -> bool:
    return _takes(pipe.__call__, "class_labels")


def _class_rows(folder: Path, pipe: Any) -> int:
    """How many classes the pipeline knows; UserError if it takes no class labels."""
    rows: object = None
    if _takes_labels(pipe):
        network = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)
        rows = getattr(getattr(network, "config", None), "num_embeds_ada_norm", None)
    elif set(pipe.components) == {"unet", "scheduler"} and pipe.unet.config.class_embed_type is None:
        rows = pipe.unet.config.num_class_embeds
    if not isinstance(rows, int):
        raise UserError(f"generator.folder: the {type(pipe).__name__} in {folder} takes no class labels")
    return rows


def _check_map(class_map: list[int] | None, dataset: Dataset, rows: int) -> list[int]:
    chosen = list(range(dataset.classes)) if class_map is None else class_map
    if len(chosen) != dataset.classes or max(chosen) >= rows:
        given = "the same numbers" if class_map is None else class_map
        raise UserError(
            f"generator.class_map = {given}: it must name, for each of the {dataset.classes} classes of "
            f"{dataset.name!r}, "
            f"one of the pipeline's classes 0 to {rows - 1}"
        )
    return chosen


def _check_range(value_range: list[float]) -> tuple[float, float]:
    black, white = value_range
    if not (np.isfinite([black, white]).all() and black != white):
        raise UserError(f"generator.value_range = {value_range}: give two different finite numbers, such as [-1, 1]")
    return black, white
