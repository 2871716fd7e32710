"""What the local loop, its algorithms and the engine say to each other: one client's data, job and result.

The hooks of a local algorithm are in `raysim.config.protocols.LocalAlgorithm`.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from raysim.core.records import ByteArray, IntArray
from raysim.models.flat_model import FlatModel


@dataclass(frozen=True)
class ClientData:
    """One client's training samples in fresh memory: real ones first, then synthetic ones."""

    images: ByteArray
    labels_N: IntArray
    n_real: int


@dataclass
class Job:
    """One client's local training while it runs: what the hooks of a local algorithm see and may change.

    start_P: the global parameters, in memory of their own, fixed during the local phase.  lr: that of this round.
    broadcast_vectors: what the server broadcasts beside the model, P each.  state: the client's state from its last
    participation.  scratch: whatever a hook wants to keep until `finish`.
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
    scratch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalResult:
    """loss: mean training loss per sample over the last (possibly unfinished) epoch, each batch before its own step."""

    loss: float
    steps: int
    seconds: float
    state: dict[str, Tensor] | None
