"""What may be wrong with some clients' data: too little of it, wrong labels, noisy images; off unless configured."""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from raysim.config.markers import OnlyWith
from raysim.core.errors import UserError
from raysim.core.records import BoolArray, IntArray, Partition
from raysim.core.rounding import fraction_of

__all__ = ["input_noise", "label_noise", "rare"]

Fraction = Annotated[
    float, Field(ge=0, le=1, allow_inf_nan=False, description="Fraction of the clients that are affected")
]
Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="Share of a client's labels replaced")]
Std = Annotated[float, Field(ge=0, allow_inf_nan=False, description="Standard deviation, pixels ranging over 0..1")]


def _affected(clients: int, fraction: float, rng: np.random.Generator, key: str) -> BoolArray:
    """round(fraction * K) clients, drawn without replacement."""
    if not 0 <= fraction <= 1:
        raise UserError(f"{key}.fraction = {fraction!r}: must be in 0..1")
    affected_K = np.zeros(clients, dtype=np.bool_)
    affected_K[rng.choice(clients, size=fraction_of(fraction, clients), replace=False)] = True
    return affected_K


def _written_out(partition: Partition, key: str) -> None:
    if partition.drawn is not None:
        raise UserError(
            f"{key}: the samples of {partition.clients:,} clients are drawn when they train, and cannot be changed "
            "beforehand; use fewer than 100,000 clients, or remove the key"
        )


def rare(
    partition: Partition,
    rng: np.random.Generator,
    *,
    fraction: Fraction = 0.2,
    max_samples: Annotated[
        int, Field(ge=1, description="What such a client keeps at most"), OnlyWith("fraction")
    ] = 120,
) -> Partition:
    """Cut a fraction of the clients to at most `max_samples` random samples; the rest goes round-robin to the others.

    No sample is lost and labels stay with their samples.  Raises UserError if no client is left to take the rest.
    """
    if max_samples < 1:
        raise UserError(f"partition.rare.max_samples = {max_samples!r}: must be a whole number of at least 1")
    _written_out(partition, "partition.rare")
    rare_K = _affected(partition.clients, fraction, rng, "partition.rare")
    owner = np.repeat(np.arange(partition.clients), partition.sizes_K)
    others = np.flatnonzero(~rare_K)
    surplus = []
    for k in np.flatnonzero(rare_K & (partition.sizes_K > max_samples)):
        surplus.append(partition.offsets_K1[k] + rng.permutation(partition.sizes_K[k])[max_samples:])
    if surplus:
        if not len(others):
            raise UserError(
                f"partition.rare.fraction = {fraction}: all {partition.clients} clients would be rare, and nobody "
                "could take the samples they give up; use a smaller fraction"
            )
        moved = np.concatenate(surplus)
        owner[moved] = others[np.arange(len(moved)) % len(others)]
    order = np.argsort(owner, kind="stable")
    sizes_K = np.bincount(owner, minlength=partition.clients)
    return replace(
        partition,
        indices=partition.indices[order],
        labels=partition.labels[order],
        offsets_K1=np.concatenate([[0], np.cumsum(sizes_K)]).astype(np.int64),
        rare_K=partition.rare_K | rare_K,
    )


def label_noise(
    partition: Partition,
    rng: np.random.Generator,
    *,
    fraction: Fraction = 0.2,
    rate: Annotated[Rate, OnlyWith("fraction")] = 0.4,
    kind: Annotated[Literal["symmetric", "pair"], OnlyWith("fraction")] = "symmetric",
) -> Partition:
    """Replace exactly round(rate * N_k) labels of a fraction of the clients, each by a DIFFERENT class.

    symmetric: any other class, equally likely.  pair: class c becomes c + 1, the last class becomes 0.
    Raises UserError if there is only one class.
    """
    if not 0 <= rate <= 1:
        raise UserError(f"partition.label_noise.rate = {rate!r}: must be in 0..1")
    if kind not in ("symmetric", "pair"):
        raise UserError(f"partition.label_noise.kind = {kind!r}: must be symmetric or pair")
    if partition.classes < 2:
        raise UserError("partition.label_noise: the data set has one class, so no label can be wrong; remove the key")
    _written_out(partition, "partition.label_noise")
    noisy_K = _affected(partition.clients, fraction, rng, "partition.label_noise")
    labels = partition.labels.copy()
    for k in np.flatnonzero(noisy_K):
        size = int(partition.sizes_K[k])
        chosen = partition.offsets_K1[k] + rng.choice(size, size=fraction_of(rate, size), replace=False)
        shift: IntArray = np.ones(len(chosen), dtype=np.int64)
        if kind == "symmetric":
            shift = rng.integers(1, partition.classes, size=len(chosen))
        labels[chosen] = (labels[chosen] + shift) % partition.classes
    return replace(partition, labels=labels, noisy_K=partition.noisy_K | noisy_K)


def input_noise(
    partition: Partition,
    rng: np.random.Generator,
    *,
    fraction: Fraction = 0.2,
    std: Annotated[Std, OnlyWith("fraction")] = 0.1,
) -> Partition:
    """Mark a fraction of the clients whose training images get Gaussian noise of standard deviation `std`.

    std: in units of the [0, 1] pixel range.  Labels and owners stay as they are.
    """
    if not 0 <= std < np.inf:
        raise UserError(f"partition.input_noise.std = {std!r}: must be a finite number of at least 0")
    noisy_K = _affected(partition.clients, fraction, rng, "partition.input_noise")
    return replace(partition, input_noise_K=np.where(noisy_K, float(std), partition.input_noise_K))
