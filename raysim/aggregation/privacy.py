"""Epsilon of the noise that a run adds, from the accountant of the dp-accounting library (the extra `privacy`).

Who is protected: a client as a whole, against whoever sees the global models (noise at the server) or its own updates
(noise at the client). Neighbouring runs differ in the data of one client (replace-one), so the most that a sum changes
is twice the clipping norm, and the noise counts for half its multiplier. Weights and scalars, such as losses, sizes and
OUIs, are taken to be public: no noise hides what they say.
"""

from importlib.util import find_spec
from typing import Any

from raysim.config.schema import Update
from raysim.core.errors import UserError


def require_library() -> None:
    """Raises UserError, saying how to install it, where dp-accounting is missing."""
    if find_spec("dp_accounting") is None:
        raise UserError(
            "update.noise_multiplier: epsilon is worked out by the package dp-accounting, which is not installed; "
            "run `pip install 'raysim[privacy]'`, or set update.noise_multiplier=0"
        )


def epsilon(options: Update, clients: int, per_round: int, times: int) -> float:
    """Epsilon at `options.delta` after `times` rounds that each draw `per_round` of `clients` without replacement.

    Noise at the client: `times` is how often the client took part that did so most often; whoever sees its updates
    knows when it does, so no sampling helps.  Renyi differential privacy, composed over the rounds (arXiv 1808.00087).
    """
    from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    event: Any = GaussianDpEvent(options.noise_multiplier / 2)
    if options.noise_at == "server" and per_round < clients:
        event = SampledWithoutReplacementDpEvent(clients, per_round, event)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, times)
    return float(accountant.get_epsilon(options.delta))
