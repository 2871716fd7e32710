"""What the server carries from one round to the next."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysim.core.records import Allocation, FloatArray, IntArray, ModelState


class ClientStates:
    """What each client keeps between its rounds, as references into the object store, by client id.

    All states of a run share one dictionary, so that no round copies it: `after` moves into it what the round before
    has changed.  Therefore only the newest state and the one before it may be read.
    """

    def __init__(self, earlier: dict[int, Any] | None = None, changed: Mapping[int, Any] | None = None) -> None:
        self._earlier = {} if earlier is None else earlier
        self._changed = {} if changed is None else changed

    def get(self, client: int) -> Any:
        """The reference to a client's state; None for a client that keeps nothing."""
        return self._changed.get(client, self._earlier.get(client))

    def after(self, changed: Mapping[int, Any]) -> "ClientStates":
        """The states after a round in which these have changed."""
        self._earlier.update(self._changed)
        return ClientStates(self._earlier, changed)

    def items(self) -> Iterator[tuple[int, Any]]:
        """(client id, reference) of every client that keeps something."""
        yield from ((k, ref) for k, ref in self._earlier.items() if k not in self._changed)
        yield from self._changed.items()

    def __len__(self) -> int:
        return len(self._earlier.keys() | self._changed.keys())


@dataclass(frozen=True)
class ServerState:
    """Everything that the next round depends on.

    round: the rounds that are done.  optimiser: the server optimiser's vectors.  rule: what the aggregation rule
    remembers of earlier rounds, as plain JSON values.  allocation: the images that clients have; None where that is
    known before the run.  chosen_M3: client, class and index of these images, where they were chosen among candidates.
    dates: when the allocation policy was asked, each with `round` and the `images` that there
    were after it.
    """

    round: int
    model: ModelState
    optimiser: dict[str, FloatArray]
    client_states: ClientStates = field(default_factory=ClientStates)
    rule: dict[str, Any] = field(default_factory=dict)
    allocation: Allocation | None = None
    chosen_M3: IntArray | None = None
    dates: tuple[dict[str, int], ...] = ()
