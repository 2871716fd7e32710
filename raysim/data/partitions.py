"""Which client owns which training sample: label-skewed, IID, or from a file.

Every kind is disjoint and complete unless its docstring says otherwise, and a function of the labels and the generator.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from raysim.config.markers import AtMost
from raysim.core import rng as streams
from raysim.core.errors import UserError
from raysim.core.records import FloatArray, IntArray, Partition, sha256
from raysim.core.rounding import split_evenly
from raysim.data.assigning import (
    cut_counts,
    deal,
    from_indices,
    from_owners,
    redraw,
    require_alpha,
    require_samples,
    rounding_offsets,
)
from raysim.data.partition_file import read_partition

__all__ = [
    "dirichlet",
    "dirichlet_balanced",
    "dirichlet_client",
    "dirichlet_fedoui",
    "file",
    "iid",
    "labels_per_client",
    "shards",
]

Clients = Annotated[int, Field(ge=1, description="Number of clients"), AtMost(10_000_000)]
Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False, description="Dirichlet concentration: small is skewed")]
MinSamples = Annotated[int, Field(ge=0, description="Drawn again until every client has this many samples")]
Positive = Annotated[int, Field(ge=1), AtMost(1_000_000_000)]
DRAWN_FROM = 100_000  # clients of `dirichlet_client`, whose rows are then drawn when they train


def iid(labels_N: IntArray, classes: int, rng: np.random.Generator, *, clients: Clients = 10) -> Partition:
    """Shuffled and dealt out: client sizes differ by at most one, and labels are mixed as in the whole."""
    require_samples(labels_N, clients)
    owner_N = np.repeat(np.arange(clients), split_evenly(len(labels_N), clients))
    return from_owners(owner_N, rng.permutation(len(labels_N)), labels_N, clients, classes)


def dirichlet(
    labels_N: IntArray,
    classes: int,
    rng: np.random.Generator,
    *,
    clients: Clients = 10,
    alpha: Alpha = 0.1,
    min_samples: MinSamples = 1,
) -> Partition:
    """Each class is cut into shares ~ Dir_K(alpha) over the clients; the usual label skew of the literature.

    Cut points are floor(cumsum(shares) * n_class + u), one u ~ U[0, 1) a class (systematic rounding, so that no client
    has more than its share on average); u = 0 with `stream: numpy`, as in earlier code.  All classes are drawn again, a
    bounded number of times, until every client has `min_samples`.
    Raises UserError where that cannot be or was not reached.
    """
    require_alpha(alpha)
    require_samples(labels_N, clients, min_samples)
    n_C = np.bincount(labels_N, minlength=classes)

    def draw() -> IntArray | None:
        shares_CK = rng.dirichlet(np.full(clients, alpha), size=classes)
        u_C = rounding_offsets(rng, classes)
        return cut_counts(shares_CK, n_C, u_C) if np.isfinite(shares_CK).all() else None

    return deal(redraw(draw, clients, classes, alpha, min_samples), labels_N, rng)


def dirichlet_balanced(
    labels_N: IntArray,
    classes: int,
    rng: np.random.Generator,
    *,
    clients: Clients = 10,
    alpha: Alpha = 0.1,
    min_samples: MinSamples = 10,
) -> Partition:
    """As `dirichlet`, but a client that already holds N / K samples gets no more: sizes stay comparable (NIID-Bench).

    Class after class, the shares of full clients are set to 0 before renormalising (Li et al., arXiv 2102.02079; also
    MOON, arXiv 2103.16257).  Raises UserError as `dirichlet` does.
    """
    require_alpha(alpha)
    require_samples(labels_N, clients, min_samples)
    n_C = np.bincount(labels_N, minlength=classes)

    def draw() -> IntArray | None:
        shares_CK = rng.dirichlet(np.full(clients, alpha), size=classes)
        u_C = rounding_offsets(rng, classes)
        counts_CK = np.zeros((classes, clients), dtype=np.int64)
        held_K = np.zeros(clients, dtype=np.int64)
        for c in range(classes):
            shares_K = shares_CK[c] * (held_K * clients < len(labels_N))
            if not 0 < shares_K.sum() < np.inf:
                return None  # all of the class had fallen to clients that are full
            # Full clients take no part: the last one would else get what the shares' rounding leaves of their sum.
            is_open_K = shares_K > 0
            counts_CK[c, is_open_K] = cut_counts(shares_K[is_open_K] / shares_K.sum(), n_C[c], u_C[c])
            held_K += counts_CK[c]
        return counts_CK

    return deal(redraw(draw, clients, classes, alpha, min_samples, loops=classes), labels_N, rng)


def dirichlet_fedoui(
    labels_N: IntArray,
    classes: int,
    rng: np.random.Generator,
    *,
    clients: Clients = 20,
    alpha: Alpha = 0.1,
    min_samples: MinSamples = 10,
) -> Partition:
    """The FedOUI authors' variant: shares are damped by what a client already holds (arXiv 2605.11571).

    Class after class, share_k is multiplied by max(0, n_class - samples client k holds) and renormalised (where no
    client has room left, all shares are equal); counts are floor(share * n_class), and the remainder goes one each to
    clients 0, 1, 2, ..., which favours the first clients where classes are small, as in their code.
    Raises UserError as `dirichlet` does.
    """
    require_alpha(alpha)
    require_samples(labels_N, clients, min_samples)
    n_C = np.bincount(labels_N, minlength=classes)

    def draw() -> IntArray | None:
        shares_CK = rng.dirichlet(np.full(clients, alpha), size=classes)
        if not np.isfinite(shares_CK).all():
            return None
        counts_CK = np.zeros((classes, clients), dtype=np.int64)
        held_K = np.zeros(clients, dtype=np.int64)
        for c in range(classes):
            counts_CK[c] = _damped_counts(shares_CK[c], held_K, int(n_C[c]))
            held_K += counts_CK[c]
        return counts_CK

    return deal(redraw(draw, clients, classes, alpha, min_samples, loops=classes), labels_N, rng)


def _damped_counts(shares_K: FloatArray, held_K: IntArray, n_class: int) -> IntArray:
    damped_K = shares_K * np.maximum(n_class - held_K, 0)
    room = damped_K.sum()
    shares_K = damped_K / room if room > 0 else np.full(len(shares_K), 1 / len(shares_K))
    counts_K = np.floor(shares_K * n_class).astype(np.int64)
    # Floors lose less than one each, so the remainder is at most one for each client.
    counts_K[: n_class - int(counts_K.sum())] += 1
    return counts_K


def dirichlet_client(
    labels_N: IntArray,
    classes: int,
    rng: np.random.Generator,
    *,
    clients: Clients = 10,
    alpha: Alpha = 0.1,
    samples_per_client: Positive = 100,
) -> Partition:
    """Each client draws its own class mix ~ Dir_C(alpha * prior) and a fixed number of samples, WITH replacement.

    prior: class frequencies of the training split (Hsu et al., arXiv 1909.06335).  Clients may share samples, and some
    samples may belong to nobody; client k is a pure function of (seed, k), the same for any number of clients.  From
    100,000 clients on, a client's samples are drawn when it trains: time and memory follow the cohort alone.
    """
    require_alpha(alpha)
    require_samples(labels_N, 1)
    by_class, key = np.argsort(labels_N, kind="stable"), int(rng.integers(2**63))
    draw = Draw(key, labels_N, by_class, np.bincount(labels_N, minlength=classes), alpha, samples_per_client)
    if clients >= DRAWN_FROM:
        nobody = from_indices(np.empty(0, dtype=np.int64), np.zeros(clients, dtype=np.int64), labels_N, classes)
        return replace(nobody, offsets_K1=np.arange(clients + 1) * samples_per_client, drawn=draw)
    rows = np.concatenate([draw(k)[0] for k in range(clients)])
    return from_indices(rows, np.full(clients, samples_per_client), labels_N, classes)


@dataclass(frozen=True)
class Draw:
    """The clients of `dirichlet_client`, one at a time.  key: drawn once from the partition's stream.

    by_class: training rows sorted by label.  n_C: samples per class.
    """

    key: int
    labels_N: IntArray
    by_class: IntArray
    n_C: IntArray
    alpha: float
    samples: int

    def __call__(self, client: int) -> tuple[IntArray, IntArray]:
        """Rows of the training split, ascending, and their labels."""
        rows = client_rows(client, self.key, self.by_class, self.n_C, self.alpha, self.samples)
        return rows, self.labels_N[rows]

    def sha256(self) -> str:
        """Identifies the function: labels, key and parameters."""
        return sha256(self.labels_N, np.array([self.key, len(self.n_C), self.samples]), np.array([self.alpha]))


def client_rows(client: int, key: int, by_class: IntArray, n_C: IntArray, alpha: float, samples: int) -> IntArray:
    """The training rows of one client of `dirichlet_client`, in ascending order.

    key: drawn once from the partition's stream.  by_class: training rows sorted by label.  n_C: samples per class.
    """
    generator = streams.stream(key, streams.PARTITION, client)
    present_C = np.flatnonzero(n_C)
    prior_C = n_C[present_C] / n_C.sum()
    mix_C = generator.dirichlet(alpha * prior_C)
    if not np.isfinite(mix_C).all():
        # Concentrations so small that every gamma variate underflows: the limit is a single class, drawn by the prior.
        mix_C = generator.multinomial(1, prior_C).astype(np.float64)
    drawn_C = present_C[np.repeat(np.arange(len(present_C)), generator.multinomial(samples, mix_C))]
    starts_C = np.cumsum(n_C) - n_C
    rows: IntArray = np.sort(by_class[starts_C[drawn_C] + generator.integers(n_C[drawn_C])])
    return rows


def shards(
    labels_N: IntArray,
    classes: int,
    rng: np.random.Generator,
    *,
    clients: Clients = 10,
    shards_per_client: Positive = 2,
) -> Partition:
    """Samples sorted by label, cut into equal shards, a fixed number of shards dealt to each client (McMahan et al.).

    Shard sizes differ by at most one (arXiv 1602.05629).  Raises UserError if there are more shards than samples.
    """
    require_samples(labels_N, clients)
    count = clients * shards_per_client
    if count > len(labels_N):
        raise UserError(
            f"partition.shards_per_client = {shards_per_client}: {clients} clients x {shards_per_client} = {count} "
            f"shards, but there are only {len(labels_N)} training samples; use fewer shards or clients"
        )
    shuffled = rng.permutation(len(labels_N))
    rows_N = shuffled[np.argsort(labels_N[shuffled], kind="stable")]
    owner_of_shard = np.repeat(np.arange(clients), shards_per_client)[rng.permutation(count)]
    owner_N = np.repeat(owner_of_shard, split_evenly(len(labels_N), count))
    return from_owners(owner_N, rows_N, labels_N, clients, classes)


def labels_per_client(
    labels_N: IntArray,
    classes: int,
    rng: np.random.Generator,
    *,
    clients: Clients = 10,
    labels: Positive = 2,
) -> Partition:
    """Each client holds exactly `labels` classes; a class is split evenly over the clients that hold it.

    Clients choose, one after the other, among the classes that fewest clients hold so far, at random among equals, so
    that every class has an owner.  Raises UserError if some class could not have one, or is too small for its owners.
    """
    require_samples(labels_N, clients)
    if not labels <= classes <= clients * labels:
        raise UserError(
            f"partition.labels = {labels}: {clients} clients x {labels} labels must cover the {classes} classes, and a "
            f"client cannot hold more than {classes}; use {-(-classes // clients)}..{classes}"
        )
    holds_CK = np.zeros((classes, clients), dtype=np.int64)
    for k in range(clients):
        fewest_first = np.lexsort((rng.random(classes), holds_CK.sum(axis=1)))
        holds_CK[fewest_first[:labels], k] = 1
    n_C, owners_C = np.bincount(labels_N, minlength=classes), holds_CK.sum(axis=1)
    for c in range(classes):
        if n_C[c] < owners_C[c]:
            raise UserError(
                f"partition.labels = {labels}: class {c} has {n_C[c]} training samples for the {owners_C[c]} clients "
                "that hold it; use fewer clients or labels"
            )
        parts = split_evenly(int(n_C[c]), int(owners_C[c]))
        # Shuffled, so that the larger parts are not always those of the first clients; not in numpy's own stream,
        # which deals as earlier code did.
        holds_CK[c, holds_CK[c] == 1] = parts if isinstance(rng, np.random.RandomState) else rng.permutation(parts)
    return deal(holds_CK, labels_N, rng)


def file(
    labels_N: IntArray, classes: int, rng: np.random.Generator, *, path: str, clients: Clients | None = None
) -> Partition:
    """Explicit index lists from a JSON or npz file, such as `raysim plan --save-partition` writes.

    JSON: a list with one list of training rows per client.  The lists must be disjoint, but may leave samples out; a
    saved partition comes back with the same hash, its modifiers included.  clients: checked against the file if given.
    Raises UserError for a file that is missing, malformed, or names a row twice or one that does not exist.
    """
    del rng  # nothing is drawn
    partition = read_partition(path, labels_N, classes)
    if clients is not None and clients != partition.clients:
        raise UserError(
            f"partition.clients = {clients}: the file {path} lists {partition.clients} clients; leave the key out"
        )
    return partition
