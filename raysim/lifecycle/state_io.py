"""The server's state to and from a checkpoint: arrays by name, and plain data."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysim.core.records import ClientRows, ModelState
from raysim.engine.object_store import get, put
from raysim.federation.server import ServerState
from raysim.lifecycle import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

Arrays = dict[str, NDArray[Any]]


def save(directory: "Path", state: ServerState, keep: int) -> None:
    """Write everything that the rounds after this one depend on.  Raises CheckpointError; older ones stay intact."""
    model = state.model
    arrays: Arrays = {"params": model.params_P, "buffers": model.buffers_F, "counters": model.counters}
    arrays.update({f"extra/{name}": v for name, v in model.broadcast_vectors.items()})
    arrays.update({f"optimiser/{name}": v for name, v in state.optimiser.items()})
    for client, ref in state.client_states.items():
        arrays.update({f"client/{client}/{name}": v for name, v in get(ref).items()})
    history = _columns(state.client_rows)
    arrays.update({f"history/{name}": v for name, v in history.items()})
    meta = {"rule": state.rule, "rows": state.rows, "history": list(history)}
    checkpoint.save(directory, state.round, arrays, meta, keep)


def load(directory: "Path") -> tuple[ServerState, list[str]] | None:
    """The newest state that is whole, and notes on damaged ones; None if there is no checkpoint."""
    found = checkpoint.load_latest(directory)
    if found is None:
        return None
    arrays = found.arrays
    clients: dict[int, Arrays] = {}
    for key, array in _below(arrays, "client/").items():
        client, _, name = key.partition("/")
        clients.setdefault(int(client), {})[name] = array
    model = ModelState(arrays["params"], arrays["buffers"], arrays["counters"], _below(arrays, "extra/"))
    state = ServerState(
        found.round,
        model,
        _below(arrays, "optimiser/"),
        {client: put(kept) for client, kept in clients.items()},
        found.meta["rule"],
        found.meta["rows"],
        _rows({name: arrays[f"history/{name}"] for name in found.meta["history"]}),
    )
    return state, found.notes


def _below(arrays: Arrays, prefix: str) -> Arrays:
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def _columns(rows: ClientRows) -> Arrays:
    """Rows of numbers as one float64 column a name; nan where a row lacks it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def _rows(columns: Arrays) -> ClientRows:
    length = len(next(iter(columns.values()))) if columns else 0
    return [{name: v[i].item() for name, v in columns.items() if not np.isnan(v[i])} for i in range(length)]
