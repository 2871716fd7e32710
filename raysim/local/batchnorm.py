"""How a model's buffers, in particular the running statistics of BatchNorm, are treated: `aggregation.buffers`.

average: a client starts from the global statistics, and the server averages the clients' final ones, weighted by n_k
    for every rule; of integer buffers it takes the maximum (FedAvg as most implement it).
local: a client starts from the final statistics of its own last participation, in its first one from the initial ones
    (SiloBN, arXiv 2008.07424). The global model, which is evaluated, gets their average as above.
global: the statistics stay those of the initial model. Clients normalise with them in training, too, as in evaluation,
    so that no client's data changes them (as FixBN does once it has fixed them, arXiv 2303.06530).
"""

from torch import Tensor, nn

from raysim.core.errors import UserError
from raysim.models.flat_model import FlatModel

# Names of the buffers in a client's state, besides those of its algorithm.
_FLOATS = "own_buffers"
_INTEGERS = "own_counters"


def save_to(model: FlatModel) -> dict[str, Tensor]:
    """Copy the model's buffers into entries for a client's state."""
    return {_FLOATS: model.buffers_F.clone(), _INTEGERS: model.counters.clone()}


def restore_from(model: FlatModel, state: dict[str, Tensor]) -> None:
    """Copy the entries of `save_to`, if there are any, into the model, and remove them from a client's state."""
    if _FLOATS in state:
        model.buffers_F.copy_(state.pop(_FLOATS))
        model.counters.copy_(state.pop(_INTEGERS))


def check_batch_size(key: str, batch_size: int, model: FlatModel, fixed_statistics: bool) -> None:
    """Raise UserError for batches of one image in training with batch normalisation: they have no statistics.

    key: the configuration key of the batch size.  fixed_statistics: whether training normalises with the running
    statistics.
    """
    if batch_size == 1 and model.batch_norm and not fixed_statistics:
        raise UserError(
            f"{key} = 1: the model has batch normalisation, and a batch of one image has no statistics; use 2 or more, "
            "aggregation.buffers=global, or a model without it (such as model.norm=group)"
        )


def fix(module: nn.Module) -> None:
    """Make every normalisation layer use its running statistics without changing them, until `module.train()`."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.eval()
