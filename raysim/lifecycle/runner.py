"""One run from its configuration to its summary: both phases, tracking, files, and a truthful end whatever happens."""

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.config.plugin_guard import blaming
from raysim.config.schema import Config
from raysim.core.errors import RunError, UserError
from raysim.core.records import Dataset, Synthetic
from raysim.core.signals import Signals
from raysim.engine.background_start import BackgroundStart
from raysim.engine.liveness import cause_of
from raysim.engine.session import Session, placement_before_start
from raysim.federation.evaluator import Evaluator
from raysim.federation.server import Server, ServerState
from raysim.federation.synthesis import synthesise
from raysim.lifecycle import resume, state_io
from raysim.lifecycle import summary as results
from raysim.lifecycle.build import Parts, Source, build_parts, plugin, read_config, worker_setup
from raysim.lifecycle.checkpoint import CheckpointError
from raysim.lifecycle.clock import PhaseClock
from raysim.lifecycle.directory import RunDirectory
from raysim.lifecycle.image_quality import measure_run
from raysim.lifecycle.messages import say_plan, say_start, store_note, totals, tracked
from raysim.lifecycle.prepare import Prepared, named, prepare
from raysim.lifecycle.summary import Result
from raysim.lifecycle.worker_data import WorkerData
from raysim.tracking.process import start_tracker
from raysim.tracking.tracker import NullTracker, Status, check_uri
from raysim.ui.display import Display

if TYPE_CHECKING:
    from raysim.engine.pool import Pool


def run(
    source: Source,
    overrides: Iterable[str] = (),
    *,
    resume: bool = False,
    session: Session | None = None,
    dataset: Dataset | None = None,
    **keys: Any,
) -> Result:
    """Run a configuration: a YAML file, a mapping, or a Config.

    overrides: dotted keys as on the command line (`allocation.beta=8`).  keys: top-level keys, such as rounds=5.
    resume: go on with the newest run of this configuration, from its last checkpoint, to the same result.
    session, dataset: an open Ray session and a loaded data set, for runs that follow one another.
    Raises ConfigError or UserError, before Ray starts, for input that cannot work, and RunError for a run that failed.
    """
    with Display() as display, Signals() as signals, BackgroundStart(signals, session) as start:
        config = read_config(source, overrides, keys)
        name = "run" if isinstance(source, Mapping | Config) else Path(source).stem
        for note in config.notes:
            display.line(f"note: {note}")
        return _Run.begin(config, name, display, signals, start, resume, dataset).to_the_end()


@dataclass
class _Run:
    """What the phases of a run share.  state: the newest committed round.  ended: the outcome is on record."""

    config: Config
    display: Display
    signals: Signals
    start: BackgroundStart
    directory: RunDirectory
    identity: dict[str, Any]
    prepared: Prepared
    parts: Parts
    worker_data: WorkerData
    tracker: NullTracker
    clock: PhaseClock
    resumed: bool
    notes: list[str] = field(default_factory=list)
    state: ServerState | None = None
    ended: bool = False

    @classmethod
    def begin(
        cls, config: Config, name: str, display: Display, signals: Signals, start: BackgroundStart, resumed: bool,
        dataset: Dataset | None,
    ) -> "_Run":
        """Everything that can be refused is refused here, before Ray starts; it starts while MLflow does."""
        clock = PhaseClock()
        check_uri(config.tracking.uri)
        placement = placement_before_start(config.resources)
        earlier = resume.find(config, name, display.line) if resumed else None
        prepared = prepare(config, dataset)
        parts = build_parts(config, prepared)
        worker_data = WorkerData(worker_setup(config, parts.rule), prepared.dataset, prepared.partition)
        say_plan(display, config, prepared)
        for note in prepared.notes:
            display.line(f"note: {note}")
        identity: dict[str, Any] = {
            "config_hash": config.hash(), "partition_sha256": prepared.partition.sha256(), "name": name
        }
        before = earlier.read_json("run.json") if earlier else {**identity, "mlflow_run_id": ""}
        if before["partition_sha256"] != identity["partition_sha256"]:
            raise UserError(f"--resume: the data set is no longer the one that {before['name']} was started with")
        identity["mlflow_run_id"] = before["mlflow_run_id"]
        identity["result_keys"] = config.result_keys()
        directory = earlier or RunDirectory.create(config, name)
        if not (earlier and resume.is_finished(earlier, config.rounds)):
            start.begin(config.resources, worker_data.give)
        try:
            directory.write_json("run.json", identity)
            if not earlier:
                directory.write_clients(prepared.partition, prepared.quota_KC)
            tracker = start_tracker(
                config.tracking.uri, config.tracking.experiment, directory.path.name, config.resolved(),
                {"config_hash": config.hash()}, identity["mlflow_run_id"] if earlier else None, directory.path,
            )
        except (UserError, KeyboardInterrupt):
            if not earlier:  # or the next --resume would find this run in place of one that did something
                shutil.rmtree(directory.path, ignore_errors=True)
            raise
        say_start(display, placement, directory.path)
        clock.seconds["prepare"] = clock.so_far()
        shared = config, display, signals, start, directory, identity, prepared, parts, worker_data, tracker
        return cls(*shared, clock, resumed)

    def to_the_end(self) -> Result:
        """Both phases; whatever happens, the run directory and the tracker say how it ended."""
        if self.resumed and resume.is_finished(self.directory, self.config.rounds):
            return self._already_finished()
        try:
            self._remember_run_id()
            for problem in [*self.directory.write_status("RUNNING", ""), *self.tracker.problems]:
                self.display.line(f"warning: {problem}")
            result = self._with_session()
        except BaseException as error:
            self._end(error)
            raise
        self.signals.check()  # one that arrived after the end stops what would have come next, not this run
        return result

    def _remember_run_id(self) -> None:
        """Keep the MLflow run's id for a resume; a store that is away at the start gives it later."""
        if self.tracker.run_id not in ("", self.identity["mlflow_run_id"]):
            self.identity["mlflow_run_id"] = self.tracker.run_id
            self.directory.write_json("run.json", self.identity)

    def _end(self, error: BaseException | None) -> None:
        """Put on record how the run ended, before Ray is shut down; only the first call counts."""
        self.signals.ending = True
        if self.ended:
            return
        self.ended = True
        status: Status = "FINISHED" if error is None else "FAILED"
        message = "" if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            status, message = "KILLED", f"interrupted {error}".strip()
            again = "go on with --resume" if self.start.alone else "it goes on from there when it is started again"
            self.display.line(f"stopped; what was done is kept in {self.directory.path}: {again}")
        problems = self.directory.write_status(status, message)
        self.tracker.finish(status, message)
        for problem in [*problems, *self.tracker.problems]:
            self.display.line(f"warning: {problem}")

    def _already_finished(self) -> Result:
        import pandas as pd

        summary = self.directory.read_json("summary.json")
        done, asked = summary["rounds"], self.config.rounds
        more = f" (rounds = {asked} asks for fewer: the results are those of {done} rounds)" if done > asked else ""
        self.display.line(f"{self.directory.path.name} has finished all {done} rounds; nothing to do{more}")
        self.tracker.finish("FINISHED", "")
        return Result(pd.read_parquet(self.directory.path / "metrics.parquet"), summary, self.directory.path)

    def _with_session(self) -> Result:
        session = None
        try:
            with self.clock.timed("start"):
                session = self.start.session(self.config.resources)
                self.signals.listen()
                self.signals.check()
                pool = session.pool(self.config.resources, self.display.line)
            self.display.line(f"{session.where}; {pool.placement}")
            with blaming(named(self.config), RunError):
                return self._phases(session, pool)
        except BaseException as error:
            cause = cause_of(error)
            self._end(cause)
            if session is not None:
                session.discard_pool()
            if cause is not error:
                raise cause from error
            raise

    def _phases(self, session: Session, pool: "Pool") -> Result:
        config, parts = self.config, self.parts
        self.worker_data.give(pool)
        prepared = self.prepared = replace(self.prepared, dataset=self.worker_data.dataset)
        with self.clock.timed("generate"):
            self.display.phase("images")
            synthetic = synthesise(
                pool, plugin("generator", config.generator), prepared.dataset, prepared.quota_KC, config.seed,
                config.output.cache, self.display,
            )
        found = [*synthetic.notes, *store_note(prepared, synthetic)]
        self.notes += [*prepared.notes, *found]
        for note in found:
            self.display.line(f"note: {note}")
        server = Server(
            config, pool, prepared.partition, synthetic, parts.algorithm, parts.rule, parts.optimiser,
            Evaluator.of(config, pool, prepared.partition, prepared.dataset), privacy=parts.privacy,
        )
        state = self._rounds(server)
        if pool.lost:
            again = f"their unfinished work was done again ({pool.lost_s:.1f} s of it)"
            self.notes.append(f"{pool.lost} workers were lost and replaced; {again}")
        self.clock.seconds.update(server.seconds)
        self.clock.workers = pool.usage.workers()
        if self.start.alone:
            session.discard_pool()  # what is left to do needs memory, but no worker
        return self._finish(state, synthetic)

    def _rounds(self, server: Server) -> ServerState:
        self.state = server.initial(self.parts.model.state())
        if self.resumed:
            found = state_io.load(self.directory.checkpoints)
            if found is not None:
                self.state, notes = found
                self.notes += notes
                for note in notes:
                    self.display.line(f"note: {note}")
            self.display.line(f"resuming {self.directory.path.name} after round {self.state.round}")
            if self.state.rule:
                server.rule.load_state(self.state.rule)
            with self.signals.held():
                for row in self.state.rows:
                    self.tracker.log_round(int(row["round"]), tracked(row))
        self.display.phase("round")
        first, began = self.state.round, time.monotonic()

        def after_round(state: ServerState) -> None:
            self.state = state
            self.signals.check()
            pace = (time.monotonic() - began) / (state.round - first)
            row, left = state.rows[-1], self.config.rounds - state.round
            shown = {k: v for k, v in row.items() if k in ("accuracy", "loss", "train_loss")}
            self.display.round(state.round, self.config.rounds, shown, pace * left)
            with self.clock.timed("track"), self.signals.held():
                self.tracker.log_round(state.round, tracked(row))
                self._remember_run_id()
            if state.round % self.config.output.checkpoint_every == 0 or not left:
                self._checkpoint()

        try:
            return server.run(self.state, after_round)
        except KeyboardInterrupt:
            self.signals.ending = True
            self._checkpoint()
            raise

    def _checkpoint(self) -> None:
        if self.state is None:
            return
        try:
            with self.clock.timed("checkpoint"):
                state_io.save(self.directory.checkpoints, self.state, self.config.output.keep_checkpoints)
        except CheckpointError as error:
            self.notes.append(str(error))
            self.display.line(f"warning: {error}")

    def _finish(self, state: ServerState, synthetic: Synthetic) -> Result:
        directory, tracker, model = self.directory, self.tracker, self.parts.model
        model.load(state.model)
        model_path, model_sha256 = directory.write_model(model.state_dict())
        metrics, clients = directory.write_metrics(state.rows, state.client_rows)
        quality = None
        if self.config.output.quality:
            with self.clock.timed("quality"):
                quality = measure_run(self.prepared.dataset, synthetic, self.config.seed, directory, self.display)
        with self.clock.timed("track"), self.signals.held():
            results.figures(directory, self.prepared, metrics, clients, synthetic)
            for path in sorted(directory.figures.glob("*.png")):
                tracker.log_figure(path)
            for name in ("metrics.parquet", "metrics.csv", "clients.parquet", "partition.npz", "quality.json"):
                if (directory.path / name).exists():
                    tracker.log_artifact(directory.path / name)
            tracker.log_model_state(model_path)
        self.clock.seconds["total"] = self.clock.so_far()
        summary = results.summarise(self.config, self.prepared, metrics, synthetic, self.clock) | {
            "status": "FINISHED",
            "model_sha256": model_sha256,
            "quality": quality,
            "privacy": self.parts.privacy and self.parts.privacy.summary(metrics, "oui" in self.parts.rule.needs),
            "mlflow_run_id": tracker.run_id,
            "mlflow_uri": tracker.uri,
            "run_directory": str(directory.path),
            "notes": [*self.config.notes, *self.notes, *tracker.problems],
        }
        self.signals.check()
        self.signals.ending = True  # from the summary on, the run is a finished one
        directory.write_json("summary.json", summary)
        tracker.log_round(state.round, totals(summary))
        tracker.log_artifact(directory.path / "summary.json")
        self.display.summary(summary)
        self._end(None)
        return Result(metrics, summary, directory.path)
