"""Who does what next: longest first to whoever will be free first, in calls that get smaller towards the end."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Item:
    """A piece of work: what it is, how long it takes in comparison, what to call it in a message."""

    payload: Any
    cost: float
    name: str
    attempts: int = 0


def cost(items: Sequence[Item]) -> float:
    """Of all these items together."""
    return sum(item.cost for item in items)


def parts(queue: Sequence[Item], loads: Mapping[int, float]) -> dict[int, list[Item]]:
    """Deal items out to workers, each to the one that is free first (Graham's longest processing time first).

    queue: in order of cost, the longest last.  loads: cost of what each worker has before it.  Returns each worker's
    items, the longest first.
    """
    free = [(load, worker) for worker, load in loads.items()]
    heapq.heapify(free)
    dealt: dict[int, list[Item]] = {worker: [] for worker in loads}
    for item in reversed(queue):
        load, worker = free[0]
        dealt[worker].append(item)
        heapq.heapreplace(free, (load + item.cost, worker))
    return dealt


def first(part: Sequence[Item], least: float) -> list[Item]:
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
