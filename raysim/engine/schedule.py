"""Which worker does what next: the longest item first, to the worker that will finish it first, in shrinking calls.

There is no Ray here and no clock: `now` is an argument, in seconds, so that a whole round can be simulated
(tests/engine).
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, TypeVar

IN_FLIGHT = 2  # calls that a worker has at a time, so that it need not wait for the driver between them
LEAST_FRACTION = 1 / 8  # a call should have at least this fraction of the mean work of a worker
LEAST_S = 0.1  # seconds that a call should take at least, because each call costs some milliseconds
WORTH_S = 0.1  # seconds that must be saved, or a worker is not asked to give work back
PACE_STEP = 1.1  # paces closer than this factor count as equal
RECOVERY = 0.05  # fraction of a pace's difference from the median that is forgotten by each `map` without work


@dataclass
class Item:
    """A unit of work.

    payload: the arguments, which only the caller of `Pool.map` understands.  cost: how long it takes in comparison with
    others.  name: what messages call it.  attempts: how often it has failed.
    """

    payload: Any  # each caller of `Pool.map` has a type of its own
    cost: float
    name: str
    attempts: int = 0


@dataclass
class Chunk:
    """The items of one call to a worker.

    asked_for: ids of the items that the worker was asked to give back.  given_back: ids of those that it gave back.
    """

    items: list[Item]
    asked_for: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)

    def left(self) -> list[Item]:
        """The items without those that were given back."""
        return [item for item in self.items if id(item) not in self.given_back] if self.given_back else self.items

    def take_back(self, items: Iterable[Item]) -> list[Item]:
        """Note that this call does not do these items; returns those for which that was not noted before."""
        news = [item for item in items if id(item) not in self.given_back]
        self.given_back.update(id(item) for item in news)
        return news


ChunkT = TypeVar("ChunkT", bound=Chunk)


@dataclass
class WorkerLoad(Generic[ChunkT]):
    """The work that a worker has.

    ready: whether it has started.  since: the time when the first of its chunks, or the start of its process, began.
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
    """Assign items to workers, each to the worker that would finish it first (longest processing time first).

    queue: in order of cost, the longest last.  free_at: when each worker will have finished what it has, in seconds.
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


def next_chunk(assigned: Sequence[Item], least: float) -> list[Item]:
    """The items of a worker's next call: half of those assigned to it by cost, or more.

    The call has at least the cost `least`, and all items if less than that would remain. An item that failed before is
    sent alone, so that others are not lost with it if it fails again.
    """
    whole = cost(assigned)
    target = max(whole / 2, least)
    if whole - target < least:
        target = whole
    chunk: list[Item] = []
    taken = 0.0
    for item in assigned:
        if chunk and (taken >= target or item.attempts):
            break
        chunk.append(item)
        taken += item.cost
        if item.attempts:
            break
    return chunk


def calls_of(costs: Sequence[float], pace: float) -> list[list[int]]:
    """The calls in which a worker gets items with these costs if it has that pace and gets no others: their positions.

    pace: seconds per unit of cost.
    """
    left = [Item(i, costs[i], "") for i in sorted(range(len(costs)), key=lambda i: -costs[i])]
    least = max(LEAST_FRACTION * cost(left), LEAST_S / pace)
    calls = []
    while left:
        chunk = next_chunk(left, least)
        calls.append([item.payload for item in chunk])
        left = left[len(chunk) :]
    return calls


class Paces:
    """The measured pace of each worker for each kind of work, in seconds per unit of cost; kept from round to round."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[int, float]] = {}

    def measured(self, kind: str, worker: int, seconds: float, cost_done: float) -> None:
        """Note how long a call took: the new pace is the mean of the old and the measured one, which damps outliers."""
        if not kind or cost_done <= 0:
            return
        paces = self._measured.setdefault(kind, {})
        pace = max(seconds, 1e-9) / cost_done
        paces[worker] = (paces.get(worker, pace) + pace) / 2

    def of(self, kind: str, workers: Iterable[int]) -> dict[int, float]:
        """The pace of each of these workers; the median of the known ones for one that is not known; {} if none is."""
        paces = self._measured.get(kind, {})
        known = [paces[worker] for worker in workers if worker in paces]
        if not known:
            return {}
        usual = median(known)
        return {worker: paces.get(worker, usual) for worker in workers}

    def idle(self, kind: str, workers: Iterable[int]) -> None:
        """Note that these workers got no work of a kind: the pace of each moves a little towards the median.

        Without this, a worker that was slow once, because another program ran at that time, would never get work again.
        """
        paces = self._measured.get(kind, {})
        usual = median(paces.values()) if paces else 0.0
        for worker in workers:
            if worker in paces:
                paces[worker] *= (usual / paces[worker]) ** RECOVERY

    def forget(self, worker: int) -> None:
        """Remove a worker that has died."""
        for paces in self._measured.values():
            paces.pop(worker, None)

    def clear(self) -> None:
        """Forget all paces, because the work changes."""
        self._measured.clear()


Loads = Mapping[int, WorkerLoad[Any]]


class Plan:
    """How the items of one `Pool.map` are handed out to workers, and taken back from those that are too slow.

    Whenever a worker can take a call, all items left are assigned anew, and the worker gets the first half of its own.
    When none is left, a worker without work gets items that another was given and has not begun.
    """

    def __init__(self, items: Iterable[Item], kind: str, paces: Paces, workers: int, most: int | None = None) -> None:
        """Plan some items.

        kind: of work, as in `Paces`; "": no pace is kept.  workers: how many.  most: how many items a call may have.
        """
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
        """Yield (worker, items of its next call, whether that is expected to be its last), one after another.

        The caller appends the call to the worker's chunks before it asks for the next one.
        """
        for depth in range(1, IN_FLIGHT + 1):
            for load in list(loads.values()):
                if load.ready and self.queue and len(load.chunks) < depth:
                    chunk, last = self._next(load, loads, now)
                    if chunk:
                        self._worked.add(load.id)
                        yield load.id, chunk, last

    def _next(self, load: WorkerLoad[Any], loads: Loads, now: float) -> tuple[list[Item], bool]:
        """(items that a worker should do next, whether they are all of its items); none if others will be sooner."""
        if self._most == 1 and len(self.queue) > 2 * IN_FLIGHT * len(loads):
            assigned = self.queue[-1:]
        else:
            pace, seconds_left = self._expected(loads, now)
            pace = {id_: _rounded(seconds) for id_, seconds in pace.items()}
            assigned = assign(self.queue, seconds_left, pace)[load.id]
            if not assigned and not load.chunks:  # workers that are still to start may have got everything
                ready_at = {id_: seconds for id_, seconds in seconds_left.items() if loads[id_].ready}
                assigned = assign(self.queue, ready_at, pace)[load.id]
        known = self._paces.of(self.kind, loads)
        least = max(LEAST_FRACTION * self._cost_per_worker, LEAST_S / known[load.id] if known else 0.0)
        chunk = next_chunk(assigned, least)[: self._most]
        taken = {id(item) for item in chunk}
        self.queue[:] = [item for item in self.queue if id(item) not in taken]
        return chunk, len(chunk) == len(assigned)

    def _expected(self, loads: Loads, now: float) -> tuple[dict[int, float], dict[int, float]]:
        """(seconds per unit of cost, seconds until it has finished what it has) of each worker.

        A call that is late is expected to take as much longer again as it is late by now. Where no pace is known, each
        is 1, and a call that has begun counts in full.
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
        """(a worker, items of it that workers without work would finish sooner), or None.

        An item is asked for at most once: a worker that has begun it does not give it back.
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
        """Note that the work is done: the pace of workers that got none of it moves towards the median."""
        if self.kind and self._worked:
            self._paces.idle(self.kind, [worker for worker in workers if worker not in self._worked])


def _rounded(pace: float) -> float:
    """A pace rounded to a power of PACE_STEP, so that workers of one kind count as equal."""
    return float(PACE_STEP ** round(math.log(pace) / math.log(PACE_STEP)))
