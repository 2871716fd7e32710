"""What training has shown: accuracy and loss by class for policies that ask; what models say of candidate images."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from raysim.allocation.common import asks_for_clients
from raysim.core.records import Candidates, ClientTask, FloatArray
from raysim.engine.messages import Classifier
from raysim.engine.pool import Pool
from raysim.engine.schedule import Item
from raysim.federation.server import Server
from raysim.federation.state import ServerState


def measure(server: Server, state: ServerState, names: Collection[str], classes: int) -> dict[str, FloatArray]:
    """What is asked for, by the names of `MEASURED_INPUTS`: K x C each, on the validation split; changes nothing.

    A client's own model is what the client would send in the next round: it is trained from the state's model, on the
    samples that it has now, and then forgotten.  Every client has one, whether or not it takes part in that round.
    """
    if not names:
        return {}
    K = len(server.sizes_K)
    model_ref, number = server.reference(state.model), state.round + 1
    tasks: list[ClientTask | None] = [None]
    if asks_for_clients(names):
        tasks += [server.task(k, state.client_states) for k in range(K)]
    items = [
        Item(task, task.n_real + task.n_synthetic, f"the model of client {task.client}") if task is not None
        else Item(task, 1.0, "the global model")
        for task in tasks
    ]

    def submit(actor: Any, chosen: list[ClientTask | None]) -> Any:
        return actor.measure.remote(number, model_ref, chosen)

    found = {
        "global_accuracy_KC": np.full((K, classes), np.nan), "global_loss_KC": np.full((K, classes), np.nan),
        "local_accuracy_KC": np.full((K, classes), np.nan), "local_loss_KC": np.full((K, classes), np.nan),
    }
    for _, done, answers in server.pool.map(items, submit, kind="measure"):
        for item, (accuracy_C, loss_C) in zip(done, answers, strict=True):
            task = item.payload
            whose, rows = ("global", slice(None)) if task is None else ("local", task.client)
            found[f"{whose}_accuracy_KC"][rows] = accuracy_C
            found[f"{whose}_loss_KC"][rows] = loss_C
    return {name: found[name] for name in names}


def judge(
    pool: Pool, candidates: Sequence[Candidates], model_ref: Any, round_: int, classifier: Classifier | None = None
) -> dict[int, FloatArray]:
    """How good each candidate is, by client (`evaluation.candidates`).

    model_ref: reference to the parameters of the classifier, or, without one, of the global model.  round_: the next
    one, in which the clients' own models would train, for candidates with a task.
    """
    items = [Item(one, len(one.labels_N), f"the images of client {one.client}") for one in candidates]

    def submit(actor: Any, some: list[Candidates]) -> Any:
        return actor.score.remote(round_, model_ref, some, classifier)

    found: dict[int, FloatArray] = {}
    for _, done, answers in pool.map(items, submit, kind="judge"):
        found |= {item.payload.client: score_N for item, score_N in zip(done, answers, strict=True)}
    return found
