"""MOON (arXiv 2103.16257)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from raysim.config.markers import OnlyWith
from raysim.core.errors import UserError
from raysim.local.sgd import sgd

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raysim.config.protocols import AggregationRule, ServerOptimiser
    from raysim.local.contract import Job

__all__ = ["moon"]


@dataclass
class moon(sgd):
    """Local SGD with a model-contrastive loss: features move towards the global model's, away from the previous ones.

    MOON (arXiv 2103.16257, equation 3), z = `features(x)` of the trained, the global and the client's previous model:
        l = l_sup + mu l_con,  l_con = -log(e^g / (e^g + e^p)),  g = cos(z, z_glob) / tau,  p = cos(z, z_prev) / tau
    The previous model is the client's own result of its last participation; in its first it is the global model, so
    that l_con = ln 2 with gradient 0. Both fixed models are in evaluation mode. mu = 0 is FedAvg, bit for bit.
    z comes from the projection head where the model has one (`model.projection: 256`), else from the layer before the
    classifier.
    """

    mu: Annotated[float, Field(ge=0, allow_inf_nan=False, description="weight of the contrastive loss")] = 1.0
    tau: Annotated[float, Field(gt=0, allow_inf_nan=False, description="temperature"), OnlyWith("mu")] = 0.5

    def check(self, module: "nn.Module", rule: "AggregationRule", server: "ServerOptimiser") -> None:  # noqa: ARG002
        """Raise UserError for a model without features to compare."""
        if not (hasattr(module, "features") and hasattr(module, "classifier")):
            raise UserError(
                f"local.name = moon: the model {type(module).__name__} (model.name) has no `features(x)` and "
                "`classifier(z)`; use one of raysim's own models, or give it both"
            )

    def start(self, job: "Job") -> None:
        """Load the global model and the client's previous one into two frozen copies, which the worker keeps."""
        if self.mu and job.state is not None:
            job.scratch["global"] = job.model.frozen("global", job.model.snapshot())
            job.scratch["previous"] = job.model.frozen("previous", job.state)

    def loss(self, job: "Job", x: "Tensor", y_B: "Tensor") -> "Tensor":
        """The loss of a batch, l_sup + mu l_con."""
        import torch
        from torch.nn.functional import cross_entropy

        if not self.mu or job.state is None:  # l_con has gradient 0 here, which autograd would give only up to rounding
            return super().loss(job, x, y_B) + self.mu * math.log(2)
        module: Any = job.model.module  # `check` has seen that it has `features` and `classifier`
        z = module.features(x)
        with torch.no_grad():
            z_glob = job.scratch["global"].features(x)
            z_prev = job.scratch["previous"].features(x)
        supervised: Tensor = cross_entropy(module.classifier(z), y_B)
        return supervised + self.mu * contrastive(z, z_glob, z_prev, self.tau)

    def finish(self, job: "Job") -> "dict[str, Tensor]":
        """Return the client's trained model, which is its previous model in its next participation."""
        return job.model.snapshot()


def contrastive(z: "Tensor", z_glob: "Tensor", z_prev: "Tensor", tau: float) -> "Tensor":
    """l_con of MOON, the mean over a batch.

    z, z_glob, z_prev: features by the trained, the global and the previous model, B x features each.
    """
    from torch.nn.functional import cosine_similarity, softplus

    # -log(e^g / (e^g + e^p)) = log(1 + e^(p - g))
    return softplus((cosine_similarity(z, z_prev) - cosine_similarity(z, z_glob)) / tau).mean()
