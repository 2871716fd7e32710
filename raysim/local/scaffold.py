"""SCAFFOLD (arXiv 1910.06378)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raysim.config.markers import OnlyWith
from raysim.core.errors import UserError
from raysim.local.sgd import sgd

if TYPE_CHECKING:
    from torch import Tensor

    from raysim.core.records import FloatArray
    from raysim.local.contract import Job

__all__ = ["scaffold"]


@dataclass
class scaffold(sgd):
    """Local SGD with control variates against client drift (SCAFFOLD, arXiv 1910.06378, option II).

    Each step:       y <- y - lr (g - c_k + c)
    After the last:  c_k+ = c_k - c + (x - y) / (steps lr), with the steps taken and the learning rate of this round
    Server:          c <- c + (1 / K) sum (c_k+ - c_k), over the participants, K all registered clients
    All variates start at 0, so round 1 is FedAvg. The paper averages clients uniformly: `aggregation: {name: uniform}`.
    With other weights it still converges to the minimum of the mean over clients with equal weights: c contains each
    client's gradient once. The norms of c (`c_norm`) and of each c_k (`c_k_norm`) are among the metrics.

    With momentum, if allowed, ||a||_1 (`unit_gradients`) takes the place of the steps: c_k+ is then still a mean of
    the client's own gradients, though no longer an evenly weighted one, and the paper's theory does not cover it.
    `clip` is refused: it would cut the corrected gradient, and c_k+ would not be a mean of gradients at all.
    """

    allow_momentum: Annotated[
        bool, Field(description="accept `momentum`, which the method was not made for"), OnlyWith("momentum")
    ] = False

    broadcast: ClassVar[tuple[str, ...]] = ("c",)
    summed: ClassVar[tuple[str, ...]] = ("c_change",)
    logged: ClassVar[tuple[str, ...]] = ("c_k_norm",)
    equal_clients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise UserError for momentum that is not explicitly allowed, and for gradient clipping."""
        super().__post_init__()
        if self.clip is not None:
            raise UserError(
                f"local.clip = {self.clip}: it would cut SCAFFOLD's corrected gradients, from which its control "
                "variates are worked out; set it to null"
            )
        if self.momentum and not self.allow_momentum:
            raise UserError(
                f"local.momentum = {self.momentum}: SCAFFOLD's control variates are made for plain SGD; "
                "set it to 0, or local.allow_momentum to true"
            )

    def start(self, job: "Job") -> None:
        """Load c_k of the client's last participation, and compute the correction c - c_k of this round."""
        import torch

        c_P = job.broadcast_vectors["c"]
        job.scratch["c_k"] = torch.zeros_like(c_P) if job.state is None else job.state["c_k"]
        job.scratch["correction"] = c_P - job.scratch["c_k"]

    def after_backward(self, job: "Job") -> None:
        """Change the gradient g to: g - c_k + c."""
        job.model.grad_P.add_(job.scratch["correction"])

    def finish(self, job: "Job") -> "dict[str, Tensor]":
        """Return the client's new state, c_k+; its change c_k+ - c_k is sent to the server."""
        moved_P = job.start_P - job.model.params_P.detach()
        job.scratch["c_change"] = moved_P / (self.unit_gradients(job) * job.lr) - job.broadcast_vectors["c"]
        c_k_P = job.scratch["c_k"] + job.scratch["c_change"]
        job.scratch["c_k_norm"] = float(c_k_P.double().norm())
        return {"c_k": c_k_P}

    def server_update(
        self, broadcast_vectors: "dict[str, FloatArray]", sums: "dict[str, FloatArray]", update_P: "FloatArray"
    ) -> "tuple[dict[str, FloatArray], FloatArray]":
        """Return the next c, c + (1 / K) sum (c_k+ - c_k), and the update unchanged."""
        return {"c": broadcast_vectors["c"] + sums["c_change"]}, update_P
