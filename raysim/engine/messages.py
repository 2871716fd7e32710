"""What the driver and its workers say to each other, besides the records of `raysim.core.records`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from raysim.config.schema import Update
from raysim.core.plain import PlainMapping
from raysim.core.records import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import nn

    from raysim.config.protocols import LocalAlgorithm

Built = TypeVar("Built")

ClientState = dict[str, NDArray[np.generic]]
"""What a client keeps between its rounds, by name: of its algorithm, of what it has not sent, of its statistics."""


@dataclass(frozen=True)
class Plugin(Generic[Built]):
    """A plug-in by kind and name with its checked parameters; found again in the process that uses it.

    Built: what it gives, such as an AggregationRule or a module of torch.
    """

    kind: str
    name: str
    params: PlainMapping

    def build(self, *positional: object) -> Built:
        """Call it with what the engine supplies and the user's parameters."""
        from raysim.config.registry import resolve

        return cast(Built, resolve(self.kind, self.name)(*positional, **self.params))


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a worker needs to take part; a replacement for a dead worker gets the same.

    measure: statistics of a trained client beyond loss and norm, with their options, such as {"oui": {...}}.
    update_bytes_limit: updates beyond this many bytes wait in the object store, which spills to disk.
    update: what a client does to its update before it sends it.  buffers: average, local or global (`local.batchnorm`).
    versions: of the driver's packages, which every worker must have too.  client_batching: whether several clients may
    be trained at once.  seed: of the run; model_seed: of the initial parameters, partition_seed: of the noise on
    clients' images, each that of the run where it is None.
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
    client_batching: bool = True
    model_seed: int | None = None
    partition_seed: int | None = None


@dataclass(frozen=True)
class SumWeights:
    """The weight of one client in each of a round's sums: of its update, its float buffers, its summed vectors."""

    update: float
    buffers: float
    vectors: float


@dataclass(frozen=True)
class Failure:
    """A client's work raised; plain text, because not every exception survives a trip between processes."""

    client: int
    cause: str
    diverged: bool = False


@dataclass(frozen=True)
class PartialSum:
    """The sums over some of a round's clients, in grid units (`engine.reduce`); counters: the element-wise maximum."""

    params_P: FloatArray
    buffers_F: FloatArray
    counters: IntArray
    summed_vectors: dict[str, FloatArray]
