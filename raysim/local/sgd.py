"""Plain local SGD: every hook of the local loop with its default. Other algorithms override what they change."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from raysim.config.markers import AtMost, OnlyWith, ReplacedBy
from raysim.local.lr_schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raysim.core.records import FloatArray
    from raysim.local.contract import Job

__all__ = ["sgd"]


@dataclass
class sgd:
    """Local SGD with optional momentum, weight decay and gradient clipping (FedAvg's client, arXiv 1602.05629)."""

    epochs: Annotated[int, Field(ge=1, description="local epochs"), AtMost(1_000_000), ReplacedBy("steps")] = 1
    steps: Annotated[
        Annotated[int, Field(ge=1, description="local steps, in place of epochs where given")] | None,
        AtMost(1_000_000_000),
    ] = None
    batch_size: Annotated[int, Field(ge=1), AtMost(1_000_000_000)] = 32
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="learning rate of round 1")] = 0.05
    lr_decay: Annotated[float, Field(gt=0, le=1, description="factor from one round to the next")] = 1.0
    schedule: Annotated[Schedule, Field(description="further factor of each round")] = field(default_factory=Schedule)
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: Annotated[bool, OnlyWith("momentum")] = False
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    clip: Annotated[float, Field(gt=0, description="largest gradient norm")] | None = None

    summed: ClassVar[tuple[str, ...]] = ()
    """Names of vectors in `job.scratch` whose sum over the round, over all registered clients, the server gets."""
    broadcast: ClassVar[tuple[str, ...]] = ()
    """Names of the server-side vectors that every client receives; they start at zero."""
    server_only: ClassVar[tuple[str, ...]] = ()
    """Those of both that a real federation would not send: only the server uses them, or it knows them anyway."""
    logged: ClassVar[tuple[str, ...]] = ()
    """Names of numbers in `job.scratch` that are kept in the record of each client; a real federation sends none."""
    equal_clients: ClassVar[bool] = False
    """Whether the method minimises the mean over clients, each counted alike, however updates are weighed."""

    def __post_init__(self) -> None:
        """Raises UserError for keys that do not fit together."""
        self.schedule.check()

    def check(self, module: "nn.Module", rule: Any, server: Any) -> None:
        """Raises UserError for a model, aggregation rule or server optimiser that the algorithm cannot work with."""

    def learning_rate(self, round_: int) -> float:
        """The learning rate of a round (counted from 1), the same for every client.

        lr * lr_decay^(round - 1) * the schedule's factor.
        """
        return self.lr * self.lr_decay ** (round_ - 1) * self.schedule.scale(round_)

    def start(self, job: "Job") -> None:
        """Before the first step."""

    def loss(self, job: "Job", x: "Tensor", y_B: "Tensor") -> "Tensor":
        """Mean cross-entropy of a batch."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(job.model.module(x), y_B)

    def after_backward(self, job: "Job") -> None:
        """Change the gradient in place, after `backward` and before the step."""

    def clip_gradient(self, job: "Job") -> None:
        """Scale the gradient down to the norm `clip`."""
        self.clip_norm(job.model.grad_P)

    def clip_norm(self, grad: "Tensor") -> None:
        """Scale each gradient, the last dimension of a tensor, down to the norm `clip`, with PyTorch's definition."""
        if self.clip is not None:
            grad.mul_((self.clip / (grad.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0))

    def step(self, job: "Job") -> None:
        """One SGD step on the flat parameters."""
        grad_P = job.model.grad_P
        self.clip_gradient(job)
        velocity_P = job.scratch.setdefault("velocity", grad_P.new_zeros(len(grad_P))) if self.momentum else grad_P
        self.descend(job.model.params_P, grad_P, velocity_P, job.lr)

    def descend(self, params: "Tensor", grad: "Tensor", velocity: "Tensor", lr: float) -> None:
        """PyTorch's SGD on any part of the parameters, in place; `velocity` begins at zero, read with momentum alone.

        g <- g + decay w;  v <- momentum v + g;  w <- w - lr v, or w - lr (g + momentum v) with Nesterov's.
        """
        import torch

        with torch.no_grad():
            if self.weight_decay:
                grad.add_(params, alpha=self.weight_decay)
            if self.momentum:
                velocity.mul_(self.momentum).add_(grad)
                grad = grad.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            params.add_(grad, alpha=-lr)

    def finish(self, job: "Job") -> "dict[str, Tensor] | None":  # noqa: ARG002
        """After the last step: the client's new state, or None for algorithms without one."""
        return None

    def effective_steps(self, job: "Job") -> float:
        """||a||_1 of FedNova (arXiv 2007.07481): how far unit gradients move a client, in units of the learning rate.

        tau for plain SGD; a = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho, tau the steps taken;
        tau + rho a with Nesterov's. A pull mu towards a fixed point, such as weight decay, shortens earlier steps:
        (1 - (1 - lr mu)^tau) / (lr mu) without momentum.
        """
        return self.pulled_steps(job) if self.pull() else self.unit_gradients(job)

    def pull(self) -> float:
        """mu of a term mu (w - fixed point) in the gradient: the weight decay."""
        return self.weight_decay

    def unit_gradients(self, job: "Job") -> float:
        """How far unit gradients move a client without any pull, in units of the learning rate."""
        tau, rho = job.steps, self.momentum
        a = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        return tau + rho * a if self.nesterov else a

    def pulled_steps(self, job: "Job") -> float:
        """||a||_1 against the pull: the sum of the absolute coefficients with which gradients enter the update.

        The coefficient of a gradient that was taken n steps before the end is how far it alone, 1 and then 0, has moved
        the client after n steps, in units of the learning rate.  With momentum and a strong pull it may be negative.
        """
        velocity = 0.0
        moved = 0.0
        total = 0.0
        for step in range(job.steps):
            gradient = (step == 0) - job.lr * self.pull() * moved
            velocity = self.momentum * velocity + gradient
            moved += gradient + self.momentum * velocity if self.nesterov else velocity
            total += abs(moved)
        return total

    def server_update(
        self, broadcast_vectors: "dict[str, FloatArray]", sums: "dict[str, FloatArray]", update_P: "FloatArray"
    ) -> "tuple[dict[str, FloatArray], FloatArray]":
        """(next round's `broadcast` vectors, the update for the server optimiser), from this round's sums (P each)."""
        del sums
        return broadcast_vectors, update_P
