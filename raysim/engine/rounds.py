"""One round on the workers: train the cohort, then answer a rule's questions with sums and products of the updates.

No client's update reaches the driver. What a dead worker held is trained again, from the same inputs, to the same bits.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray

from raysim.engine.messages import Failure, PartialSum, Share
from raysim.engine.pool import Item, Pool
from raysim.engine.reduce import BUFFER_BITS, PARAM_BITS, scale, total
from raysim.errors import ClientError, DivergenceError
from raysim.records import ClientReport, ClientTask, FloatArray, IntArray


class Round:
    """A round's updates, where they are: the `updates` handle that aggregation rules get.

    reports: the clients that trained, in order of client id.  dropped: the others, with the reason.
    states: new client states, for algorithms that keep one.
    """

    def __init__(
        self, pool: Pool, number: int, state_ref: Any, tasks: Sequence[ClientTask], shares: Mapping[int, Share] | None,
        drop_failures: bool = False,
    ) -> None:
        """shares: each client's part in the sums, for rules whose weights sum to 1 and do not depend on the updates."""
        self.pool, self.number, self.state_ref, self.shares = pool, number, state_ref, shares
        self.drop_failures = drop_failures
        self.tasks = {task.client: task for task in tasks}
        self.owner: dict[int, int] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.dropped: dict[int, Failure] = {}
        self._reports: dict[int, ClientReport] = {}
        self._train(list(self.tasks))

    @property
    def reports(self) -> list[ClientReport]:
        return [self._reports[k] for k in sorted(self._reports)]

    @property
    def clients(self) -> list[int]:
        """Ids of the clients that trained, ascending: the order of every `K` below."""
        return sorted(self._reports)

    def _train(self, clients: Sequence[int]) -> None:
        def submit(actor: Any, tasks: list[ClientTask]) -> Any:
            shares = None if self.shares is None else [self.shares[t.client] for t in tasks]
            return actor.train.remote(self.number, self.state_ref, tasks, shares)

        for worker, items, answers in self.pool.map(map(self._item, clients), submit, self._lost):
            for item, (outcome, state) in zip(items, answers, strict=True):
                self._take(worker, item.payload, outcome, state)

    def _item(self, client: int) -> Item:
        task = self.tasks[client]
        return Item(task, task.n_real + task.n_synthetic, f"client {client} in round {self.number}")

    def _take(
        self, worker: int, task: ClientTask, outcome: ClientReport | Failure, state: dict[str, Any] | None
    ) -> None:
        if isinstance(outcome, Failure):
            if not self.drop_failures:
                raise (DivergenceError if outcome.diverged else ClientError)(task.client, self.number, outcome.cause)
            self.dropped[task.client] = outcome
            return
        self.owner[task.client] = worker
        self._reports[task.client] = outcome
        if state is not None:
            self.states[task.client] = state

    def _lost(self, worker: int) -> list[Item]:
        """The clients whose updates died with a worker."""
        gone = [k for k, owner in self.owner.items() if owner == worker]
        for k in gone:
            del self.owner[k]
        return [self._item(k) for k in gone]

    def _each(self, clients: Sequence[int], question: Any) -> list[tuple[list[int], Any]]:
        """Ask the owners of these clients' updates; (clients, answer) of each, lost updates trained again first."""
        answers: list[tuple[list[int], Any]] = []
        left = set(clients)
        while left:
            self._train([k for k in left if k not in self.owner])
            groups: dict[int, list[int]] = {}
            for k in sorted(left):
                groups.setdefault(self.owner[k], []).append(k)
            got, lost = self.pool.ask({worker: partial(question, ks) for worker, ks in groups.items()})
            for worker in lost:
                for item in self._lost(worker):
                    left.add(item.payload.client) if item.payload.client in clients else None
            for worker, answer in got.items():
                answers.append((groups[worker], answer))
                left.difference_update(groups[worker])
        return answers

    # The `updates` handle

    def norms(self) -> FloatArray:
        """Euclidean norm of each client's update, shape K."""
        return np.array([r.delta_norm for r in self.reports])

    def dot(self, vector_P: FloatArray) -> FloatArray:
        """Inner product of each client's update with a vector, shape K."""
        ref = ray.put(vector_P)
        found: dict[int, float] = {}
        for clients, values in self._each(self.clients, lambda ks, actor, _: actor.dot.remote(ks, ref)):
            found.update(zip(clients, values, strict=True))
        return np.array([found[k] for k in self.clients])

    def weighted_sum(self, w_K: FloatArray) -> FloatArray:
        """sum_k w_k Delta_k, shape P: exact on the grid of `engine.reduce`, whatever the workers and their order."""
        return self.sums({k: Share(w, 0.0, 0.0) for k, w in zip(self.clients, w_K.tolist(), strict=True)})[0]

    def sums(self, shares: Mapping[int, Share]) -> tuple[FloatArray, FloatArray, IntArray, dict[str, FloatArray]]:
        """(weighted sum of updates, of float buffers, maximum of integer buffers, weighted sums of further vectors)."""
        by = 1.0 if self.shares is not None else scale(np.array([shares[k].update for k in self.clients]))
        scaled = {k: Share(shares[k].update / by, shares[k].buffers, shares[k].extra) for k in self.clients}

        def question(clients: list[int], actor: Any, _: Any) -> Any:
            return actor.partial_sum.remote(clients, [scaled[k] for k in clients])

        parts: list[PartialSum] = [answer for _, answer in self._each(self.clients, question)]
        names = parts[0].extra
        return (
            by * total([p.params_P for p in parts], PARAM_BITS),
            total([p.buffers_F for p in parts], BUFFER_BITS),
            np.max([p.counters for p in parts], axis=0),
            {name: total([p.extra[name] for p in parts], PARAM_BITS) for name in names},
        )
