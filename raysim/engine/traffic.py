"""How many bytes a round sends from one node of a cluster to another: computed from the sizes of arrays, not measured.

Between workers and driver on one node nothing crosses: there these numbers are 0. What all workers of a node need, such
as the global model, goes to that node once. Reports and other scalars, and the overhead of messages, are not counted.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from raysim.core.records import ClientTask, FloatArray, ModelState
from raysim.engine.messages import PartialSum

FLOAT32_BYTES = 4


class Traffic:
    """Of one round.  here: the driver's node."""

    def __init__(self, here: str) -> None:
        self.here = here
        self.nodes: set[str] = set()
        self.bytes = Counter({"broadcast": 0, "reduced": 0})
        self._asked = 0

    def trained(self, node: str, task: ClientTask, state: dict[str, Any] | None) -> None:
        """A client was trained on a node: it needed the model there; its state went there, if it had one, and back."""
        self.nodes |= {node} - {self.here}
        if state is not None:
            size = sum(array.nbytes for array in state.values())
            self._cross("states", node, size * (1 if task.state is None else 2))

    def broadcast(self, nbytes: int) -> None:
        """Something besides the model was sent to all nodes that trained."""
        self._asked += nbytes

    def reduced(self, node: str, part: PartialSum) -> PartialSum:
        """A partial sum was fetched from a node; gives it back."""
        self._cross("reduced", node, _nbytes(part))
        return part

    def gathered(self, node: str, rows: Sequence[tuple[str, int]], cut: tuple[int, int], answer: FloatArray) -> None:
        """A worker on `node` gathered a slice of updates from (node, how many clients), and answered the driver."""
        width = cut[1] - cut[0]
        for source, clients in rows:
            self.bytes["slices"] += FLOAT32_BYTES * clients * width if source != node else 0
        self._cross("slices", node, answer.nbytes)

    def _cross(self, what: str, node: str, nbytes: int) -> None:
        self.bytes[what] += nbytes if node != self.here else 0

    def metrics(self, model: ModelState) -> dict[str, float]:
        """The round's numbers, by their names among the metrics.  model: the global one that was trained on."""
        self.bytes["broadcast"] = len(self.nodes) * (_nbytes(model) + self._asked)
        return {f"engine_bytes_{what}": size for what, size in self.bytes.items()}


def _nbytes(of: ModelState | PartialSum) -> int:
    """Size of its arrays."""
    vectors = of.broadcast_vectors if isinstance(of, ModelState) else of.summed_vectors
    return sum(array.nbytes for array in (of.params_P, of.buffers_F, of.counters, *vectors.values()))
