"""The keys of a pretraining configuration; needs neither torch nor diffusers."""

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from raysim.config.markers import MAY_CHANGE, AtMost, OnlyWith, markers_of
from raysim.config.schema import (
    AggregationSection,
    Fraction,
    PartitionSection,
    Resources,
    Section,
    Tracking,
    Update,
)
from raysim.core.plain import PlainDict
from raysim.core.secrets import plain_without_secrets
from raysim.core.validation import show

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Below1 = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

_OF_FEDERATION = {
    "steps": "federation.rounds and federation.local.steps",
    "minutes": "federation.rounds and federation.local.steps",
    "batch_size": "federation.local.batch_size",
    "lr": "federation.local.lr",
    "warmup": "federation.local.schedule",
    "ema": "federation.ema",
    "precision": "federation.resources.precision",
    "device": "federation.resources.gpus_per_worker",
    "log_every": "federation.evaluate_every",
    "checkpoint_every": "federation.checkpoint_every",
    "sampling.every": "sampling.every_minutes",
}
"""Key of a training on all images -> what takes its place in one by clients."""


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


_WITH_IMAGES = (OnlyWith("images"), OnlyWith("every"), OnlyWith("every_minutes"))


class SamplingConfig(_Base):
    """How images are sampled: during the training to show them, and at its end to measure their quality."""

    images: Annotated[int, Field(ge=0)] = 1000
    """Images whose quality is measured at the end, equally many of each class; 0: none."""
    every: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps between grids of sample images; 0: none by steps."""
    every_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3.0
    """Minutes between grids of sample images; 0: none by time."""
    sampler: Annotated[Literal["ddim", "ddpm", "dpmsolver++", "unipc"], *_WITH_IMAGES] = "ddim"
    """As in `generator.sampler`."""
    steps: Annotated[Count, *_WITH_IMAGES] = 20
    """Denoising steps; at most `train_steps`."""
    guidance: Annotated[float, Field(ge=0, allow_inf_nan=False), *_WITH_IMAGES] = 1.5
    """Guidance; 1 is used where label_dropout is 0."""


class Federation(_Base):
    """A training by clients, in place of one on all images: the keys are those of a run."""

    rounds: Annotated[int, Field(ge=1), AtMost(10_000_000), MAY_CHANGE]
    """Federated rounds; more of them go on with a finished training."""
    clients_per_round: Annotated[int, Field(ge=1)] | Fraction = 1.0
    """Participants of a round: a number, or a fraction in (0, 1]."""
    partition: PartitionSection = PartitionSection(name="dirichlet")
    """How the training split is spread over clients; with --for, by default as in the run."""
    local: Section = Section(name="adamw")
    """Local training."""
    aggregation: AggregationSection = AggregationSection(name="fedavg")
    """Weights of the clients' updates."""
    server: Section = Section(name="sgd")
    """The step from the aggregated update to the next global network."""
    ema: Below1 = 0.0
    """Decay a round of the running mean of the global network that is kept in the end; 0: the network itself."""
    update: Update = Update()
    evaluate_every: Annotated[int, Field(ge=1)] = 10
    """Rounds between measurements of the denoising error on the test split."""
    checkpoint_every: Annotated[int, Field(ge=1), MAY_CHANGE] = 10
    """Rounds between checkpoints."""
    resources: Resources = Resources()


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
    steps: Count | None = None
    """Optimiser steps: the reproducible length of the training; null: as many as `minutes` has time for."""
    minutes: Annotated[Positive | None, MAY_CHANGE] = None
    """Without `steps`: how long to train; the first seconds show how many steps that makes, and the card keeps their
    number. With `steps`: stop after this many minutes, with a checkpoint that the same command resumes."""
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
    federation: Federation | None = None
    """Train on clients, none of whose images leaves them; null: on all images at once."""
    notes: Annotated[str, MAY_CHANGE] = ""
    """Text for the model card, such as the source and licence of the data."""

    @property
    def length(self) -> int:
        """`steps`; ValueError where their number is not settled yet."""
        if self.steps is None:
            raise ValueError("the number of steps is not settled; see raysim.generation.pretrain.settle")
        return self.steps

    def problems(self) -> list[str]:
        """What does not go together, one line a problem."""
        if self.federation is not None:
            given = {key: getattr(self, key) for key in self.model_fields_set}
            given |= {f"sampling.{key}": getattr(self.sampling, key) for key in self.sampling.model_fields_set}
            return [
                f"{key} = {show(given[key])}: with federation this is {instead}; remove it"
                for key, instead in _OF_FEDERATION.items()
                if key in given
            ]
        if self.steps is None and self.minutes is None:
            return ["steps is missing: give the number of optimiser steps, or minutes=30 for a training of that length"]
        return []

    def hash(self) -> str:
        """Hex digest that identifies what is trained: all keys but those marked MAY_CHANGE, such as the folder.

        Of a training by clients see the hash of its run (`raysim.commands.pretrain_federated`).
        """
        fields = type(self).model_fields
        plain = {k: v for k, v in self.model_dump(mode="json").items() if MAY_CHANGE not in markers_of(fields[k])}
        if self.federation is None:
            del plain["federation"]
        masked = plain_without_secrets(plain)  # a new password makes no other training
        return hashlib.sha256(json.dumps(masked, sort_keys=True).encode()).hexdigest()[:16]


def defaults_for(image_size: tuple[int, int]) -> PlainDict:
    """Keys that suit images of 8 x 8 to 64 x 64 pixels, for a user who has given none.

    image_size: (height, width).  Up to 16 pixels a small network and 2,000 steps, a few minutes on one core; larger
    images get a resolution more with each doubling, and half an hour.
    """
    height, width = image_size
    largest = max(height, width)
    halvings = 1 if largest <= 16 else 2 if largest <= 32 else 3
    while height % 2**halvings or width % 2**halvings:
        halvings -= 1
    small = largest <= 16
    return {
        "unet": {"channels": [32, *[64] * halvings]},
        "batch_size": 128 if small else 64,
        "lr": 0.002 if small else 0.0012,
        "ema": 0.995 if small else 0.999,
        **({"steps": 2000} if small else {"minutes": 30.0}),
    }
