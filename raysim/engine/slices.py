"""Questions that need all clients' updates at once, answered slice by slice of coordinates.

A slice is a range of coordinates whose matrix, clients x p, fits into SLICE_BYTES. Workers put the rows they hold into
the object store; one of them gathers a slice, applies a function, and returns its small result. Where slices begin and
end depends on the numbers of clients and parameters alone, rows are in order of client id, and no product is computed
by a BLAS, so the answer has the same bits from every worker.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import ray
from ray.exceptions import ObjectLostError

from raysim.core.records import Float32Array, FloatArray
from raysim.engine.calls import Ref

SLICE_BYTES = 32_000_000  # of a slice in float32, in the object store; twice that in the worker that gathers it
BLOCK = 2048  # coordinates multiplied at a time, so that the products stay in the cache

Slice = tuple[int, int]
StoredRows = tuple[Sequence[int], Ref]
"""Client ids, and a reference to their rows of a slice, float32, in that order."""
SliceFunction = Callable[[FloatArray], FloatArray]
"""(values of all clients in a slice: K x p, float64) -> numbers."""


def slices(parameters: int, clients: int) -> list[Slice]:
    """(first, one past the last) coordinate of each slice."""
    width = max(1, SLICE_BYTES // (4 * clients))
    return [(start, min(start + width, parameters)) for start in range(0, parameters, width)]


def put_slices(rows_K: Iterable[Float32Array], wanted: Sequence[Slice]) -> list[Ref]:
    """Put each wanted slice of these rows into the object store; returns one reference for each slice."""
    cut: list[list[Float32Array]] = [[] for _ in wanted]
    for row_P in rows_K:
        for rows, (start, stop) in zip(cut, wanted, strict=True):
            rows.append(row_P[start:stop])
    return [ray.put(np.stack(rows)) for rows in cut]


def answer(fn: SliceFunction, stored: Sequence[StoredRows]) -> FloatArray | None:
    """Apply `fn` to one slice of all clients, K x p in float64; None if rows were lost with their worker."""
    rows: dict[int, Float32Array] = {}
    try:
        for clients, ref in stored:
            rows.update(zip(clients, ray.get(ref), strict=True))
    except ObjectLostError:
        return None
    return np.asarray(fn(np.stack([rows[k] for k in sorted(rows)], dtype=np.float64)), dtype=np.float64)


def gram_matrix(values_Kp: FloatArray) -> FloatArray:
    """Inner products of the rows with each other, K x K, exactly symmetric; equal rows give equal entries."""
    K, p = values_Kp.shape
    gram_KK = np.zeros((K, K))
    for start in range(0, p, BLOCK):
        block = np.ascontiguousarray(values_Kp[:, start : start + BLOCK])
        for k in range(K):
            gram_KK[k, k:] += (block[k:] * block[k]).sum(axis=1)
    return np.triu(gram_KK) + np.triu(gram_KK, 1).T
