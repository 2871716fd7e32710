"""AdamW (arXiv 1711.05101) as the local optimiser."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from raysim.local.sgd import sgd

if TYPE_CHECKING:
    from raysim.local.contract import Job

__all__ = ["adamw"]

Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass
class adamw(sgd):
    """Local AdamW whose moments start at zero in every round (arXiv 1711.05101, as in PyTorch).

    m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2, both corrected for their start at zero;
    w <- w - lr (m / (sqrt(v) + eps) + weight_decay w).  A step is about lr long, so FedNova's ||a||_1 is their number.
    """

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="learning rate of round 1")] = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False, description="decoupled from the gradient")] = 0.01
    beta1: Annotated[Beta, Field(description="decay of the mean gradient")] = 0.9
    beta2: Annotated[Beta, Field(description="decay of the mean squared gradient")] = 0.999
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8

    # Not keys of this algorithm, which has a momentum of its own.
    momentum: ClassVar[float] = 0.0  # type: ignore[misc]
    nesterov: ClassVar[bool] = False  # type: ignore[misc]

    def pull(self) -> float:
        """0, because FedNova's count is approximate for AdamW anyway, by more than the weight decay would change it."""
        return 0.0

    def start(self, job: "Job") -> None:
        """Build a new optimiser over the flat parameters, with moments of zero."""
        from torch.optim import AdamW

        betas = self.beta1, self.beta2
        job.scratch["optimiser"] = AdamW(
            [job.model.params_P], lr=job.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay
        )

    def step(self, job: "Job") -> None:
        """Take one AdamW step on the flat parameters."""
        self.clip_gradient(job)
        job.model.params_P.grad = job.model.grad_P
        job.scratch["optimiser"].step()
        job.model.params_P.grad = None
