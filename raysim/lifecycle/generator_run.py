"""The training of a generator by the clients: a run whose task is denoising and whose result is a network."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.aggregation.running_mean import mean_of
from raysim.config.schema import Config
from raysim.core.errors import UserError
from raysim.core.persistent import persistent_path
from raysim.core.plain import PlainDict
from raysim.core.records import Dataset, Synthetic
from raysim.core.signals import Signals
from raysim.engine.background_start import BackgroundStart
from raysim.engine.session import Session
from raysim.federation.server import RoundResult
from raysim.federation.state import ServerState
from raysim.federation.training import AfterRound
from raysim.generation.denoising import DENOISING, Denoiser
from raysim.lifecycle import resume as resuming
from raysim.lifecycle.clock import PhaseClock
from raysim.lifecycle.description import Origin
from raysim.lifecycle.directory import SUMMARY, RunDirectory, model_sha256
from raysim.lifecycle.entry import only_one
from raysim.lifecycle.experiment import Experiment
from raysim.lifecycle.inputs import Inputs
from raysim.lifecycle.result import Result
from raysim.lifecycle.runner import Run, begin, locked
from raysim.ui.display import Display

if TYPE_CHECKING:
    from raysim.engine.pool import Pool

Preview = Callable[[Denoiser, int], Path | None]
"""Called with the network after a round, and its number; returns the path of a figure of it, if there is one."""


@dataclass(frozen=True)
class TrainedGenerator:
    """What the clients have trained.

    denoiser: the running mean of the global network over the rounds.  summary: the content of summary.json.
    """

    denoiser: Denoiser
    summary: PlainDict
    directory: Path


def train_generator(
    config: Config, name: str, dataset: Dataset, display: Display, signals: Signals, *, again: str,
    on_preview: Preview | None = None, preview_s: float = 0.0, session: Session | None = None,
) -> TrainedGenerator:
    """Train a generator on the clients of a configuration, or go on with the training that `output.dir` holds.

    config: of a run whose model is a Denoiser.  name: begins the name of the training's folder.  again: the command
    that goes on with it.  on_preview: called at most every `preview_s` seconds.  session: an open Ray session.

    Raises UserError before Ray starts for input that cannot work, and where `output.dir` holds another training;
    RunError for a training that failed.
    """
    with only_one(), contextlib.ExitStack() as owned, BackgroundStart(signals, session) as start:
        clock = PhaseClock()
        for note in config.notes:
            display.line(f"note: {note}")
        earlier = _earlier(config)
        if earlier is not None:
            owned.enter_context(locked(earlier))
        experiment = Experiment.prepare(config, name, Inputs(dataset), DENOISING)
        sizes_K = experiment.prepared.partition.sizes_K
        display.line(
            f"{config.partition.name}: {len(sizes_K):,} clients of {sizes_K.min():,} to {sizes_K.max():,} images; "
            "none of these images leaves its client"
        )
        notes = [*experiment.prepared.notes, *experiment.components.notes]
        for note in notes:
            display.line(f"note: {note}")
        changes: list[str] = []
        if earlier is not None:
            resuming.check_identity(earlier, experiment.identity, True, changes.append)
        directory = earlier or RunDirectory.create(config, name)
        if earlier is None:
            owned.enter_context(locked(directory))
        begun = begin(
            experiment, directory, earlier is None, changes, clock, display, start, None,
            Origin("raysim pretrain", name=name),
        )
        run = GeneratorRun(
            experiment, *begun, start, signals, resumed=earlier is not None, hint=f"go on with: {again}",
            on_preview=on_preview, preview_s=preview_s,
        )
        run.record.notes += notes
        result = run.to_the_end()
        return TrainedGenerator(_denoiser(experiment), result.summary, result.directory)


def _earlier(config: Config) -> RunDirectory | None:
    """The training that `output.dir` holds; None where it holds none, and UserError for one with other values."""
    folders = sorted(path.parent for path in persistent_path(config.output.dir).glob("*/run.json"))
    if not folders:
        return None
    changes = resuming.changes(folders[-1], config)
    if changes:
        raise UserError(
            f"output: {folders[-1]} holds a training with other values ({changes}); undo that, choose another folder, "
            "or remove it"
        )
    done = resuming.rounds_done(RunDirectory(folders[-1]))
    if done > config.rounds:
        raise UserError(
            f"federation.rounds = {config.rounds}: {folders[-1]} has done {done} rounds; ask for at least as many, "
            "choose another folder, or remove it"
        )
    return RunDirectory(folders[-1])


def _denoiser(experiment: Experiment) -> Denoiser:
    module = experiment.components.model.module
    assert isinstance(module, Denoiser)  # `Denoising.check` has seen to it
    return module


@dataclass
class GeneratorRun(Run):
    """A training of a generator that goes on; the driver's model is the running mean, at previews and at the end."""

    on_preview: Preview | None = None
    preview_s: float = 0.0
    _previewed: float = 0.0

    def images(self, pool: "Pool") -> Synthetic:  # noqa: ARG002
        """No synthetic image: they are what this is for."""
        return Synthetic(self.experiment.prepared.quota_KC)

    def further_steps(self) -> list[AfterRound]:
        """A preview now and then."""
        self._previewed = time.monotonic()
        return [] if self.on_preview is None or not self.preview_s else [self._preview]

    def _preview(self, result: RoundResult) -> None:
        if self.on_preview is None or time.monotonic() - self._previewed < self.preview_s:
            return
        with self.signals.held():
            self._load_mean(result.state)
            figure = self.on_preview(_denoiser(self.experiment), result.state.round)
            if figure is not None:
                self.record.tracker.log_figure(figure)
        self._previewed = time.monotonic()

    def _load_mean(self, state: ServerState) -> None:
        """Load the running mean of the global network into the driver's model."""
        params_P = mean_of(state.model.params_P, state.optimiser)
        self.experiment.components.model.load(replace(state.model, params_P=params_P))

    def finish(self, state: ServerState, synthetic: Synthetic) -> Result:  # noqa: ARG002
        """Write the tables and the summary, and leave the running mean in the driver's model."""
        record, directory = self.record, self.record.directory
        components, prepared = self.experiment.components, self.experiment.prepared
        metrics = record.history.metrics.frame()
        directory.write_metrics(metrics, record.history.clients.frame())
        self._load_mean(state)
        record.clock.seconds["total"] = record.clock.so_far()
        sizes_K = prepared.partition.sizes_K
        summary: dict[str, Any] = {
            "status": "FINISHED",
            "rounds": state.round,
            "clients": len(sizes_K),
            "sizes_K": sizes_K.tolist() if prepared.partition.drawn is None else [],
            "partition_sha256": prepared.partition.sha256(),
            "data_sha256": hashlib.sha256(repr(sorted(self.experiment.identity.data.items())).encode()).hexdigest(),
            "config_hash": self.experiment.config.hash(),
            "model_sha256": model_sha256(components.model.state_dict()),
            "denoising_error": float(metrics["denoising_error"].dropna().iloc[-1]),
            "steps": int(np.nansum(metrics["steps"])),
            "bytes_up": float(np.nansum(metrics["bytes_up"])),
            "privacy": components.privacy and components.privacy.summary(metrics, oui=False, scaled_by_data=False),
            "client_batching": record.batching and asdict(record.batching),
            "seconds": record.clock.rounded(),
            "mlflow_run_id": record.tracker.run_id,
            "notes": record.notes,
        }
        self.signals.check()
        self.signals.ending = True  # from the summary on, the training is a finished one
        directory.write_json(SUMMARY, summary)
        record.tracker.log_artifact(directory.path / SUMMARY)
        self.end(None)
        return Result(metrics, summary, directory.path)
