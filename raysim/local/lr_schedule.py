"""Learning rates that change from round to round, the same for every client."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from raysim.config.markers import OnlyWith
from raysim.core.errors import UserError


class Schedule(BaseModel):
    """The factor of the learning rate in each round: a warm-up, then constant, steps, or half a cosine.

    `rounds` is a key of its own and not the length of the run, so that a run may be made longer without changing the
    rounds it has done; later rounds keep the last factor, which is never 0.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    kind: Annotated[Literal["constant", "step", "cosine"], Field(description="what follows the warm-up")] = "constant"
    warmup: Annotated[int, Field(ge=0, description="rounds of linear warm-up; the last has the full rate")] = 0
    every: Annotated[int, Field(ge=1, description="step: rounds between two steps"), OnlyWith("kind", "step")] = 10
    factor: Annotated[
        float, Field(gt=0, le=1, allow_inf_nan=False, description="step: factor of each step"), OnlyWith("kind", "step")
    ] = 0.1
    rounds: Annotated[
        Annotated[int, Field(ge=1, description="cosine: round in which the rate is lowest")] | None,
        OnlyWith("kind", "cosine"),
    ] = None
    floor: Annotated[
        float,
        Field(ge=0, le=1, description="cosine: fraction it would reach a round later"),
        OnlyWith("kind", "cosine"),
    ] = 0.0

    def check(self) -> None:
        """Raise UserError for a cosine whose number of rounds is missing or shorter than the warm-up."""
        if self.kind == "cosine" and (self.rounds is None or self.rounds < max(1, self.warmup)):
            raise UserError(
                f"local.schedule.rounds = {'null' if self.rounds is None else self.rounds}: a cosine needs the number "
                f"of rounds it spans, at least its warm-up of {self.warmup}; usually the `rounds` of the run"
            )

    def scale(self, round_: int) -> float:
        """The factor of a round (counted from 1): min(1, round / warmup) times what `kind` says.

        t rounds after the warm-up that is 1 (constant), factor^floor(t / every) (step), or
        floor + (1 - floor) (1 + cos(pi t / T)) / 2 with T rounds of cosine.
        """
        first = max(1, self.warmup)  # the first round at the full rate
        t = max(0, round_ - first)
        if self.kind == "step":
            return min(1.0, round_ / first) * self.factor ** (t // self.every)
        if self.kind == "cosine" and self.rounds is not None:
            span = self.rounds - first + 1
            half = (1 + math.cos(math.pi * min(t, span - 1) / span)) / 2
            return min(1.0, round_ / first) * (self.floor + (1 - self.floor) * half)
        return min(1.0, round_ / first)
