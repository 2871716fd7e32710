"""Phase 2: the round loop, and the state that the server carries from one round to the next."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysim.aggregation.common import buffer_weights
from raysim.aggregation.privacy import PrivacyMechanism
from raysim.config.protocols import AggregationRule, LocalAlgorithm, ServerOptimiser
from raysim.config.schema import Config
from raysim.core import rng
from raysim.core.errors import RunError, ServerDivergenceError
from raysim.core.records import (
    BoolArray,
    ClientReport,
    ClientRows,
    ClientTask,
    FloatArray,
    MetricRows,
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
from raysim.federation.evaluator import Evaluator

PHASES = ("train", "dispatch", "aggregate", "evaluate")  # dispatch: what of the training the driver itself takes


@dataclass
class ServerState:
    """Everything that the next round depends on, and the record of the rounds so far.

    optimiser: the server optimiser's vectors.  client_states: what each client keeps between its rounds.
    rows: one dictionary of metrics a round.  client_rows: one dictionary per client and round.
    """

    round: int
    model: ModelState
    optimiser: dict[str, FloatArray]
    client_states: dict[int, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    rows: MetricRows = field(default_factory=list)
    client_rows: ClientRows = field(default_factory=list)


def cohort_size(clients_per_round: int | float, clients: int) -> int:
    """Participants of a round; a fraction is rounded, and stands for at least one client."""
    if isinstance(clients_per_round, int):
        return clients_per_round
    return max(1, round(clients_per_round * clients))


def cohort(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """The participants of a round, ascending, drawn without replacement; a function of seed and round alone."""
    drawn = rng.stream(seed, rng.COHORT, round_).choice(clients, size, replace=False, shuffle=False)
    return sorted(int(k) for k in drawn)


@dataclass
class Server:
    """The plug-ins and data of a run, and one method for one round.

    shared: the newest global model that the workers can read, and its reference.
    """

    config: Config
    pool: Pool
    partition: Partition
    synthetic: Synthetic
    algorithm: LocalAlgorithm
    rule: AggregationRule
    optimiser: ServerOptimiser
    evaluator: Evaluator
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    parameters: int = 0
    float_buffers: int = 0
    shared: tuple[ModelState, Any] | None = None
    privacy: PrivacyMechanism | None = None

    def __post_init__(self) -> None:
        self.sizes_K = self.partition.sizes_K
        self.noisy_K = self.partition.noisy_K | (self.partition.input_noise_K > 0)

    def initial(self, model: ModelState) -> ServerState:
        """The state before round 1."""
        parameters = len(model.params_P)
        self.parameters, self.float_buffers = parameters, len(model.buffers_F)
        vectors = {name: np.zeros(parameters, np.float32) for name in self.algorithm.broadcast}
        start = ModelState(model.params_P, model.buffers_F, model.counters, vectors)
        return ServerState(0, start, self.optimiser.init(parameters))

    def run(self, state: ServerState, after_round: Callable[[ServerState], None]) -> ServerState:
        """All rounds that are left; `after_round` sees each committed state."""
        while state.round < self.config.rounds:
            state = self.next_round(state)
            after_round(state)
        return state

    def next_round(self, state: ServerState) -> ServerState:
        """One round: the same state gives the same next state, whatever the workers."""
        began, usage, number = time.monotonic(), self.pool.usage, state.round + 1
        usage.begin_round()
        waited_s = usage.waited_s
        tasks = [self._task(k, state.client_states) for k in self.participants(number)]
        model_ref = self._share(state.model)
        keep_all = self.config.resources.on_client_failure == "raise"
        prior = self.rule.weights(self._table(number, tasks), None) if self.rule.streams and keep_all else None
        sum_weights = None if prior is None else self._sum_weights(tasks, prior.w_K)
        round_ = Round(
            self.pool, number, model_ref, tasks, sum_weights, len(state.model.params_P), drop_failures=not keep_all
        )
        round_.train()
        trained, waited_s = time.monotonic(), usage.waited_s - waited_s
        tasks = [round_.tasks[k] for k in round_.clients]
        if not tasks:
            raise RunError(f"no client of round {number} finished: {next(iter(round_.dropped.values())).cause}")
        table = self._table(number, tasks, round_.reports)
        weights = prior or self.rule.weights(table, round_)
        model, optimiser = self._step(state, round_, table, weights)
        aggregated = time.monotonic()
        client_states = {**state.client_states, **{k: put(s) for k, s in round_.states.items()}}
        row = self._row(round_, table, weights) | self._privacy(state, table)
        row |= round_.traffic.metrics(state.model)
        row |= self.evaluator.due(number, lambda: self._share(model), lambda k: self._task(k, client_states))
        row["seconds_train"], row["seconds_aggregate"] = trained - began, aggregated - trained
        row["seconds_dispatch"] = trained - began - waited_s
        row["seconds_evaluate"] = time.monotonic() - aggregated
        row["seconds_idle"] = usage.end_round(self.pool.members, time.monotonic() - began)
        for phase in self.seconds:
            self.seconds[phase] += row[f"seconds_{phase}"]
        self.seconds["train"] -= row["seconds_dispatch"]
        return ServerState(
            number, model, optimiser, client_states,
            self.rule.state(),
            [*state.rows, row],
            [*state.client_rows, *self._client_rows(number, round_.reports, weights)],
        )

    def participants(self, number: int) -> list[int]:
        """The clients of a round, ascending."""
        clients = len(self.sizes_K)
        return cohort(self.config.seed, number, clients, cohort_size(self.config.clients_per_round, clients))

    def _task(self, k: int, states: Mapping[int, Any]) -> ClientTask:
        kept, synthetic = states.get(k), self.synthetic.refs.get(k)
        if synthetic is None:
            return ClientTask(k, int(self.sizes_K[k]), state=kept)
        quota_C = self.synthetic.quota_KC[k]
        return ClientTask(k, int(self.sizes_K[k]), int(quota_C.sum()), quota_C, synthetic, kept)

    def _table(self, number: int, tasks: Sequence[ClientTask], reports: Sequence[ClientReport] = ()) -> RoundTable:
        by_total = self.config.aggregation.weight_by == "total"
        n_K = np.array([t.n_real + (t.n_synthetic if by_total else 0) for t in tasks])
        names = sorted({name for report in reports for name in report.metrics})
        columns = {name: np.array([r.metrics[name] for r in reports]) for name in names}
        if reports:
            columns["effective_steps"] = np.array([r.effective_steps for r in reports])
        return RoundTable(number, np.array([t.client for t in tasks]), n_K, columns)

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

    def _privacy(self, state: ServerState, table: RoundTable) -> dict[str, float]:
        """Epsilon so far, where noise is added."""
        if self.privacy is None:
            return {}
        took_part = [*(int(row["client"]) for row in state.client_rows), *table.client_K.tolist()]
        return {"epsilon": self.privacy.epsilon(table.round, int(np.bincount(took_part).max()))}

    def _share(self, model: ModelState) -> Any:
        """A reference to a global model, which is put once though it is evaluated and then trained on."""
        if self.shared is None or self.shared[0] is not model:
            self.shared = (model, put(model))
        return self.shared[1]

    def _row(self, round_: Round, table: RoundTable, weights: Weights) -> dict[str, float]:
        reports = round_.reports
        n_K = np.array([r.n_real + r.n_synthetic for r in reports])
        row: dict[str, float] = {
            "round": round_.number,
            "train_loss": float(np.average([r.loss for r in reports], weights=n_K)),
            "participants": len(reports),
            "dropped": len(round_.dropped),
            "samples": int(n_K.sum()),
            "steps": sum(r.steps for r in reports),
            "weight_max": float(weights.w_K.max()),
            "weight_entropy": _entropy(weights.w_K),
            "update_norm_mean": float(np.mean([r.delta_norm for r in reports])),
        }
        row.update(_weight_ratio(weights.w_K, self.noisy_K[table.client_K]))
        row.update(self._traffic(reports))
        for name in sorted(reports[0].metrics):
            row[f"{name}_mean"] = float(table.columns[name].mean())
        for name, value in weights.info.items():  # metrics are numbers: a text becomes a 1 under its own name
            row.update({f"{name}_{value}": 1} if isinstance(value, str) else {name: value})
        return row

    def _traffic(self, reports: Sequence[ClientReport]) -> dict[str, float]:
        """Bytes that the participants of a real federation would exchange: float32, updates as sent, 8 a scalar."""
        kind = self.config.aggregation.buffers  # own statistics go up, to be evaluated with; fixed ones nowhere
        further_down, further_up = (
            4 * (self.float_buffers * sent + self.parameters * len(set(names) - set(self.algorithm.server_only)))
            for names, sent in (
                (self.algorithm.broadcast, kind == "average"), (self.algorithm.summed, kind != "global")
            )
        )
        down = 4 * self.parameters + further_down
        up = self.config.update.bytes_up(self.parameters) + further_up
        scalars = 8 * (3 + max((len(r.metrics) for r in reports), default=0))
        k = len(reports)
        return {"bytes_down": k * down, "bytes_up": k * (up + scalars)}

    def _client_rows(
        self, number: int, reports: Sequence[ClientReport], weights: Weights
    ) -> ClientRows:
        rows: ClientRows = []
        for i, report in enumerate(reports):
            row = {
                "round": number, "client": report.client, "n_real": report.n_real, "n_synthetic": report.n_synthetic,
                "steps": report.steps, "loss": report.loss, "update_norm": report.delta_norm,
                "seconds": report.seconds, "weight": float(weights.w_K[i]),
                "rare": int(self.partition.rare_K[report.client]), "noisy": int(self.partition.noisy_K[report.client]),
                "input_noise": float(self.partition.input_noise_K[report.client]), **report.metrics,
            }
            if weights.scores_K is not None:
                row["score"] = float(weights.scores_K[i])
            rows.append(row)
        return rows


def _weight_ratio(w_K: FloatArray, noisy_K: BoolArray) -> dict[str, float]:
    """Mean weight of the noisy clients of a round over that of the clean ones; nothing where a group has no weight."""
    if not noisy_K.any() or not w_K[~noisy_K].any():
        return {}
    return {"weight_ratio_noisy": float(w_K[noisy_K].mean() / w_K[~noisy_K].mean())}


def _entropy(w_K: FloatArray) -> float:
    """Entropy of the weights over its maximum: 1 for equal weights, 0 for one client that decides alone."""
    w = w_K[w_K > 0] / w_K[w_K > 0].sum()
    return float(-(w * np.log(w)).sum() / np.log(len(w_K))) if len(w_K) > 1 else 0.0
