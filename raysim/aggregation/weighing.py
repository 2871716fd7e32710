"""The arithmetic behind the aggregation rules: normalisation, scores of OUIs by a Beta fit, Krum, order statistics."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from raysim.core.errors import RunError, UserError
from raysim.core.records import FloatArray, RoundTable

CLIP_FIT = 1e-3  # a Beta fit diverges on values of exactly 0 or 1
CLIP_CDF = 1e-4
RESOLUTION = 1e-9  # OUIs closer than this are equal: below it the Beta CDF loses its digits, and ranks would be noise


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


def alignment(table: RoundTable, updates: Updates | None) -> FloatArray:
    """a_k = max(0, cos(Delta_k, Delta_bar)) with the size-weighted mean update; 0 where either vector is zero."""
    if updates is None:
        raise ValueError("alignment needs the clients' updates")
    mean_P = updates.weighted_sum(normalise(table, table.n_K.astype(np.float64)))
    scale_K = updates.norms() * math.sqrt(np.square(mean_P).sum())  # no BLAS: its bits depend on the thread count
    a_K = np.zeros(len(table.n_K))
    np.divide(updates.dot(mean_P), scale_K, out=a_K, where=scale_K > 0)
    return np.clip(a_K, 0, 1)


def score(o_K: FloatArray, pool: FloatArray, fit: str) -> tuple[FloatArray, dict[str, float | str]]:
    """How typical each OUI is of the pool: s_K in [0, 1], 1 at the median; and the fit's mode and parameters.

    The first of these that works: `fit` (moments or mle), mle, ranks; one participant alone scores 1.
    """
    if len(o_K) == 1:
        return np.ones(1), {"fit_mode": "single"}
    x = np.sort(np.clip(pool, CLIP_FIT, 1 - CLIP_FIT))  # sorted: the order of clients must not reach the sums
    for mode in dict.fromkeys([fit, "mle"]):
        ab = _FITS[mode](x) if x[-1] - x[0] > RESOLUTION else None
        s_K = _two_sided(o_K, *ab) if ab else None
        if ab and s_K is not None and np.isfinite(s_K).all():
            return s_K, {"fit_mode": mode, "fit_a": ab[0], "fit_b": ab[1]}
    rounded_K = np.round(o_K / RESOLUTION)
    ordered_K = np.sort(rounded_K)
    left_K, right_K = np.searchsorted(ordered_K, rounded_K), np.searchsorted(ordered_K, rounded_K, side="right")
    p_K = (left_K + right_K + 1) / 2 / (len(o_K) + 1)  # average rank / (K + 1)
    return 2 * np.minimum(p_K, 1 - p_K), {"fit_mode": "ranks"}


def check_krum(participants: int, byzantine: int) -> None:
    """Raises UserError unless K >= 2 f + 3."""
    if participants < 2 * byzantine + 3:
        raise UserError(
            f"aggregation.byzantine: {byzantine} needs at least {2 * byzantine + 3} clients per round, there are "
            f"{participants}; raise clients_per_round or lower byzantine to at most {max(0, (participants - 3) // 2)}"
        )


def krum_scores(gram_KK: FloatArray, byzantine: int) -> FloatArray:
    """Sum of each update's squared distances to its K - f - 2 nearest others (arXiv 1703.02757): K; less is better."""
    square_K = np.diagonal(gram_KK)
    distance_KK = np.maximum(0, square_K[:, None] + square_K[None, :] - 2 * gram_KK)
    np.fill_diagonal(distance_KK, np.inf)  # a client is no neighbour of its own
    nearest: FloatArray = np.sort(distance_KK, axis=1)[:, : len(gram_KK) - byzantine - 2]
    score_K: FloatArray = nearest.sum(axis=1)
    return score_K


def coordinate_median(values_Kp: FloatArray) -> FloatArray:
    """Median over clients: p."""
    middle_p: FloatArray = np.median(values_Kp, axis=0)
    return middle_p


def coordinate_trimmed_mean(values_Kp: FloatArray, dropped: int) -> FloatArray:
    """Mean over clients without the `dropped` lowest and highest values: p."""
    kept = np.sort(values_Kp, axis=0)[dropped : len(values_Kp) - dropped]
    mean_p: FloatArray = kept.mean(axis=0)
    return mean_p


def _moments(x: FloatArray) -> tuple[float, float] | None:
    """Beta(a, b) with the mean and the variance (ddof 1) of x; None where no such Beta exists."""
    m, v = float(x.mean()), float(x.var(ddof=1))
    c = m * (1 - m) / v - 1
    return (m * c, (1 - m) * c) if c > 0 else None


def _mle(x: FloatArray) -> tuple[float, float] | None:
    """Beta(a, b) of largest likelihood on [0, 1]; None where the solver fails."""
    from scipy import stats

    try:
        with np.errstate(all="ignore"):
            a, b, _, _ = stats.beta.fit(x, floc=0, fscale=1)
    except (stats.FitError, ValueError, ArithmeticError):
        return None
    return (float(a), float(b)) if math.isfinite(a) and math.isfinite(b) and min(a, b) > 0 else None


_FITS = {"moments": _moments, "mle": _mle}


def _two_sided(o_K: FloatArray, a: float, b: float) -> FloatArray:
    from scipy.special import betainc

    F_K = betainc(a, b, np.clip(o_K, CLIP_CDF, 1 - CLIP_CDF))
    s_K: FloatArray = 2 * np.minimum(F_K, 1 - F_K)
    return s_K
