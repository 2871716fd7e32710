"""A session for tests, whose workers stay warm whatever their number: most of what a small run takes is their start."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import cast

from raysim.config.schema import Resources
from raysim.engine.calls import WorkerActor
from raysim.engine.cluster import place_on_cluster
from raysim.engine.placement import Placement
from raysim.engine.pool import Pool, _kill, _Member
from raysim.engine.session import Session

CORES = 16  # of the Ray that the tests share: enough for the largest pool of a run, and for those that tests start


class SharingPool(Pool):
    """A pool that takes workers which others have left before it starts any."""

    def __init__(self, placement: Placement, resources: Resources, left: list[WorkerActor]) -> None:
        self.left = left
        super().__init__(placement, resources)

    def _start(self) -> None:
        if not self.left:
            super()._start()
            return
        actor = self.left.pop()
        first = actor.where.remote() if self._configuration is None else actor.configure.remote(*self._configuration)
        self.members[self._next_id] = _Member(id=self._next_id, actor=actor, ready_ref=first, since=time.monotonic())
        self._next_id += 1

    def leave(self) -> None:
        """Leave the workers that have nothing to do to the next pool, which takes those first that have started."""
        idle = [id_ for id_, member in self.members.items() if not member.chunks]
        for id_ in idle:
            member = self.members.pop(id_)
            self.left.insert(len(self.left) if member.ready else 0, member.actor)
        self.close()


class WarmSession(Session):
    """Hands its workers on to a run with another number of them, where a session would end them and start others."""

    def __init__(self) -> None:
        super().__init__(Resources())
        self._left: defaultdict[object, list[WorkerActor]] = defaultdict(list)

    def pool(self, resources: Resources, say: Callable[[str], None] = lambda _: None) -> Pool:
        """Return the pool of the run before, if it has as many workers and the same resources, else another."""
        placement = place_on_cluster(resources, say)
        pool = cast(SharingPool | None, self._pool)
        kind = (placement, resources.threads_per_worker)
        if pool is None or (pool.placement, pool.resources.threads_per_worker) != kind:
            if pool is not None:
                pool.leave()
            left = self._left[placement.gpus_per_worker, resources.threads_per_worker]
            self._pool = SharingPool(placement, resources, left)
        return super().pool(resources, say)

    def discard_all(self) -> None:
        """End all workers, so that every core of the shared Ray is free."""
        self.discard_pool()
        for left in self._left.values():
            while left:
                _kill(left.pop())
