"""FedDyn (arXiv 2111.04263)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from raysim.core.errors import UserError
from raysim.local.sgd import sgd

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raysim.config.protocols import AggregationRule, ServerOptimiser
    from raysim.core.records import FloatArray
    from raysim.local.contract import Job

__all__ = ["feddyn"]


@dataclass
class feddyn(sgd):
    """Local SGD on a dynamically regularised objective (FedDyn, arXiv 2111.04263, algorithm 1).

    Client k:  minimise F_k(w) - <g_k, w> + (alpha / 2) ||w - w_t||^2, then g_k <- g_k - alpha (w_k - w_t)
    Server:    h <- h - (alpha / K) sum (w_k - w_t), over the participants, K all registered clients;
               w_{t+1} = mean w_k - h / alpha
    g_k and h start at 0. The paper's mean is uniform: `aggregation: {name: uniform}`.
    With other weights, too, it minimises the mean over clients with equal weights, because h sums drifts unweighted.
    alpha = 0 is FedAvg, bit for bit, by definition: h stays 0, and h / alpha counts as 0. (It is not the limit of small
    alpha, where h / alpha is minus the sum of past drifts over K, whatever alpha.)
    """

    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False, description="weight of the regulariser")] = 0.01

    broadcast: ClassVar[tuple[str, ...]] = ("h",)
    summed: ClassVar[tuple[str, ...]] = ("drift",)
    equal_clients: ClassVar[bool] = True
    server_only: ClassVar[tuple[str, ...]] = ("h", "drift")

    def check(self, module: "nn.Module", rule: "AggregationRule", server: "ServerOptimiser") -> None:  # noqa: ARG002
        """Raise UserError for a rule that is no mean and a server that changes the step: w_{t+1} is set here."""
        if self.alpha and (server.init(1) or server.step({}, np.ones(1))[1] != 1):
            raise UserError("server.name: FedDyn sets the next model itself, to mean w_k - h / alpha; use sgd, lr 1")
        if self.alpha and not rule.normalises:
            name = type(rule).__name__
            raise UserError(f"aggregation.name: FedDyn needs a mean, and {name}'s weights do not sum to 1; use uniform")

    def start(self, job: "Job") -> None:
        """Load g_k of the client's last participation; 0 before the first."""
        import torch

        job.scratch["g_k"] = torch.zeros_like(job.start_P) if job.state is None else job.state["g_k"]

    def after_backward(self, job: "Job") -> None:
        """Change the gradient to: gradient - g_k + alpha (w - w_t)."""
        if self.alpha:
            drift_P = job.model.params_P.detach() - job.start_P
            job.model.grad_P.sub_(job.scratch["g_k"]).add_(drift_P, alpha=self.alpha)

    def finish(self, job: "Job") -> "dict[str, Tensor]":
        """Return the client's state, g_k - alpha (w_k - w_t); the server sums the drifts w_k - w_t."""
        job.scratch["drift"] = job.model.params_P.detach() - job.start_P
        return {"g_k": job.scratch["g_k"] - self.alpha * job.scratch["drift"]}

    def server_update(
        self, broadcast_vectors: "dict[str, FloatArray]", sums: "dict[str, FloatArray]", update_P: "FloatArray"
    ) -> "tuple[dict[str, FloatArray], FloatArray]":
        """Return the next h, h - (alpha / K) sum (w_k - w_t), and the update, mean w_k - w_t - h / alpha."""
        if not self.alpha:
            return broadcast_vectors, update_P
        h_P = broadcast_vectors["h"] - self.alpha * sums["drift"]
        return {"h": h_P}, update_P - h_P / self.alpha
