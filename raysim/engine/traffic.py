"""How many bytes a round sends from one node of a cluster to another: computed from the sizes of arrays, not measured.

Between workers and driver on one node nothing is sent over the network: there these numbers are 0. What all workers of
a node need, such as the global model, is sent to that node once. Reports and other scalars, and the overhead of
messages, are not counted.
"""

from collections import Counter
from collections.abc import Sequence

from raysim.core.records import ClientTask, FloatArray, ModelState
from raysim.engine.messages import ClientState, PartialSum

FLOAT32_BYTES = 4


class Traffic:
    """The bytes that are sent from node to node in one round.  here: Ray's name of the driver's node."""

    def __init__(self, here: str) -> None:
        self.here = here
        self.nodes: set[str] = set()
        self.bytes = Counter({"broadcast": 0, "reduced": 0})
        self._asked = 0

    def trained(self, node: str, task: ClientTask, state: ClientState | None) -> None:
        """Count a client that was trained on a node: the model and its old state are sent there, its new state back."""
        self.nodes |= {node} - {self.here}
        if state is not None:
            size = sum(array.nbytes for array in state.values())
            self._cross("states", node, size * (1 if task.state is None else 2))

    def broadcast(self, nbytes: int) -> None:
        """Count something besides the model that was sent to all nodes that trained."""
        self._asked += nbytes

    def reduced(self, node: str, fetched: PartialSum) -> PartialSum:
        """Count a partial sum that was fetched from a node; returns it."""
        self._cross("reduced", node, _nbytes(fetched))
        return fetched

    def gathered(self, node: str, rows: Sequence[tuple[str, int]], cut: tuple[int, int], answer: FloatArray) -> None:
        """Count a slice that a worker on `node` gathered from (node, how many clients), and its answer."""
        width = cut[1] - cut[0]
        for source, clients in rows:
            self.bytes["slices"] += FLOAT32_BYTES * clients * width if source != node else 0
        self._cross("slices", node, answer.nbytes)

    def _cross(self, what: str, node: str, nbytes: int) -> None:
        self.bytes[what] += nbytes if node != self.here else 0

    def metrics(self, model: ModelState) -> dict[str, float]:
        """The round's numbers, by the names of their metrics.  model: the global model that clients started from."""
        self.bytes["broadcast"] = len(self.nodes) * (_nbytes(model) + self._asked)
        return {f"engine_bytes_{what}": size for what, size in self.bytes.items()}


def _nbytes(of: ModelState | PartialSum) -> int:
    """The bytes of all arrays of a model or a sum."""
    vectors = of.broadcast_vectors if isinstance(of, ModelState) else of.summed_vectors
    return sum(array.nbytes for array in (of.params_P, of.buffers_F, of.counters, *vectors.values()))
