"""The record of a run: its folder, its MLflow run, the history of its rounds, and how it ended."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raysim.core.errors import DiskError, UserError, described
from raysim.core.files import cannot_write
from raysim.core.records import BatchingChoice
from raysim.engine.liveness import check_ray
from raysim.federation.server import RoundResult
from raysim.federation.state import ServerState
from raysim.lifecycle import state_io
from raysim.lifecycle.checkpoint import CheckpointError
from raysim.lifecycle.client_file import ClientFile
from raysim.lifecycle.clock import PhaseClock
from raysim.lifecycle.description import Origin, about
from raysim.lifecycle.directory import IDENTITY, RunDirectory
from raysim.lifecycle.experiment import Experiment
from raysim.lifecycle.history import History
from raysim.lifecycle.mirror import Mirror
from raysim.lifecycle.mlflow_names import by_mlflow_name
from raysim.tracking.process import MlflowProcess, start_tracker
from raysim.tracking.tracker import NullTracker, Status
from raysim.ui.display import Display

_UNNAMED = Origin()


@dataclass
class Record:
    """The run directory and the MLflow run of an experiment.

    identity: the content of run.json.  state: that after the newest recorded round.  saved_round: that of
    the newest checkpoint, 0 without one.  notes: texts for the summary.  ended: whether the end of the run is recorded.
    mirror: the copy of the folder at another place, if there is one.
    """

    directory: RunDirectory
    identity: dict[str, Any]
    tracker: NullTracker
    history: History
    client_file: ClientFile
    display: Display
    clock: PhaseClock
    keep_checkpoints: int
    notes: list[str] = field(default_factory=list)
    state: ServerState | None = None
    saved_round: int = 0
    ended: bool = False
    mirror: Mirror | None = None

    @classmethod
    def open(
        cls,
        experiment: Experiment,
        directory: RunDirectory,
        is_new: bool,
        display: Display,
        clock: PhaseClock,
        mlflow: MlflowProcess | None,
        accepted: Sequence[str] = (),
        origin: Origin = _UNNAMED,
    ) -> "Record":
        """Begin the record of an experiment, or go on with that of an earlier run.

        origin: what was run, for its page in MLflow.

        accepted: the changes of code, versions or device over which the user lets an earlier run go on; they are kept
        with it, and named in its summary whenever it ends.

        Raises UserError where the MLflow store can never be used, and DiskError where the disk refuses the first
        files; the new folder is then removed.
        """
        config = experiment.config
        before = {} if is_new else directory.identity()
        run_id = before.get("mlflow_run_id", "")
        accepted_changes = [*before.get("accepted_changes", []), *accepted]
        identity = {
            **experiment.identity.as_json(),
            "name": experiment.name,
            "mlflow_run_id": run_id,
            "accepted_changes": accepted_changes,
            "result_keys": config.result_keys(),
        }
        if "client_batching" in before:
            identity["client_batching"] = before["client_batching"]
        try:
            directory.write_json(IDENTITY, identity)
            if is_new:
                prepared = experiment.prepared
                directory.write_clients(prepared.partition, prepared.quota_KC, prepared.dealt)
            tracker = start_tracker(
                mlflow,
                config.tracking.uri,
                config.tracking.experiment,
                origin.name or directory.path.name,
                config.resolved(),
                {"config_hash": experiment.identity.config},
                None if is_new else run_id,
                directory.path,
                about(config, experiment.prepared, experiment.identity.data, directory.path, origin),
            )
        except (UserError, DiskError, KeyboardInterrupt):
            if is_new:  # or the next --resume would find this run in place of one that did something
                directory.remove()
            raise
        history = History(directory.path / "history")
        client_file = ClientFile(directory.checkpoints)
        record = cls(directory, identity, tracker, history, client_file, display, clock, config.output.keep_checkpoints)
        record.note(*accepted_changes)
        if config.output.mirror is not None:
            record.mirror = Mirror(config.output.mirror, directory.path)
        return record

    @property
    def batching(self) -> BatchingChoice | None:
        """The run's choice of how clients are trained, once it is made; None where there is none to make."""
        kept = self.identity.get("client_batching")
        return None if kept is None else BatchingChoice(**kept)

    def remember_batching(self, choice: BatchingChoice) -> None:
        """Keep that choice for a resume.  Raises DiskError where it cannot be kept: a resume might choose another."""
        identity = {**self.identity, "client_batching": asdict(choice)}
        if identity != self.identity:
            self.directory.write_json(IDENTITY, identity)
            self.identity = identity

    def begin(self) -> None:
        """Record that the run has begun."""
        self._remember_run_id()
        self._warn([*self.directory.write_status("RUNNING", ""), *self.tracker.problems_so_far])
        self._update_mirror()

    def note(self, *notes: str) -> None:
        """Keep notes for the summary, and show them."""
        self.notes += notes
        for text in notes:
            self.display.line(f"note: {text}")

    def restore(self, initial: ServerState) -> ServerState:
        """Load the state to go on from, with its history: that of the newest intact checkpoint, or the initial one."""
        found = state_io.load(self.directory.checkpoints, self.history, self.client_file)
        self.state = initial
        if found is not None:
            self.state = found.state
            self.saved_round = found.state.round
            self.note(*found.notes)
        self.display.line(f"resuming {self.directory.path.name} after round {self.state.round}")
        for row in self.history.metrics.frame().to_dict("records"):
            self.tracker.log_round(int(row["round"]), by_mlflow_name({k: v for k, v in row.items() if v == v}))
        return self.state

    def append(self, result: RoundResult) -> None:
        """Append a finished round to the history; rows that cannot be written wait for the next checkpoint."""
        try:
            self.history.append(result.metrics, result.clients)
        except OSError as error:
            waits = "its rows wait in memory for the next checkpoint"
            self._note_once(f"{cannot_write(Path(error.filename), error)}; {waits}")
        self.state = result.state

    def track(self, result: RoundResult) -> None:
        """Send a round's metrics to MLflow."""
        with self.clock.timed("track"):
            self.tracker.log_round(result.state.round, by_mlflow_name(result.metrics))
            self._remember_run_id()

    def checkpoint(self) -> None:
        """Write a checkpoint of the newest state and the history; if the disk is full, warn and go on."""
        if self.state is None:
            return
        try:
            with self.clock.timed("checkpoint"):
                state_io.save(
                    self.directory.checkpoints, self.state, self.history, self.client_file, self.keep_checkpoints
                )
            self.saved_round = self.state.round
        except CheckpointError as error:
            self.notes.append(str(error))
            self._warn([str(error)])
        self._update_mirror()

    def save_unsaved(self) -> None:
        """After an error or an interrupt: write a checkpoint if rounds were finished since the newest one.

        Nothing that goes wrong here hides that error: it is shown, and the run ends with the first one.
        """
        if self.state is None or self.state.round <= self.saved_round:
            return
        try:
            if self.state.client_states:
                check_ray()  # they are in its object store, from which no answer would come
            self.checkpoint()
        except Exception as error:  # noqa: BLE001 - shown, as the docstring says
            self._warn([f"round {self.state.round} could not be saved: {' '.join(str(error).split())}"])

    def end(self, error: BaseException | None, hint: str = "") -> None:
        """Record how the run ended; only the first call counts.  hint: how to go on."""
        if self.ended:
            return
        self.ended = True
        status: Status = "FINISHED" if error is None else "FAILED"
        message = "" if error is None else described(error)
        if isinstance(error, KeyboardInterrupt):
            status = "KILLED"
            message = f"interrupted {error}".strip()
        if error is not None:
            self.display.line(f"{'stopped' if status == 'KILLED' else 'failed'}; {self._kept(hint)}")
        problems = self.directory.write_status(status, message)
        self.tracker.finish(status, message)
        self._warn([*problems, *self.tracker.problems])
        if self.mirror is not None:
            self.mirror.finish(self.display.line)
            self._warn([self.mirror.problem] if self.mirror.problem else [])

    def _update_mirror(self) -> None:
        """Have what changed copied to the mirror; what it could not take before is said once."""
        if self.mirror is not None:
            self.mirror.update()
            if self.mirror.problem:
                self._note_once(self.mirror.problem)

    def _kept(self, hint: str) -> str:
        """What is kept of the rounds so far, and how to go on."""
        done, saved = self.state.round if self.state else 0, self.saved_round
        lost = f"the work after round {saved} is lost, for it could not be saved; " if done > saved else ""
        kept = f"the state after round {saved} is kept in {self.directory.path}: {hint}"
        return lost + (kept if saved else f"no round is kept in {self.directory.path}")

    def _remember_run_id(self) -> None:
        """Keep the MLflow run's id for a resume; a store that is away at the start gives it later."""
        if self.tracker.run_id not in ("", self.identity["mlflow_run_id"]):
            identity = {**self.identity, "mlflow_run_id": self.tracker.run_id}
            try:
                self.directory.write_json(IDENTITY, identity)
                self.identity = identity
            except DiskError as error:  # tried again after the next round
                self._note_once(f"{error}; until it is written, a resume begins another MLflow run")

    def _note_once(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._warn([text])

    def _warn(self, problems: list[str]) -> None:
        for problem in problems:
            self.display.line(f"warning: {problem}")
