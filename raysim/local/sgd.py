"""Plain local SGD: every hook of the local loop with its default, which other algorithms override."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raysim.config.markers import AtMost, OnlyWith, ReplacedBy
from raysim.local.lr_schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raysim.config.protocols import AggregationRule, ServerOptimiser
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
    """Names of vectors in `job.scratch`; the server gets their sum divided by the number of all clients."""
    broadcast: ClassVar[tuple[str, ...]] = ()
    """Names of the server-side vectors that every client receives; they start at zero."""
    server_only: ClassVar[tuple[str, ...]] = ()
    """Those of `broadcast` and `summed` that a real federation would not send: the server can compute them itself."""
    logged: ClassVar[tuple[str, ...]] = ()
    """Names of numbers in `job.scratch` that are recorded for each client; a real federation sends none of them."""
    equal_clients: ClassVar[bool] = False
    """Whether the method minimises the mean over clients with equal weights, whatever the weights of their updates."""

    def __post_init__(self) -> None:
        """Raise UserError for keys that do not fit together."""
        self.schedule.check()

    def check(self, module: "nn.Module", rule: "AggregationRule", server: "ServerOptimiser") -> None:
        """Raise UserError for a model, aggregation rule or server optimiser that the algorithm cannot work with."""

    def learning_rate(self, round_: int) -> float:
        """The learning rate of a round (counted from 1), the same for every client.

        lr * lr_decay^(round - 1) * the schedule's factor.
        """
        return self.lr * self.lr_decay ** (round_ - 1) * self.schedule.scale(round_)

    def start(self, job: "Job") -> None:
        """Prepare a client's training, before the first step."""

    def loss(self, job: "Job", x: "Tensor", y_B: "Tensor") -> "Tensor":
        """The mean loss of a batch x with labels y_B: that of the run's task, cross-entropy for classification."""
        return job.loss(job.model.module, x, y_B)

    def after_backward(self, job: "Job") -> None:
        """Change the gradient in place, after `backward` and before the step."""

    def clip_gradient(self, job: "Job") -> None:
        """Scale the gradient down to the norm `clip`."""
        self.clip_norm(job.model.grad_P)

    def clip_norm(self, grad: "Tensor") -> None:
        """Scale gradients down in place to the norm `clip`, as PyTorch does; the last dimension is one gradient."""
        if self.clip is not None:
            grad.mul_((self.clip / (grad.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0))

    def step(self, job: "Job") -> None:
        """Take one SGD step on the flat parameters."""
        grad_P = job.model.grad_P
        self.clip_gradient(job)
        velocity_P = job.scratch.setdefault("velocity", grad_P.new_zeros(len(grad_P))) if self.momentum else grad_P
        self.descend(job.model.params_P, grad_P, velocity_P, job.lr)

    def descend(self, params: "Tensor", grad: "Tensor", velocity: "Tensor", lr: float) -> None:
        """Take a step of PyTorch's SGD on any part of the parameters, in place.

        velocity: of the same shape, zero before the first step; used only with momentum.
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
        """Return the client's new state after the last step, or None for algorithms without one."""
        return None

    def effective_steps(self, job: "Job") -> float:
        """||a||_1 of FedNova (arXiv 2007.07481): how far unit gradients move a client, in units of the learning rate.

        tau for plain SGD; a = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho, tau the steps taken;
        tau + rho a with Nesterov's. A pull mu towards a fixed point, such as weight decay, shortens earlier steps:
        (1 - (1 - lr mu)^tau) / (lr mu) without momentum.
        """
        return self.pulled_steps(job) if self.pull() else self.unit_gradients(job)

    def pull(self) -> float:
        """The factor mu of a term mu (w - fixed point) in the gradient; here the weight decay."""
        return self.weight_decay

    def unit_gradients(self, job: "Job") -> float:
        """How far unit gradients move a client without any pull, in units of the learning rate."""
        tau = job.steps
        rho = self.momentum
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
        """Compute (next round's `broadcast` vectors, the update for the server optimiser), all of shape P.

        sums: this round's sums of the vectors in `summed`.  update_P: the weighted sum of the clients' updates.
        """
        del sums
        return broadcast_vectors, update_P
