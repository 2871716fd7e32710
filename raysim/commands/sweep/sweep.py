"""Many runs on one Ray: every combination of a grid, finished ones skipped, and a table over seeds at the end."""

import contextlib
import hashlib
import json
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from raysim.commands.sweep import table as sweep_table
from raysim.commands.sweep.grid import Cell, Grid, named, read_sweep
from raysim.config.schema import Config, Resources
from raysim.core.errors import ConfigError, RayLost, RunError, UserError
from raysim.core.files import write_atomic
from raysim.core.persistent import persistent_path
from raysim.core.records import Dataset
from raysim.core.signals import Signals
from raysim.engine.session import Session
from raysim.lifecycle import resume
from raysim.lifecycle.build import build_parts
from raysim.lifecycle.checkpoint import find_runs
from raysim.lifecycle.directory import RunDirectory
from raysim.lifecycle.prepare import load_dataset, prepare
from raysim.lifecycle.runner import run
from raysim.tracking.tracker import check_uri
from raysim.ui.display import Display, duration

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SweepResult:
    """runs: one row a cell.  table: one row a group, mean and sd over seeds.  failed: cell -> cause."""

    runs: "pd.DataFrame"
    table: "pd.DataFrame"
    directory: Path
    failed: dict[str, str]

    def check(self) -> None:
        """Raise RunError that names the cells that failed, if any did."""
        if self.failed:
            causes = "".join(f"\n  - {cell}: {cause}" for cell, cause in self.failed.items())
            raise RunError(f"{len(self.failed)} of {len(self.runs)} runs failed; start it again to retry them:{causes}")


def sweep(file: str | Path, overrides: Iterable[str] = ()) -> SweepResult:
    """Run every combination of a sweep file, one after another on one Ray.

    overrides: dotted keys that change the base, `grid.KEY=[...]` one axis.
    Cells whose run is finished (same configuration, same rounds, in output.dir) are not run again; interrupted ones go
    on from their last checkpoint.  A cell that fails is recorded and the others go on.
    Raises ConfigError or UserError, before Ray starts, for input that cannot work in any cell.
    """
    with Display() as display:
        display.line(f"raysim: reading {file}")
        grid = read_sweep(file, overrides)
        splits = _Splits()
        images = _check(grid, splits)
        directory = _directory(grid)
        write_atomic(directory / "sweep.json", json.dumps({"runs": len(grid.cells)}).encode())
        work = _Sweep(grid, directory, display, splits)
        for note in [*grid.notes, *splits.notes]:
            display.line(f"note: {note}")
        done = sum(_finished(cell.config) is not None for cell in grid.cells)
        display.line(
            f"{len(grid.cells)} runs, {done} of them finished before; {images:,} synthetic images in all, those that "
            f"runs share counted each time; results in {directory}"
        )
        work.all_cells()
        return work.result()


@dataclass
class _Sweep:
    """The state of a sweep that is running.  rows: one per cell that has ended, in any way."""

    grid: Grid
    directory: Path
    display: Display
    splits: "_Splits"
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def all_cells(self) -> None:
        """Run what is left, on one Ray that is started here unless there is one."""
        with Signals() as signals, contextlib.ExitStack() as stack:
            began, ran, session = time.monotonic(), 0, None
            for i, cell in enumerate(self.grid.cells, 1):
                finished = _finished(cell.config)
                where = f"[{i}/{len(self.grid.cells)}] {cell.name}"
                if finished is not None:
                    self.display.line(f"{where}: finished before, in {finished.path.name}")
                else:
                    pace = f", about {duration((time.monotonic() - began) / ran * self._left(i))} left" if ran else ""
                    self.display.line(f"\n{where}{pace}")
                    if session is None:
                        widest = _widest([c.config.resources for c in self.grid.cells])
                        session = stack.enter_context(Session(widest))
                        signals.listen()  # Ray takes SIGTERM for itself when it starts
                    finished, ran = self._run(cell, session), ran + 1
                self._record(cell, finished)

    def _left(self, i: int) -> int:
        return sum(_finished(cell.config) is None for cell in self.grid.cells[i - 1 :])

    def _run(self, cell: Cell, session: Session) -> RunDirectory | None:
        """The finished run of a cell, or None if it failed."""
        path = _write_cell(self.directory, cell)
        outcome = _Outcome()
        with outcome:
            dataset = self.splits.of(cell.config)
            earlier = _to_resume(cell.config)
            if earlier is not None:
                self.display.line(f"goes on with {earlier.path.name}, which has {resume.rounds_done(earlier)} rounds")
            result = run(path, resume=earlier is not None, session=session, dataset=dataset)
            return RunDirectory(result.directory)
        self.failed[cell.name] = outcome.cause
        path.with_suffix(".error.txt").write_text(outcome.trace, encoding="utf-8")
        self.display.line(f"{cell.name} failed: {outcome.cause}")
        return None

    def _record(self, cell: Cell, finished: RunDirectory | None) -> None:
        """Add the row of a cell, and write the files anew: what is done is never lost."""
        cause = self.failed.get(cell.name, "")
        self.rows.append(sweep_table.row(cell, finished, cause, self.grid.target_accuracy))
        sweep_table.write(self.directory, self.rows, self.grid.target_accuracy)

    def result(self) -> SweepResult:
        runs, table = sweep_table.frames(self.rows, self.grid.target_accuracy)
        text = (self.directory / "table.txt").read_text(encoding="utf-8")
        self.display.line(f"\n{text}")
        return SweepResult(runs, table, self.directory, self.failed)


class _Outcome:
    """Keeps what a run ended with instead of letting it end the sweep; interrupts pass.

    The one place where every kind of error is caught: it is shown, written to a file, and the sweep fails in the end.
    """

    cause = ""
    trace = ""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> Literal[True] | None:
        if not isinstance(error, Exception) or isinstance(error, RayLost):
            return None
        is_plain = isinstance(error, UserError | RunError)
        self.cause = " ".join((str(error) if is_plain else f"{type(error).__name__}: {error}").split())
        self.trace = "".join(traceback.format_exception(error))
        return True


class _Splits:
    """The data sets of a sweep, each loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Dataset] = {}
        self.notes: list[str] = []

    def of(self, config: Config) -> Dataset:
        """The data set of a cell."""
        key = json.dumps(config.data.model_dump(exclude={"augment"}), sort_keys=True)
        if key not in self._loaded:
            self._loaded[key] = load_dataset(config, self.notes)
        return self._loaded[key]


def _check(grid: Grid, splits: _Splits) -> int:
    """Everything that can be known before Ray starts, for every cell; returns the images of all quotas together."""
    for uri in {cell.config.tracking.uri for cell in grid.cells}:
        check_uri(uri)
    images = 0
    found: dict[str, list[str]] = {}
    for cell in grid.cells:
        try:
            prepared = prepare(cell.config, splits.of(cell.config))
            build_parts(cell.config, prepared)
            images += int(prepared.quota_KC.sum())
        except UserError as error:
            found.setdefault(str(error), []).append(cell.name)
    if found:
        raise ConfigError([f"{problem} [{named(cells)}]" for problem, cells in found.items()], f"the sweep {grid.name}")
    return images


def _directory(grid: Grid) -> Path:
    """The folder of this sweep: the same whenever the same cells are run."""
    cells = [[cell.name, cell.config.hash(), cell.config.rounds] for cell in grid.cells]
    digest = hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:8]
    path = persistent_path(grid.cells[0].config.output.dir) / f"sweep-{grid.name}-{digest}"
    try:
        (path / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output.dir: {path} cannot be made ({error.strerror}); name a folder that can") from error
    return path


def _write_cell(directory: Path, cell: Cell) -> Path:
    """The configuration of a cell as a file, which `raysim run` takes too; its name becomes that of the run."""
    path = directory / "cells" / f"{cell.slug}.yaml"
    write_atomic(path, yaml.safe_dump(cell.config.resolved(), sort_keys=False).encode())
    return path


def _runs(config: Config) -> list[RunDirectory]:
    root = persistent_path(config.output.dir)
    return [RunDirectory(path) for path in find_runs(root, config.hash())]


def _finished(config: Config) -> RunDirectory | None:
    """The newest run of this configuration that has ended after exactly these rounds."""
    for found in _runs(config):
        if resume.is_finished(found, config.rounds) and not resume.is_finished(found, config.rounds + 1):
            return found
    return None


def _to_resume(config: Config) -> RunDirectory | None:
    """The newest run of this configuration, unless it has gone beyond the rounds asked for."""
    newest = next(iter(_runs(config)), None)
    return newest if newest is not None and resume.rounds_done(newest) <= config.rounds else None


def _widest(resources: list[Resources]) -> Resources:
    """The resources of the cell that needs most workers: a Ray started for it has room for all."""
    return max(resources, key=lambda r: r.workers if isinstance(r.workers, int) else 0)
