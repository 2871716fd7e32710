"""Means over clients: weights from numbers of samples and steps alone."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from raysim.aggregation.common import normalise
from raysim.config.protocols import AggregationRule, Updates
from raysim.core.errors import UserError
from raysim.core.records import FloatArray, IntArray, RoundTable, Weights

__all__ = ["fedavg", "fednova", "fixed_denominator", "uniform"]


@dataclass
class fedavg(AggregationRule):
    """Weight each client by its number of samples (McMahan et al., arXiv 1602.05629).

    w_k = n_k / sum of n over the clients of the round.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """The weights of K clients; raises RunError where their total is 0."""
        return Weights(normalise(table, table.n_K.astype(np.float64)))

    def needs_samples(self) -> bool:
        """True, because sizes are divided by their sum."""
        return True

    def constant_weights(self, n_K: IntArray, participants: int) -> FloatArray | None:
        """The weights n_k / sum of n where all clients take part in every round, 1 / participants for equal sizes: K.

        None where the weights depend on the cohort.
        """
        if participants == len(n_K):
            return n_K / math.fsum(n_K)
        return np.full(len(n_K), 1 / participants) if (n_K == n_K[0]).all() else None


@dataclass
class uniform(AggregationRule):
    """Give every client of the round the same weight: w_k = 1 / K."""

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """The weights of K clients; raises RunError where there is no client."""
        return Weights(normalise(table, np.ones(len(table.n_K))))

    def constant_weights(self, n_K: IntArray, participants: int) -> FloatArray:
        """The weights 1 / participants for every registered client: K."""
        return np.full(len(n_K), 1 / participants)


@dataclass
class fixed_denominator(AggregationRule):
    """Weight by size with a denominator that is the same for every cohort (DP-FedAvg, arXiv 1710.06963).

    w_k = min(n_k, cap) / (q sum_j min(n_j, cap)),  the sum over all registered clients, q the fraction of them in a
    round: the fixed-denominator estimator. The weights of a round add up to 1 on average, not in each round, and no
    client's weight depends on who else takes part, which is what noise at the server needs. cap = 1: equal weights.
    """

    cap: Annotated[int | None, Field(ge=1, description="samples beyond this many do not count; null: all count")] = None

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True
    normalises: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._denominator: float | None = None

    def register(self, n_K: IntArray, participants: int) -> None:
        """Compute q sum_j min(n_j, cap); raises UserError where no client has a sample that counts.

        n_K: the sizes of all registered clients.  participants: how many of them each round draws.
        """
        total = math.fsum(self._capped(n_K))
        if not total > 0:
            raise UserError(
                "aggregation.name = fixed_denominator: no client has a sample that counts; set "
                "aggregation.weight_by=total, or use aggregation.name=uniform"
            )
        self._denominator = participants / len(n_K) * total

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """The weights of K clients; raises ValueError before `register` was called."""
        if self._denominator is None:
            raise ValueError("fixed_denominator must be told the sizes of all clients first: call `register`")
        w_K = self._capped(table.n_K) / self._denominator
        return Weights(w_K, info={"weight_sum": math.fsum(w_K)})

    def constant_weights(self, n_K: IntArray, participants: int) -> FloatArray:
        """The weights min(n_k, cap) / denominator, which are the same in every cohort: K."""
        self.register(n_K, participants)
        assert self._denominator is not None
        return self._capped(n_K) / self._denominator

    def _capped(self, n_K: IntArray) -> FloatArray:
        return (n_K if self.cap is None else np.minimum(n_K, self.cap)).astype(np.float64)


@dataclass
class fednova(AggregationRule):
    """Average the clients' updates per local step, so that more steps give no more weight (FedNova, arXiv 2007.07481).

    x <- x - tau_eff sum_k p_k (x - y_k) / ||a_k||_1,  so w_k = p_k tau_eff / ||a_k||_1,  with
    p_k = n_k / sum_j n_j,  tau_eff = sum_k p_k ||a_k||_1,  ||a_k||_1 the client's effective steps.
    w sums to 1 where all take equally many steps, which is fedavg, else to more, up to K for steps in proportion to
    size.
    """

    needs: ClassVar[tuple[str, ...]] = ("effective_steps",)
    streams: ClassVar[bool] = False
    normalises: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """The weights of K clients, with the effective steps as scores; raises RunError where there is no sample."""
        n_K = table.n_K.astype(np.float64)
        a_K = table.columns["effective_steps"]
        p_K = normalise(table, n_K)
        tau_eff = math.fsum(n_K * a_K) / math.fsum(n_K)
        w_K = p_K * (tau_eff / a_K)
        return Weights(w_K, a_K, {"tau_eff": tau_eff, "weight_sum": math.fsum(w_K)})

    def needs_samples(self) -> bool:
        """True, because sizes are divided by their sum."""
        return True
