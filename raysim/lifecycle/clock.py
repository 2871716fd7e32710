"""Measures how long each phase of a run takes."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PhaseClock:
    """The clock of a run.

    began: when the run began, by time.monotonic.  seconds: by phase; no phase is part of another.  workers: how busy
    each was during the rounds.
    """

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time in this context to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def add_round(self, metrics: Mapping[str, float]) -> None:
        """Add the phases of a round, given as its metrics; `dispatch` is what the driver itself took to train."""
        spent = {phase: metrics[f"seconds_{phase}"] for phase in ("train", "dispatch", "aggregate", "evaluate")}
        spent["train"] -= spent["dispatch"]
        for phase, seconds in spent.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def rounded(self) -> dict[str, float]:
        """Seconds by phase, to the millisecond."""
        return {phase: round(value, 3) for phase, value in self.seconds.items()}

    def so_far(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began
