"""What a checkpoint contains: writes and reads the server's state as named arrays and plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from raysim.core.records import Allocation, ModelState
from raysim.federation.state import ClientStates, ServerState
from raysim.lifecycle import checkpoint
from raysim.lifecycle.appended_file import FileDamaged
from raysim.lifecycle.client_file import ClientFile
from raysim.lifecycle.history import History

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Restored:
    """A state that was read from a checkpoint.  notes: messages about checkpoints that are damaged."""

    state: ServerState
    notes: list[str]


def save(directory: Path, state: ServerState, history: History, client_file: ClientFile, keep: int) -> None:
    """Write a checkpoint: everything that later rounds depend on, and the history so far.

    Of what clients keep, and of the history, only what is new since the checkpoint before is written.

    Raises CheckpointError; older checkpoints stay intact.
    """
    model = state.model
    arrays: Arrays = {"params": model.params_P, "buffers": model.buffers_F, "counters": model.counters}
    arrays.update({f"extra/{name}": v for name, v in model.broadcast_vectors.items()})
    arrays.update({f"optimiser/{name}": v for name, v in state.optimiser.items()})
    if state.allocation is not None:
        arrays["allocation"] = state.allocation.quota_KC
        if state.allocation.candidates_KC is not None and state.chosen_M3 is not None:
            arrays |= {"candidates": state.allocation.candidates_KC, "chosen": state.chosen_M3}
    try:
        meta = {
            "rule": state.rule,
            "dates": list(state.dates),
            "shared": state.allocation is not None and state.allocation.shared,
            "history": history.flush(),
            "clients": client_file.write(state.round, state.client_states),
        }
        checkpoint.save(directory, state.round, arrays, meta, keep)
        client_file.prune(kept.get("clients", {}) for kept in checkpoint.metas(directory))
    except OSError as error:
        raise checkpoint.cannot_write(directory, state.round, error) from error


def load(directory: Path, history: History, client_file: ClientFile) -> Restored | None:
    """Read the newest state that is not damaged, and truncate the history to it; None if there is no checkpoint.

    Raises CheckpointError if there are checkpoints and every one of them is damaged.
    """
    states = ClientStates()

    def restores(meta: Mapping[str, Any]) -> str:
        nonlocal states
        try:
            history.cut(meta["history"])
            states = client_file.read(meta["clients"])
        except FileDamaged as damage:
            return str(damage)
        return ""

    found = checkpoint.load_latest(directory, restores)
    if found is None:
        history.cut({})
        return None
    arrays = found.arrays
    model = ModelState(arrays["params"], arrays["buffers"], arrays["counters"], _below(arrays, "extra/"))
    allocation = None
    if "allocation" in arrays:
        candidates_KC = arrays.get("candidates")
        allocation = Allocation(arrays["allocation"], shared=found.meta["shared"], candidates_KC=candidates_KC)
    dates = tuple(found.meta.get("dates", ()))
    optimiser, rule = _below(arrays, "optimiser/"), found.meta["rule"]
    state = ServerState(found.round, model, optimiser, states, rule, allocation, arrays.get("chosen"), dates)
    return Restored(state, found.notes)


def _below(arrays: Arrays, prefix: str) -> Arrays:
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
