"""The `pipeline` generator: any pipeline of diffusers that makes images from class labels or from text.

A pipeline around a UNet2DModel (diffusers' DDPMPipeline, DDIMPipeline and others) is sampled by a loop of raysim's own,
because those pipelines take no labels; its batches are padded to one shape. Others, such as DiTPipeline and
StableDiffusionPipeline, are called as they are: one image at a time, or with `batch_size` always that many, since the
number of images in a batch may change the last bits of each.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from raysim.config.protocols import ImageGenerator
from raysim.core.errors import UserError
from raysim.core.plain import PlainDict
from raysim.core.records import ByteArray, Dataset, IntArray
from raysim.generation.pipeline_folder import DTYPES, KEY, PipelineFolder, quiet, require_text, sha256_of, takes
from raysim.generation.prompts import described, prompts_per_class
from raysim.generation.samplers import public_keys
from raysim.generation.sampling import LANES, check_labels, one_thread, to_uint8
from raysim.generation.weights_folder import CARD, PICKLES, pickle_refusal, read_json

__all__ = ["pipeline"]

CODE_VERSION = 2
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
_STRIDE = 8  # pixels; the sides of the images of pipelines with an autoencoder are multiples of it
_DIT_NULL = 1000  # the class that DiTPipeline takes for "no label", whatever the size of its table
_FOR_TEXT = ("prompts", "negative_prompt", "image_size", "safety_checker")
_FOR_LABELS = ("class_map",)
_FOR_UNET = ("null_class", "value_range")

Prompt = str | list[str]
Side = Annotated[int, Field(ge=1)]


class pipeline(ImageGenerator):
    """Any diffusers pipeline that takes class labels or prompts, its images resized and recoloured to the data set's.

    Larger images are averaged over areas, smaller ones enlarged (bicubic); RGB becomes grey by luminance, grey is
    repeated.  Image i depends on its label and seed alone.  The weights are loaded when the first image is asked for.
    Raises UserError for a folder that cannot be used, and for keys that do not suit its pipeline.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: str,
        *,
        folder: Annotated[str, Field(description="of `DiffusionPipeline.save_pretrained`, or owner/name on the hub")],
        steps: Annotated[int, Field(ge=1, description="denoising steps per image")] = 50,
        guidance: Annotated[float, Field(ge=1, allow_inf_nan=False, description="1: none, at half the cost")] = 1.0,
        prompts: Annotated[
            str | list[Prompt] | dict[str, Prompt] | None,
            Field(description="template with {class}; or for each class, in order or by name, a prompt or several"),
        ] = None,
        negative_prompt: Annotated[
            str | None, Field(description="what images made from text should not show; for guidance")
        ] = None,
        image_size: Annotated[
            Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None,
            Field(description="pixels, or [height, width], that are made from text before resizing; null: as trained"),
        ] = None,
        lora: Annotated[str | None, Field(description="safetensors file of LoRA weights, or a folder with one")] = None,
        lora_scale: Annotated[float, Field(allow_inf_nan=False, description="how much of the LoRA is added")] = 1.0,
        scheduler: Annotated[str | None, Field(description="another class of diffusers, such as LCMScheduler")] = None,
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
        batch_size: Annotated[
            int | None,
            Field(ge=1, description="images at once; null: 16 (its multiples) of a UNet2DModel, 1 of others")
        ] = None,
        precision: Annotated[
            Literal["float32", "bf16", "float16"], Field(description="arithmetic of the networks")
        ] = "float32",
        variant: Annotated[str | None, Field(description="which weights, where there are several; e.g. fp16")] = None,
        safety_checker: Annotated[
            bool, Field(description="with the pipeline's own, where it has one; a blanked image ends the run")
        ] = True,
    ) -> None:
        self.source = PipelineFolder(folder, variant)
        self.mode = _mode(self.source)
        _refuse_other_keys(self.source, self.mode, {
            "prompts": prompts, "negative_prompt": negative_prompt, "image_size": image_size, "class_map": class_map,
            "safety_checker": safety_checker, "null_class": null_class, "value_range": value_range,
        })
        self.device = torch.device(device)
        self.shape = (dataset.channels, *dataset.image_size)
        self.names = dataset.class_names
        self.steps = steps
        self.guidance = float(guidance)
        self.null_class = null_class
        self.value_range = _check_range(value_range)
        self.batch_size = -(-(batch_size or LANES) // LANES) * LANES if self.mode == "unet" else batch_size or 1
        self.precision = precision
        self.safety_checker = safety_checker
        self.image_size = _check_size(self.source, image_size)
        self.lora = _find_lora(self.source, lora, lora_scale)
        self.lora_scale = float(lora_scale)
        self.scheduler = self.source.scheduler(scheduler)
        self.negative_prompt = negative_prompt
        self.prompts: list[list[str]] = []
        self.class_map: list[int] = list(range(dataset.classes))
        if self.mode == "text":
            self._check_text(dataset, prompts)
        else:
            self.class_map = _check_map(self.source, class_map, dataset, _class_rows(self.source, self.mode))
        self._check_sampling()
        _check_channels(self.source, self.shape[0])

    def _check_text(self, dataset: Dataset, prompts: str | list[Prompt] | dict[str, Prompt] | None) -> None:
        if prompts is None:
            raise UserError(
                f"generator.prompts: {self.source} makes images from text; give a template such as "
                "generator.prompts='a photo of a {class}', or a prompt for each class"
            )
        self.prompts = prompts_per_class(prompts, dataset.class_names)
        for key, value, parameter in (
            ("negative_prompt", self.negative_prompt, "negative_prompt"), ("image_size", self.image_size, "height")
        ):
            if value is not None and not takes(self.source.kind.__call__, parameter):
                raise UserError(f"generator.{key} = {value!r}: {self.source} does not take it; leave it out")
        if self.negative_prompt is not None and self.guidance == 1:
            raise UserError(
                "generator.negative_prompt has no effect without guidance; set generator.guidance above 1, or leave it "
                "out"
            )
        _check_lengths(self.source, [prompt for own in self.prompts for prompt in own])

    def _check_sampling(self) -> None:
        settings = self.scheduler.config
        trained = settings.get("num_train_timesteps", self.steps)
        distilled = settings.get("original_inference_steps", trained)  # of LCMScheduler
        if self.steps > min(trained, distilled):
            raise UserError(
                f"generator.steps = {self.steps}: the {type(self.scheduler).__name__} of {self.source.path} was "
                f"trained on {min(trained, distilled)}; use at most that"
            )
        if self.guidance == 1:
            return
        if self.mode == "unet":
            rows = _class_rows(self.source, self.mode)
            if self.null_class is None or self.null_class >= rows:
                raise UserError(
                    f"generator.guidance = {self.guidance}: guidance needs generator.null_class, the row (0 to "
                    f"{rows - 1}) of the class table in {self.source.path} that stands for no label, not "
                    f"{self.null_class}; or use 1"
                )
        elif not takes(self.source.kind.__call__, "guidance_scale"):
            raise UserError(f"generator.guidance = {self.guidance}: {self.source} has no guidance; leave it out")
        elif self.mode == "labels" and _class_rows(self.source, self.mode) != _DIT_NULL:
            raise UserError(
                f"generator.guidance = {self.guidance}: {self.source.kind.__name__} takes class {_DIT_NULL} for no "
                f"label, and this one has {_class_rows(self.source, self.mode)} classes; use 1"
            )

    @staticmethod
    def notes(
        dataset: Dataset,
        quota_KC: IntArray,  # noqa: ARG004
        *,
        folder: str,
        variant: str | None = None,
        prompts: str | list[Prompt] | dict[str, Prompt] | None = None,
        image_size: int | list[int] | None = None,
        guidance: float = 1.0,
        class_map: list[int] | None = None,
        **keys: object,  # noqa: ARG004
    ) -> list[str]:
        """Say what the images are made of, how they are resized, and what cannot be known of a pipeline."""
        source = PipelineFolder(folder, variant)
        where = f"{KEY} = {folder}"
        notes = [f"{where} does not say which images it was trained on, so test images among them cannot be found"]
        if prompts is not None:
            own = prompts_per_class(prompts, dataset.class_names)
            notes.append(f"generator.prompts: {described(own, dataset.class_names)}")
            usual = inspect.signature(source.kind.__call__).parameters.get("guidance_scale")
            if usual is not None and guidance == 1 and isinstance(usual.default, float) and usual.default > 1:
                notes.append(
                    f"generator.guidance = 1: images are made without guidance; {source.kind.__name__}'s own default "
                    f"is {usual.default:g}, which few-step models such as SDXL-Turbo do without"
                )
        elif differ := _other_names(source, class_map or range(dataset.classes), dataset.class_names):
            notes.append(
                f"{where}: its classes have other names than the data set's: images are made of class "
                f"{', '.join(differ[:10])}{f' and {len(differ) - 10} more' if len(differ) > 10 else ''}"
            )
        made = _check_size(source, image_size) or _own_size(source)
        if made is not None and made != dataset.image_size:
            notes.append(f"{where} makes images of {_resizing(made, dataset.image_size)}")
        return notes

    @staticmethod
    def images_per_call(
        *, folder: str, variant: str | None = None, batch_size: int | None = None, **keys: object  # noqa: ARG004
    ) -> int:
        """The images of a batch, which may take long: by default 16 of a UNet2DModel, and 1 of other pipelines."""
        return batch_size or (LANES if _mode(PipelineFolder(folder, variant)) == "unet" else 1)

    def memory_bytes(self) -> int:
        """The memory that the loaded weights take in each process, in bytes."""
        return self.source.bytes_in(DTYPES[self.precision], "" if self.safety_checker else "safety_checker")

    def fingerprint(self) -> str:
        """Hex sha256 of every file that is read and of everything else that changes the pixels."""
        content = {
            "files": self.source.digests(),
            "sampling": [self.steps, self.guidance, self.null_class, self.value_range, self.class_map, self.shape],
            "text": [self.prompts, self.negative_prompt, self.image_size, self.safety_checker],
            "lora": [sha256_of(self.lora), self.lora_scale] if self.lora else None,
            "scheduler": [type(self.scheduler).__name__, public_keys(self.scheduler.config)],
            "batch": self.batch_size,
            "precision": self.precision,
            "code": [CODE_VERSION, torch.__version__, self.device.type],
            "libraries": _libraries(self.mode, self.lora is not None),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def sample(self, labels_B: IntArray, seeds_B: IntArray) -> ByteArray:
        """Make one image per label and seed: uint8 B x channels x height x width, for any B.

        Raises UserError for labels that are not integers or not classes, and for an image that is blanked.
        """
        labels = check_labels(np.asarray(labels_B), len(self.class_map)).tolist()
        seeds = [int(seed) for seed in np.asarray(seeds_B)]
        images = np.empty((len(labels), *self.shape), np.uint8)
        make = self._unet_batch if self.mode == "unet" else self._called
        if labels:
            _ = self.pipe  # loaded outside of what follows
        with torch.inference_mode(), one_thread(self.device), torch.random.fork_rng():
            for start in range(0, len(labels), self.batch_size):
                batch = slice(start, start + self.batch_size)
                images[batch] = to_uint8(fit(make(labels[batch], seeds[batch]), self.shape))
        return images

    @cached_property
    def pipe(self) -> Any:  # diffusers has no types
        """The loaded pipeline, on the device."""
        pipe = self.source.load(
            DTYPES[self.precision], self.device, checked=self.safety_checker, scheduler=self.scheduler
        )
        if self.lora is not None:
            _add_lora(pipe, self.lora, self.lora_scale)
        return pipe

    def _unet_batch(self, labels: list[int], seeds: list[int]) -> Tensor:
        """Make at most `batch_size` images in [-1, 1], computed in the one padded shape; the padding is dropped."""
        padding = self.batch_size - len(seeds)
        unet = self.pipe.unet
        scheduler = self.pipe.scheduler
        generators = [torch.Generator().manual_seed(seed) for seed in seeds + [0] * padding]
        classes = torch.tensor([self.class_map[label] for label in labels + labels[:1] * padding], device=self.device)
        size = unet.config.sample_size
        shape = (unet.config.in_channels, *((size, size) if isinstance(size, int) else size))
        scheduler.set_timesteps(self.steps)
        noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
        x = noise.to(self.device) * scheduler.init_noise_sigma
        own = {"generator": generators} if takes(scheduler.step, "generator") else {}
        for t in scheduler.timesteps:
            scaled = scheduler.scale_model_input(x, t).to(unet.dtype)
            predicted = unet(scaled, t, classes, return_dict=False)[0].float()
            if self.guidance != 1:
                null = torch.full_like(classes, self.null_class or 0)
                unconditional = unet(scaled, t, null, return_dict=False)[0].float()
                predicted = unconditional + self.guidance * (predicted - unconditional)
            x = scheduler.step(predicted, t, x, return_dict=False, **own)[0]
        black, white = self.value_range
        scaled_to_one: Tensor = (x[: len(seeds)].float() - black) * (2 / (white - black)) - 1
        return scaled_to_one

    def _called(self, labels: list[int], seeds: list[int]) -> Tensor:
        """Make at most `batch_size` images in [-1, 1] by the pipeline's own call; the padding is dropped.

        All random numbers of an image come from its own seed; a pipeline that draws others is refused for batches.
        """
        padding = self.batch_size - len(seeds)
        padded, padded_seeds = labels + labels[:1] * padding, seeds + [0] * padding
        call = self.pipe.__call__
        generators = [torch.Generator().manual_seed(seed) for seed in padded_seeds]
        one = self.batch_size == 1
        keys: PlainDict = {"num_inference_steps": self.steps, "output_type": "np", "return_dict": False}
        if takes(call, "generator"):
            keys["generator"] = generators[0] if one else generators
        if takes(call, "guidance_scale"):
            keys["guidance_scale"] = self.guidance
        if takes(call, "batch_size"):
            keys["batch_size"] = self.batch_size
        if self.mode == "text":
            keys |= self._text_keys(padded, padded_seeds)
        else:
            keys["class_labels"] = [self.class_map[label] for label in padded]
        torch.manual_seed(padded_seeds[0])
        before = torch.get_rng_state()
        try:
            result = self.pipe(**keys)
        except ValueError as error:  # of its check of what it is given
            raise UserError(f"generator: {self.source} refuses its keys: {error}") from None
        if not one and not torch.equal(torch.get_rng_state(), before):
            raise UserError(
                f"generator.batch_size = {self.batch_size}: {self.source} draws random numbers for a whole batch, so "
                "an image would depend on the others; use 1"
            )
        made = torch.from_numpy(np.asarray(result[0], dtype=np.float32))[: len(labels)]
        if self.mode == "text":
            self._refuse_blank(made, result[1:], labels, seeds)
        return made.permute(0, 3, 1, 2) * 2 - 1

    def _text_keys(self, labels: list[int], seeds: list[int]) -> PlainDict:
        keys: PlainDict = {"prompt": [self._prompt(*pair) for pair in zip(labels, seeds, strict=True)]}
        if self.negative_prompt is not None:
            keys["negative_prompt"] = [self.negative_prompt] * len(labels)
        if self.image_size is not None:
            keys["height"], keys["width"] = self.image_size
        return keys

    def _prompt(self, label: int, seed: int) -> str:
        """The prompt of an image: of several of its class, the one that its seed chooses."""
        return self.prompts[label][seed % len(self.prompts[label])]

    def _refuse_blank(self, made: Tensor, further: tuple[Any, ...], labels: list[int], seeds: list[int]) -> None:
        """Raise UserError for an image that a safety checker has blanked, or that is black all over."""
        flagged = further[0] if further and isinstance(further[0], list) else [False] * len(labels)
        for image, label, seed, is_flagged in zip(made, labels, seeds, flagged, strict=False):
            if is_flagged or not bool(image.any()):
                by = "its safety checker blanked" if is_flagged else "it gave, all black,"
                raise UserError(
                    f"generator: {self.source}: {by} an image of class {self.names[label]!r} (prompt "
                    f"{self._prompt(label, seed)!r}, seed {seed}); change the prompt, or, if it is harmless, set "
                    "generator.safety_checker=false" + ("" if is_flagged else " or generator.precision=float32")
                )


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


def _mode(source: PipelineFolder) -> Literal["unet", "labels", "text"]:
    """How a pipeline is sampled: around its UNet, called with labels, or called with prompts; UserError for none."""
    call = inspect.signature(source.kind.__call__).parameters
    needed = [name for name, p in call.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [name for name in needed if name not in ("self", "prompt", "class_labels")]
    if "num_inference_steps" in call and not needed and "image" not in call:
        if "class_labels" in call:
            return "labels"
        if "prompt" in call:
            return "text"
    if set(source.components) == {"unet", "scheduler"} and source.components["unet"].class_name == "UNet2DModel":
        return "unet"
    takes_more = f"; it needs {', '.join(needed)}" if needed else ""
    raise UserError(f"{KEY}: {source} makes no images from class labels or prompts alone{takes_more}")


def _refuse_other_keys(source: PipelineFolder, mode: str, given: Mapping[str, object]) -> None:
    """Raise UserError for a key that this kind of pipeline does not read."""
    defaults = inspect.signature(pipeline.__init__).parameters
    for keys, modes, what in (
        (_FOR_TEXT, ("text",), "takes class labels, not text"),
        (_FOR_LABELS, ("labels", "unet"), "takes text, not class labels: what it shows is said by generator.prompts"),
        (_FOR_UNET, ("unet",), "is called as it is; this key is for pipelines around a UNet2DModel"),
    ):
        for key in keys:
            if given[key] != defaults[key].default and mode not in modes:
                raise UserError(f"generator.{key} = {given[key]!r}: {source} {what}; leave it out")


def _class_rows(source: PipelineFolder, mode: str) -> int:
    """How many classes a pipeline with class labels knows; UserError if its network takes none."""
    network = source.config("transformer", "unet")
    rows = network.get("num_class_embeds" if mode == "unet" else "num_embeds_ada_norm")
    if rows is None and mode == "labels":
        rows = network.get("num_class_embeds")
    if not isinstance(rows, int) or (mode == "unet" and network.get("class_embed_type") is not None):
        raise UserError(f"{KEY}: {source} takes no class labels")
    return rows


def _class_names(source: PipelineFolder) -> dict[int, str]:
    """The names of the pipeline's classes by number, as far as its index or its card says them."""
    named = source.index.get("id2label")
    if isinstance(named, dict):
        return {int(number): str(name) for number, name in named.items() if str(number).isdecimal()}
    card = read_json(source.path / CARD, KEY) if (source.path / CARD).is_file() else {}
    names = card.get("class_names")
    return {i: str(name) for i, name in enumerate(names)} if isinstance(names, list) else {}


def _is_called(label: str, name: str) -> bool:
    """Whether a label of ImageNet's kind, `tench, Tinca tinca`, has this name among its own."""
    return name.casefold() in {label.casefold(), *(part.strip().casefold() for part in label.split(","))}


def _other_names(source: PipelineFolder, class_map: Sequence[int], names: Sequence[str]) -> list[str]:
    """What the pipeline calls each class that it calls otherwise than the data set does."""
    theirs = _class_names(source)
    pairs = zip((theirs.get(row, "") for row in class_map), names, strict=True)
    return [f"{c} {own!r} for {name!r}" for c, (own, name) in enumerate(pairs) if own and not _is_called(own, name)]


def _resizing(made: tuple[int, int], wanted: tuple[int, int]) -> str:
    """For a note: how images of `made` pixels become images of `wanted` pixels (height, width)."""
    is_smaller = made[0] >= wanted[0] and made[1] >= wanted[1]
    how = "averaged over areas" if is_smaller else "enlarged (bicubic)"
    squeezed = ", squeezed into another shape" if made[0] * wanted[1] != made[1] * wanted[0] else ""
    return f"{made[0]} x {made[1]} pixels, which are {how} to {wanted[0]} x {wanted[1]}{squeezed}"


def _check_map(source: PipelineFolder, class_map: list[int] | None, dataset: Dataset, rows: int) -> list[int]:
    chosen = list(range(dataset.classes)) if class_map is None else class_map
    if len(chosen) != dataset.classes or max(chosen) >= rows:
        given = "the same numbers" if class_map is None else class_map
        raise UserError(
            f"generator.class_map = {given}: it must name, for each of the {dataset.classes} classes of "
            f"{dataset.name!r}, one of the pipeline's classes 0 to {rows - 1}"
        )
    theirs = _class_names(source)
    found = [[row for row, label in theirs.items() if _is_called(label, name)] for name in dataset.class_names]
    if class_map is None and all(found) and any(c not in row for c, row in enumerate(found)):
        right = [row[0] for row in found]
        c = next(c for c, row in enumerate(found) if c not in row)
        raise UserError(
            f"generator.class_map: class {c} of {dataset.name!r} is {dataset.class_names[c]!r}, and that of the "
            f"pipeline in {source.path} is {theirs.get(c, '')!r}, so images of one class would be made for another; by "
            f"their names, it is generator.class_map={right}"
        )
    return chosen


def _check_range(value_range: list[float]) -> tuple[float, float]:
    black, white = value_range
    if not (np.isfinite([black, white]).all() and black != white):
        raise UserError(f"generator.value_range = {value_range}: give two different finite numbers, such as [-1, 1]")
    return black, white


def _check_size(source: PipelineFolder, size: int | list[int] | None) -> tuple[int, int] | None:
    """(height, width) of the images that the pipeline is asked for; None where it is left to it."""
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    if "vae" in source.components and (height % _STRIDE or width % _STRIDE):
        raise UserError(
            f"generator.image_size = {size}: {source} makes images whose sides are multiples of {_STRIDE}; they are "
            "resized to the data set's afterwards"
        )
    return height, width


def _own_size(source: PipelineFolder) -> tuple[int, int] | None:
    """(height, width) of the images that the pipeline makes unless told otherwise; None where that is not known."""
    size = source.config("unet", "transformer").get("sample_size")
    height, width = (size, size) if isinstance(size, int) else (size if isinstance(size, list) else (None, None))
    widths = source.config("vae").get("block_out_channels", [1])
    if not isinstance(height, int) or not isinstance(width, int) or not isinstance(widths, list):
        return None
    return height << (len(widths) - 1), width << (len(widths) - 1)


def _check_channels(source: PipelineFolder, wanted: int) -> None:
    vae, network = source.config("vae"), source.config("unet", "transformer")
    channels = vae.get("out_channels", 3) if vae else network.get("out_channels", network.get("in_channels", 3))
    if channels != wanted and (channels, wanted) not in ((3, 1), (1, 3)):
        raise UserError(
            f"{KEY}: {source.path} makes images of {channels} channels and the data set has {wanted}; only grey and "
            "RGB are converted into each other"
        )


def _check_lengths(source: PipelineFolder, prompts: list[str]) -> None:
    """Raise UserError for a prompt that is longer than every text encoder reads: diffusers cuts it."""
    names = [name for name in source.components if name.startswith("tokenizer")]
    tokenizers = [source.load_component(name) for name in names]
    for prompt in prompts:
        with quiet():
            room = [(len(t(prompt).input_ids), t.model_max_length) for t in tokenizers]
        if room and all(length > most for length, most in room):
            length, most = max(room, key=lambda pair: pair[1])
            raise UserError(
                f"generator.prompts: {prompt!r} takes {length} tokens and {source} reads {most}, so its end would be "
                "cut off; shorten it"
            )


def _find_lora(source: PipelineFolder, lora: str | None, scale: float) -> Path | None:
    if lora is None:
        if scale != 1:
            raise UserError(f"generator.lora_scale = {scale} has no effect without generator.lora; leave it out")
        return None
    path = Path(lora).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.suffix.lower() in PICKLES:
        raise UserError(pickle_refusal(path, "generator.lora"))
    if len(files) != 1 or not files[0].is_file() or files[0].suffix != ".safetensors":
        raise UserError(f"generator.lora = {lora}: give a .safetensors file, or a folder that holds one and no other")
    if not hasattr(source.kind, "load_lora_weights"):
        raise UserError(f"generator.lora = {lora}: {source} takes no LoRA weights; leave it out")
    require_text(f"generator.lora = {lora}: LoRA weights are to be added", ("transformers", "peft"))
    return files[0]


def _add_lora(pipe: Any, file: Path, scale: float) -> None:
    """Add the LoRA weights of a file to those of the pipeline; UserError where they are for another network."""
    try:
        with quiet():
            pipe.load_lora_weights(str(file.parent), weight_name=file.name, local_files_only=True)
            reached = any(pipe.get_list_adapters().values())
            if reached:
                pipe.fuse_lora(lora_scale=scale)
                pipe.unload_lora_weights()
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise UserError(f"generator.lora: {file} cannot be added to the {type(pipe).__name__}: {error}") from None
    if not reached:
        raise UserError(f"generator.lora: {file} holds no LoRA weights for the networks of the {type(pipe).__name__}")


def _libraries(mode: str, with_lora: bool) -> dict[str, str]:
    names = ["diffusers"] + ["transformers"] * (mode == "text") + ["peft"] * with_lora
    return {name: version(name) for name in names}
