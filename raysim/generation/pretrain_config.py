"""The keys of a pretraining configuration; needs neither torch nor diffusers."""

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from raysim.config.markers import MAY_CHANGE, OnlyWith, markers_of
from raysim.config.schema import Tracking
from raysim.core.plain import PlainDict
from raysim.core.secrets import plain_without_secrets

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Below1 = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())


class UNetConfig(_Base):
    """Size of the network (diffusers' UNet2DModel)."""

    channels: Annotated[list[Count], Field(min_length=1)] = [32, 64]
    """Channels at each resolution, finest first; every further entry halves height and width once more."""
    layers_per_block: Count = 1
    """Residual blocks at each resolution."""
    attention: bool = False
    """Self-attention at the lowest resolution; slow, and small images do well without."""


_WITH_IMAGES = (OnlyWith("images"), OnlyWith("every"))


class SamplingConfig(_Base):
    """How images are sampled: during the training to show them, and at its end to measure their quality."""

    images: Annotated[int, Field(ge=0)] = 1000
    """Images whose quality is measured at the end, equally many of each class; 0: none."""
    every: Annotated[int, Field(ge=0)] = 1000
    """Optimiser steps between grids of sample images; 0: none."""
    sampler: Annotated[Literal["ddim", "ddpm", "dpmsolver++", "unipc"], *_WITH_IMAGES] = "ddim"
    """As in `generator.sampler`."""
    steps: Annotated[Count, *_WITH_IMAGES] = 20
    """Denoising steps; at most `train_steps`."""
    guidance: Annotated[float, Field(ge=0, allow_inf_nan=False), *_WITH_IMAGES] = 1.5
    """Guidance; 1 is used where label_dropout is 0."""


class PretrainConfig(_Base):
    """One training run of a class-conditional diffusion model."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Everything random is a function of this number."""
    data: PlainDict
    """The data set: its name and keys, as in a run; only the training split is used to fit."""
    unet: UNetConfig = UNetConfig()
    """The network."""
    prediction: Literal["epsilon", "v"] = "v"
    """What the network predicts: the noise, or v = sqrt(abar) noise - sqrt(1 - abar) image (arXiv 2202.00512)."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How noise grows with the timestep: cosine (arXiv 2102.09672) or linear (arXiv 2006.11239)."""
    train_steps: Annotated[int, Field(ge=2)] = 1000
    """Timesteps of the diffusion; sampling can use any number up to this."""
    label_dropout: Below1 = 0.1
    """Fraction of labels replaced by the null class, which guidance needs; 0: no null class."""
    batch_size: Count = 128
    """Images of one optimiser step."""
    lr: Positive = 0.002
    """Peak learning rate of AdamW; it falls to zero along a half cosine."""
    warmup: Annotated[int, Field(ge=0)] = 100
    """Optimiser steps over which the learning rate rises to its peak."""
    steps: Count
    """Optimiser steps: the reproducible length of the training."""
    minutes: Annotated[Positive | None, MAY_CHANGE] = None
    """Stop after this many minutes, with a checkpoint that the same command resumes; null: no limit."""
    ema: Below1 = 0.999
    """Decay of the running mean of the weights that is kept in the end; it starts lower and rises to this."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the network: float32, or bf16 autocast (faster where the processor has it)."""
    flips: Literal["auto"] | bool = "auto"
    """Mirror half of the images; auto: where the data set says that a mirrored image keeps its label."""
    output: Annotated[str, MAY_CHANGE]
    """Folder that gets the weights."""
    device: Annotated[str, MAY_CHANGE] = "auto"
    """`cpu`, `cuda`, or auto: a GPU where there is one."""
    log_every: Annotated[Count, MAY_CHANGE] = 50
    """Optimiser steps between progress reports."""
    checkpoint_every: Annotated[Count, MAY_CHANGE] = 500
    """Optimiser steps between checkpoints."""
    sampling: Annotated[SamplingConfig, MAY_CHANGE] = SamplingConfig()
    """Samples during the training and the measurement of quality at its end; changes nothing in the training."""
    tracking: Annotated[Tracking, MAY_CHANGE] = Tracking()
    """Where MLflow keeps loss, sample grids and quality."""
    notes: Annotated[str, MAY_CHANGE] = ""
    """Text for the model card, such as the source and licence of the data."""

    def hash(self) -> str:
        """Hex digest that identifies what is trained: all keys but those marked MAY_CHANGE, such as the folder."""
        fields = type(self).model_fields
        plain = {k: v for k, v in self.model_dump(mode="json").items() if MAY_CHANGE not in markers_of(fields[k])}
        masked = plain_without_secrets(plain)  # a new password makes no other training
        return hashlib.sha256(json.dumps(masked, sort_keys=True).encode()).hexdigest()[:16]
