"""FedProx (arXiv 1812.06127)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from raysim.local.sgd import sgd

if TYPE_CHECKING:
    from raysim.local.contract import Job

__all__ = ["fedprox"]


@dataclass
class fedprox(sgd):
    """Local SGD with a proximal term that pulls towards the global model (FedProx, arXiv 1812.06127, equation 2).

    Local objective F_k(w) + (mu / 2) ||w - w_t||^2, so mu (w - w_t) is added to the gradient; w_t is the global model,
    fixed during the local phase. mu = 0 is FedAvg, bit for bit.
    """

    mu: Annotated[float, Field(ge=0, allow_inf_nan=False, description="weight of the proximal term")] = 0.01

    def after_backward(self, job: "Job") -> None:
        """Change the gradient to: gradient + mu (w - w_t)."""
        if self.mu:
            job.model.grad_P.add_(job.model.params_P.detach() - job.start_P, alpha=self.mu)

    def pull(self) -> float:
        """The sum of mu, which pulls towards w_t, and of the weight decay, which pulls towards 0."""
        return self.mu + self.weight_decay
