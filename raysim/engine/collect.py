"""Partial sums where they were made, and their way to the driver: one for each node crosses the network.

A worker's partial sum stays in its node's object store. It belongs to the driver, so it outlives the worker; only the
loss of the node takes it away. Where a node has several, one of its workers adds them there, and the driver fetches
that sum. Sums are exact (`engine.reduce`), so the grouping changes no bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from raysim.engine.messages import PartialSum

if TYPE_CHECKING:
    from raysim.engine.pool import Pool

INLINE_BYTES = 100 * 1024  # Ray sends what is smaller along with the answer of the call that made it


@dataclass(frozen=True)
class Part:
    """A partial sum.  clients: whose updates it holds.  node: where it was made.  ref: what it is fetched by."""

    clients: Sequence[int]
    node: str
    ref: Any


def collect(
    pool: "Pool", parts: Sequence[Part], parameters: int
) -> tuple[list[tuple[str, PartialSum]], list[Part]]:
    """Fetch parts, added up by node where a node other than the driver's has several.

    parameters: how many numbers a part has, at least.  Returns ((node, sum) of all that came, parts that were lost).
    """
    nodes = {part.node: [p for p in parts if p.node == part.node] for part in parts}
    questions, asked = {}, {}
    for node, there in nodes.items():
        adder = pool.worker_on(node)
        if node != pool.here and len(there) > 1 and adder is not None and 8 * parameters >= INLINE_BYTES:
            questions[adder], asked[adder] = partial(_ask_to_add, [part.ref for part in there]), node
    answers, _ = pool.ask(questions) if questions else ({}, [])
    sums = [(asked[worker], answer) for worker, answer in answers.items() if answer is not None]
    done, lost = {node for node, _ in sums}, []
    for part in parts:
        if part.node in done:
            continue
        try:
            sums.append((part.node, ray.get(part.ref, timeout=pool.resources.task_timeout_s)))
        except (ObjectLostError, GetTimeoutError):
            lost.append(part)
    return sums, lost


def _ask_to_add(refs: list[Any], actor: Any, _: Any) -> Any:
    return actor.add.remote(refs)


def add(refs: Sequence[Any]) -> PartialSum | None:
    """The sum of parts on this node; None if one is lost."""
    try:
        return joined(ray.get(list(refs)))
    except ObjectLostError:
        return None


def joined(parts: Sequence[PartialSum]) -> PartialSum:
    """The sum of partial sums, in grid units; their order does not matter."""
    return PartialSum(
        np.sum([p.params_P for p in parts], axis=0),
        np.sum([p.buffers_F for p in parts], axis=0),
        np.max([p.counters for p in parts], axis=0),
        {name: np.sum([p.summed_vectors[name] for p in parts], axis=0) for name in parts[0].summed_vectors},
    )
