"""What allocation policies share: their checks, and `total`, the exact number of images that each can be asked for.

`total` is a number, or {of: another policy, ...its keys}, for comparisons at exactly equal budgets.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raysim.config.plugin_guard import ask_policy
from raysim.config.protocols import AllocationPolicy
from raysim.config.registry import check_parameters, resolve
from raysim.core.errors import ConfigError, UserError
from raysim.core.plain import PlainDict
from raysim.core.records import IntArray
from raysim.core.rounding import largest_remainder

Total = Annotated[int, Field(ge=0, description="Exact number of images")] | PlainDict | None
OWN_COUNTS_ALONE = frozenset({"none", "full", "missing_only", "fbl", "fedeas"})
"""Policies that, without a total, work out a client's images from its own counts; `fedeas` with a number as beta."""


def looks_at_others(name: str, params: PlainDict) -> bool:
    """Whether a client's images may depend on the counts of other clients: so for every policy not known better."""
    return name not in OWN_COUNTS_ALONE or params.get("total") is not None or params.get("beta") == "auto"


def asks_for_clients(inputs: Iterable[str]) -> bool:
    """Whether some of MEASURED_INPUTS are of the clients' own models, for which every client is trained."""
    return any(name.startswith("local") for name in inputs)


def _policy(name: str) -> AllocationPolicy:
    try:
        return resolve("allocation", name)
    except LookupError as error:
        raise UserError(f"allocation.total.of: {error}") from error


def resolve_total(total: Total, counts_KC: IntArray) -> int | None:
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
        return ask_policy(total["of"], policy, counts_KC, checked, "allocation.total.of").images
    if isinstance(total, bool) or not isinstance(total, int | np.integer) or total < 0:
        raise UserError(f"allocation.total = {total!r}: must be a whole number of at least 0, or {{of: a policy}}")
    return int(total)


def required_total(total: Total, counts_KC: IntArray, policy: str) -> int:
    """The number of images asked for; UserError where there is none, because this policy cannot decide on it."""
    wanted = resolve_total(total, counts_KC)
    if wanted is None:
        raise UserError(
            f"allocation.total is required by `{policy}`: give a number of images, or {{of: fedeas}} for the "
            "total that another policy takes"
        )
    return wanted


def scaled(quota_KC: IntArray, total: int | None) -> IntArray:
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


def checked_counts(counts_KC: NDArray[Any]) -> IntArray:  # Any: the dtype is what is checked
    """The counts as int64 in C order, from whole numbers of any type and order; ValueError for anything else.

    Unsigned and signed numbers together would become floating-point ones, and narrow ones would overflow.
    """
    if counts_KC.ndim != 2 or 0 in counts_KC.shape or counts_KC.dtype.kind not in "iub":
        raise ValueError(f"counts_KC must be integers, clients x classes, not {counts_KC.dtype} {counts_KC.shape}")
    if counts_KC.min() < 0 or counts_KC.max() > np.iinfo(np.int64).max:
        raise ValueError(f"counts_KC must be in 0..2^63 - 1, not {counts_KC.min()} to {counts_KC.max()}")
    return np.ascontiguousarray(counts_KC, dtype=np.int64)


def served(counts_KC: IntArray, quota_KC: IntArray, policy: str) -> IntArray:
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
