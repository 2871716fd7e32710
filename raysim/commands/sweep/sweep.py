"""Many runs on one Ray: every combination of a grid, finished ones skipped, and a table over seeds at the end.

Ray and torch are imported where a cell is left to run: a sweep that is finished shows its table without them.
"""

import contextlib
import functools
import hashlib
import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Literal

import yaml

from raysim.commands.report.tables import chosen_on
from raysim.commands.sweep import table as sweep_table
from raysim.commands.sweep.compare import Comparison
from raysim.commands.sweep.endings import Endings
from raysim.commands.sweep.grid import Cell, Grid, named, read_sweep, running_order
from raysim.commands.sweep.page import SweepPage
from raysim.config.plugin_guard import blaming
from raysim.config.schema import PLUGIN_SECTIONS, Config, Resources, Tracking
from raysim.core.errors import ConfigError, RayLost, RunError, UserError, described
from raysim.core.files import write_file
from raysim.core.locks import FolderLock
from raysim.core.persistent import persistent_path
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.secrets import plain_without_secrets, without_secrets
from raysim.core.signals import Signals
from raysim.engine.versions import installed
from raysim.lifecycle import resume
from raysim.lifecycle.directory import RunDirectory, folder_name
from raysim.lifecycle.figure_process import FigureProcess
from raysim.lifecycle.find_runs import RunIndex
from raysim.lifecycle.identity import Identity, code_digests
from raysim.lifecycle.inputs import Inputs
from raysim.lifecycle.mirror import Mirror, check_mirror, gather
from raysim.lifecycle.prepare import Prepared
from raysim.lifecycle.prepare import named as named_plugins
from raysim.lifecycle.result import Result
from raysim.tracking.process import MlflowProcess
from raysim.tracking.tracker import check_uri
from raysim.ui.display import Display, Lines, duration

if TYPE_CHECKING:
    import pandas as pd

    from raysim.engine.background_start import BackgroundStart
    from raysim.engine.session import Session
    from raysim.lifecycle.conclusion import Conclusion


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    runs: one row per cell.  table: one row per group, with mean and sd over seeds.  directory: the folder of the sweep.
    failed: the cause by the name of each cell that failed.
    """

    runs: "pd.DataFrame"
    table: "pd.DataFrame"
    directory: Path
    failed: dict[str, str]

    def check(self) -> None:
        """Raise RunError that names the cells that failed, if any did."""
        if self.failed:
            causes = "".join(f"\n  - {cell}: {cause}" for cell, cause in self.failed.items())
            raise RunError(f"{len(self.failed)} of {len(self.runs)} runs failed; start it again to retry them:{causes}")


def run_sweep(
    file: str | Path,
    overrides: Iterable[str] = (),
    mlflow: MlflowProcess | None = None,
    session: "Session | None" = None,
    resources: PlainMapping = MappingProxyType({}),
) -> SweepResult:
    """Run a sweep; arguments and errors are those of `commands.sweep.entry.sweep`.

    mlflow: the process that writes the MLflow runs; None: this process.  session: an open one; None: one for the sweep.
    resources: values of that section for keys that nothing sets.
    """
    with Display() as display:
        display.line(f"raysim: reading {file}")
        grid = read_sweep(file, overrides, display.line, resources)
        for uri in {cell.config.tracking.uri for cell in grid.cells}:
            check_uri(uri)
        inputs = _Inputs()
        output = grid.cells[0].config.output
        check_mirror(output.mirror, output.dir)
        index = gather(output, {cell.config_hash for cell in grid.cells}, display.line)
        tasks = _check(grid, inputs, index)
        directory = _directory(grid)
        with FolderLock(directory):
            for note in [*grid.notes, *inputs.notes, *_differences(tasks)]:
                display.line(f"note: {note}")
            if grid.compare:
                display.line(f"compare: {', '.join(grid.compare)} in all cells on the same clients")
            done = sum(task.finished is not None for task in tasks)
            images = sum(task.images for task in tasks)
            display.line(
                f"{len(tasks)} runs, {done} of them finished before; {images:,} synthetic images in all, those that "
                f"runs share counted each time; results in {directory}"
            )
            mirror = None if output.mirror is None else Mirror(output.mirror, directory)
            with contextlib.ExitStack() as stack:
                start = _start([task.cell for task in tasks if task.finished is None], session, stack)
                page = SweepPage.open(grid, directory, mlflow)
                write_file(directory / "sweep.json", json.dumps({**_asked(grid), **page.kept()}).encode())
                work = _Sweep(grid, directory, display, inputs, mlflow, page, mirror)
                try:
                    work.all_cells(tasks, start)
                    work.tell()
                    result = work.result()
                    tables = sweep_table.markdown(result.table, grid.target_accuracy, chosen_on(result.runs))
                    page.end(tables, result.failed, work.finished, display.line)
                except BaseException as error:
                    page.abandon(error)
                    raise
                finally:
                    work.tell()
                    work.finish_mirror()
            return result


def _start(cells: Sequence[Cell], given: "Session | None", stack: contextlib.ExitStack) -> "BackgroundStart | None":
    """Begin to start Ray with the workers of the first of the cells, and room for all; None for no cells.

    given: a session that is open.  stack: ends what is started here.
    """
    if not cells:
        return None
    from raysim.engine.background_start import BackgroundStart

    signals = stack.enter_context(Signals())
    start = stack.enter_context(BackgroundStart(signals, given))
    start.begin(_widest([cell.config.resources for cell in cells]), workers=cells[0].config.resources)
    return start


@dataclass
class _Task:
    """A cell, and the run of it that exists: a finished one to reuse, or an interrupted one to go on with, or neither.

    images: how many synthetic ones it asks for.  stale: what changed since a finished run, which is made again.
    other_code: differences of code and versions from a finished run that is reused all the same.
    """

    cell: Cell
    images: int
    finished: RunDirectory | None = None
    interrupted: RunDirectory | None = None
    stale: list[str] = field(default_factory=list)
    other_code: list[str] = field(default_factory=list)


@dataclass
class _Sweep:
    """The state of a sweep that is running.

    page: its run in MLflow.  mirror: the copy of its folder at another place, if there is one.  rows: one per cell that
    has ended, in any way.  finished: the runs of cells.  lines: what the ends of runs have to say, which is shown when
    no run shows its rounds.  lock: held by who changes what is found, the main thread or that of the ends.
    """

    grid: Grid
    directory: Path
    display: Display
    inputs: "_Inputs"
    mlflow: MlflowProcess | None
    page: SweepPage
    mirror: Mirror | None = None
    rows: dict[str, PlainDict] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    finished: dict[str, RunDirectory] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    figures: FigureProcess = field(default_factory=FigureProcess)
    endings: Endings = field(default_factory=Endings)

    def all_cells(self, tasks: Sequence[_Task], start: "BackgroundStart | None") -> None:
        """Run the cells that are not finished, on one Ray, the end of each beside the next.  start: of that Ray."""
        placed = [(place, tasks[i]) for place, i in enumerate(running_order([task.cell for task in tasks]), 1)]
        for place, task in placed:
            if task.finished is not None:
                self.display.line(f"{self._where(place, task)}: finished before, in {task.finished.path.name}")
                self._record(task.cell, task.finished)
        left = [(place, task) for place, task in placed if task.finished is None]
        self._write()
        if start is None:
            return
        session = start.session(_widest([task.cell.config.resources for _, task in left]))
        start.listen()
        began = time.monotonic()
        with self.figures, self.endings:
            for ran, (place, task) in enumerate(left):
                pace_s = (time.monotonic() - began) / ran if ran else 0.0
                pace = f", about {duration(pace_s * (len(left) - ran))} left" if ran else ""
                self.display.line(f"\n{self._where(place, task)}{pace}")
                self._run(task, session)
                self.endings.check()
            start.let_go()

    def _where(self, place: int, task: _Task) -> str:
        return f"[{place}/{len(self.grid.cells)}] {task.cell.name}"

    def _run(self, task: _Task, session: "Session") -> None:
        """Run a cell; what is left once its model is written is carried out while the next one runs."""
        from raysim.lifecycle.runner import run_experiment

        cell = task.cell
        earlier = task.interrupted
        path = self.directory / "cells" / f"{cell.slug}.yaml"
        plain = _plain(cell)
        write_file(path, yaml.safe_dump(plain_without_secrets(plain), sort_keys=False).encode())
        outcome = _Outcome()
        result = None
        with outcome:
            if earlier is not None:
                self.display.line(f"goes on with {earlier.path.name}, which has {resume.rounds_done(earlier)} rounds")
            result = run_experiment(
                plain,
                name=path.stem,
                resume=earlier is not None,
                session=session,
                inputs=self.inputs,
                mlflow=self.mlflow,
                origin=self.page.origin(cell),
                conclude=functools.partial(self._conclude_later, cell),
            )
        if result is None:
            self._failed(cell, outcome, self.display.line)
        elif result.summary["status"] == "FINISHED":  # by another process, since the sweep began
            self._ended(cell, RunDirectory(result.directory))

    def _conclude_later(self, cell: Cell, conclusion: "Conclusion") -> Result:
        """Have the end of a run carried out beside the next run, once that of the run before is over."""
        result = conclusion.hand_over(Lines(f"{cell.name}: ", self.lines))
        self.endings.add(functools.partial(self._conclude, cell, conclusion))
        self.tell()
        return result

    def _conclude(self, cell: Cell, conclusion: "Conclusion") -> None:
        outcome = _Outcome()
        result = None
        with outcome:
            result = conclusion.carry_out(draw=self.figures.draw)
        if result is None:
            self._failed(cell, outcome, self.lines.append)
        else:
            self._ended(cell, conclusion.record.directory)

    def tell(self) -> None:
        """Show what the ends of earlier runs had to say."""
        told = self.lines[:]
        del self.lines[: len(told)]
        for line in told:
            self.display.line(line)

    def _failed(self, cell: Cell, outcome: "_Outcome", say: Callable[[str], object]) -> None:
        """Take in a cell that failed."""
        say(f"{cell.name} failed: {outcome.cause}")
        write_file(self.directory / "cells" / f"{cell.slug}.error.txt", outcome.trace.encode())
        with self.lock:
            self.failed[cell.name] = outcome.cause
        self._ended(cell, None)

    def _ended(self, cell: Cell, finished: RunDirectory | None) -> None:
        """Take in a cell that has ended, in any way, and write the tables."""
        with self.lock:
            self._record(cell, finished)
            self._write()

    def _record(self, cell: Cell, finished: RunDirectory | None) -> None:
        """Add the row of a cell."""
        if finished is not None:
            self.finished[cell.name] = finished
        cause = self.failed.get(cell.name, "")
        self.rows[cell.name] = sweep_table.row(cell, finished, cause, self.grid.target_accuracy)

    def _write(self) -> None:
        """Write the files again, with cells in the order of the grid, so that finished cells are never lost."""
        if self.rows:
            sweep_table.write(self.directory, self._rows(), self.grid.target_accuracy, self._cells())
            if self.mirror is not None:
                self.mirror.update()

    def finish_mirror(self) -> None:
        """Wait for the files of the sweep to reach the mirror; what is missing there is a warning."""
        if self.mirror is not None:
            self.mirror.finish(self.display.line)
            if self.mirror.problem:
                self.display.line(f"warning: {self.mirror.problem}")

    def _rows(self) -> list[PlainDict]:
        return [self.rows[cell.name] for cell in self.grid.cells if cell.name in self.rows]

    def _cells(self) -> Counter[str]:
        """How many runs each group is to have."""
        return Counter(cell.group for cell in self.grid.cells)

    def result(self) -> SweepResult:
        """Show the table, and return the result."""
        runs, table = sweep_table.frames(self._rows(), self.grid.target_accuracy, self._cells())
        text = (self.directory / "table.txt").read_text(encoding="utf-8")
        self.display.line(f"\n{text}")
        return SweepResult(runs, table, self.directory, self.failed)


class _Outcome:
    """A context that keeps the error of a run, so that it does not end the sweep; interrupts are not caught.

    It is the one place where every kind of error is caught: the error is shown and written to a file, and the sweep
    fails at its end.
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
        cause = str(error) if is_plain else described(error)
        self.cause = without_secrets(" ".join(cause.split()))
        self.trace = without_secrets("".join(traceback.format_exception(error)))
        return True


class _Inputs(Inputs):
    """The inputs of the cells of a sweep, with what identifies them: generators and source files, each read once."""

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[tuple[str, str], str] = {}
        self._models: dict[tuple[str, str], str] = {}
        self._code: dict[frozenset[str], dict[str, str]] = {}
        self.versions = installed()

    def identity(self, cell: Cell, prepared: Prepared) -> Identity:
        """The identity of the inputs that a run of a cell would have now."""
        config = cell.config
        names = frozenset(getattr(config, section).name for section in PLUGIN_SECTIONS)
        if names not in self._code:
            self._code[names] = code_digests(config)
        return Identity(
            config=cell.config_hash,
            partition=prepared.partition.sha256(),
            data=self.digest(config),
            generator=self._generator(config, prepared) if prepared.makes_images else "",
            model=self._fixed(config, prepared) if ":" in config.model.name else "",
            code=self._code[names],
            versions=self.versions,
            device="",
        )

    def _generator(self, config: Config, prepared: Prepared) -> str:
        from raysim.lifecycle.build import build_generator, generator_fingerprint

        key = json.dumps(config.generator.model_dump(), sort_keys=True), self.key(config)
        if key not in self._generators:
            built = build_generator(config, prepared.dataset)
            self._generators[key] = generator_fingerprint(config, prepared.dataset, built)
        return self._generators[key]

    def _fixed(self, config: Config, prepared: Prepared) -> str:
        """Digest of the parameters that a model of the user's own does not train; those of raysim train all."""
        from raysim.lifecycle.build import initial_model

        key = json.dumps([config.model.model_dump(), config.model_seed], sort_keys=True), self.key(config)
        if key not in self._models:
            self._models[key] = initial_model(config, prepared).fixed_sha256()
        return self._models[key]


def _check(grid: Grid, inputs: _Inputs, index: RunIndex) -> list[_Task]:
    """Find out for every cell, before Ray starts, what is left to do.

    Raises ConfigError for cells that cannot work, and where cells differ in what `compare` asks to be equal.
    """
    tasks: list[_Task] = []
    found: dict[str, list[str]] = {}
    comparison = Comparison(grid.compare)
    for cell in grid.cells:
        try:
            prepared = inputs.prepare(cell.config)
            comparison.add(cell, prepared)
            with blaming(named_plugins(cell.config)):
                task = _task(cell, prepared, inputs, index)
            if task.finished is None:
                from raysim.lifecycle.build import build_components

                build_components(cell.config, prepared)
            tasks.append(task)
        except UserError as error:
            found.setdefault(str(error), []).append(cell.name)
    problems = [f"{problem} [{named(cells)}]" for problem, cells in found.items()] + comparison.problems()
    if problems:
        raise ConfigError(problems, f"the sweep {grid.name}")
    return tasks


def _task(cell: Cell, prepared: Prepared, inputs: _Inputs, index: RunIndex) -> _Task:
    """Search the runs of a cell's configuration, the newest first, for one to reuse or to go on with."""
    task = _Task(cell, prepared.images)
    rounds = cell.config.rounds
    identity = inputs.identity(cell, prepared)
    for run in index.of(identity.config):
        try:
            before = run.identity()
            done = resume.rounds_done(run)
            is_finished = resume.is_finished(run, rounds) and not resume.is_finished(run, rounds + 1)
        except UserError as error:
            inputs.notes.append(f"{error}; the run {run.path.name} is passed over")
            continue
        changed = identity.changed_inputs(before)
        code = identity.changed_code(before)
        changed += [f"the code of {module}" for module in identity.changed_plugins(before)]
        if is_finished:
            if not changed:
                task.finished = run
                task.other_code = [*code, *before.get("accepted_changes", [])]
                task.stale = []  # of newer runs, in whose place this one is taken
                return task
            task.stale = changed
        elif task.interrupted is None and not changed and not code and done <= rounds:
            task.interrupted = run
    return task


def _differences(tasks: Sequence[_Task]) -> list[str]:
    """Messages about finished runs that differ from what a new run would be."""
    notes = []
    for stale, names in _grouped(tasks, lambda task: task.stale).items():
        notes.append(f"{stale} changed since a finished run was made, which is therefore made again: {names}")
    for code, names in _grouped(tasks, lambda task: task.other_code).items():
        notes.append(f"{code}: finished before that change, and kept as they are: {names}")
    return notes


def _grouped(tasks: Sequence[_Task], texts: Callable[[_Task], list[str]]) -> dict[str, str]:
    groups: dict[str, list[str]] = {}
    for task in tasks:
        if texts(task):
            groups.setdefault(" and ".join(texts(task)), []).append(task.cell.name)
    return {text: named(cells) for text, cells in groups.items()}


def _asked(grid: Grid) -> PlainDict:
    """What the sweep is to do, for reports while it is not done: the content of sweep.json."""
    cells = [sweep_table.labels(cell) for cell in grid.cells]
    return {"runs": len(cells), "target_accuracy": grid.target_accuracy, "cells": cells}


def _directory(grid: Grid) -> Path:
    """Make the folder of this sweep, which is the same whenever the same cells are run."""
    cells = [[cell.name, cell.config_hash, cell.config.rounds] for cell in grid.cells]
    digest = hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:8]
    path = persistent_path(grid.cells[0].config.output.dir) / f"sweep-{folder_name(grid.name)}-{digest}"
    try:
        (path / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"output.dir: {path} cannot be made ({error.strerror})"
        raise UserError(f"{told}; free space there, or name another folder") from error
    return path


def _plain(cell: Cell) -> PlainDict:
    """The configuration of a cell as plain data."""
    plain = cell.config.resolved()
    if cell.config.tracking.uri == "none":
        # Nothing reads the experiment, which the sweep has named; kept, each cell would report it as without effect.
        plain["tracking"]["experiment"] = Tracking().experiment
    return plain


def _widest(resources: list[Resources]) -> Resources:
    """The resources of the cell that needs the most workers, so that a Ray started for it has room for all cells."""
    return max(resources, key=lambda r: r.workers if isinstance(r.workers, int) else 0)
