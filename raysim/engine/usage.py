"""How long the workers and the driver work and wait in the rounds, by the driver's clock."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator


class Usage:
    """Seconds that each worker of a pool was busy and idle in the rounds of one run.

    A worker is busy from when a call is sent to it until its answer is seen here, which includes loading, summing and
    the messages, about a millisecond.  waited_s: seconds that the driver spent waiting for answers.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._lap_s: defaultdict[int, float] = defaultdict(float)
        self._busy_s: defaultdict[int, float] = defaultdict(float)
        self._there_s: defaultdict[int, float] = defaultdict(float)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def worked(self, worker: int, seconds: float) -> None:
        """Count a call that a worker has answered."""
        self._lap_s[worker] += seconds

    def begin_round(self) -> None:
        """Begin to count a round: forget work that was done before it, such as making images."""
        self._lap_s.clear()

    def end_round(self, workers: Iterable[int], seconds: float) -> float:
        """End a round that took `seconds`; returns the mean over workers of the seconds that each was idle in it.

        workers: ids of those that have started; one that was lost during the round counts, too.
        """
        idle_s = []
        for worker in {*workers, *self._lap_s}:
            busy_s = min(self._lap_s[worker], seconds)
            self._busy_s[worker] += busy_s
            self._there_s[worker] += seconds
            idle_s.append(seconds - busy_s)
        self.begin_round()
        return sum(idle_s) / max(1, len(idle_s))

    def workers(self) -> list[dict[str, float]]:
        """Each worker that took part: its number, busy seconds, and the fraction of the rounds' time it was idle."""
        return [
            {"worker": id_, "busy_s": round(self._busy_s[id_], 3), "idle_frac": round(1 - self._busy_s[id_] / there, 4)}
            for id_, there in sorted(self._there_s.items())
            if there > 0
        ]
