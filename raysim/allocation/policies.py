"""Policies that decide how many synthetic images each client gets of each class: counts_KC -> quota_KC.

Every policy takes `total`: a number, or {of: another policy, ...its keys}, for comparisons at exactly equal budgets.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raysim.allocation import fedeas_budget
from raysim.config.markers import ReplacedBy
from raysim.config.plugin_guard import ask_policy
from raysim.config.registry import check_parameters, resolve
from raysim.core.errors import ConfigError, UserError
from raysim.core.plain import PlainDict
from raysim.core.records import IntArray
from raysim.core.rounding import even_over_classes, largest_remainder

__all__ = ["fedeas", "full", "missing_only", "none", "size_proportional", "uniform"]

Policy = Callable[..., IntArray]
Total = Annotated[int, Field(ge=0, description="Exact number of images")] | PlainDict | None
Beta = Annotated[float, Field(gt=0, allow_inf_nan=False, description="Budget factor")] | Literal["auto"]


def none(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """No synthetic images: plain federated learning.

    Raises UserError for a total above 0, and for a client without a sample.
    """
    counts_KC = _checked_counts(counts_KC)
    wanted = _resolve_total(total, counts_KC)
    if wanted:
        raise UserError(f"allocation.total = {wanted}: the policy `none` makes no image; leave the total out")
    return _served(counts_KC, np.zeros_like(counts_KC), "none")


def full(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """Full class balancing: every client's classes are filled up to its largest one, g_kc = max_c' n_kc' - n_kc.

    With a total, the images are spread in proportion to that quota.
    """
    counts_KC = _checked_counts(counts_KC)
    quota_KC = counts_KC.max(axis=1, keepdims=True) - counts_KC
    return _served(counts_KC, _scaled(quota_KC, _resolve_total(total, counts_KC)), "full")


def uniform(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """The same number of images for every client and class: total / (K C) each, the remainder to the first cells.

    Raises UserError without a total.
    """
    counts_KC = _checked_counts(counts_KC)
    wanted = _required_total(total, counts_KC, "uniform")
    equal_K = np.ones(len(counts_KC), dtype=np.int64)
    return _served(counts_KC, even_over_classes(equal_K, counts_KC.shape[1], wanted), "uniform")


def size_proportional(counts_KC: IntArray, *, total: Total = None) -> IntArray:
    """Client k gets total * N_k / N images, evenly over its classes: in proportion to size, whatever the skew.

    Raises UserError without a total.
    """
    counts_KC = _checked_counts(counts_KC)
    wanted = _required_total(total, counts_KC, "size_proportional")
    if not counts_KC.any():
        return _served(counts_KC, np.zeros_like(counts_KC), "size_proportional")
    quota_KC = even_over_classes(counts_KC.sum(axis=1), counts_KC.shape[1], wanted)
    return _served(counts_KC, quota_KC, "size_proportional")


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
    counts_KC = _checked_counts(counts_KC)
    if (total is None) == (level is None):
        raise UserError("allocation.total, allocation.level: `missing_only` needs exactly one of them; set one")
    missing_KC = counts_KC == 0
    if level is not None:
        if isinstance(level, bool) or not isinstance(level, int | np.integer) or level < 1:
            raise UserError(f"allocation.level = {level!r}: must be a whole number of at least 1")
        return _served(counts_KC, missing_KC * np.int64(level), "missing_only")
    wanted = _required_total(total, counts_KC, "missing_only")
    cells = int(missing_KC.sum())
    if wanted and not cells:
        raise UserError(
            f"allocation.total = {wanted}: no client lacks a class, so `missing_only` cannot place an image; "
            "use total 0 or another policy"
        )
    each, rest = divmod(wanted, max(cells, 1))
    quota_KC = missing_KC * np.int64(each)
    quota_KC.reshape(-1)[np.flatnonzero(missing_KC)[:rest]] += 1
    return _served(counts_KC, quota_KC, "missing_only")


def fedeas(
    counts_KC: IntArray,
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
    Raises UserError for an empty client, or where no beta satisfies the rule or reaches the total.
    """
    counts_KC = _checked_counts(counts_KC)
    strength = fedeas_budget.strength_K(counts_KC, entropy, size)
    wanted = _resolve_total(total, counts_KC)
    if wanted is not None:
        return _served(counts_KC, fedeas_budget.fill_to_total(counts_KC, strength, wanted), "fedeas")
    chosen = auto_beta(counts_KC, entropy, size) if beta == "auto" else _checked_beta(beta)
    return _served(counts_KC, fedeas_budget.fill(counts_KC, fedeas_budget.threshold_K(strength, chosen)), "fedeas")


def auto_beta(counts_KC: IntArray, entropy: bool = True, size: fedeas_budget.Size = "sqrt") -> float:
    """The beta of the selection rule; the smallest beta where there is no imbalance to remove.

    Raises UserError with the two nearest betas where none removes half of the imbalance at under a quarter of synthetic
    samples.
    """
    rows = fedeas_budget.beta_table(_checked_counts(counts_KC), entropy=entropy, size=size)
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


def _policy(name: str) -> Policy:
    try:
        return resolve("allocation", name)
    except LookupError as error:
        raise UserError(f"allocation.total.of: {error}") from error


def _resolve_total(total: Total, counts_KC: IntArray) -> int | None:
    """The number of images asked for, or None where the policy decides."""
    if total is None:
        return None
    if isinstance(total, dict):
        keys = {key: value for key, value in total.items() if key != "of"}
        if not isinstance(total.get("of"), str):
            raise UserError(f"allocation.total = {total!r}: needs the key `of` with a policy, as in {{of: fedeas}}")
        policy = _policy(total["of"])
        checked, problems = check_parameters(policy, keys, "allocation.total", also=["of"])
        if problems:
            raise ConfigError(problems)
        return int(ask_policy(total["of"], policy, counts_KC, checked, "allocation.total.of").sum())
    if isinstance(total, bool) or not isinstance(total, int | np.integer) or total < 0:
        raise UserError(f"allocation.total = {total!r}: must be a whole number of at least 0, or {{of: a policy}}")
    return int(total)


def _required_total(total: Total, counts_KC: IntArray, policy: str) -> int:
    wanted = _resolve_total(total, counts_KC)
    if wanted is None:
        raise UserError(
            f"allocation.total is required by `{policy}`: give a number of images, or {{of: fedeas}} for the "
            "total that another policy takes"
        )
    return wanted


def _scaled(quota_KC: IntArray, total: int | None) -> IntArray:
    """The quota itself, or one in proportion to it with exactly `total` images."""
    if total is None:
        return quota_KC
    try:
        return largest_remainder(quota_KC, total)
    except ValueError as error:
        raise UserError(
            f"allocation.total = {total}: the policy places no image on these clients, so it cannot place this many; "
            "use total 0 or another policy"
        ) from error


def _checked_beta(beta: Any) -> float:  # Any: a caller from Python may give anything
    is_number = isinstance(beta, int | float | np.integer | np.floating) and not isinstance(beta, bool)
    if not (is_number and 0 < beta < np.inf):
        raise UserError(f"allocation.beta = {beta!r}: must be a finite number greater than 0, or auto")
    return float(beta)


def _checked_counts(counts_KC: NDArray[Any]) -> IntArray:  # Any: the dtype is what is checked
    """The counts as int64 in C order, from whole numbers of any type and order; ValueError for anything else.

    Unsigned and signed numbers together would become floating-point ones, and narrow ones would overflow.
    """
    if counts_KC.ndim != 2 or 0 in counts_KC.shape or counts_KC.dtype.kind not in "iub":
        raise ValueError(f"counts_KC must be integers, clients x classes, not {counts_KC.dtype} {counts_KC.shape}")
    if counts_KC.min() < 0 or counts_KC.max() > np.iinfo(np.int64).max:
        raise ValueError(f"counts_KC must be in 0..2^63 - 1, not {counts_KC.min()} to {counts_KC.max()}")
    return np.ascontiguousarray(counts_KC, dtype=np.int64)


def _served(counts_KC: IntArray, quota_KC: IntArray, policy: str) -> IntArray:
    """Return the quota; UserError if a client then has no sample, real or synthetic."""
    candidates_K = np.flatnonzero(counts_KC.sum(axis=1) == 0)
    empty_K = candidates_K[quota_KC[candidates_K].sum(axis=1) == 0]
    if len(empty_K):
        named = ", ".join(map(str, empty_K[:5])) + (" ..." if len(empty_K) > 5 else "")
        raise UserError(
            f"allocation.name = {policy}: {len(empty_K)} of {len(counts_KC)} clients have no sample and get no image "
            f"(client {named}); use a partition.min_samples of at least 1, or a policy that fills empty clients"
        )
    return quota_KC
