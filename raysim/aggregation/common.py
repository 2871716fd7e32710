"""What all aggregation rules share: how weights are normalised, and the keys that several of them take."""

import math
from typing import Annotated

import numpy as np
from pydantic import Field

from raysim.core.errors import RunError
from raysim.core.records import FloatArray, IntArray, RoundTable

Exponent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Rho = Annotated[Exponent, Field(description="exponent of the client's number of samples; 0: size does not count")]
Eps = Annotated[float, Field(ge=0, le=1, description="added to every score, so that no client gets weight 0")]


def normalise(table: RoundTable, raw_K: FloatArray) -> FloatArray:
    """Divide raw_K by its total, which is correctly rounded and therefore independent of the order of clients.

    Raises RunError, naming the round and its clients, where the total is not positive and finite.
    """
    total = math.fsum(raw_K)
    if not 0 < total < math.inf:
        clients = ", ".join(map(str, table.client_K[:10].tolist())) + (", ..." if len(table.client_K) > 10 else "")
        raise RunError(
            f"round {table.round}: the aggregation weights of clients [{clients}] add up to {total:g}, so no mean "
            f"update exists; their samples: {table.n_K[:10].tolist()} (see `weight_by` and `partition.min_samples`)"
        )
    return raw_K / total


def size_factor(table: RoundTable, rho: float) -> FloatArray:
    """n_k^rho of each client: K."""
    return np.power(table.n_K.astype(np.float64), rho)


def registered_sizes(real_K: IntArray, quota_KC: IntArray, weight_by: str) -> IntArray:
    """n_k of every registered client: its real samples, plus its synthetic ones where `weight_by` is total: K."""
    return real_K + quota_KC.sum(axis=1) if weight_by == "total" else real_K


def buffer_weights(n_K: IntArray) -> FloatArray | None:
    """The weight of each client's float buffers in their average, n_k / sum of n: K; None if no client has a sample."""
    total = n_K.sum()
    return n_K / total if total else None
