"""How long workers may take to start: longer where the machine is slow, and longest where they have no machine yet."""

import os
import time
from collections.abc import Callable

from raysim.config.schema import Resources
from raysim.core.errors import RunError
from raysim.engine.ray_private import autoscaler_status

PATIENCE = 8  # times start_timeout_s that a worker may take, once others or the same have missed it
SAY_AFTER_S = 10.0  # seconds without a machine before that is said
SAY_EVERY_S = 60.0


class Starting:
    """The patience with the workers of a pool that have not started.

    limit_s: how long a worker that has a machine may take, at present.
    """

    def __init__(self, resources: Resources, say: Callable[[str], None], now: float) -> None:
        """Begin to wait at the time `now`.  say: told what is waited for."""
        self.limit_s = resources.start_timeout_s
        self._most_s = PATIENCE * resources.start_timeout_s
        self._cluster_s = resources.cluster_timeout_s
        self._say = say
        self._placed_at = now
        self._said_at = -SAY_EVERY_S

    def grow(self, where: str) -> bool:
        """Double the limit, because a worker that lives has missed it; False where it is as long as it gets.

        where: what is known of the machine, for people.
        """
        if self.limit_s >= self._most_s:
            return False
        self._say(
            f"a worker has not started within {self.limit_s:g} s (resources.start_timeout_s){where}; waiting up to "
            f"{min(2 * self.limit_s, self._most_s):g} s"
        )
        self.limit_s = min(2 * self.limit_s, self._most_s)
        return True

    def placed(self, now: float) -> None:
        """Note that some worker has a machine."""
        self._placed_at = now

    def without_machine(self, workers: int, now: float) -> None:
        """Say that no worker has a machine, and since when; RunError after resources.cluster_timeout_s."""
        waited = now - self._placed_at
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
        if waited > self._cluster_s:
            raise RunError(
                f"no machine had room for any of {workers} workers for {self._cluster_s:g} s, since {since} "
                f"(resources.cluster_timeout_s); {autoscaler_state()}; see `ray status` and the file monitor.log of "
                "Ray on the head for why"
            )
        if waited >= SAY_AFTER_S and now >= self._said_at + SAY_EVERY_S:
            self._said_at = now
            self._say(
                f"no machine has room for any of {workers} workers since {since}; waiting up to "
                f"{self._cluster_s:g} s (resources.cluster_timeout_s); {autoscaler_state()}"
            )


def autoscaler_state() -> str:
    """What the autoscaler of the cluster says of nodes that it starts and of failures, for people."""
    heading, found = "", dict[str, list[str]]()
    for line in autoscaler_status().splitlines():
        if not line.startswith(" "):
            heading = line.rstrip(":").strip()
        elif line.strip() and not line.strip().startswith("(no "):
            found.setdefault(heading, []).append(" ".join(line.split()))
    if not found:
        return "no autoscaler reports to this cluster"
    said = [f"{name.lower()}: {', '.join(found[name])}" for name in ("Pending", "Recent failures") if name in found]
    return f"autoscaler: {'; '.join(said) or 'no node is being started, and no failure is reported'}"


def load_here() -> str:
    """How busy this machine is, for people."""
    return f", at a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
