"""What a checkpoint contains: writes and reads the server's state as named arrays and plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from raysim.core.records import ModelState
from raysim.engine.object_store import get, put
from raysim.federation.state import ClientStates, ServerState
from raysim.lifecycle import checkpoint
from raysim.lifecycle.history import History, HistoryDamaged

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Restored:
    """A state that was read from a checkpoint.  notes: messages about checkpoints that are damaged."""

    state: ServerState
    notes: list[str]


def save(directory: Path, state: ServerState, history: History, keep: int) -> None:
    """Write a checkpoint: everything that later rounds depend on, and the history so far.

    Raises CheckpointError; older checkpoints stay intact.
    """
    model = state.model
    arrays: Arrays = {"params": model.params_P, "buffers": model.buffers_F, "counters": model.counters}
    arrays.update({f"extra/{name}": v for name, v in model.broadcast_vectors.items()})
    arrays.update({f"optimiser/{name}": v for name, v in state.optimiser.items()})
    for client, ref in state.client_states.items():
        arrays.update({f"client/{client}/{name}": v for name, v in get(ref).items()})
    try:
        marks = history.flush()
    except OSError as error:
        raise checkpoint.cannot_write(directory, state.round, error) from error
    checkpoint.save(directory, state.round, arrays, {"rule": state.rule, "history": marks}, keep)


def load(directory: Path, history: History) -> Restored | None:
    """Read the newest state that is not damaged, and truncate the history to it; None if there is no checkpoint.

    Raises CheckpointError if there are checkpoints and every one of them is damaged.
    """

    def restores_history(meta: Mapping[str, Any]) -> str:
        try:
            history.cut(meta["history"])
        except HistoryDamaged as damage:
            return str(damage)
        return ""

    found = checkpoint.load_latest(directory, restores_history)
    if found is None:
        history.cut({})
        return None
    arrays = found.arrays
    clients: dict[int, Arrays] = {}
    for key, array in _below(arrays, "client/").items():
        client, _, name = key.partition("/")
        clients.setdefault(int(client), {})[name] = array
    model = ModelState(arrays["params"], arrays["buffers"], arrays["counters"], _below(arrays, "extra/"))
    states = ClientStates({client: put(kept) for client, kept in clients.items()})
    state = ServerState(found.round, model, _below(arrays, "optimiser/"), states, found.meta["rule"])
    return Restored(state, found.notes)


def _below(arrays: Arrays, prefix: str) -> Arrays:
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
