"""What the local loop, its algorithms and the engine say to each other: one client's data, job, hooks and result."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from raysim.core.records import ByteArray, FloatArray, IntArray
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


class LocalAlgorithm(Protocol):
    """The hooks around the one loop; `raysim.local.sgd` gives each its default."""

    epochs: int
    steps: int | None
    batch_size: int
    summed: ClassVar[tuple[str, ...]]
    broadcast: ClassVar[tuple[str, ...]]
    server_only: ClassVar[tuple[str, ...]]

    def check(self, module: nn.Module, rule: Any, server: Any) -> None: ...
    def learning_rate(self, round_: int) -> float: ...
    def start(self, job: Job) -> None: ...
    def loss(self, job: Job, x: Tensor, y_B: Tensor) -> Tensor: ...
    def after_backward(self, job: Job) -> None: ...
    def step(self, job: Job) -> None: ...
    def finish(self, job: Job) -> dict[str, Tensor] | None: ...
    def effective_steps(self, job: Job) -> float: ...
    def server_update(
        self, broadcast_vectors: dict[str, FloatArray], sums: dict[str, FloatArray], update_P: FloatArray
    ) -> tuple[dict[str, FloatArray], FloatArray]: ...


@dataclass(frozen=True)
class LocalResult:
    """loss: mean training loss per sample over the last (possibly unfinished) epoch, each batch before its own step."""

    loss: float
    steps: int
    seconds: float
    state: dict[str, Tensor] | None
