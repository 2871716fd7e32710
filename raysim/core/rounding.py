"""Rounding of fractions and proportions to whole numbers; what is exact on paper stays exact in floating point."""

import numpy as np

from raysim.core.records import BoolArray, FloatArray, IntArray

_TOLERANCE = 1e-9  # far above the error of a product of two doubles, far below any difference a user could intend
_GRID = 2.0**40  # weights given as floats are rounded to this grid, so that weights equal on paper are equal
_SLICE = 1 << 20


def floor_count(value: FloatArray) -> IntArray:
    """The floor of each value (any shape), at least 0; a value less than 1e-9 below a whole number counts as whole.

    11.999999999999998 gives 12, and -1e-16 gives 0.
    """
    return np.maximum(np.floor(value + _TOLERANCE), 0).astype(np.int64)


def fraction_of(fraction: float, n: int) -> int:
    """round(fraction * n), halves to the even number; a floating-point error of the product has no effect."""
    return round(round(fraction * n, 9))


def split_evenly(total: int, parts: int) -> IntArray:
    """Split `total` into `parts` whole numbers that differ by at most one, the larger ones first."""
    sizes = np.full(parts, total // parts, dtype=np.int64)
    sizes[: total % parts] += 1
    return sizes


def largest_remainder(weights: IntArray | FloatArray, total: int) -> IntArray:
    """Whole numbers in proportion to `weights` (any shape, >= 0, any scale) whose sum is exactly `total`.

    Hamilton's method: each cell gets the floor of weight * total / (sum of weights); the units left over go to the
    largest remainders, ties in the order of the flattened array, which is (client, class).  The division is in
    integers, hence exact.
    Raises ValueError if `total` is positive and every weight is 0.
    """
    cells = _integers(weights).reshape(-1)
    if not cells.any():
        if total:
            raise ValueError(f"cannot spread {total} over cells that all have weight 0")
        return np.zeros(weights.shape, dtype=np.int64)
    # Equal weights give equal quotients: among 100 million small weights, each value is divided once, and looked up.
    is_small = int(cells.max()) < cells.size
    value_V = np.arange(int(cells.max()) + 1) if is_small else cells
    value_of_cell = cells if is_small else np.arange(cells.size)
    cells_V = np.bincount(value_of_cell)
    floor_V, remainder_V = _divide(value_V, total, int(cells.sum()))
    units = total - int(floor_V @ cells_V)
    descending = np.argsort(-remainder_V, kind="stable")
    last = remainder_V[descending[np.searchsorted(np.cumsum(cells_V[descending]), units)]]
    is_above_V = remainder_V > last
    is_tied_V = remainder_V == last
    counts: IntArray = (floor_V + is_above_V).take(value_of_cell, mode="clip")
    _add_to_first_tied(counts, is_tied_V, value_of_cell, units - int(cells_V[is_above_V].sum()))
    return counts.reshape(weights.shape)


def largest_remainder_rows(weights_KC: IntArray, total_K: IntArray) -> IntArray:
    """`largest_remainder` of each row by itself: row k sums to exactly total_K[k]; ties go to the first class.

    weights_KC: integers >= 0, K x C.  No cell grows beyond its weight where total_K[k] is at most the sum of row k.
    Raises ValueError for a positive total over a row of zeros.
    """
    sum_K = weights_KC.sum(axis=1)
    if (total_K[sum_K == 0] > 0).any():
        raise ValueError("cannot spread a total over a row that has weight 0")
    exact = int(weights_KC.max(initial=0)) * int(total_K.max(initial=0)) < 2**62
    product_KC = weights_KC * total_K[:, None] if exact else weights_KC.astype(object) * total_K[:, None]
    whole_K1 = np.maximum(sum_K, 1)[:, None]
    counts_KC: IntArray = (product_KC // whole_K1).astype(np.int64)
    remainder_KC = (product_KC % whole_K1).astype(np.int64)
    units_K = total_K - counts_KC.sum(axis=1)
    rank_KC = np.argsort(np.argsort(-remainder_KC, axis=1, kind="stable"), axis=1)
    counts_KC += rank_KC < units_K[:, None]
    return counts_KC


def _add_to_first_tied(counts: IntArray, is_tied_V: BoolArray, value_of_cell: IntArray, units: int) -> None:
    """Add 1 to each of the first `units` cells whose value is tied; in slices, so that they are never listed all."""
    for start in range(0, len(counts), _SLICE):
        tied = start + np.flatnonzero(is_tied_V[value_of_cell[start : start + _SLICE]])[:units]
        counts[tied] += 1
        units -= len(tied)
        if not units:
            return


def even_over_classes(weights_K: IntArray, classes: int, total: int) -> IntArray:
    """`largest_remainder` of cells that are equal within a client, in the memory of its result alone.

    weights_K: the integer weight of each client.  Returns quota_KC, which sums to exactly `total`.
    """
    floors_K, remainder_K = _divide(weights_K, total, int(weights_K.sum()) * classes)
    # The cells of a client have equal remainders, so units go to whole clients, class by class, until they run out.
    full, rest = divmod(total - int(floors_K.sum()) * classes, classes)
    order_K = np.argsort(-remainder_K, kind="stable")
    extra_K = np.zeros(len(weights_K), dtype=np.int64)
    extra_K[order_K[:full]] = classes
    if rest:
        extra_K[order_K[full]] = rest
    quota_KC: IntArray = floors_K[:, None] + (np.arange(classes) < extra_K[:, None])
    return quota_KC


def _integers(weights: IntArray | FloatArray) -> IntArray:
    if np.issubdtype(weights.dtype, np.integer):
        return weights.astype(np.int64, copy=False)
    whole = float(weights.sum())
    return np.rint(weights / (whole or 1.0) * _GRID).astype(np.int64)


def _divide(weights: IntArray, total: int, whole: int) -> tuple[IntArray, IntArray]:
    """Quotient and remainder of weights * total / whole, in Python's integers where 64 bits are not enough."""
    if int(weights.max()) * total < 2**62:
        quotient, remainder = np.divmod(weights * np.int64(total), whole)
        return quotient, remainder
    exact = weights.astype(object) * total
    return (exact // whole).astype(np.int64), (exact % whole).astype(np.int64)
