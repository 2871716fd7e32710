"""Policies that decide how many synthetic images each client gets of each class: counts_KC -> quota_KC.

Every policy takes `total`: a number, or {of: another policy, ...its keys}, for comparisons at exactly equal budgets.
"""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from raysim.allocation import fedeas_budget
from raysim.allocation.common import Total, checked_counts, required_total, resolve_total, scaled, served
from raysim.config.markers import ReplacedBy
from raysim.core.errors import UserError
from raysim.core.records import IntArray
from raysim.core.rounding import even_over_classes

__all__ = ["fedeas", "full", "missing_only", "none", "size_proportional", "uniform"]

Beta = Annotated[float, Field(gt=0, allow_inf_nan=False, description="Budget factor")] | Literal["auto"]


def none(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """No synthetic images: plain federated learning.

    Raises UserError for a total above 0, and for a client without a sample.
    """
    counts_KC = checked_counts(counts_KC)
    wanted = resolve_total(total, counts_KC)
    if wanted:
        raise UserError(f"allocation.total = {wanted}: the policy `none` makes no image; leave the total out")
    return served(counts_KC, np.zeros_like(counts_KC), "none")


def full(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """Full class balancing: every client's classes are filled up to its largest one, g_kc = max_c' n_kc' - n_kc.

    With a total, the images are spread in proportion to that quota.
    """
    counts_KC = checked_counts(counts_KC)
    quota_KC = counts_KC.max(axis=1, keepdims=True) - counts_KC
    return served(counts_KC, scaled(quota_KC, resolve_total(total, counts_KC)), "full")


def uniform(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """The same number of images for every client and class: total / (K C) each, the remainder to the first cells.

    Raises UserError without a total.
    """
    counts_KC = checked_counts(counts_KC)
    wanted = required_total(total, counts_KC, "uniform")
    equal_K = np.ones(len(counts_KC), dtype=np.int64)
    return served(counts_KC, even_over_classes(equal_K, counts_KC.shape[1], wanted), "uniform")


def size_proportional(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """Client k gets total * N_k / N images, evenly over its classes: in proportion to size, whatever the skew.

    Raises UserError without a total.
    """
    counts_KC = checked_counts(counts_KC)
    wanted = required_total(total, counts_KC, "size_proportional")
    if not counts_KC.any():
        return served(counts_KC, np.zeros_like(counts_KC), "size_proportional")
    quota_KC = even_over_classes(counts_KC.sum(axis=1), counts_KC.shape[1], wanted)
    return served(counts_KC, quota_KC, "size_proportional")


def full_balance(counts_KC: IntArray) -> int:
    """How many images full class balancing takes; a client without a sample takes none."""
    return int((counts_KC.max(axis=1, keepdims=True) - counts_KC).sum())


def missing_only(
    counts_KC: IntArray,
    *,
    total: Total = None,
    level: Annotated[int, Field(ge=1, description="Images for each missing cell")] | None = None,
) -> IntArray:
    """Images only for classes of which a client has no sample: `level` for each, or `total` spread evenly over them.

    Raises UserError unless exactly one of total and level is given, and for a total when nothing is missing.
    """
    counts_KC = checked_counts(counts_KC)
    if (total is None) == (level is None):
        raise UserError("allocation.total, allocation.level: `missing_only` needs exactly one of them; set one")
    missing_KC = counts_KC == 0
    if level is not None:
        if isinstance(level, bool) or not isinstance(level, int | np.integer) or level < 1:
            raise UserError(f"allocation.level = {level!r}: must be a whole number of at least 1")
        return served(counts_KC, missing_KC * np.int64(level), "missing_only")
    wanted = required_total(total, counts_KC, "missing_only")
    cells = int(missing_KC.sum())
    if wanted and not cells:
        raise UserError(
            f"allocation.total = {wanted}: no client lacks a class, so `missing_only` cannot place an image; "
            "use total 0 or another policy"
        )
    each, rest = divmod(wanted, max(cells, 1))
    quota_KC = missing_KC * np.int64(each)
    quota_KC.reshape(-1)[np.flatnonzero(missing_KC)[:rest]] += 1
    return served(counts_KC, quota_KC, "missing_only")


def fedeas(
    counts_KC: IntArray,
    images_KC: IntArray | None = None,
    *,
    beta: Annotated[Beta, ReplacedBy("total")] = 12.0,
    entropy: bool = True,
    size: Literal["sqrt", "linear", "none"] = "sqrt",
    total: Total = None,
) -> IntArray:
    """FedEAS: fill the classes of client k up to b_k = floor(sqrt(nbar_k) (1 - H_k) beta); skewed clients get most.

    g_kc = max(0, b_k - n_kc), nbar_k the mean count per class, H_k the label entropy ("WHERE to Generate Matters").
    beta: `auto` takes the smallest that removes half of the imbalance at under a quarter of synthetic samples.
    entropy, size: ablations, without the factor (1 - H_k), with nbar_k or 1 for sqrt(nbar_k).
    total: beta is solved for and not used; the quota is trimmed to the exact total.
    images_KC: what clients got when it was asked before, which then counts as theirs; None: nothing.
    Raises UserError for an empty client, or where no beta satisfies the rule or reaches the total.
    """
    counts_KC = checked_counts(counts_KC)
    counts_KC = counts_KC if images_KC is None else counts_KC + images_KC
    strength = fedeas_budget.strength_K(counts_KC, entropy, size)
    wanted = resolve_total(total, counts_KC)
    if wanted is not None:
        return served(counts_KC, fedeas_budget.fill_to_total(counts_KC, strength, wanted), "fedeas")
    chosen = auto_beta(counts_KC, entropy, size) if beta == "auto" else _checked_beta(beta)
    return served(counts_KC, fedeas_budget.fill(counts_KC, fedeas_budget.threshold_K(strength, chosen)), "fedeas")


def auto_beta(counts_KC: IntArray, entropy: bool = True, size: fedeas_budget.Size = "sqrt") -> float:
    """The beta of the selection rule; the smallest beta where there is no imbalance to remove.

    Raises UserError with the two nearest betas where none removes half of the imbalance at under a quarter of synthetic
    samples.
    """
    rows = fedeas_budget.beta_table(checked_counts(counts_KC), entropy=entropy, size=size)
    chosen = fedeas_budget.select_beta(rows)
    if chosen is not None:
        return chosen.beta
    if not any(row.removed > 0 for row in rows):
        return rows[0].beta
    last_cheap = max((r for r in rows if r.synthetic_share < 0.25), key=lambda r: r.beta, default=rows[0])
    first_good = min((r for r in rows if r.removed >= 0.5), key=lambda r: r.beta, default=rows[-1])
    raise UserError(
        "allocation.beta = 'auto': no beta removes 50 % of the imbalance at under 25 % synthetic samples; beta "
        f"{last_cheap.beta:g} removes {last_cheap.removed:.0%} at {last_cheap.synthetic_share:.0%}, beta "
        f"{first_good.beta:g} removes {first_good.removed:.0%} at {first_good.synthetic_share:.0%}; give a number"
    )


def _checked_beta(beta: Any) -> float:  # Any: a caller from Python may give anything
    is_number = isinstance(beta, int | float | np.integer | np.floating) and not isinstance(beta, bool)
    if not (is_number and 0 < beta < np.inf):
        raise UserError(f"allocation.beta = {beta!r}: must be a finite number greater than 0, or auto")
    return float(beta)
