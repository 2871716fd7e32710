"""Phase 2, the algorithm: from one state of the server to the next, by training a cohort and aggregating."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.aggregation.common import buffer_weights
from raysim.aggregation.privacy import PrivacyMechanism
from raysim.config.protocols import AggregationRule, LocalAlgorithm, ServerOptimiser
from raysim.config.schema import Config
from raysim.core import rng
from raysim.core.errors import RunError, ServerDivergenceError
from raysim.core.records import (
    ClientReport,
    ClientTable,
    ClientTask,
    FloatArray,
    IntArray,
    ModelState,
    Partition,
    RoundTable,
    Synthetic,
    Weights,
)
from raysim.engine.messages import SumWeights
from raysim.engine.object_store import put
from raysim.engine.pool import Pool
from raysim.engine.rounds import Round
from raysim.federation.cohort import cohort, cohort_size
from raysim.federation.metrics import ModelSize, client_table, round_metrics, vector_norms
from raysim.federation.state import ClientStates, ServerState


@dataclass(frozen=True)
class RoundResult:
    """A finished round: the state after it, its metrics, and a row of numbers for each participant."""

    state: ServerState
    metrics: dict[str, float]
    clients: ClientTable


@dataclass(frozen=True)
class Trained:
    """A round whose cohort has trained.

    weights: where they depend on the clients' sizes alone; None where they need the updates.
    """

    round: Round
    weights: Weights | None


class Server:
    """The plug-ins and the data of a run, and what happens in one round.

    Nothing that a round depends on is kept here: the same state gives the same next state, whatever the workers.
    `synthetic` is the images of the state's allocation; who changes the one sets the other.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        partition: Partition,
        synthetic: Synthetic,
        algorithm: LocalAlgorithm,
        rule: AggregationRule,
        optimiser: ServerOptimiser,
        privacy: PrivacyMechanism | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.partition = partition
        self.synthetic = synthetic
        self.algorithm = algorithm
        self.rule = rule
        self.optimiser = optimiser
        self.privacy = privacy
        self.sizes_K = partition.sizes_K
        self.noisy_K = partition.noisy_K | (partition.input_noise_K > 0)
        self._participations = _Participations(self)
        self._newest: tuple[ModelState, Any] | None = None

    def initial(self, model: ModelState) -> ServerState:
        """The state before round 1, from the initial model."""
        vectors = {name: np.zeros(len(model.params_P), np.float32) for name in self.algorithm.broadcast}
        start = ModelState(model.params_P, model.buffers_F, model.counters, vectors)
        return ServerState(0, start, self.optimiser.init(len(model.params_P)))

    def next_round(self, state: ServerState) -> RoundResult:
        """One round: train its cohort, then aggregate."""
        return self.aggregate(state, self.train(state))

    def train(self, state: ServerState) -> Trained:
        """Train the next round's cohort from the state's model; the updates stay where they were computed.

        Raises ClientError or DivergenceError for a client that fails, unless such clients are to be dropped, and
        RunError where none is left.
        """
        number = state.round + 1
        tasks = [self.task(k, state.client_states) for k in self.participants(number)]
        weights = self._weights_beforehand(state, number, tasks)
        round_ = Round(
            self.pool,
            number,
            self.reference(state.model),
            tasks,
            None if weights is None else self._sum_weights(tasks, weights.w_K),
            len(state.model.params_P),
            drop_failures=self._drops_failures,
        )
        round_.train()
        if not round_.clients:
            raise RunError(f"no client of round {number} finished: {next(iter(round_.dropped.values())).cause}")
        return Trained(round_, weights)

    def aggregate(self, state: ServerState, trained: Trained) -> RoundResult:
        """The next global model from a trained round's updates, and the round's metrics and client rows."""
        round_ = trained.round
        tasks = [round_.tasks[k] for k in round_.clients]
        table = self._table(round_.number, tasks, round_.reports)
        seen = self._seen_by_rule(table)
        weights = trained.weights or self._weights(state, seen, round_)
        model, optimiser = self._step(state, round_, seen, weights)
        after = ServerState(
            round_.number,
            model,
            optimiser,
            state.client_states.after({k: put(kept) for k, kept in round_.states.items()}),
            self.rule.state(),
            state.allocation,
            state.chosen_M3,
            state.dates,
        )
        metrics = round_metrics(self.config, round_, table, weights, self.noisy_K, self._model_size(model))
        metrics |= vector_norms(model)
        metrics |= self._privacy(round_.number)
        if state.allocation is not None:
            metrics["synthetic_images"] = self.synthetic.images
        metrics |= round_.traffic.metrics(state.model)
        return RoundResult(after, metrics, client_table(round_.number, round_.reports, weights, self.partition))

    def participants(self, number: int) -> list[int]:
        """The clients of a round, ascending."""
        clients = len(self.sizes_K)
        return cohort(self.config.seed, number, clients, cohort_size(self.config.clients_per_round, clients))

    def task(self, k: int, states: ClientStates) -> ClientTask:
        """What client k trains on and starts with."""
        kept, synthetic = states.get(k), self.synthetic.of(k)
        if synthetic is None:
            return ClientTask(k, int(self.sizes_K[k]), state=kept)
        quota_C = self.synthetic.quota_KC[k]
        return ClientTask(k, int(self.sizes_K[k]), int(quota_C.sum()), quota_C, synthetic, kept)

    def reference(self, model: ModelState) -> Any:
        """A reference to a global model, which is put once though it is evaluated and then trained on."""
        if self._newest is None or self._newest[0] is not model:
            self._newest = (model, put(model))
        return self._newest[1]

    @property
    def _drops_failures(self) -> bool:
        return self.config.resources.on_client_failure == "drop"

    def _weights_beforehand(self, state: ServerState, number: int, tasks: Sequence[ClientTask]) -> Weights | None:
        """The weights of the cohort where sizes alone decide them, so that updates are added up as they come."""
        if not self.rule.streams or self._drops_failures:
            return None
        return self._weights(state, self._table(number, tasks), None)

    def _weights(self, state: ServerState, table: RoundTable, updates: Round | None) -> Weights:
        if state.rule:
            self.rule.load_state(state.rule)
        return self.rule.weights(table, updates)

    def _table(self, number: int, tasks: Sequence[ClientTask], reports: Sequence[ClientReport] = ()) -> RoundTable:
        by_total = self.config.aggregation.weight_by == "total"
        n_K = np.array([t.n_real + (t.n_synthetic if by_total else 0) for t in tasks])
        names = sorted({name for report in reports for name in report.metrics})
        columns = {name: np.array([r.metrics[name] for r in reports]) for name in names}
        if reports:
            columns["effective_steps"] = np.array([r.effective_steps for r in reports])
        return RoundTable(number, np.array([t.client for t in tasks]), n_K, columns)

    def _seen_by_rule(self, table: RoundTable) -> RoundTable:
        """The table that the aggregation rule reads: without the columns where clients add noise to updates alone."""
        hidden = self.privacy is not None and self.privacy.hides_reports
        return RoundTable(table.round, table.client_K, table.n_K) if hidden else table

    def _sum_weights(self, tasks: Sequence[ClientTask], w_K: FloatArray) -> dict[int, SumWeights]:
        """Updates weigh by the rule, float buffers by n_k, further vectors by one over all registered clients."""
        n_K = self._table(0, tasks).n_K
        weights_K = buffer_weights(n_K)
        buffers_K = np.zeros(len(n_K)) if weights_K is None else weights_K
        of_vectors = 1.0 / len(self.sizes_K)
        triples = zip(tasks, w_K.tolist(), buffers_K.tolist(), strict=True)
        return {task.client: SumWeights(w, b, of_vectors) for task, w, b in triples}

    def _step(
        self, state: ServerState, round_: Round, table: RoundTable, weights: Weights
    ) -> tuple[ModelState, dict[str, FloatArray]]:
        """The next global model from the round's exact sums, or from what a rule makes of all updates together."""
        tasks = [round_.tasks[k] for k in round_.clients]
        update_P, buffers_F, counters, sums = round_.sums(self._sum_weights(tasks, weights.w_K))
        if self.config.aggregation.buffers == "global" or buffer_weights(table.n_K) is None:
            buffers_F, counters = state.model.buffers_F.astype(np.float64), state.model.counters
        combined_P = self.rule.aggregate(table, round_)
        update_P = update_P if combined_P is None else combined_P
        if self.privacy is not None:
            noise = rng.stream(self.config.seed, rng.NOISE, round_.number)
            update_P = self.privacy.noisy(update_P, weights.w_K, noise)
        vectors = {name: v.astype(np.float64) for name, v in state.model.broadcast_vectors.items()}
        vectors, update_P = self.algorithm.server_update(vectors, sums, update_P)
        optimiser, step_P = self.optimiser.step(state.optimiser, update_P)
        params_P = (state.model.params_P + step_P).astype(np.float32)
        as_float32 = {name: v.astype(np.float32) for name, v in vectors.items()}
        after = ModelState(params_P, buffers_F.astype(np.float32), counters, as_float32)
        named = {"the global model": params_P, "the model's running statistics": after.buffers_F, **as_float32}
        for name, values in named.items():
            if not np.isfinite(values).all():
                raise ServerDivergenceError(round_.number, f"{name} is no longer finite")
        return after, optimiser

    def _privacy(self, rounds: int) -> dict[str, float]:
        """Epsilon so far, where noise is added."""
        if self.privacy is None:
            return {}
        return {"epsilon": self.privacy.epsilon(rounds, self._participations.most(rounds))}

    def _model_size(self, model: ModelState) -> ModelSize:
        server_only = set(self.algorithm.server_only)
        down, up = (len(set(names) - server_only) for names in (self.algorithm.broadcast, self.algorithm.summed))
        return ModelSize(len(model.params_P), len(model.buffers_F), down, up, len(self.algorithm.logged))


class _Participations:
    """How often each client was drawn: a function of the seed, counted once a round and never kept on disk."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._rounds = 0
        self._times_K: IntArray | None = None

    def most(self, rounds: int) -> int:
        """Draws of the client that was drawn most often in so many rounds."""
        if self._times_K is None or rounds < self._rounds:
            self._times_K = np.zeros(len(self._server.sizes_K), dtype=np.int64)
            self._rounds = 0
        for number in range(self._rounds + 1, rounds + 1):
            self._times_K[self._server.participants(number)] += 1
        self._rounds = rounds
        return int(self._times_K.max())


