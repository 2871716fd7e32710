"""What the local loop, its algorithms and the engine exchange: one client's data, job and result.

The hooks of a local algorithm are in `raysim.config.protocols.LocalAlgorithm`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

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


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(module, x, y_B) -> the mean loss, a scalar, of a batch x, B x channels x height x width in float32, labels y_B."""


def cross_entropy(module: nn.Module, x: Tensor, y_B: Tensor) -> Tensor:
    """The mean cross-entropy of a batch x with labels y_B: the loss of classification."""
    return F.cross_entropy(module(x), y_B)


@dataclass
class Job:
    """One client's local training while it runs: what the hooks of a local algorithm see and may change.

    start_P: the global parameters, in memory of their own, fixed during the local phase.  lr: learning rate of this
    round.  n: how many samples the client has.  broadcast_vectors: what the server sends besides the model, P each.
    state: the client's state from its last participation; None before the first.  steps: how many are done.
    scratch: what the hooks keep between each other until `finish`, by name.  loss: of a batch, which the task of the
    run decides (`evaluation.task`).
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
    loss: Loss = cross_entropy


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
