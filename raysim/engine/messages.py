"""What the driver and its workers say to each other, besides the records of `raysim.core.records`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from raysim.config.schema import Update
from raysim.core.plain import PlainMapping
from raysim.core.records import FloatArray, IntArray
from raysim.evaluation.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from torch import nn

    from raysim.config.protocols import LocalAlgorithm

Built = TypeVar("Built")

BatchTrainer = Literal["dense", "vmap"]
"""What trains several clients at once: `local.batched.on_cpu`, with the bits of one after another, or `on_gpu`."""

ClientState = dict[str, NDArray[np.generic]]
"""What a client keeps between its rounds, by name: vectors of its algorithm, what it has not sent, its statistics."""


@dataclass(frozen=True)
class Plugin(Generic[Built]):
    """A plug-in by kind and name with its checked parameters, so that any process can look it up and build it.

    Built: the type of what it builds, such as an AggregationRule or a module of torch.
    """

    kind: str
    name: str
    params: PlainMapping

    def build(self, *positional: object) -> Built:
        """Build it from the arguments that the engine supplies and the user's parameters."""
        from raysim.config.registry import resolve

        return cast(Built, resolve(self.kind, self.name)(*positional, **self.params))


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker needs for its work; a worker that replaces a dead one gets the same.

    measure: statistics of a trained client beyond loss and norm, with their options, such as {"oui": {...}}.
    update_bytes_limit: updates beyond this many bytes wait in the object store, which spills to disk.
    update: what a client does to its update before it sends it.  buffers: average, local or global (`local.batchnorm`).
    versions: those of the driver's packages, which every worker must have too.  batch_trainer: what trains several
    clients at once, where it can; None: nothing.  seed: that of the run.  model_seed: the seed of the initial
    parameters; None: that of the run.  partition_seed: the seed of the noise on clients' images; None: that of the run.
    task: what the network is trained for.
    """

    seed: int
    model: "Plugin[nn.Module]"
    local: "Plugin[LocalAlgorithm]"
    augment: tuple[str, ...] = ()
    bf16: bool = False
    measure: dict[str, PlainMapping] = field(default_factory=dict)
    update_bytes_limit: int = 1_000_000_000
    update: Update = field(default_factory=Update)
    buffers: str = "average"
    versions: dict[str, str] = field(default_factory=dict)
    batch_trainer: BatchTrainer | None = "dense"
    model_seed: int | None = None
    partition_seed: int | None = None
    task: Task = CLASSIFICATION


@dataclass(frozen=True)
class Classifier:
    """A trained model that judges images: how it is built, and the scaling of its input.

    seed: of its initial parameters, which its state replaces.  mean, std: per channel, of pixels in [0, 1].
    """

    model: "Plugin[nn.Module]"
    seed: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class SumWeights:
    """The weights of one client in a round's sums: for its update, for its float buffers and for its summed vectors."""

    update: float
    buffers: float
    vectors: float


@dataclass(frozen=True)
class Failure:
    """A client's work raised an exception; described in text, because not every exception can be sent on to the driver.

    diverged: whether its training left the numbers that can be aggregated.
    """

    client: int
    cause: str
    diverged: bool = False


@dataclass(frozen=True)
class PartialSum:
    """The sums over some of a round's clients, in grid units (`engine.reduce`).

    counters: the element-wise maximum of the integer buffers, not their sum.
    """

    params_P: FloatArray
    buffers_F: FloatArray
    counters: IntArray
    summed_vectors: dict[str, FloatArray]
