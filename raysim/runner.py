"""One run from its configuration to its summary: both phases, tracking, files, and a truthful end whatever happens."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim import results, resume, run_state
from raysim.assemble import check_plugins, initial_model, plugin, worker_setup
from raysim.checkpoint import CheckpointError
from raysim.config import Config, load_config
from raysim.display import Display
from raysim.engine.session import Session, placement_before_start
from raysim.engine.store import put
from raysim.errors import UserError
from raysim.flat_model import FlatModel
from raysim.interrupts import Interrupted, interruptible
from raysim.narration import say_plan, store_note, totals, tracked
from raysim.prepare import Prepared, prepare
from raysim.records import Split, Synthetic
from raysim.run_directory import RunDirectory
from raysim.run_quality import measure_run
from raysim.server import Server, ServerState
from raysim.synthesis import synthesise
from raysim.tracking import NullTracker, Tracker, check_uri
from raysim.yaml_io import read_yaml

if TYPE_CHECKING:
    import pandas as pd

    from raysim.engine.pool import Pool

Source = str | Path | Mapping[str, Any] | Config


@dataclass(frozen=True)
class Result:
    """A finished run.  metrics: one row a round.  summary: the content of summary.json.  directory: its files."""

    metrics: "pd.DataFrame"
    summary: dict[str, Any]
    directory: Path


def run(
    source: Source,
    overrides: Iterable[str] = (),
    *,
    resume: bool = False,
    session: Session | None = None,
    split: Split | None = None,
    **keys: Any,
) -> Result:
    """Run a configuration: a YAML file, a mapping, or a Config.

    overrides: dotted keys as on the command line (`allocation.beta=8`).  keys: top-level keys, such as rounds=5.
    resume: go on with the newest run of this configuration, from its last checkpoint, to the same result.
    session, split: an open Ray session and a loaded data set, for runs that follow one another.
    Raises ConfigError or UserError, before Ray starts, for input that cannot work, and RunError for a run that failed.
    """
    with Display() as display:
        name = "run" if isinstance(source, Mapping | Config) else Path(source).stem
        config = _configuration(source, overrides, keys)
        for note in config.notes:
            display.line(f"note: {note}")
        return _Run.begin(config, name, display, resume, split).to_the_end(session)


def _configuration(source: Source, overrides: Iterable[str], keys: dict[str, Any]) -> Config:
    if isinstance(source, Config):
        source = source.resolved()
    if keys:
        source = {**(source if isinstance(source, Mapping) else read_yaml(source)), **keys}
    return load_config(source, overrides)


@dataclass
class _Run:
    """What the phases of a run share.  state: the newest committed round."""

    config: Config
    display: Display
    directory: RunDirectory
    prepared: Prepared
    tracker: NullTracker
    began: float
    resumed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    state: ServerState | None = None
    signals: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, config: Config, name: str, display: Display, resumed: bool, split: Split | None) -> "_Run":
        """Everything that can be refused is refused here, before Ray starts."""
        began = time.monotonic()
        check_uri(config.tracking.uri)
        placement = placement_before_start(config.resources)
        directory = resume.find(config, name) if resumed else None
        prepared = prepare(config, split)
        check_plugins(config, prepared)
        say_plan(display, config, prepared)
        identity = {"config_hash": config.hash(), "partition_sha256": prepared.partition.sha256(), "name": name}
        before = directory.read_json("run.json") if directory else {}
        if directory and before["partition_sha256"] != identity["partition_sha256"]:
            raise UserError(f"--resume: the data set is no longer the one that {directory.path.name} was started with")
        if directory is None:
            directory = RunDirectory.create(config, name)
            directory.write_clients(prepared.partition, prepared.quota_KC)
        tracker = Tracker.start(
            config.tracking.uri, config.tracking.experiment, directory.path.name, config.resolved(),
            {"config_hash": config.hash()}, before.get("mlflow_run_id") or None, directory.path,
        )
        directory.write_json("run.json", {**identity, "mlflow_run_id": tracker.run_id})
        if placement:
            display.line(f"to start: {placement}")
        run = cls(config, display, directory, prepared, tracker, began, resumed)
        run.seconds["prepare"] = time.monotonic() - began
        return run

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def to_the_end(self, session: Session | None) -> Result:
        """Both phases; whatever happens, the run directory and the tracker say how it ended."""
        if self.resumed and resume.is_finished(self.directory, self.config.rounds):
            return self._already_finished()
        status, message = "FAILED", ""
        try:
            with interruptible(self.signals):
                result = self._with_session(session)
            status = "FINISHED"
            return result
        except KeyboardInterrupt as stop:
            status, message = "KILLED", f"interrupted {stop}".strip()
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise
        finally:
            try:
                self.directory.write_json("status.json", {"status": status, "message": message})
            except OSError as error:
                self.display.line(f"warning: status.json could not be written: {error}")
            self.tracker.finish(status, message)  # type: ignore[arg-type]
            for problem in self.tracker.problems:
                self.display.line(f"warning: {problem}")

    def _already_finished(self) -> Result:
        import pandas as pd

        self.display.line(f"{self.directory.path.name} has finished all {self.config.rounds} rounds; nothing to do")
        self.tracker.finish("FINISHED", "")
        summary = self.directory.read_json("summary.json")
        return Result(pd.read_parquet(self.directory.path / "metrics.parquet"), summary, self.directory.path)

    def _with_session(self, session: Session | None) -> Result:
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if session is None:
                session = stack.enter_context(Session(self.config.resources))
                stack.enter_context(interruptible(self.signals))  # again: Ray takes SIGTERM for itself when it starts
            try:
                pool = session.pool(self.config.resources)
                self.display.line(f"{session.where}; {pool.placement}")
                self.seconds["start"] = time.monotonic() - began
                return self._phases(pool)
            except BaseException:
                session.discard_pool()
                raise

    def _phases(self, pool: "Pool") -> Result:
        config, prepared = self.config, self.prepared
        rule = plugin("aggregation", config.aggregation).build()
        setup = worker_setup(config, rule)
        pool.configure(setup, put(prepared.split), put(prepared.partition))
        with self.timed("generate"):
            self.display.phase("images")
            synthetic = synthesise(
                pool, plugin("generator", config.generator), prepared.split, prepared.quota_KC, config.seed,
                config.output.cache, self.display,
            )
        self.notes += [*synthetic.notes, *store_note(prepared, synthetic)]
        for note in self.notes:
            self.display.line(f"note: {note}")
        server = Server(
            config, pool, prepared.partition, synthetic, setup.local.build(), rule,
            plugin("server", config.server).build(), len(prepared.split.test_labels_N),
        )
        model = initial_model(config, prepared)
        state = self._rounds(server, model)
        if pool.lost:
            self.notes.append(f"{pool.lost} workers were lost and replaced; their unfinished work was done again")
        self.seconds.update(server.seconds)
        return self._finish(state, model, synthetic)

    def _rounds(self, server: Server, model: FlatModel) -> ServerState:
        self.state = server.initial(model.state())
        if self.resumed:
            found = run_state.load(self.directory.checkpoints)
            if found is not None:
                self.state, notes = found
                self.notes += notes
                for note in notes:
                    self.display.line(f"note: {note}")
            self.display.line(f"resuming {self.directory.path.name} after round {self.state.round}")
            if self.state.rule:
                server.rule.load_state(self.state.rule)
            for row in self.state.rows:
                self.tracker.log_round(int(row["round"]), tracked(row))
        self.display.phase("round")
        first, began = self.state.round, time.monotonic()

        def after_round(state: ServerState) -> None:
            self.state = state
            if self.signals:
                raise Interrupted(f"by {self.signals[0]}")
            pace = (time.monotonic() - began) / (state.round - first)
            row, left = state.rows[-1], self.config.rounds - state.round
            shown = {k: v for k, v in row.items() if k in ("accuracy", "loss", "train_loss")}
            self.display.round(state.round, self.config.rounds, shown, pace * left)
            with self.timed("track"):
                self.tracker.log_round(state.round, tracked(row))
            if state.round % self.config.output.checkpoint_every == 0 or not left:
                self._checkpoint()

        try:
            return server.run(self.state, after_round)
        except KeyboardInterrupt:
            self._checkpoint()
            raise

    def _checkpoint(self) -> None:
        if self.state is None:
            return
        try:
            with self.timed("checkpoint"):
                run_state.save(self.directory.checkpoints, self.state, self.config.output.keep_checkpoints)
        except CheckpointError as error:
            self.notes.append(str(error))
            self.display.line(f"warning: {error}")

    def _finish(self, state: ServerState, model: FlatModel, synthetic: Synthetic) -> Result:
        directory, tracker = self.directory, self.tracker
        model.load(state.model)
        model_path, model_sha256 = directory.write_model(model.state_dict())
        metrics = directory.write_metrics(state.rows, state.client_rows)
        quality = None
        if self.config.output.quality:
            quality = measure_run(self.prepared.split, synthetic, self.config.seed, directory, self.display)
        with self.timed("track"):
            results.figures(directory, self.prepared, metrics, synthetic)
            for path in sorted(directory.figures.glob("*.png")):
                tracker.log_figure(path)
            names = ["metrics.parquet", "metrics.csv", "clients.parquet", "partition.npz"]
            for name in [*names, "quality.json"] if quality else names:
                tracker.log_artifact(directory.path / name)
            tracker.log_model_state(model_path)
        self.seconds["total"] = time.monotonic() - self.began
        summary = results.summarise(self.config, self.prepared, metrics, synthetic, self.seconds) | {
            "status": "FINISHED",
            "model_sha256": model_sha256,
            "quality": quality,
            "mlflow_run_id": tracker.run_id,
            "mlflow_uri": tracker.uri,
            "run_directory": str(directory.path),
            "notes": [*self.config.notes, *self.notes, *tracker.problems],
        }
        directory.write_json("summary.json", summary)
        tracker.log_round(state.round, totals(summary))
        tracker.log_artifact(directory.path / "summary.json")
        self.display.summary(summary)
        return Result(metrics, summary, directory.path)
