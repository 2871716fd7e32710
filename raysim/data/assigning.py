"""From decisions (how many samples of each class go to each client) to a Partition, with the checks all kinds share."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.records import BoolArray, FloatArray, IntArray, Partition


def from_owners(owner_N: IntArray, rows_N: IntArray, labels_N: IntArray, clients: int, classes: int) -> Partition:
    """The partition in which client owner_N[i] owns training sample rows_N[i]; each client's rows ascend."""
    order = np.lexsort((rows_N, owner_N))
    sizes_K = np.bincount(owner_N, minlength=clients)
    return from_indices(rows_N[order], sizes_K, labels_N, classes)


def from_indices(indices: IntArray, sizes_K: IntArray, labels_N: IntArray, classes: int) -> Partition:
    """The partition of flat `indices`, client after client, untouched by any modifier."""
    offsets_K1 = np.concatenate([[0], np.cumsum(sizes_K)]).astype(np.int64)
    clients = len(sizes_K)
    return Partition(
        indices=indices.astype(np.int64),
        offsets_K1=offsets_K1,
        labels=labels_N[indices].astype(np.int64),
        classes=classes,
        rare_K=np.zeros(clients, dtype=np.bool_),
        noisy_K=np.zeros(clients, dtype=np.bool_),
        input_noise_K=np.zeros(clients, dtype=np.float64),
    )


def keep_samples(partition: Partition, keep_KC: IntArray, seed: int) -> Partition:
    """The partition in which client k keeps keep_KC[k, c] of its samples labelled c, drawn at random, in their order.

    keep_KC: K x C, at most what there is.  The draw depends on the seed and the client alone, and of two numbers the
    larger keeps what the smaller one keeps.  Raises UserError for clients that are drawn one by one.
    """
    if partition.drawn is not None:
        raise UserError(
            f"allocation: real samples of {partition.clients:,} clients that are drawn when they train cannot be left "
            "out; use a policy that keeps all, or fewer than 100,000 clients"
        )
    is_kept: list[BoolArray] = []
    for k in range(partition.clients):
        _, labels_N = partition.client(k)
        order = rng.stream(seed, rng.KEPT, k).permutation(len(labels_N))
        by_class = order[np.argsort(labels_N[order], kind="stable")]
        n_C = np.bincount(labels_N, minlength=partition.classes)
        place_N = np.empty(len(labels_N), dtype=np.int64)  # of each sample among those of its label
        place_N[by_class] = np.arange(len(labels_N)) - np.repeat(np.cumsum(n_C) - n_C, n_C)
        is_kept.append(place_N < keep_KC[k, labels_N])
    kept = np.concatenate(is_kept)
    sizes_K = np.array([part.sum() for part in is_kept])
    return replace(
        partition, indices=partition.indices[kept], labels=partition.labels[kept],
        offsets_K1=np.concatenate([[0], np.cumsum(sizes_K)]).astype(np.int64),
    )


def deal(counts_CK: IntArray, labels_N: IntArray, rng: np.random.Generator) -> Partition:
    """Give client k counts_CK[c, k] samples of class c, drawn at random; every class must be dealt out completely."""
    classes, clients = counts_CK.shape
    rows, owners = [], []
    for c in range(classes):
        rows.append(rng.permutation(np.flatnonzero(labels_N == c)))
        owners.append(np.repeat(np.arange(clients), counts_CK[c]))
    return from_owners(np.concatenate(owners), np.concatenate(rows), labels_N, clients, classes)


def require_samples(labels_N: IntArray, clients: int, min_samples: int = 1) -> None:
    """UserError unless every client can have `min_samples` (at least one): simple arithmetic, before any draw."""
    samples, least = len(labels_N), max(min_samples, 1)
    if clients < 1:
        raise UserError(f"partition.clients = {clients}: there must be at least one client")
    if clients > samples:
        raise UserError(f"partition.clients = {clients}: there are only {samples} training samples; use fewer clients")
    if min_samples < 0 or clients * least > samples:
        raise UserError(
            f"partition.min_samples = {min_samples}: {clients} clients x {min_samples} = {clients * min_samples}, "
            f"but there are {samples} training samples; use a minimum in 0..{samples // clients}"
        )


def require_alpha(alpha: float) -> None:
    """UserError unless alpha is one positive, finite number."""
    is_number = isinstance(alpha, int | float | np.integer | np.floating) and not isinstance(alpha, bool)
    if not (is_number and math.isfinite(alpha) and alpha > 0):
        raise UserError(f"partition.alpha = {alpha!r}: must be one number greater than 0 and finite, such as 0.1")


def redraw(
    draw: Callable[[], IntArray | None],
    clients: int,
    classes: int,
    alpha: float,
    min_samples: int,
    loops: int = 1,
) -> IntArray:
    """counts_CK of the first draw in which every client has `min_samples`; None from `draw` is a failed attempt.

    loops: interpreted steps in one draw.  The number of attempts follows from the sizes alone, a few seconds' worth,
    so that success or failure never depends on the machine.  Raises UserError with the best minimum reached.
    """
    attempts = max(10, min(10_000, 10_000_000 // (clients * classes), 200_000 // loops))
    best = -1
    for _ in range(attempts):
        counts_CK = draw()
        if counts_CK is None:
            continue
        smallest = int(counts_CK.sum(axis=0).min())
        if smallest >= min_samples:
            return counts_CK
        best = max(best, smallest)
    reached = f"the best left a client with {best}" if best >= 0 else "no draw was a finite number"
    raise UserError(
        f"partition.min_samples = {min_samples}: not reached in {attempts} attempts with partition.alpha = {alpha} and "
        f"partition.clients = {clients}; {reached}. Use a larger alpha, fewer clients, or a smaller min_samples"
    )


def rounding_offsets(rng: np.random.Generator, count: int) -> FloatArray:
    """One u ~ U[0, 1) for each of `count` classes, for `cut_counts`; zeros for numpy's own stream.

    numpy's RandomState (`partition.stream: numpy`) is there to deal as earlier code did, which took floors.
    """
    return np.zeros(count) if isinstance(rng, np.random.RandomState) else rng.random(count)


def cut_counts(shares_K: FloatArray, n_class: IntArray | int, u: FloatArray | float) -> IntArray:
    """Cut points floor(cumsum(shares) * n_class + u) along the last axis, as the number of samples between them.

    With one u ~ U[0, 1) a class this is systematic rounding: client k gets shares_k * n_class samples on average.  With
    u = 0 the last client gets what all floors left, which is most of the samples where classes are small.
    """
    whole = np.asarray(n_class)[..., None]
    cuts = np.floor(np.cumsum(shares_K, axis=-1) * whole + np.asarray(u)[..., None]).astype(np.int64)
    cuts = np.minimum(cuts, whole)
    cuts[..., -1] = n_class  # floor(n_class + u), whatever the shares' own rounding makes of their sum
    counts: IntArray = np.diff(cuts, axis=-1, prepend=0)
    return counts
