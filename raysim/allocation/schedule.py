"""When an allocation policy is asked, with how many images to place each time, and what it may look at.

A budget that is spent over time, `allocation.total` over J dates of `allocation.at`, gives date j (from 0) the images
floor(total (j + 1) / J) - floor(total j / J).  What a policy answers is added to what clients have: images that were
made are kept, and new ones extend them.

Where images are chosen among candidates (`generator.keep`), the candidates are what a budget counts: of n images a date
keeps floor(n / ratio), which is the total that the policy is asked for, and its candidates are spread in proportion to
what it answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.allocation.common import resolve_total
from raysim.config.plugin_guard import ask_policy
from raysim.config.protocols import MEASURED_INPUTS, POLICY_INPUTS, AllocationPolicy
from raysim.config.registry import asked_for, parameters, resolve
from raysim.config.schema import AllocationSection
from raysim.core.errors import UserError
from raysim.core.plain import PlainDict
from raysim.core.records import Allocation, FloatArray, IntArray
from raysim.core.rounding import largest_remainder

Measured = Mapping[str, FloatArray]
"""What training has shown, by the names of MEASURED_INPUTS, K x C each."""


@dataclass(frozen=True)
class AllocationSchedule:
    """A policy, the dates at which it is asked, and the images of each date.

    at: rounds after which it is asked.  parts: how many images each date has; empty where the policy decides on them.
    measures: what training must have shown for it to be asked.  ratio: candidates for each image that is kept.
    """

    name: str
    policy: AllocationPolicy
    params: PlainDict
    at: tuple[int, ...]
    parts: tuple[int, ...]
    measures: tuple[str, ...]
    ratio: float = 1.0

    @classmethod
    def of(cls, section: AllocationSection, counts_KC: IntArray, ratio: float = 1.0) -> "AllocationSchedule":
        """For the section `allocation` of a configuration; UserError for dates that do not suit policy and budget.

        counts_KC: real samples per client and class.  ratio: candidates for each image that is kept.
        """
        policy = resolve("allocation", section.name)
        wanted, at = asked_for(policy), tuple(section.at)
        measures = tuple(name for name, is_needed in wanted.items() if is_needed and name in MEASURED_INPUTS)
        if measures and at[0] == 0:
            raise UserError(
                f"allocation.at = {list(at)}: `{section.name}` asks for {measures[0]}, and before round 1 nothing has "
                "been trained; begin with a later round, such as allocation.at=[1]"
            )
        parts: tuple[int, ...] = ()
        if "total" in parameters(policy).model_fields and (len(at) > 1 or ratio > 1):
            parts = _parts(resolve_total(section.params.get("total"), counts_KC), at, ratio)
        changing = [name for name in POLICY_INPUTS if name != "seed"]
        if len(at) > 1 and not set(wanted) & set(changing):
            raise UserError(
                f"allocation.at = {list(at)}: `{section.name}` looks at nothing that changes during training, so it "
                f"would answer the same each time; use one round, or a policy that asks for one of "
                f"{', '.join(changing)}"
            )
        return cls(section.name, policy, section.params, at, parts, measures, ratio)

    @property
    def is_later(self) -> bool:
        """Whether the policy is asked after a round has been trained."""
        return self.at != (0,)

    @property
    def asks_measured(self) -> list[str]:
        """What of MEASURED_INPUTS the policy is given, if there is any."""
        return [name for name in asked_for(self.policy) if name in MEASURED_INPUTS]

    def total(self, counts_KC: IntArray) -> int | None:
        """The images of all dates; None where the policy decides."""
        return sum(self.parts) if self.parts else resolve_total(self.params.get("total"), counts_KC)

    def start(self, counts_KC: IntArray, seed: int) -> Allocation:
        """What clients have before round 1."""
        if self.at[0] == 0:
            return self.ask(0, counts_KC, seed, None)
        return Allocation(np.zeros_like(counts_KC))

    def foreseen(self, counts_KC: IntArray, seed: int) -> Allocation | None:
        """What clients have after the last date; None for a policy that must see what training shows."""
        if self.measures:
            return None
        so_far = self.start(counts_KC, seed)
        for date in range(self.at[0] == 0, len(self.at)):
            so_far = self.ask(date, counts_KC if so_far.keep_KC is None else so_far.keep_KC, seed, so_far)
        return so_far

    def ask(
        self, date: int, counts_KC: IntArray, seed: int, so_far: Allocation | None, measured: Measured | None = None
    ) -> Allocation:
        """What clients have after a date: what they had, and what the policy adds.

        date: which, from 0.  counts_KC: the real samples that clients train on.  so_far: what clients had; None:
        nothing.  measured: what training has shown; None: nothing.
        """
        so_far = so_far or Allocation(np.zeros_like(counts_KC))
        given: dict[str, Any] = {
            "seed": seed, "round": self.at[date], "images_KC": so_far.quota_KC, "spent": so_far.images,
            **(measured or {}),
        }  # fmt: skip
        kept = kept_of(self.parts[date], self.ratio) if self.parts else 0
        params = {**self.params, "total": kept} if self.parts else self.params
        answer = ask_policy(self.name, self.policy, counts_KC, params, given=given)
        if self.at[date] and answer.keep_KC is not None:
            raise UserError(
                f"allocation.at = {list(self.at)}: `{self.name}` leaves real samples out, and on what clients train is "
                "decided before round 1; use allocation.at=[0]"
            )
        if so_far.quota_KC.any() and answer.shared != so_far.shared:
            raise UserError(f"allocation.name = {self.name}: at one date its images are shared, at another not")
        keep_KC = so_far.keep_KC if self.at[date] else answer.keep_KC
        quota_KC = so_far.quota_KC + answer.quota_KC
        if self.ratio == 1:
            return Allocation(quota_KC, keep_KC, answer.shared)
        if answer.shared:
            raise UserError(
                f"generator.keep.ratio = {self.ratio:g}: the images of `{self.name}` are shared by all clients, and "
                "these are not chosen; use generator.keep.rule=none, or another policy"
            )
        if self.parts and answer.images == kept:
            added_KC = answer.quota_KC + largest_remainder(answer.quota_KC, self.parts[date] - kept)
        else:
            added_KC = np.ceil(self.ratio * answer.quota_KC - 1e-9).astype(np.int64)
        before_KC = np.zeros_like(quota_KC) if so_far.candidates_KC is None else so_far.candidates_KC
        return Allocation(quota_KC, keep_KC, candidates_KC=before_KC + added_KC)


def kept_of(images: int, ratio: float) -> int:
    """How many of so many candidates are kept: floor(images / ratio), not changed by floating-point errors."""
    return int(images / ratio + 1e-9)


def _parts(total: int | None, at: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    """The images of each date; none where there is but one, and the policy decides on them."""
    dates = len(at)
    if total is None and dates == 1:
        return ()
    if total is None:
        raise UserError(
            f"allocation.at = {list(at)}: without a budget there is nothing to spend over {dates} dates; set "
            "allocation.total"
        )
    if total < dates and dates > 1:
        raise UserError(
            f"allocation.total = {total}: the budget is spent before the last of the {dates} dates of allocation.at = "
            f"{list(at)}; give at least {dates} images, or fewer dates"
        )
    parts = tuple(total * (date + 1) // dates - total * date // dates for date in range(dates))
    if ratio > 1 and total and kept_of(min(parts), ratio) == 0:
        raise UserError(
            f"allocation.total = {total}: with generator.keep.ratio = {ratio:g} none of the {min(parts)} candidates of "
            f"a date would be kept; give at least {math.ceil(ratio) * dates} images"
        )
    return parts
