"""Who does what next: longest first to whoever will be done with it first, in calls that get smaller towards the end.

No Ray here and no clock: `now` is an argument, in seconds, so that a whole round can be simulated (tests/engine).
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, TypeVar

IN_FLIGHT = 2  # calls that a worker has at a time, so that it need not wait for the driver between them
LEAST_FRACTION = 1 / 8  # of a worker's part of the work, and
LEAST_S = 0.1  # seconds: no call should be less, because each costs some milliseconds
WORTH_S = 0.1  # seconds that must be won, or a worker is not asked to give work back
PACE_STEP = 1.1  # paces closer than this factor count as equal
RECOVERY = 0.05  # of a worker's difference from the others that is forgotten by each `map` in which it did nothing


@dataclass
class Item:
    """A piece of work.  cost: how long it takes in comparison with others.  name: what to call it in a message."""

    payload: Any  # a plain value that the caller of `Pool.map` understands
    cost: float
    name: str
    attempts: int = 0


@dataclass
class Chunk:
    """The items of one call to a worker.

    asked_for: ids of the items that the worker was asked to give back.  given_back: of those that it did give back.
    """

    items: list[Item]
    asked_for: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)

    def left(self) -> list[Item]:
        """The items without those that were given back."""
        return [item for item in self.items if id(item) not in self.given_back] if self.given_back else self.items

    def take_back(self, items: Iterable[Item]) -> list[Item]:
        """Note that these items are not done by this call; those of which that was not known yet."""
        news = [item for item in items if id(item) not in self.given_back]
        self.given_back.update(id(item) for item in news)
        return news


ChunkT = TypeVar("ChunkT", bound=Chunk)


@dataclass
class WorkerLoad(Generic[ChunkT]):
    """What a worker has to do.

    ready: whether it has started.  since: when the first of its chunks began, or the start of its process.
    """

    id: int
    ready: bool = False
    chunks: deque[ChunkT] = field(default_factory=deque)
    since: float = 0.0


def cost(items: Iterable[Item]) -> float:
    """The cost of all these items together."""
    return sum(item.cost for item in items)


def assign(
    queue: Sequence[Item], free_at: Mapping[int, float], pace: Mapping[int, float]
) -> dict[int, list[Item]]:
    """Assign items to workers, each to the one that would be done with it first (longest processing time first).

    queue: in order of cost, the longest last.  free_at: when each worker will be done with what it has, in seconds.
    pace: seconds per unit of cost, of each worker.  Returns each worker's items, the longest first.
    Graham (1969), Bounds on multiprocessing timing anomalies; for unequal paces Gonzalez, Ibarra and Sahni (1977).
    """
    by_pace: dict[float, list[tuple[float, int]]] = {}
    for worker, free in free_at.items():
        by_pace.setdefault(pace[worker], []).append((free, worker))
    for heap in by_pace.values():
        heapq.heapify(heap)
    heaps = list(by_pace.items())
    assigned: dict[int, list[Item]] = {worker: [] for worker in free_at}
    for item in reversed(queue):
        seconds, heap = heaps[0]
        if len(heaps) > 1:
            seconds, heap = min(heaps, key=lambda entry: (entry[1][0][0] + item.cost * entry[0], entry[1][0]))
        free, worker = heap[0]
        assigned[worker].append(item)
        heapq.heapreplace(heap, (free + item.cost * seconds, worker))
    return assigned


def next_chunk(part: Sequence[Item], least: float) -> list[Item]:
    """The items of a worker's next call: half of its part by cost, unless `least` is more or what remained were less.

    An item that failed before travels alone, so that it cannot take others down with it.
    """
    whole = cost(part)
    target = max(whole / 2, least)
    if whole - target < least:
        target = whole
    chunk: list[Item] = []
    taken = 0.0
    for item in part:
        if chunk and (taken >= target or item.attempts):
            break
        chunk.append(item)
        taken += item.cost
        if item.attempts:
            break
    return chunk


class Paces:
    """Seconds per unit of cost of each worker, for each kind of work, as measured last; kept from round to round."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[int, float]] = {}

    def measured(self, kind: str, worker: int, seconds: float, cost_done: float) -> None:
        """Note a call: the mean of what was known and what it shows, so that one hiccup does not count for much."""
        if not kind or cost_done <= 0:
            return
        paces = self._measured.setdefault(kind, {})
        pace = max(seconds, 1e-9) / cost_done
        paces[worker] = (paces.get(worker, pace) + pace) / 2

    def of(self, kind: str, workers: Iterable[int]) -> dict[int, float]:
        """The pace of each of these workers; the median of the others for one that is not known; {} if none is."""
        paces = self._measured.get(kind, {})
        known = [paces[worker] for worker in workers if worker in paces]
        if not known:
            return {}
        usual = median(known)
        return {worker: paces.get(worker, usual) for worker in workers}

    def idle(self, kind: str, workers: Iterable[int]) -> None:
        """These workers got no work of a kind: each counts as a little less different from the others than before.

        Without this, a worker that was slow once, because something else ran beside it, would never be tried again.
        """
        paces = self._measured.get(kind, {})
        usual = median(paces.values()) if paces else 0.0
        for worker in workers:
            if worker in paces:
                paces[worker] *= (usual / paces[worker]) ** RECOVERY

    def forget(self, worker: int) -> None:
        """Remove a worker that is no more."""
        for paces in self._measured.values():
            paces.pop(worker, None)

    def clear(self) -> None:
        """Forget everything: other work comes."""
        self._measured.clear()


Loads = Mapping[int, WorkerLoad[Any]]


class Plan:
    """How the items of one `Pool.map` are handed out to workers, and taken back from those that are too slow.

    Whenever a worker can take a call, all that is left is assigned anew, and the worker gets the first half of its
    part. When nothing is left, a worker without work gets what another was given and has not begun.
    """

    def __init__(self, items: Iterable[Item], kind: str, paces: Paces, workers: int, most: int | None = None) -> None:
        """kind: of work, as in `Paces`; "": no pace is kept.  workers: how many.  most: items in one call."""
        self.queue = sorted(items, key=lambda item: item.cost)
        self.kind = kind
        self._paces = paces
        self._most = most
        self._cost_per_worker = cost(self.queue) / max(1, workers)
        self._worked: set[int] = set()

    def add(self, items: Iterable[Item]) -> None:
        """Put items into the queue: lost work, or work that was given back."""
        self.queue.extend(items)
        self.queue.sort(key=lambda item: item.cost)

    def hand_out(self, loads: Loads, now: float) -> Iterator[tuple[int, list[Item], bool]]:
        """(worker, items of its next call, whether no other call is expected to follow for it), one after another.

        Whoever iterates appends the call to the worker's chunks before asking for the next one.
        """
        for depth in range(1, IN_FLIGHT + 1):
            for load in list(loads.values()):
                if load.ready and self.queue and len(load.chunks) < depth:
                    chunk, last = self._next(load, loads, now)
                    if chunk:
                        self._worked.add(load.id)
                        yield load.id, chunk, last

    def _next(self, load: WorkerLoad[Any], loads: Loads, now: float) -> tuple[list[Item], bool]:
        """(what a worker should do next, whether that is all of its part); nothing if others will be done sooner."""
        if self._most == 1 and len(self.queue) > 2 * IN_FLIGHT * len(loads):
            part = self.queue[-1:]
        else:
            pace, seconds_left = self._expected(loads, now)
            pace = {id_: _rounded(seconds) for id_, seconds in pace.items()}
            part = assign(self.queue, seconds_left, pace)[load.id]
            if not part and not load.chunks:  # those that are still to start may have got it all
                ready_at = {id_: seconds for id_, seconds in seconds_left.items() if loads[id_].ready}
                part = assign(self.queue, ready_at, pace)[load.id]
        known = self._paces.of(self.kind, loads)
        least = max(LEAST_FRACTION * self._cost_per_worker, LEAST_S / known[load.id] if known else 0.0)
        chunk = next_chunk(part, least)[: self._most]
        taken = {id(item) for item in chunk}
        self.queue[:] = [item for item in self.queue if id(item) not in taken]
        return chunk, len(chunk) == len(part)

    def _expected(self, loads: Loads, now: float) -> tuple[dict[int, float], dict[int, float]]:
        """(seconds per unit of cost, seconds until it is done with what it has) of each worker.

        A call that takes longer than expected is expected to go on for as long again as it is late. Where no pace is
        known each is 1, and what has begun counts in full.
        """
        pace = self._paces.of(self.kind, loads)
        known = bool(pace)
        if not known:
            pace = dict.fromkeys(loads, 1.0)
        seconds_left: dict[int, float] = {}
        for load in loads.values():
            begun = cost(load.chunks[0].left()) if load.ready and load.chunks else 0.0
            elapsed = now - load.since if begun and known else 0.0
            late = elapsed - begun * pace[load.id]
            if late > 0:
                pace[load.id] = (elapsed + late) / begun
            seconds_left[load.id] = sum(cost(chunk.left()) for chunk in load.chunks) * pace[load.id] - elapsed
        return pace, seconds_left

    def answered(self, worker: int, seconds: float, items: Sequence[Item]) -> None:
        """Note how long a worker took for these items."""
        self._paces.measured(self.kind, worker, seconds, cost(items))

    def to_take_back(self, loads: Loads, now: float) -> tuple[int, list[Item]] | None:
        """(a worker, items that workers without work would be done with sooner), or None.

        Asks for an item once at most: a worker that has begun it does not give it back.
        """
        idle = [load.id for load in loads.values() if load.ready and not load.chunks]
        if self.queue or not idle:
            return None
        pace, seconds_left = self._expected(loads, now)
        busy = sorted((load for load in loads.values() if load.chunks), key=lambda load: -seconds_left[load.id])
        for load in busy:
            free_at = dict.fromkeys(idle, 0.0)
            ends = seconds_left[load.id]
            wanted: list[Item] = []
            waiting = [item for chunk in load.chunks for item in chunk.items][1:]  # the first has begun
            asked_before = {id_ for chunk in load.chunks for id_ in chunk.asked_for}
            for item in reversed([item for item in waiting if id(item) not in asked_before]):
                done_at = {worker: free + item.cost * pace[worker] for worker, free in free_at.items()}
                helper = min(done_at, key=lambda worker: done_at[worker])
                if done_at[helper] + WORTH_S > ends:
                    break
                free_at[helper] = done_at[helper]
                ends -= item.cost * pace[load.id]
                wanted.append(item)
            if wanted:
                asked_for = {id(item) for item in wanted}
                for chunk in load.chunks:
                    chunk.asked_for |= asked_for
                return load.id, wanted
        return None

    def ended(self, workers: Iterable[int]) -> None:
        """The work is done: workers that got none of it move towards the pace of the others."""
        if self.kind and self._worked:
            self._paces.idle(self.kind, [worker for worker in workers if worker not in self._worked])


def _rounded(pace: float) -> float:
    """A pace on a grid of PACE_STEP, so that workers of one kind count as equal."""
    return float(PACE_STEP ** round(math.log(pace) / math.log(PACE_STEP)))
