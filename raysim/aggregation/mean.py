"""Means over clients: weights from numbers of samples and steps alone."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.aggregation.common import normalise
from raysim.config.protocols import AggregationRule, Updates
from raysim.core.records import RoundTable, Weights

__all__ = ["fedavg", "fednova", "uniform"]


@dataclass
class fedavg(AggregationRule):
    """Weigh each client by its number of samples (McMahan et al., arXiv 1602.05629).

    w_k = n_k / sum of n over the clients of the round.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Weights of K clients; raises RunError where their total is 0."""
        return Weights(normalise(table, table.n_K.astype(np.float64)))


@dataclass
class uniform(AggregationRule):
    """Weigh every client of the round alike: w_k = 1 / K."""

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Weights of K clients; raises RunError where there is none."""
        return Weights(normalise(table, np.ones(len(table.n_K))))


@dataclass
class fednova(AggregationRule):
    """Average the clients' updates per local step, so that many steps do not buy influence (FedNova, arXiv 2007.07481).

    x <- x - tau_eff sum_k p_k (x - y_k) / ||a_k||_1,  so w_k = p_k tau_eff / ||a_k||_1,  with
    p_k = n_k / sum_j n_j,  tau_eff = sum_k p_k ||a_k||_1,  ||a_k||_1 the client's effective steps.
    w sums to 1 where all take equally many steps, which is fedavg, else to more, up to K where steps go by size.
    """

    needs: ClassVar[tuple[str, ...]] = ("effective_steps",)
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Weights of K clients, the effective steps as scores; raises RunError where there is no sample."""
        n_K, a_K = table.n_K.astype(np.float64), table.columns["effective_steps"]
        p_K = normalise(table, n_K)
        tau_eff = math.fsum(n_K * a_K) / math.fsum(n_K)
        w_K = p_K * (tau_eff / a_K)
        return Weights(w_K, a_K, {"tau_eff": tau_eff, "weight_sum": math.fsum(w_K)})
