"""Fractions and shares turned into whole numbers, so that what is exact on paper stays exact in floating point."""

import numpy as np

from raysim.records import FloatArray, IntArray

_TOLERANCE = 1e-9  # far above the error of a product of two doubles, far below what a user could mean
_GRID = 2.0**40  # shares given as floats are rounded to this grid, so that shares equal on paper are equal
_SLICE = 1 << 20


def floor_count(value: FloatArray) -> IntArray:
    """Floor, at least 0, that keeps what is whole on paper: 11.999999999999998 gives 12, and -1e-16 gives 0."""
    return np.maximum(np.floor(value + _TOLERANCE), 0).astype(np.int64)


def fraction_of(fraction: float, n: int) -> int:
    """round(fraction * n), halves to the even neighbour, after the product's own error is rounded away."""
    return round(round(fraction * n, 9))


def split_evenly(total: int, parts: int) -> IntArray:
    """`total` in `parts` whole numbers that differ by at most one, the larger ones first."""
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


def largest_remainder(weights: IntArray | FloatArray, total: int) -> IntArray:
    """Whole numbers in proportion to `weights` (any shape, >= 0, any scale) whose sum is exactly `total`.

    Each cell gets the floor of its exact share; the units left over go to the largest remainders, ties in the order of
    the flattened array, which is (client, class) (Hamilton's method).  The division is in integers, hence exact.
    Raises ValueError if `total` is positive and every weight is 0.
    """
    floors, remainder = _divide(_integers(weights), total)
    units = total - int(floors.sum())
    if units:
        flat, ranked = floors.reshape(-1), remainder.reshape(-1)
        threshold = _nth_largest(ranked, units)
        above = ranked > threshold
        flat += above
        flat[np.flatnonzero(ranked == threshold)[: units - int(above.sum())]] += 1
    return floors


def _nth_largest(values: IntArray, n: int) -> int:
    """By bisection on the value: of 100 million cells, neither a sort nor a copy can be afforded."""
    low, high = int(values.min()), int(values.max())
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.count_nonzero(values >= middle)) >= n:
            low = middle
        else:
            high = middle - 1
    return low


def even_over_classes(weights_K: IntArray, classes: int, total: int) -> IntArray:
    """`largest_remainder` of cells that are equal within a client, in the memory of its result alone.

    weights_K: integer share of each client.  Returns quota_KC, which sums to exactly `total`.
    """
    floors_K, remainder_K = _divide(weights_K, total, classes)
    # The cells of a client have equal remainders, so units go to whole clients, class by class, until they run out.
    full, part = divmod(total - int(floors_K.sum()) * classes, classes)
    order_K = np.argsort(-remainder_K, kind="stable")
    extra_K = np.zeros(len(weights_K), dtype=np.int64)
    extra_K[order_K[:full]] = classes
    if part:
        extra_K[order_K[full]] = part
    quota_KC: IntArray = floors_K[:, None] + (np.arange(classes) < extra_K[:, None])
    return quota_KC


def _integers(weights: IntArray | FloatArray) -> IntArray:
    if np.issubdtype(weights.dtype, np.integer):
        return weights.astype(np.int64, copy=False)
    whole = float(weights.sum())
    return np.rint(weights / (whole or 1.0) * _GRID).astype(np.int64)


def _divide(weights: IntArray, total: int, cells: int = 1) -> tuple[IntArray, IntArray]:
    """Quotient and remainder of weights * total / (sum of weights over all cells, of which each weight has `cells`)."""
    whole = int(weights.sum()) * cells
    if whole == 0:
        if total:
            raise ValueError(f"cannot spread {total} over cells that all have weight 0")
        return np.zeros_like(weights), np.zeros_like(weights)
    if int(weights.max()) * total < 2**62:
        remainder: IntArray = weights * np.int64(total)
        quotient: IntArray = remainder // whole
        # In slices, because the product would be one more array of the size of the result.
        flat, flat_quotient = remainder.reshape(-1), quotient.reshape(-1)
        for start in range(0, flat.size, _SLICE):
            flat[start : start + _SLICE] -= flat_quotient[start : start + _SLICE] * whole
        return quotient, remainder
    exact = weights.astype(object) * total
    return (exact // whole).astype(np.int64), (exact % whole).astype(np.int64)
