"""The sections of a configuration that name a plug-in, and the one that evaluates clients."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A plug-in: its name, and beside it the plug-in's own keys."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True, protected_namespaces=())
    name: str
    """Name of the plug-in (`python -m raysim list` shows them), or `package.module:attribute`."""

    @property
    def params(self) -> dict[str, Any]:
        """The plug-in's own keys, defaults filled in."""
        return self.__pydantic_extra__ or {}


class DataSection(Section):
    """Which images: a data set, and how much of it."""

    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many training images, class-balanced; null for all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many test images, class-balanced; null for all."""
    public_frac: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Class-balanced fraction of the training images that no client owns: for the oracle, or to pretrain on."""
    augment: list[Literal["crop", "flip"]] = []
    """Augmentation of training batches, drawn per client and round: random crop after 4-pixel padding, mirror."""


class PartitionSection(Section):
    """Who owns which training sample, and what is changed afterwards (in the order below)."""

    stream: Literal["raysim", "numpy"] = "raysim"
    """Random numbers that deal out the samples: raysim's own, or numpy.random.RandomState(seed) of earlier code."""
    rare: dict[str, Any] | None = None
    """Cut a fraction of clients to few samples: {fraction: 0.2, max_samples: 120}."""
    label_noise: dict[str, Any] | None = None
    """Replace labels of a fraction of clients: {fraction: 0.2, rate: 0.4, kind: symmetric}."""
    input_noise: dict[str, Any] | None = None
    """Add Gaussian noise to the images of a fraction of clients: {fraction: 0.2, std: 0.1}."""


class AggregationSection(Section):
    """How much each client's update counts."""

    weight_by: Literal["real", "total"] = "real"
    """What n_k counts: real samples, or real plus synthetic ones."""
    buffers: Literal["average", "local", "global"] = "average"
    """Running statistics (BatchNorm): averaged by size, each client's own, or fixed at the initial ones."""


class FineTuning(BaseModel):
    """How well the global model serves a client that trains it on its own samples first; changes no bit of the run."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())

    every: Annotated[int, Field(ge=1)] | None = None
    """Rounds between such evaluations, of which the last round is always one; null: none at all."""
    clients: Annotated[int, Field(ge=1)] | None = None
    """How many clients are tuned, the same ones each time; null: all."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the client's samples, with plain SGD."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Samples a step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Learning rate."""
    test_images: Annotated[int, Field(ge=1)] | None = 100
    """Test images of each class that a tuned model is evaluated on; null: all."""
