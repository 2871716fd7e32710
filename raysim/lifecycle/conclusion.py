"""The last part of a run, once its tables and model are written: figures, MLflow, the summary of a finished run."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.config.schema import Config
from raysim.core.files import cannot_write
from raysim.core.records import ByteArray, Synthetic
from raysim.core.secrets import plain_without_secrets
from raysim.core.signals import Signals
from raysim.lifecycle.description import description, result_tags
from raysim.lifecycle.directory import MODEL, PER_CLIENT, SUMMARY
from raysim.lifecycle.figures import RunFigures
from raysim.lifecycle.kept_model import EXAMPLES, write_for_mlflow
from raysim.lifecycle.prepare import Prepared
from raysim.lifecycle.record import Record
from raysim.lifecycle.result import Result
from raysim.tracking import links
from raysim.ui.display import Display

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

Draw = Callable[[RunFigures, Path], object]
_FILES = (PER_CLIENT, "metrics.csv", "metrics.parquet", "clients.parquet", "partition.npz", "quality.json", MODEL)


@dataclass
class Conclusion:
    """What is left of a run whose workers are done; it may be carried out in a thread, while another run goes on.

    It needs neither Ray nor a worker, and holds copies of what it takes of the object store.  Until it is carried out,
    the run counts as unfinished: started again, it goes on from the checkpoint of its last round.

    summary: the content of summary.json so far.  module: the trained network; example: images that it takes.
    hint: how to go on where this fails.  owned: what the run gives free at the end of all, such as its lock.
    """

    config: Config
    prepared: Prepared
    record: Record
    metrics: "pd.DataFrame"
    figures: RunFigures
    module: "nn.Module"
    example: ByteArray
    summary: dict[str, Any]
    hint: str
    owned: contextlib.ExitStack

    @classmethod
    def of(
        cls, config: Config, prepared: Prepared, record: Record, metrics: "pd.DataFrame", clients: "pd.DataFrame",
        synthetic: Synthetic, module: "nn.Module", summary: dict[str, Any], hint: str, owned: contextlib.ExitStack,
    ) -> "Conclusion":
        """Collect what the end of a run needs.  metrics: one row per round.  clients: one per participant and round."""
        dataset, partition = prepared.dataset, prepared.partition
        counts = (partition.counts_KC, synthetic.quota_KC) if partition.drawn is None else None
        examples = None
        if synthetic.examples is not None:
            images, labels = synthetic.examples
            examples = np.array(images), np.array(labels)
        figures = RunFigures(metrics, clients, counts, dataset.class_names, examples)
        example = np.array(dataset.test_images[:EXAMPLES])
        return cls(config, prepared, record, metrics, figures, module, example, summary, hint, owned)

    def result(self) -> Result:
        """The result as far as it is there."""
        return Result(self.metrics, dict(self.summary), self.record.directory.path)

    def hand_over(self, lines: Display) -> Result:
        """Show and return the result as far as it is there; the rest goes on beside another run, and shows `lines`.

        The time of the run ends here: that of the rest would depend on what goes on beside it.
        """
        clock = self.record.clock
        clock.seconds["total"] = clock.so_far()
        notes = plain_without_secrets([*self.config.notes, *self.record.notes])
        shown = {**self.summary, **self._where(), "seconds": clock.rounded(), "notes": notes}
        shown.pop("status")
        self.record.display.summary(shown)
        self.record.display = lines
        return self.result()

    def _where(self) -> dict[str, str]:
        """Where the run is in MLflow."""
        tracker = self.record.tracker
        return {
            "mlflow_run_id": tracker.run_id,
            "mlflow_experiment_id": tracker.experiment_id,
            "mlflow_page": links.run_page(tracker.uri, tracker.experiment_id, tracker.run_id),
            "mlflow_uri": tracker.uri,
        }

    def carry_out(self, signals: Signals | None = None, draw: Draw | None = None) -> Result:
        """Draw, send, write the summary of a finished run, and record how the run ended, even after an error.

        signals: those of a run that the caller waits for.  draw: draws the figures; None: they are drawn here.
        """
        signals = signals or Signals()  # which, unless it is entered, hears nothing
        with self.owned:
            try:
                self._finish(signals, draw)
            except BaseException as error:
                signals.ending = True
                self.record.end(error, self.hint)
                raise
        return self.result()

    def _finish(self, signals: Signals, draw: Draw | None) -> None:
        record, directory, tracker = self.record, self.record.directory, self.record.tracker
        seconds = dict(record.clock.seconds)
        with record.clock.timed("track"), signals.held():
            if tracker.uri != "none":
                record.note(*self._log_files())  # which MLflow's process copies while the figures are drawn
            record.note(*self._draw(draw))
            for path in sorted(directory.figures.glob("*.png")):
                tracker.log_figure(path)
            problems = tracker.problems  # when all of that has been done; a store that was away has an id by now
        if "total" in seconds:  # beside another run
            record.clock.seconds = seconds
        else:
            record.clock.seconds["total"] = record.clock.so_far()
        self.summary |= {
            "status": "FINISHED",
            "seconds": record.clock.rounded(),
            **self._where(),
            "notes": plain_without_secrets([*self.config.notes, *record.notes, *problems]),
        }
        signals.check()
        signals.ending = True  # from the summary on, the run is a finished one
        directory.write_json(SUMMARY, self.summary)
        tracker.describe(
            description(self.config, self.prepared, directory.path, self.summary), result_tags(self.summary)
        )
        tracker.log_artifact(directory.path / SUMMARY)
        record.display.summary(self.summary)
        record.end(None)
        directory.remove_model_folder()

    def _log_files(self) -> list[str]:
        """Send the files of the run to MLflow, and the model in its form; returns what could not be made of them."""
        directory, tracker = self.record.directory, self.record.tracker
        for name in _FILES:
            if (directory.path / name).exists():
                tracker.log_artifact(directory.path / name)
        try:
            folder = write_for_mlflow(directory, self.module, self.prepared.dataset, self.example)
        except Exception as error:  # noqa: BLE001 - whatever a user's own module says to being pickled
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return [f"MLflow has the weights alone, and no model that it can load: {told}"]
        tracker.log_model(folder)
        return []

    def _draw(self, draw: Draw | None) -> list[str]:
        """Draw the figures; returns a message where the disk refused one, after which no other is drawn."""
        folder = self.record.directory.figures
        try:
            self.figures.draw(folder) if draw is None else draw(self.figures, folder)
        except OSError as error:
            return [f"{cannot_write(Path(error.filename or folder), error)}; the run goes on without figures"]
        return []
