"""One run from its configuration to its summary: both phases, tracking, files, and a record of how it ended."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raysim.allocation.common import looks_at_others
from raysim.config.plugin_guard import blaming
from raysim.config.schema import Config
from raysim.core.errors import RunError, UserError
from raysim.core.locks import FolderLock
from raysim.core.plain import PlainMapping
from raysim.core.records import Allocation, Candidates, FloatArray, IntArray, Synthetic
from raysim.core.signals import Signals
from raysim.engine import batching
from raysim.engine.background_start import BackgroundStart
from raysim.engine.liveness import cause_of
from raysim.engine.object_store import put
from raysim.engine.placement import crowding, local_node
from raysim.engine.session import Session, starts_here
from raysim.federation.evaluator import Evaluator
from raysim.federation.measuring import judge, measure
from raysim.federation.server import RoundResult, Server
from raysim.federation.state import ServerState
from raysim.federation.synthesis import Synthesis
from raysim.federation.training import AfterRound, initial_result, train_rounds
from raysim.lifecycle import resume as resuming
from raysim.lifecycle import summary as summaries
from raysim.lifecycle.build import Source, generator_plugin, plugin, read_config, worker_setup
from raysim.lifecycle.clock import PhaseClock
from raysim.lifecycle.conclusion import Conclusion
from raysim.lifecycle.description import Origin
from raysim.lifecycle.directory import SUMMARY, RunDirectory, model_bytes, model_sha256
from raysim.lifecycle.experiment import Experiment
from raysim.lifecycle.image_quality import measure_run
from raysim.lifecycle.inputs import Inputs
from raysim.lifecycle.kept_model import load_classifier
from raysim.lifecycle.messages import say_plan, say_start, shared_memory_note, store_note
from raysim.lifecycle.prepare import named
from raysim.lifecycle.record import Record
from raysim.lifecycle.result import Result
from raysim.lifecycle.worker_data import WorkerData
from raysim.tracking.process import MlflowProcess
from raysim.ui.display import Display

if TYPE_CHECKING:
    from raysim.engine.pool import Pool


def run_experiment(
    source: Source,
    overrides: Iterable[str] = (),
    keys: Mapping[str, Any] | None = None,
    *,
    resume: bool | str | Path = False,
    accept_changes: bool = False,
    session: Session | None = None,
    inputs: Inputs | None = None,
    mlflow: MlflowProcess | None = None,
    name: str | None = None,
    origin: Origin | None = None,
    resources: PlainMapping = MappingProxyType({}),
    conclude: Callable[[Conclusion], Result] | None = None,
) -> Result:
    """Run a configuration; arguments and errors are those of `raysim.run`.

    inputs: of runs before it, which are not read again.  mlflow: the process that writes the MLflow run; None: this
    process.  name: begins the name of a new run's folder; None: that of the file, or `run`.  origin: the sweep that the
    run belongs to.  resources: values of that section for keys that nothing sets.
    conclude: given the last part of the run once its model is written, in place of carrying it out at once; returns the
    result so far.
    """
    with (
        Display() as display,
        Signals() as signals,
        contextlib.ExitStack() as owned,
        BackgroundStart(signals, session) as start,
    ):
        clock = PhaseClock()
        config = read_config(source, overrides, keys or {}, display.line, resources)
        name = name or ("run" if isinstance(source, Mapping | Config) else Path(source).stem)
        for note in config.notes:
            display.line(f"note: {note}")
        folder = None if isinstance(resume, bool) else Path(resume).expanduser().absolute()
        earlier = resuming.find(config, name, display.line, folder) if resume else None
        if earlier is not None and not resuming.is_finished(earlier, config.rounds):
            owned.enter_context(FolderLock(earlier.path))
        experiment = Experiment.prepare(config, name, inputs)
        say_plan(display, config, experiment.prepared)
        notes = [*experiment.prepared.notes, *experiment.components.notes]
        if experiment.placement is not None and starts_here(config.resources):
            notes += crowding(experiment.placement, config.resources, local_node())
        for note in notes:
            display.line(f"note: {note}")
        changes: list[str] = []
        if earlier is not None:
            resuming.check_identity(earlier, experiment.identity, accept_changes, changes.append)
            if resuming.is_finished(earlier, config.rounds):
                return _already_finished(earlier, config.rounds, display)
        directory = earlier or RunDirectory.create(config, name)
        if earlier is None:
            owned.enter_context(locked(directory))
        again = "to go on: --resume, or resume=True from Python"
        if origin is not None:
            again = "the sweep goes on from there when it is started again"
        origin = origin or Origin("raysim.run" if isinstance(source, Mapping | Config) else Path(source).name)
        begun = begin(experiment, directory, earlier is None, changes, clock, display, start, mlflow, origin)
        run = Run(
            experiment, *begun, start, signals, resumed=earlier is not None, hint=again, owned=owned, conclude=conclude
        )
        run.record.notes += notes
        del experiment  # frees the driver's copy of the images; from here on those in the object store are used
        return run.to_the_end()


def locked(directory: RunDirectory) -> FolderLock:
    """Take the lock of a new run; its folder is removed where the disk refuses that."""
    try:
        return FolderLock(directory.path)
    except UserError:
        directory.remove()
        raise


def _already_finished(directory: RunDirectory, asked: int, display: Display) -> Result:
    summary = directory.summary() or {}
    metrics = directory.metrics()
    if problem := directory.model_problem(summary):
        raise UserError(problem)
    done = summary["rounds"]
    more = f" (rounds = {asked} asks for fewer: the results are those of {done} rounds)" if done > asked else ""
    display.line(f"{directory.path.name} has finished all {done} rounds; nothing to do{more}")
    return Result(metrics, summary, directory.path)


def begin(
    experiment: Experiment,
    directory: RunDirectory,
    is_new: bool,
    accepted: Sequence[str],
    clock: PhaseClock,
    display: Display,
    start: BackgroundStart,
    mlflow: MlflowProcess | None,
    origin: Origin,
) -> tuple[Record, WorkerData]:
    """Start Ray in the background and begin the record; UserError only for an MLflow store that cannot be used."""
    config = experiment.config
    prepared = experiment.prepared
    setup = worker_setup(config, experiment.components.rule, experiment.components.task)
    worker_data = WorkerData(setup, prepared.dataset, prepared.partition, config.output.cache)
    starts = starts_here(config.resources)
    shared_memory = shared_memory_note(prepared, config.resources) if starts else []  # before Ray takes some
    start.begin(config.resources, worker_data.give)
    record = Record.open(experiment, directory, is_new, display, clock, mlflow, accepted, origin)
    say_start(display, experiment.placement, directory.path, record.tracker.uri)
    record.note(*shared_memory)
    clock.seconds["prepare"] = clock.so_far()
    return record, worker_data


@dataclass
class Run:
    """An experiment that is running: its record, and the Ray session that it uses.

    hint: how to go on where it is interrupted.  owned: what is given free at its end, such as its lock.
    conclude: given what is left once its model is written, in place of carrying that out at once.
    """

    experiment: Experiment
    record: Record
    worker_data: WorkerData
    start: BackgroundStart
    signals: Signals
    resumed: bool
    hint: str
    owned: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    conclude: Callable[[Conclusion], Result] | None = None

    def to_the_end(self) -> Result:
        """Run both phases; run directory and tracker then say how the run ended, even after an error."""
        try:
            self.record.begin()
            result = self._with_session()
        except BaseException as error:
            self.end(error)
            raise
        self.signals.check()  # a signal that arrived after the end does not change this run, but stops the program
        return result

    def end(self, error: BaseException | None) -> None:
        self.signals.ending = True
        self.record.end(error, self.hint)

    def _with_session(self) -> Result:
        config = self.experiment.config
        display = self.record.display
        session = None
        try:
            with self.record.clock.timed("start"):
                session = self.start.session(config.resources)
                self.signals.listen()
                self.signals.check()
                pool = session.pool(config.resources, display.line)
            display.line(f"{session.where}; {pool.placement}")
            with blaming(named(config), RunError):
                return self._phases(session, pool)
        except BaseException as error:
            cause = cause_of(error)
            self.end(cause)
            if session is not None:
                session.after_failure(cause)
            if cause is not error:
                raise cause from error
            raise

    def _phases(self, session: Session, pool: "Pool") -> Result:
        """Give the workers what they need, make the images, train the rounds, keep the results."""
        self.worker_data.give(pool)
        prepared = replace(self.experiment.prepared, dataset=self.worker_data.dataset)
        self.experiment = replace(self.experiment, prepared=prepared)  # from here on without images of its own
        self.record.note(*self.worker_data.notes, *store_note(prepared, self.worker_data.is_mapped))
        state, synthetic = self._rounds(pool, self.images(pool))
        if pool.lost:
            again = f"their unfinished work was done again ({pool.lost_s:.1f} s of it)"
            self.record.notes.append(f"{pool.lost} workers were lost and replaced; {again}")
        self.record.clock.workers = pool.usage.workers()
        if self.start.alone:
            session.discard_pool()  # the remaining work needs memory, but no worker
        return self.finish(state, synthetic)

    def images(self, pool: "Pool") -> Synthetic:
        """Phase 1: make the synthetic images that clients have before round 1."""
        return self._make_images(pool, self.experiment.prepared.allocation)

    def _make_images(
        self, pool: "Pool", allocation: Allocation, earlier: Synthetic | None = None, chosen_M3: IntArray | None = None,
        by: "tuple[Server, ServerState] | None" = None,
    ) -> Synthetic:
        """Make the synthetic images of an allocation.

        earlier: those that the allocation extends.  chosen_M3: which a checkpoint says were chosen; then no other is
        made.  by: the server and its state, whose models judge candidates during training.
        """
        config = self.experiment.config
        display = self.record.display
        with self.record.clock.timed("generate"):
            display.phase("images")
            dataset = self.experiment.prepared.dataset
            is_needed = allocation.images > 0  # weights are asked for where images are
            generator = generator_plugin(config, dataset) if is_needed else plugin("generator", config.generator)
            phase = Synthesis(pool, generator, dataset, config.seed, config.output.cache, display)
            if allocation.candidates_KC is None:
                synthetic = phase.make(allocation, earlier)
            elif chosen_M3 is not None:
                synthetic = phase.make_chosen(allocation, chosen_M3)
            else:
                synthetic = phase.make_and_choose(
                    allocation, lambda candidates: self._judge(pool, candidates, by), earlier
                )
        self.record.note(*(note for note in synthetic.notes if note not in self.record.notes))
        return synthetic

    def _judge(
        self, pool: "Pool", candidates: Sequence[Candidates], by: "tuple[Server, ServerState] | None"
    ) -> dict[int, FloatArray]:
        """How good candidate images are, by the rule of `generator.keep`."""
        keep = self.experiment.config.generator.keep
        if keep.rule == "confidence" and keep.classifier is not None:
            classifier, model = load_classifier(keep.classifier, self.experiment.prepared.dataset)
            return judge(pool, candidates, put(model), 1, classifier)
        if by is None:
            raise RunError(f"generator.keep.rule = {keep.rule}: there is no model to judge images by yet")
        server, state = by
        if keep.rule == "discrepancy":
            candidates = [replace(one, task=server.task(one.client, state.client_states)) for one in candidates]
        return judge(pool, candidates, server.reference(state.model), state.round + 1)

    def _ask_if_due(self, server: Server, state: ServerState) -> ServerState:
        """At a date of `allocation.at`: ask the policy, with what training has shown, and make the images it adds."""
        schedule, date = self.experiment.prepared.schedule, len(state.dates)
        if schedule is None or date == len(schedule.at) or schedule.at[date] != state.round:
            return state
        record, config, prepared = self.record, self.experiment.config, self.experiment.prepared
        if state.round > record.saved_round:
            record.checkpoint()  # the images may take long
        dataset = prepared.dataset
        with record.clock.timed("allocate"):
            measured = {}
            if dataset.validation_labels_N is not None:
                measured = measure(server, state, schedule.asks_measured, dataset.classes)
            counts_KC = prepared.partition.counts_KC
            allocation = schedule.ask(date, counts_KC, config.seed, state.allocation, measured)
        more = allocation.images - server.synthetic.images
        record.display.close()
        record.display.line(f"after round {state.round}: {schedule.name} asks for {more:,} more images")
        server.synthetic = self._make_images(server.pool, allocation, server.synthetic, by=(server, state))
        record.display.phase("round")
        state = _dated(state, allocation, server.synthetic)
        record.state = state
        return state

    def _rounds(self, pool: "Pool", synthetic: Synthetic) -> tuple[ServerState, Synthetic]:
        """Phase 2: train the rounds, from the newest checkpoint where there is one; (state, images) at the end."""
        config = self.experiment.config
        prepared = self.experiment.prepared
        components = self.experiment.components
        server = Server(
            config,
            pool,
            prepared.partition,
            synthetic,
            components.algorithm,
            components.rule,
            components.optimiser,
            components.privacy,
        )
        evaluator = Evaluator.of(config, pool, prepared.dealt, prepared.dataset, components.task)
        state = server.initial(components.model.state())
        if prepared.schedule is not None or synthetic.chosen is not None:
            asked = config.allocation.at[0] == 0
            state = replace(state, allocation=prepared.allocation)
            state = _dated(state, prepared.allocation, synthetic) if asked else state
        if self.resumed:
            with self.signals.held():
                state = self.record.restore(state)
            if state.allocation is not None and state.allocation.images > synthetic.images:
                server.synthetic = self._make_images(pool, state.allocation, synthetic, state.chosen_M3)
        self.record.state = state
        self.record.display.phase("round")
        if not state.round:
            with self.record.clock.timed("evaluate"):
                initial = initial_result(server, evaluator, state)
            self.record.append(initial)
            self._track(initial)
        self._settle_batching(server, state)
        after_round = [
            self.record.append,
            lambda result: self.record.clock.add_round(result.metrics),
            lambda _: self.signals.check(),
            _Progress(self.record.display, state.round, config.rounds, components.task.shown).show,
            *self.further_steps(),
            self._track,
            self._checkpoint_if_due,
        ]
        try:
            state = train_rounds(
                server, evaluator, state, config.rounds, after_round, lambda state: self._ask_if_due(server, state)
            )
        except BaseException:
            self.signals.ending = True  # the state is saved before anything else stops it
            self.record.save_unsaved()
            raise
        return state, server.synthetic

    def _settle_batching(self, server: Server, state: ServerState) -> None:
        """Decide for the whole run whether clients are trained several at once, where that changes bits."""
        config, record, pool, setup = self.experiment.config, self.record, server.pool, self.worker_data.setup
        asked = config.resources.client_batching
        with record.clock.timed("start"):
            tasks = [server.task(k, state.client_states) for k in server.participants(state.round + 1)]
            sizes_K = [task.n_real + task.n_synthetic for task in tasks]
            dataset = self.experiment.prepared.dataset
            trained = setup.model, setup.local, setup.bf16, dataset.channels, dataset.image_size, len(tasks)
            choice = batching.choose(pool, asked, sizes_K, repr(trained), record.batching)
            if choice is None:
                reason = batching.without_effect(pool) if asked == "on" else ""
                record.note(*([f"resources.client_batching = on has no effect: {reason}"] if reason else []))
                return
            record.remember_batching(choice)
            record.display.line(f"clients train {choice}")
            if choice.at_once:
                self.worker_data.train_at_once(pool)

    def further_steps(self) -> list[AfterRound]:
        """What else comes after each round; nothing here."""
        return []

    def _track(self, result: RoundResult) -> None:
        with self.signals.held():
            self.record.track(result)

    def _checkpoint_if_due(self, result: RoundResult) -> None:
        config = self.experiment.config
        done = result.state.round
        if done % config.output.checkpoint_every == 0 or done == config.rounds:
            self.record.checkpoint()

    def finish(self, state: ServerState, synthetic: Synthetic) -> Result:
        """Write tables, summary and model, small files first, so that a full disk costs as little as can be; conclude.

        The summary is written twice: before the model, as that of an unfinished run, and by the conclusion.
        """
        record = self.record
        config = self.experiment.config
        prepared = self.experiment.prepared
        components = self.experiment.components
        directory = record.directory
        metrics = summaries.as_uninterrupted(record.history.metrics.frame(), config)
        clients = record.history.clients.frame()
        if state.allocation is not None:
            directory.write_clients(prepared.partition, state.allocation.quota_KC, prepared.dealt)
        directory.write_metrics(metrics, clients, summaries.per_client_table(clients, metrics, prepared))
        record.note(*summaries.not_finite(metrics), *summaries.left_out(metrics))
        quality = None
        if config.output.quality:
            with record.clock.timed("quality"):
                quality = measure_run(prepared.dataset, synthetic, config.seed, directory, record.display)
        components.model.load(state.model)
        arrays = components.model.state_dict()
        model = model_bytes(arrays)
        once = {"round": 0, "images": synthetic.images}
        summary = summaries.summarise(config, prepared, metrics, synthetic, record.clock) | {
            "allocations": [once] if state.allocation is None else list(state.dates),
            "status": "UNFINISHED",
            "model_sha256": model_sha256(arrays),
            "model_file_sha256": hashlib.sha256(model).hexdigest(),
            "quality": quality,
            "privacy": components.privacy and components.privacy.summary(
                metrics,
                oui="oui" in components.rule.needs,
                generator=config.generator.name if prepared.makes_images else None,
                shared_budget=looks_at_others(config.allocation.name, config.allocation.params),
            ),
            "client_batching": record.batching and asdict(record.batching),
            "run_directory": str(directory.path),
        }
        directory.write_json(SUMMARY, summary)
        directory.write_model(model)
        conclusion = Conclusion.of(
            config, prepared, record, metrics, clients, synthetic, components.model.module, summary, self.hint,
            self.owned.pop_all(),
        )
        return conclusion.carry_out(self.signals) if self.conclude is None else self.conclude(conclusion)


def _dated(state: ServerState, allocation: Allocation, synthetic: Synthetic) -> ServerState:
    """The state after a date at which the policy was asked, with what clients have since then."""
    date = {"round": state.round, "images": allocation.images}
    chosen_M3 = None if synthetic.chosen is None else synthetic.chosen.keys_M3
    return replace(state, allocation=allocation, chosen_M3=chosen_M3, dates=(*state.dates, date))


class _Progress:
    """Shows each round, and how long the remaining ones will take at the pace so far.

    The first round, in which workers load what they need, counts only as long as there is no other.
    """

    def __init__(self, display: Display, first: int, rounds: int, names: Sequence[str]) -> None:
        self.display = display
        self.rounds = rounds
        self.first = first
        self.names = names
        self.began = time.monotonic()
        self.alone = True  # the round that is counted is the first

    def show(self, result: RoundResult) -> None:
        done, now = result.state.round, time.monotonic()
        pace_s = (now - self.began) / (done - self.first)
        if self.alone:
            self.alone, self.first, self.began = False, done, now
        shown = {k: v for k, v in result.metrics.items() if k in self.names}
        self.display.round(done, self.rounds, shown, pace_s * (self.rounds - done))
