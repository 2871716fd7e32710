"""What all aggregation rules share: the handle on a round's updates, and how weights are normalised.

A rule turns a round's per-client scalars into the weight of each client's update. It is a dataclass with `needs` (the
columns of the round table it reads), `streams` (whether n_K alone decides, so that updates can be summed while clients
still train) and `weights`. `robust` marks those that bound what a few clients can do, as all with `aggregate` do.
Three methods are optional: `check(participants)` refuses a cohort it cannot work with, before the run; `state` and
`load_state` carry what it remembers from earlier rounds, as plain JSON values; `aggregate(table, updates)` gives the
combined update of a rule that weighs coordinates rather than clients. No rule ever sees one client's update: `Updates`
answers with scalars and sums.
"""

import math
from collections.abc import Callable
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field

from raysim.core.errors import RunError
from raysim.core.records import FloatArray, RoundTable

Exponent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Rho = Annotated[Exponent, Field(description="exponent of the client's number of samples; 0: size does not count")]
Eps = Annotated[float, Field(ge=0, le=1, description="added to every score, so that no client is silenced")]


class Updates(Protocol):
    """A handle on the K updates of a round, which stay where they were computed; rows in the order of the table."""

    def norms(self) -> FloatArray:
        """Euclidean norm of each update: K."""

    def dot(self, v_P: FloatArray) -> FloatArray:
        """Inner product of each update with v_P: K."""

    def weighted_sum(self, w_K: FloatArray) -> FloatArray:
        """sum_k w_k Delta_k: P."""

    def gram(self) -> FloatArray:
        """Inner products of the updates with each other: K x K."""

    def by_coordinate(self, fn: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """`fn` maps any slice of coordinates, K x p, to p numbers; the slices' answers, joined: P."""


def normalise(table: RoundTable, raw_K: FloatArray) -> FloatArray:
    """raw_K over its total, the one place where weights are normalised; a correctly rounded total has no order."""
    total = math.fsum(raw_K)
    if not 0 < total < math.inf:
        clients = ", ".join(map(str, table.client_K[:10].tolist())) + (", ..." if len(table.client_K) > 10 else "")
        raise RunError(
            f"round {table.round}: the aggregation weights of clients [{clients}] add up to {total:g}, so no mean "
            f"update exists; their samples: {table.n_K[:10].tolist()} (see `weight_by` and `partition.min_samples`)"
        )
    return raw_K / total


def size_factor(table: RoundTable, rho: float) -> FloatArray:
    """n_k^rho: K."""
    return np.power(table.n_K.astype(np.float64), rho)
