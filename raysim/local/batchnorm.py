"""What becomes of a model's buffers, the running statistics of BatchNorm above all: `aggregation.buffers`.

average: a client starts from the global statistics, and the server averages what the clients end with, weighted by
    n_k whatever the rule; integer buffers take the maximum (FedAvg as most implement it).
local: a client starts from the statistics that its own last participation ended with, before its first from the initial
    ones (SiloBN, arXiv 2008.07424). The global model, which is evaluated, gets their average as above.
global: the statistics stay those of the initial model. Clients normalise with them in training, too, as in evaluation,
    so that nobody's data changes them (as FixBN does once it has fixed them, arXiv 2303.06530).
"""

from typing import Any

from torch import Tensor, nn

from raysim.core.errors import UserError
from raysim.models.flat_model import FlatModel

_FLOATS, _INTEGERS = "own_buffers", "own_counters"  # in a client's state, beside its algorithm's own


def save_to(model: FlatModel) -> dict[str, Tensor]:
    """Copies of the buffers, as entries of the client's state."""
    return {_FLOATS: model.buffers_F.clone(), _INTEGERS: model.counters.clone()}


def restore_from(model: FlatModel, state: dict[str, Any]) -> None:
    """Take the entries of `save_to`, if there are any, out of a client's state and into the model."""
    if _FLOATS in state:
        model.buffers_F.copy_(state.pop(_FLOATS))
        model.counters.copy_(state.pop(_INTEGERS))


def check_batch_size(key: str, batch_size: int, model: FlatModel, fixed_statistics: bool) -> None:
    """Raises UserError for batches of one image in training with batch normalisation: they have no statistics.

    key: what the batch size is called.  fixed_statistics: whether training normalises with the running statistics.
    """
    if batch_size == 1 and model.batch_norm and not fixed_statistics:
        raise UserError(
            f"{key} = 1: the model has batch normalisation, and a batch of one image has no statistics; use 2 or more, "
            "aggregation.buffers=global, or a model without it (such as model.norm=group)"
        )


def fix(module: nn.Module) -> None:
    """Make every normalisation layer use its running statistics as they are, until the next `module.train()`."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.eval()
