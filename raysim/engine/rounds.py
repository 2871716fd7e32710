"""One round on the workers: train the cohort, then answer a rule's questions with sums and products of the updates.

No client's update reaches the driver. Clients whose updates are lost with a dead worker are trained again, from the
same inputs, which gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from raysim.core.errors import ClientError, DivergenceError
from raysim.core.records import ClientReport, ClientTask, FloatArray, IntArray
from raysim.engine import slices
from raysim.engine.calls import Question, Ref, WorkerActor
from raysim.engine.collect import StoredSum, collect
from raysim.engine.messages import ClientState, Failure, PartialSum, SumWeights
from raysim.engine.pool import Pool
from raysim.engine.reduce import BUFFER_BITS, PARAM_BITS, add_sums, from_units, scale
from raysim.engine.schedule import Item
from raysim.engine.traffic import Traffic

SUMMED = -1
"""Owner of an update that is part of a sum in the object store or at the driver, where no worker's death removes it."""
Asking = Callable[[list[int]], Question]
"""(client ids) -> the question for the worker that holds their updates."""


class Round:
    """A round's updates, which stay on the workers: the `updates` handle that aggregation rules get.

    reports: one of each client that trained, in order of client id.  dropped: the failures of the others, by client id.
    states: new client states, for algorithms that keep one.
    """

    def __init__(
        self,
        pool: Pool,
        number: int,
        state_ref: Ref,
        tasks: Sequence[ClientTask],
        sum_weights: Mapping[int, SumWeights] | None,
        parameters: int,
        drop_failures: bool = False,
    ) -> None:
        """Prepare a round; `train` begins it.

        number: of the round.  state_ref: reference to the global model.  parameters: P, the length of an update.
        sum_weights: each client's weights in the sums, for rules whose weights do not depend on updates; None for
        others.  drop_failures: clients that fail are left out, instead of ending the run.
        """
        self.pool = pool
        self.number = number
        self.state_ref = state_ref
        self.tasks = {task.client: task for task in tasks}
        self.scale = scale(np.array([w.update for w in sum_weights.values()])) if sum_weights else 1.0
        self.sum_weights = None if sum_weights is None else self._scaled(sum_weights, self.scale)
        self.parameters = parameters
        self.drop_failures = drop_failures
        self.owner: dict[int, int] = {}
        self.states: dict[int, ClientState] = {}
        self.dropped: dict[int, Failure] = {}
        self.traffic = Traffic(pool.here)
        self._reports: dict[int, ClientReport] = {}
        self._stored: list[StoredSum] = []
        self._sums: list[PartialSum] = []

    def train(self) -> None:
        """Train the cohort on the workers, once; afterwards `reports`, `clients` and the methods below can be used.

        Raises ClientError or DivergenceError for a client that fails, unless failures are dropped.
        """
        self._train(list(self.tasks))

    @property
    def reports(self) -> list[ClientReport]:
        """One report of each client that trained, in order of client id."""
        return [self._reports[k] for k in sorted(self._reports)]

    @property
    def clients(self) -> list[int]:
        """Ids of the clients that trained, ascending: the order of every `K` below."""
        return sorted(self._reports)

    def _train(self, clients: Sequence[int]) -> None:
        def submit(actor: WorkerActor, tasks: list[ClientTask]) -> Ref:
            return actor.train.remote(self.number, self.state_ref, tasks, self._weights_of(tasks))

        def submit_last(actor: WorkerActor, tasks: list[ClientTask]) -> list[Ref]:
            return actor.train_and_sum.remote(self.number, self.state_ref, tasks, self._weights_of(tasks))

        def take_back(actor: WorkerActor, tasks: list[ClientTask]) -> Ref:
            return actor.give_back.remote(self.number, [task.client for task in tasks])

        last = None if self.sum_weights is None else submit_last
        items = [self._item(k) for k in clients]
        done = self.pool.map(items, submit, self._lost, last=last, kind="train", take_back=take_back)
        for worker, chunk, answer in done:
            answers, sum_ref = answer if isinstance(answer, tuple) else (answer, None)
            for item, one in zip(chunk, answers, strict=True):
                if one is not None:  # else another worker does it
                    outcome, state = one
                    self._take(worker, item.payload, outcome, state)
            if sum_ref is not None:
                self._note_sum(worker, sum_ref)

    def _weights_of(self, tasks: Sequence[ClientTask]) -> list[SumWeights] | None:
        return None if self.sum_weights is None else [self.sum_weights[task.client] for task in tasks]

    def _note_sum(self, worker: int, sum_ref: Ref) -> None:
        """Note a worker's running sum over all that it trained since it last gave one."""
        clients = [k for k, owner in self.owner.items() if owner == worker]
        if clients:
            self._stored.append(StoredSum(clients, self.pool.node(worker), sum_ref))
        self.owner.update(dict.fromkeys(clients, SUMMED))

    def _item(self, client: int) -> Item:
        task = self.tasks[client]
        return Item(task, task.n_real + task.n_synthetic, f"client {client} in round {self.number}")

    def _take(
        self, worker: int, task: ClientTask, outcome: ClientReport | Failure, state: ClientState | None
    ) -> None:
        """Record a worker's answer about one client.  Raises for a failure, unless failures are dropped."""
        if isinstance(outcome, Failure):
            if not self.drop_failures:
                raise (DivergenceError if outcome.diverged else ClientError)(task.client, self.number, outcome.cause)
            self.dropped[task.client] = outcome
            return
        self.owner[task.client] = worker
        self.traffic.trained(self.pool.node(worker), task, state)
        self._reports[task.client] = outcome
        if state is not None:
            self.states[task.client] = state

    def _lost(self, worker: int) -> list[Item]:
        """Forget the updates that are lost with a worker; returns their clients as items."""
        gone = [k for k, owner in self.owner.items() if owner == worker]
        for k in gone:
            del self.owner[k]
        return [self._item(k) for k in gone]

    def _each(self, clients: Sequence[int], asking: Asking, sums: bool = False) -> list[tuple[str, list[int], Any]]:
        """Ask the owners of these clients' updates; returns (node, clients, answer) of each.

        Clients whose updates were lost are trained again first.  sums: the answer is a running sum, and its owner no
        longer has these updates afterwards.
        """
        answers: list[tuple[str, list[int], Any]] = []
        left = set(clients)
        while left:
            self._train([k for k in left if k not in self.owner])
            left = {k for k in left if self.owner[k] != SUMMED}
            groups: dict[int, list[int]] = {}
            for k in sorted(left):
                groups.setdefault(self.owner[k], []).append(k)
            got, lost = self.pool.ask({worker: asking(ks) for worker, ks in groups.items()})
            for worker in lost:
                self._lost(worker)
            for worker, answer in got.items():
                answers.append((self.pool.node(worker), groups[worker], answer))
                left.difference_update(groups[worker])
                if sums:
                    self.owner.update(dict.fromkeys(groups[worker], SUMMED))
        return answers

    # The `updates` handle

    def norms(self) -> FloatArray:
        """Euclidean norm of each client's update, shape K."""
        return np.array([r.delta_norm for r in self.reports])

    def dot(self, vector_P: FloatArray) -> FloatArray:
        """Inner product of each client's update with a vector, shape K."""
        ref = ray.put(vector_P)
        self.traffic.broadcast(vector_P.nbytes)
        found: dict[int, float] = {}
        for _, clients, values in self._each(self.clients, lambda ks: lambda actor: actor.dot.remote(ks, ref)):
            found.update(zip(clients, values, strict=True))
        return np.array([found[k] for k in self.clients])

    def weighted_sum(self, w_K: FloatArray) -> FloatArray:
        """sum_k w_k Delta_k, shape P: exact on the grid of `engine.reduce`, so it does not depend on the workers."""
        return self.sums({k: SumWeights(w, 0.0, 0.0) for k, w in zip(self.clients, w_K.tolist(), strict=True)})[0]

    def gram(self) -> FloatArray:
        """Inner products of the updates with each other, K x K, summed over slices of coordinates in a fixed order."""
        gram_KK: FloatArray = np.sum(self._by_slice(slices.gram_matrix), axis=0)
        return gram_KK

    def by_coordinate(self, fn: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Apply `fn`, which maps any slice of coordinates, K x p in float64, to p numbers; returns them joined: P."""
        return np.concatenate(self._by_slice(fn))

    def _by_slice(self, fn: slices.SliceFunction) -> list[FloatArray]:
        """The answers of `fn` for all slices, in order; as many slices at a time as there are workers."""
        cuts = slices.slices(self.parameters, len(self.clients))
        at_once = max(1, len(self.pool.members))
        waves = (cuts[i : i + at_once] for i in range(0, len(cuts), at_once))
        return [answer for wave in waves for answer in self._wave(fn, wave)]

    def _wave(self, fn: slices.SliceFunction, wave: list[slices.Slice]) -> list[FloatArray]:
        """The answers for a few slices; a slice of which rows were lost with a worker is asked for again."""

        def give_up(worker: int) -> list[Item]:
            self._lost(worker)  # its clients are trained again when their updates are next asked for
            return []

        def submit(actor: WorkerActor, gathered: list[tuple[int, list[slices.StoredRows]]]) -> Ref:
            return actor.answer.remote(fn, [stored for _, stored in gathered])

        found: dict[int, FloatArray] = {}
        while left := [i for i in range(len(wave)) if i not in found]:
            stored = self._each(self.clients, _cutting([wave[i] for i in left]))
            items = []
            for n, i in enumerate(left):
                name = f"coordinates {wave[i][0]} to {wave[i][1] - 1} in round {self.number}"
                items.append(Item((i, [(clients, refs[n]) for _, clients, refs in stored]), 1.0, name))
            for worker, done, answers in self.pool.map(items, submit, give_up):
                for item, answer in zip(done, answers, strict=True):
                    if answer is not None:
                        i = item.payload[0]
                        found[i] = answer
                        rows = [(node, len(clients)) for node, clients, _ in stored]
                        self.traffic.gathered(self.pool.node(worker), rows, wave[i], answer)
        return [found[i] for i in range(len(wave))]

    def sums(
        self, sum_weights: Mapping[int, SumWeights]
    ) -> tuple[FloatArray, FloatArray, IntArray, dict[str, FloatArray]]:
        """Weighted sums over the round's clients, by the given weights of each.

        Returns (sum of updates: P, sum of float buffers: F, maximum of integer buffers, sums of further vectors).
        """
        w_K = np.array([sum_weights[k].update for k in self.clients])
        by = self.scale if self.sum_weights is not None else scale(w_K)
        scaled = self._scaled(sum_weights, by)

        def asking(clients: list[int]) -> Question:
            return lambda actor: actor.partial_sum.remote(clients, [scaled[k] for k in clients])

        whole = add_sums(self._all_sums(asking))
        return (
            by * from_units(whole.params_P, PARAM_BITS),
            from_units(whole.buffers_F, BUFFER_BITS),
            whole.counters,
            {name: from_units(vector, PARAM_BITS) for name, vector in whole.summed_vectors.items()},
        )

    @staticmethod
    def _scaled(sum_weights: Mapping[int, SumWeights], by: float) -> dict[int, SumWeights]:
        """The weights divided by a power of two, so that the sum of updates stays in the range in which it is exact."""
        return {k: replace(w, update=w.update / by) for k, w in sum_weights.items()}

    def _all_sums(self, asking: Asking) -> list[PartialSum]:
        """Partial sums that together contain every client once; clients of lost sums are trained again."""
        streams = self.sum_weights is not None
        if not streams:
            self._sums = []
        left = [k for k in self.clients if self.owner.get(k) != SUMMED]
        while left or self._stored:
            for node, clients, (_, sum_ref) in self._each(left, asking, sums=streams):
                self._stored.append(StoredSum(clients, node, sum_ref))
            sums, lost = collect(self.pool, self._stored, self.parameters)
            self._stored = []
            self._sums += [self.traffic.reduced(node, partial_sum) for node, partial_sum in sums]
            left = [k for stored in lost for k in stored.clients]
            if streams:
                for k in left:
                    del self.owner[k]
        return self._sums


def _cutting(wanted: list[slices.Slice]) -> Asking:
    """The question that makes a worker put slices of its clients' updates into the object store."""

    def asking(clients: list[int]) -> Question:
        return lambda actor: actor.put_slices.remote(clients, wanted)

    return asking
