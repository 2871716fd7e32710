"""A session for tests, whose workers stay warm whatever their number: most of what a small run takes is their start."""

from collections.abc import Callable

from raysim.config.schema import Resources
from raysim.engine.pool import Pool
from raysim.engine.session import Session

CORES = 16  # of the Ray that the tests share: enough for pools of 1, 2, 3 and 4 workers at once and some more


class WarmSession(Session):
    """Keeps a pool for each number of workers, where a session keeps only that of the run before."""

    def __init__(self) -> None:
        super().__init__(Resources())
        self._kept: dict[object, Pool] = {}

    def pool(self, resources: Resources, say: Callable[[str], None] = lambda _: None) -> Pool:
        """Return the workers of an earlier run with as many workers and the same resources, else new ones."""
        if self._pool is not None:
            self._kept[self._pool.placement.workers] = self._pool
        self._pool = self._kept.pop(resources.workers, None)
        return super().pool(resources, say)

    def discard_all(self) -> None:
        """End all workers, so that every core of the shared Ray is free."""
        self.discard_pool()
        while self._kept:
            self._pool = self._kept.popitem()[1]
            self.discard_pool()
