"""How partial sums get from the workers to the driver: one sum for each node crosses the network.

A worker's partial sum stays in its node's object store. The driver owns it, so it remains when the worker dies, and is
lost only with the node. Where a node has several, one of its workers adds them there, and the driver fetches that sum.
Sums are exact (`engine.reduce`), so the grouping changes no bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from raysim.engine.calls import Question, Ref, WorkerActor
from raysim.engine.messages import PartialSum
from raysim.engine.pool import Pool

INLINE_BYTES = 100 * 1024  # Ray sends a smaller value together with the answer of the call that made it


@dataclass(frozen=True)
class StoredSum:
    """A partial sum in the object store.

    clients: those whose updates are in the sum.  node: Ray's name of the node where it was made.  ref: its reference.
    """

    clients: Sequence[int]
    node: str
    ref: Ref


def collect(
    pool: Pool, stored: Sequence[StoredSum], parameters: int
) -> tuple[list[tuple[str, PartialSum]], list[StoredSum]]:
    """Fetch partial sums, added up by node where a node other than the driver's has several.

    parameters: how many numbers a sum has at least.  Returns ((node, sum) of those that were fetched, those that were
    lost).
    """
    by_node = {one.node: [other for other in stored if other.node == one.node] for one in stored}
    questions: dict[int, Question] = {}
    node_of_adder: dict[int, str] = {}
    for node, there in by_node.items():
        adder = pool.worker_on(node)
        if node != pool.here and len(there) > 1 and adder is not None and 8 * parameters >= INLINE_BYTES:
            questions[adder] = _addition([one.ref for one in there])
            node_of_adder[adder] = node
    answers, _ = pool.ask(questions) if questions else ({}, [])
    sums = [(node_of_adder[worker], answer) for worker, answer in answers.items() if answer is not None]
    done = {node for node, _ in sums}
    lost: list[StoredSum] = []
    for one in stored:
        if one.node in done:
            continue
        try:
            sums.append((one.node, ray.get(one.ref, timeout=pool.resources.task_timeout_s)))
        except (ObjectLostError, GetTimeoutError):
            lost.append(one)
    return sums, lost


def _addition(refs: list[Ref]) -> Question:
    """The question whose answer is the sum of these partial sums."""

    def ask(actor: WorkerActor) -> Ref:
        return actor.add.remote(refs)

    return ask
