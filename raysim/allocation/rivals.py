"""Policies of other papers, and the control that each should beat, for comparisons with FedEAS at equal budgets.

Each works from the real samples per client and class alone, and takes the same `total` as all policies.
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from raysim.allocation.common import Total, checked_counts, required_total, resolve_total, scaled, served
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.records import Allocation, IntArray
from raysim.core.rounding import largest_remainder_rows, split_evenly

__all__ = ["fbl", "iid_fill", "random", "server_pool"]


def fbl(counts_KC: IntArray, *, total: Total = None) -> Allocation:
    """Federated Balanced Learning: a client keeps its number of samples; images take the place of its large classes.

    With t_kc = n_k / C: g_kc = max(0, t_kc - n_kc) images, and max(0, n_kc - t_kc) real samples are left out
    ("Federated Balanced Learning", arXiv 2601.14042: knowledge filling and knowledge sampling).  Where C does not
    divide n_k, the targets of the client's n_k mod C largest classes are one higher.
    By hand, n_0 = (6, 0, 0), t = 2: images (0, 2, 2), kept (2, 0, 0).  n_1 = (1, 4, 2), n_1 mod 3 = 1, so
    t = (2, 3, 2): images (1, 0, 0), kept (1, 3, 2).  n_2 = (3, 3, 3): nothing changes.
    With a total, the images are spread in proportion to g, and a client leaves out as many samples as it gets images,
    in proportion to what it has above t.  Raises UserError for a total above the sum of g, and for an empty client.
    The paper's alignment and drop of synthetic samples belong to training, not to this policy.
    """
    counts_KC = checked_counts(counts_KC)
    n_K, classes = counts_KC.sum(axis=1), counts_KC.shape[1]
    rank_KC = np.argsort(np.argsort(-counts_KC, axis=1, kind="stable"), axis=1)
    target_KC = n_K[:, None] // classes + (rank_KC < (n_K % classes)[:, None])
    quota_KC = np.maximum(target_KC - counts_KC, 0)
    wanted, most = resolve_total(total, counts_KC), int(quota_KC.sum())
    if wanted is not None and wanted > most:
        raise UserError(
            f"allocation.total = {wanted}: `fbl` keeps every client's number of samples, so it has room for {most} "
            f"images here; use at most {most}, or a policy that adds images"
        )
    quota_KC = scaled(quota_KC, wanted)
    left_out_KC = largest_remainder_rows(np.maximum(counts_KC - target_KC, 0), quota_KC.sum(axis=1))
    return Allocation(served(counts_KC, quota_KC, "fbl"), counts_KC - left_out_KC)


def iid_fill(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """Fill every client up to the class mix of all clients together, so that its samples are IID.

    r_k = max_c n_kc / N_c, the largest share of a class that the client holds; g_kc = round(r_k N_c) - n_kc, N_c the
    samples of class c over all clients: the fewest images that give client k the global mix without leaving a sample
    out (the aim of Gen-FedSD, "Stable Diffusion-based Data Augmentation for Federated Learning with Non-IID Data",
    arXiv 2405.07925, which makes each client's data IID).  Halves are rounded up.
    By hand, N = (8, 4, 4): n_0 = (4, 0, 0), r = 4 / 8, so r N = (4, 2, 2) and the images are (0, 2, 2).
    n_1 = (2, 4, 1), r = 4 / 4: (8, 4, 4), images (6, 0, 3).  n_2 = (2, 0, 3), r = 3 / 4: (6, 3, 3), images (4, 3, 0).
    With a total, the images are spread in proportion to g.
    Raises UserError for an empty client, and for a total where every client has the global mix.
    """
    counts_KC = checked_counts(counts_KC)
    N_C = counts_KC.sum(axis=0)
    share_KC = counts_KC / np.maximum(N_C, 1)
    largest_K = share_KC.argmax(axis=1)  # equal shares, such as 1 / 3 and 2 / 6, are equal quotients in floating point
    n_K = counts_KC[np.arange(len(counts_KC)), largest_K][:, None]
    of_K = np.maximum(N_C[largest_K], 1)[:, None]
    exact = int(counts_KC.max()) * int(N_C.max()) < 2**61
    filled_KC = (2 * n_K * N_C + of_K) // (2 * of_K) if exact else (2 * n_K.astype(object) * N_C + of_K) // (2 * of_K)
    quota_KC = np.maximum(filled_KC.astype(np.int64) - counts_KC, 0)
    return served(counts_KC, scaled(quota_KC, resolve_total(total, counts_KC)), "iid_fill")


def random(counts_KC: IntArray, seed: int = 0, round: int = 0, *, total: Total = None) -> IntArray:
    """A random quota: each way to spread the total over clients and classes is equally likely; the control.

    w_kc ~ Exp(1), g ~ Multinomial(total, w / sum w), which is uniform over all K x C arrays of whole numbers with this
    sum (a Dirichlet-multinomial with all parameters 1).  What a policy gains over it is due to where it puts images,
    not to how many there are.  With 2 images for 2 cells, (2, 0), (1, 1) and (0, 2) have a chance of 1/3 each.
    seed: of the run.  round: rounds trained so far; each date has a draw of its own.
    Raises UserError without a total, and for an empty client that gets no image.
    """
    counts_KC = checked_counts(counts_KC)
    wanted = required_total(total, counts_KC, "random")
    stream = rng.stream(seed, rng.QUOTA, round)
    weight = stream.exponential(size=counts_KC.size)
    quota_KC = stream.multinomial(wanted, weight / weight.sum()).reshape(counts_KC.shape).astype(np.int64)
    return served(counts_KC, quota_KC, "random")


def server_pool(
    counts_KC: IntArray,
    *,
    total: Total = None,
    per_class: Annotated[int, Field(ge=1, description="Images of each class in the pool")] | None = None,
) -> Allocation:
    """One pool of images, made once by the server and given to every client: `per_class` of each class.

    G_c = per_class (or total / C, the remainder to the first classes), and every client trains on all of G beside its
    own samples: a data set that all clients share ("Federated Learning with Non-IID Data", arXiv 1806.00582), made of
    synthetic images ("Synthetic Data Aided Federated Learning Using Foundation Models", DPSDA-FL, arXiv 2407.05174).
    The pool counts once in a budget, though all K clients have it; that costs local steps, not images.
    By hand, 3 clients, 3 classes, total 7: G = (3, 2, 2), so 7 images are made and each client gets (3, 2, 2).
    Neither the privacy of DPSDA-FL nor its way to make images is part of this policy.
    Raises UserError unless exactly one of total and per_class is given.
    """
    counts_KC = checked_counts(counts_KC)
    if (total is None) == (per_class is None):
        raise UserError("allocation.total, allocation.per_class: `server_pool` needs exactly one of them; set one")
    classes = counts_KC.shape[1]
    if per_class is not None and (isinstance(per_class, bool) or per_class < 1):
        raise UserError(f"allocation.per_class = {per_class!r}: must be a whole number of at least 1")
    wanted = classes * per_class if per_class is not None else required_total(total, counts_KC, "server_pool")
    quota_KC = np.tile(split_evenly(wanted, classes), (len(counts_KC), 1))
    return Allocation(served(counts_KC, quota_KC, "server_pool"), shared=True)
