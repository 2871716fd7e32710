"""What the local loop, its algorithms and the engine exchange: one client's data, job and result.

The hooks of a local algorithm are in `raysim.config.protocols.LocalAlgorithm`.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from raysim.core.records import ByteArray, IntArray
from raysim.models.flat_model import FlatModel


@dataclass(frozen=True)
class ClientData:
    """One client's training samples, in memory of their own: real ones first, then synthetic ones.

    n_real: how many are real.
    """

    images: ByteArray
    labels_N: IntArray
    n_real: int


@dataclass
class Job:
    """One client's local training while it runs: what the hooks of a local algorithm see and may change.

    start_P: the global parameters, in memory of their own, fixed during the local phase.  lr: learning rate of this
    round.  n: how many samples the client has.  broadcast_vectors: what the server sends besides the model, P each.
    state: the client's state from its last participation; None before the first.  steps: how many are done.
    scratch: what the hooks keep between each other until `finish`, by name.
    """

    model: FlatModel
    start_P: Tensor
    lr: float
    round: int
    client: int
    n: int
    broadcast_vectors: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] | None = None
    steps: int = 0
    scratch: dict[str, Any] = field(default_factory=dict)  # tensors, numbers, an optimiser: the algorithm knows


@dataclass(frozen=True)
class LocalResult:
    """The result of one client's local training.

    loss: mean training loss per sample over the last (possibly unfinished) epoch, each batch before its own step.
    seconds: wall time.  state: the client's new state, or None for algorithms without one.
    """

    loss: float
    steps: int
    seconds: float
    state: dict[str, Tensor] | None
