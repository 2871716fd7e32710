"""The page of a sweep in MLflow: a run above those of its cells, with the table and the curves."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raysim.commands.sweep.grid import Cell, Grid, short_groups
from raysim.core.errors import DiskError
from raysim.core.files import disk_errors
from raysim.core.plain import PlainDict
from raysim.lifecycle.description import Origin
from raysim.lifecycle.directory import RunDirectory
from raysim.tracking import links
from raysim.tracking.about import About
from raysim.tracking.process import MlflowProcess, start_tracker
from raysim.tracking.tracker import NullTracker, Status
from raysim.ui.comparison_plots import Curves, accuracy_curves
from raysim.ui.display import ui_command

FILES = ("table.csv", "runs.csv", "table.txt", "sweep.json")


@dataclass
class SweepPage:
    """The run of a sweep in MLflow, begun before the cells, so that they can name it, and ended after them.

    tracker: writes it; None where there is none, as without a store.
    """

    grid: Grid
    directory: Path
    mlflow: MlflowProcess | None
    uri: str
    experiment: str
    names: Mapping[str, str]
    tracker: NullTracker | None = None

    @classmethod
    def open(cls, grid: Grid, directory: Path, mlflow: MlflowProcess | None) -> "SweepPage":
        """Begin the run of a sweep, or go on with the one that its folder names; UserError for a store that fails.

        A sweep whose cells write to several stores or experiments has none.
        """
        stores = {(cell.config.tracking.uri, cell.config.tracking.experiment) for cell in grid.cells}
        uri, experiment = stores.pop() if len(stores) == 1 else ("none", "")
        page = cls(grid, directory, mlflow, uri, experiment, short_groups(grid.cells))
        if uri != "none":
            page.tracker = page._begin(_before(directory) or None)
        return page

    def kept(self) -> PlainDict:
        """What sweep.json keeps of it."""
        if self.tracker is None or not self.tracker.run_id:
            return {}
        at = self.tracker
        return {"mlflow_run_id": at.run_id, "mlflow_experiment_id": at.experiment_id, "mlflow_uri": at.uri}

    def origin(self, cell: Cell) -> Origin:
        """What the run of a cell says of where it comes from."""
        method = self.names[cell.group]
        name = f"{method}, seed {cell.config.seed}"
        above = "" if self.tracker is None else self.tracker.run_id
        return Origin(f"{self.grid.name}.yaml", self.grid.name, above, name, method)

    def end(
        self, tables: str, failed: Mapping[str, str], finished: Mapping[str, RunDirectory],
        say: Callable[[str], object],
    ) -> None:
        """Send the table and the curves, adopt the cells that were finished before, and end the run.

        tables: of what was found, in Markdown.  failed, finished: the causes and the runs, by the name of a cell.
        """
        tracker = self.tracker
        if tracker is None or not tracker.run_id:
            return
        for name in FILES:
            if (self.directory / name).is_file():
                tracker.log_artifact(self.directory / name)
        with contextlib.suppress(DiskError), disk_errors(self.directory / "figures"):
            self._draw(finished)
        for figure in sorted((self.directory / "figures").glob("*.png")):
            tracker.log_figure(figure)
        summaries = [run.summary() or {} for run in finished.values()]
        tracker.adopt(s["mlflow_run_id"] for s in summaries if s.get("mlflow_uri") == tracker.uri)
        tracker.describe(f"{self._heading()}\n\n{tables}", {})
        causes = "; ".join(f"{cell}: {cause}" for cell, cause in failed.items())
        self._finish("FAILED" if failed else "FINISHED", causes)
        for problem in tracker.problems:
            say(f"warning: {problem}")
        say(f"MLflow    {links.runs_page(tracker.uri, tracker.experiment_id)}")
        if not tracker.uri.startswith("http"):
            say(f"          which this serves: {ui_command(self.directory)}")

    def abandon(self, error: BaseException) -> None:
        """End the run of a sweep that an error, or an interrupt, has ended."""
        interrupted = isinstance(error, KeyboardInterrupt)
        message = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
        self._finish("KILLED" if interrupted else "FAILED", message)

    def _finish(self, status: Status, message: str) -> None:
        if self.tracker is not None:
            self.tracker.finish(status, message)
            self.tracker = None

    def _begin(self, run_id: str | None) -> NullTracker:
        about = About(
            f"{self._heading()}, which goes on", f"{self.grid.name}.yaml", {"sweep": self.grid.name, "method": "sweep"}
        )
        return start_tracker(
            self.mlflow, self.uri, self.experiment, f"sweep {self.grid.name}", {}, {}, run_id, self.directory, about
        )

    def _heading(self) -> str:
        return f"**Sweep {self.grid.name}**: {len(self.grid.cells)} runs of {len(self.names)} methods"

    def _draw(self, cells: Mapping[str, RunDirectory]) -> None:
        """Draw accuracy over rounds, a curve for each method."""
        curves: dict[str, Curves] = {}
        for cell in self.grid.cells:
            known = curves.get(self.names[cell.group], Curves([], 0))
            metrics = [cells[cell.name].metrics()[["round", "accuracy"]].dropna()] if cell.name in cells else []
            curves[self.names[cell.group]] = Curves([*known.runs, *metrics], known.expected + 1)
        if cells:
            accuracy_curves({self.grid.name: curves}, self.directory / "figures" / "accuracy.png")


def _before(directory: Path) -> str:
    """The run of an earlier start of the same sweep; empty without one."""
    try:
        return str(json.loads((directory / "sweep.json").read_text(encoding="utf-8")).get("mlflow_run_id", ""))
    except (OSError, ValueError, AttributeError):
        return ""
