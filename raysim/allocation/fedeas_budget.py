"""The budget of FedEAS: thresholds, the beta that gives a total, and the rule that chooses beta.

"WHERE to Generate Matters: Budget-Aware Synthetic Augmentation for Label-Skewed Federated Learning".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.allocation.imbalance import normalised_entropy_K, removed_fraction, row_slices
from raysim.core.errors import UserError
from raysim.core.records import FloatArray, IntArray
from raysim.core.rounding import floor_count, largest_remainder

Size = Literal["sqrt", "linear", "none"]
BETAS = tuple(range(1, 65))
_SAMPLE = 1 << 13


def strength_K(counts_KC: IntArray, entropy: bool = True, size: Size = "sqrt") -> FloatArray:
    """The factor of beta in each client's threshold: sqrt(nbar_k) (1 - H_k), with nbar_k = N_k / C: K.

    entropy, size: the ablations, each of which changes one factor.
    """
    nbar_K = counts_KC.sum(axis=1) / counts_KC.shape[1]
    size_K: FloatArray = {"sqrt": np.sqrt(nbar_K), "linear": nbar_K, "none": np.ones(len(nbar_K))}[size]
    return size_K * (1.0 - normalised_entropy_K(counts_KC)) if entropy else size_K


def threshold_K(strength: FloatArray, beta: float) -> IntArray:
    """b_k = floor(strength_k * beta), not changed by floating-point errors (see `floor_count`): K."""
    return floor_count(strength * beta)


def fill(counts_KC: IntArray, b_K: IntArray) -> IntArray:
    """g_kc = max(0, b_k - n_kc): fill every class of client k up to its threshold; K x C."""
    quota_KC: IntArray = b_K[:, None] - counts_KC
    return np.maximum(quota_KC, 0, out=quota_KC)


def images(counts_KC: IntArray, b_K: IntArray) -> int:
    """The sum of `fill`, computed without an array of its size."""
    return sum(int(fill(counts_KC[rows], b_K[rows]).sum()) for rows in row_slices(*counts_KC.shape))


def fill_to_total(counts_KC: IntArray, strength: FloatArray, total: int) -> IntArray:
    """The quota of FedEAS at the smallest beta that makes `total` images or more, reduced to exactly `total`: K x C.

    It is reduced by `largest_remainder` of that quota, so no cell grows and none exceeds its client's threshold.
    Raises UserError if no beta reaches the total, because every client that counts is already balanced.
    """
    if total == 0:
        return np.zeros_like(counts_KC)
    quota_KC = fill(counts_KC, threshold_K(strength, solve_beta(counts_KC, strength, total)))
    return quota_KC if int(quota_KC.sum()) == total else largest_remainder(quota_KC, total)


def solve_beta(counts_KC: IntArray, strength: FloatArray, total: int) -> float:
    """A beta that makes exactly `total` > 0 images; if none does, the smallest (to one part in 10^12) that makes more.

    Raises UserError if no beta reaches the total.
    """
    if not strength.max(initial=0.0) > 0:
        raise UserError(
            f"allocation.total = {total}: every client is balanced, so no beta places an image; "
            "use another policy, or total 0"
        )
    low, high = _bracket(counts_KC, strength, total)
    decided = 0
    while high - low > 1e-12 * high:
        # Clients whose threshold is the same at both ends are counted once and not looked at again.
        b_K = threshold_K(strength, high)
        open_K = threshold_K(strength, low) != b_K
        if 2 * np.count_nonzero(open_K) < len(open_K):
            decided += images(counts_KC[~open_K], b_K[~open_K])
            counts_KC = counts_KC[open_K]
            strength = strength[open_K]
        middle = (low + high) / 2
        made = decided + images(counts_KC, threshold_K(strength, middle))
        if made == total:
            return middle  # quotas only grow with beta, so every beta of this total has this quota
        low, high = (middle, high) if made < total else (low, middle)
    return high


def _bracket(counts_KC: IntArray, strength: FloatArray, total: int) -> tuple[float, float]:
    """(a beta that makes fewer images than `total`, one that makes at least as many).

    Where there are many clients, a sample of a few thousand gives the beta to within a few per cent, which saves passes
    over all of them: each takes a second.
    """
    every = len(strength) // _SAMPLE
    if every < 2 or not strength[::every].max() > 0:
        low, high = 0.0, 4.0 / float(strength.max())
        while images(counts_KC, threshold_K(strength, high)) < total:
            low, high = high, high * 4
        return low, high
    guess = solve_beta(counts_KC[::every], strength[::every], max(1, total // every))
    step = 1.02
    if images(counts_KC, threshold_K(strength, guess)) < total:
        low, high = guess, guess * step
        while images(counts_KC, threshold_K(strength, high)) < total:
            step **= 2
            low, high = high, high * step
        return low, high
    low, high = guess / step, guess
    while images(counts_KC, threshold_K(strength, low)) >= total:
        step **= 2
        low, high = low / step, low
    return low, high


@dataclass(frozen=True)
class BetaRow:
    """What one beta would do.

    images: how many are made.  synthetic_share: synthetic / (real + synthetic).  removed: fraction of the imbalance
    that is removed.
    """

    beta: float
    images: int
    synthetic_share: float
    removed: float

    @property
    def satisfies(self) -> bool:
        """Whether it removes at least half of the imbalance while less than a quarter of all samples is synthetic."""
        return self.removed >= 0.5 and self.synthetic_share < 0.25


def beta_table(
    counts_KC: IntArray, betas: Sequence[float] = BETAS, *, entropy: bool = True, size: Size = "sqrt"
) -> list[BetaRow]:
    """One row for each beta, computed from the counts alone: no image is made."""
    strength = strength_K(counts_KC, entropy, size)
    real = int(counts_KC.sum())
    rows = []
    for beta in betas:
        quota_KC = fill(counts_KC, threshold_K(strength, beta))
        made = int(quota_KC.sum())
        removed = removed_fraction(counts_KC, counts_KC + quota_KC)
        rows.append(BetaRow(float(beta), made, made / max(real + made, 1), removed))
    return rows


def select_beta(rows: Sequence[BetaRow]) -> BetaRow | None:
    """The row with the smallest beta that removes >= 50 % of the imbalance at < 25 % synthetic samples, or None."""
    return min((row for row in rows if row.satisfies), key=lambda row: row.beta, default=None)
