"""`raysim report`: the results of a run, of a sweep, or of several, shown and written to their folder."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.report import figures, statistics, tables
from raysim.commands.report.page import page
from raysim.commands.report.results import (
    RUNS,
    Results,
    default_reference,
    named,
    read_results,
    result_keys,
    why_unfinished,
)
from raysim.core.errors import DiskError, UserError
from raysim.core.files import disk_errors, write_file
from raysim.core.signals import stoppable
from raysim.core.validation import nearest
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable
from raysim.ui.display import Display, summary_rows
from raysim.ui.tables import Table

if TYPE_CHECKING:
    import pandas as pd

FORMS = ("text", "markdown", "latex", "csv")
PAGE = "report.html"
_ENDINGS = {"text": "txt", "markdown": "md", "latex": "tex"}


@stoppable
def report(
    folders: str | Path | Sequence[str | Path],
    against: str | None = None,
    csv: str | None = None,
    *,
    target: float | None = None,
    form: str = "text",
    output: str | Path | None = None,
) -> list[Path]:
    """Show the results in folders of runs and sweeps, and write tables, figures and a page; returns what was written.

    folders: of one run, of one sweep, of several of them for one table, or a folder that holds such, of which the
    newest is taken.  against: the label of the method that the others are compared with, seed by seed; the first one
    by default.  csv: a file for one row per run of a sweep, without what belongs to this machine, to be kept with the
    project.  target: an accuracy whose cost is tabulated; by default the sweep's.  form: of the tables on the
    terminal: text, markdown, latex or csv.  output: where to write; by default the folder itself, or, for several, one
    beside the first.

    Raises UserError for a folder that is neither, is damaged, or has nothing finished, and for a label that no run has.
    """
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    if form not in FORMS:
        raise UserError(f"--format = {form}: no such format{nearest(form, FORMS)} ({', '.join(FORMS)})")
    if target is not None and not 0 < target <= 1:
        raise UserError(f"--target = {target:g}: must be greater than 0 and at most 1, such as 0.9")
    with Display() as display:
        quiet = form != "text"
        writer = _Writer(display, quiet=quiet)
        paths = [_chosen(Path(path).expanduser(), writer) for path in given]
        if csv is not None:
            if len(paths) > 1 or not (paths[0] / RUNS).is_file():
                raise UserError(f"--csv = {csv}: the runs of one sweep make such a table; {paths[0]} is one run")
            write_csv(paths[0], Path(csv).expanduser())
        if len(paths) == 1 and not (paths[0] / RUNS).is_file():
            if against is not None:
                raise UserError(f"--against = {against}: only several runs can be compared; {paths[0]} is one run")
            return _one_run(paths[0], Path(output or paths[0]).expanduser(), target, form, writer)
        results = read_results(paths, against, target)
        folder = paths[0] if len(paths) == 1 else paths[0].parent / f"report-{results.name[:150]}"
        return _comparison(results, against, Path(output or folder).expanduser(), form, writer)


def write_csv(folder: Path, path: Path) -> None:
    """Write a row per run of a sweep: its results, the hash of its configuration and that of the code that made it."""
    import pandas as pd

    with readable(folder / RUNS):
        runs = pd.read_csv(folder / RUNS, dtype={"group": str})
        names = runs["run_directory"] if "run_directory" in runs else [""] * len(runs)
        runs["code"] = [_code(folder.parent / Path(str(name)).name) for name in names]
    mine = [name for name in ("run_directory", "mlflow_run_id", "error") if name in runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, runs.drop(columns=mine).to_csv(index=False).encode())


def _code(run: Path) -> str:
    """The hash of raysim's own code that made a run; empty where its folder is gone."""
    if not (run / "run.json").is_file():
        return ""
    return str(RunDirectory(run).read_json("run.json").get("code", {}).get("raysim", ""))


@dataclass
class _Writer:
    """Says and writes; a file that the disk refuses costs that file alone, since the report is on the terminal.

    quiet: say nothing but tables, for output that another program reads.
    """

    display: Display
    quiet: bool
    written: list[Path] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Say something of the report, unless quiet."""
        if not self.quiet:
            self.display.line(text)

    def write(self, path: Path, text: str) -> None:
        """Write a text file; a disk that refuses it is a warning."""
        with self.warned():
            write_file(path, text.encode(), "--output")

    @contextlib.contextmanager
    def warned(self) -> Iterator[None]:
        """A context in which a file that cannot be written is a warning."""
        try:
            yield
        except DiskError as error:
            self.display.line(f"warning: {error}")


def _chosen(path: Path, writer: _Writer) -> Path:
    """The folder itself, if it is that of a run or a sweep; of one that holds such, the newest, which is named."""
    if (path / RUNS).is_file() or (path / "run.json").is_file():
        return path
    sweeps = sorted(file.parent for file in path.glob(f"*/{RUNS}"))
    runs = sorted(file.parent for file in path.glob("*/run.json"))
    if not sweeps and not runs:
        raise UserError(f"{path}: not the folder of a run or a sweep; they lie in output.dir, `runs` by default")
    done = [run for run in runs if _is_finished(run, writer)]
    ended = {**{sweep: sweep / RUNS for sweep in sweeps}, **{run: run / SUMMARY for run in done}}
    open_ = [f"{run.name}{why_unfinished(run)}" for run in runs if run not in done]
    if open_:
        writer.say(f"note: {len(open_)} of {len(runs)} runs in {path} have not finished: {named(open_)}")
    if not ended:
        raise UserError(f"{path}: none of its {len(runs)} runs has finished")
    newest = max(ended, key=lambda folder: ended[folder].stat().st_mtime_ns)
    writer.say(f"{path} holds {len(sweeps)} sweeps and {len(runs)} runs; the newest: {newest}")
    return newest


def _is_finished(run: Path, writer: _Writer) -> bool:
    try:
        return RunDirectory(run).summary() is not None
    except UserError as error:
        writer.say(f"note: {error}")
        return False


def _one_run(folder: Path, output: Path, target: float | None, form: str, writer: _Writer) -> list[Path]:
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder}: not the folder of a run or a sweep; they lie in output.dir, `runs` by default")
    run = RunDirectory(folder)
    summary = run.summary()
    if summary is None:
        raise UserError(f"{folder}: this run has not finished{why_unfinished(folder)}; `--resume` goes on with it")
    results = read_results([folder], target=target)
    shown = _tables(results, None, None)
    with readable(folder / SUMMARY):
        if not writer.quiet:
            writer.display.summary(summary)
        facts = summary_rows(summary, blocks=True)
    if target is not None:
        writer.say(shown[1].text())
    if writer.quiet:
        _print(shown, results, form, writer)
    notes = [problem] if (problem := run.model_problem(summary)) else []
    drawn: list[Path] = []
    try:
        with writer.warned(), disk_errors(output / "figures"):
            drawn = figures.of_run(run, summary, output / "figures")
    except UserError as error:
        notes.append(f"{error}; its figures are not drawn")
    for note in notes:
        writer.say(f"warning: {note}")
    listings = []
    if (folder / "config.yaml").is_file():
        with readable(folder / "config.yaml"):
            listings = [("Configuration", (folder / "config.yaml").read_text(encoding="utf-8"))]
    return _finish(folder.name, results, notes, facts, shown, drawn, listings, output, writer)


def _comparison(results: Results, against: str | None, folder: Path, form: str, writer: _Writer) -> list[Path]:
    reference = against or default_reference(results)
    paired = None
    if reference is not None:
        paired = statistics.paired_differences(results.runs, reference, tables.ACCURACIES)
    shown = _tables(results, reference, paired)
    for table in shown:
        writer.say(table.text())
    if writer.quiet:
        _print(shown, results, form, writer)
    notes = list(dict.fromkeys([*results.notes, *tables.best_on_validation(results.finished)]))
    if paired is not None and (warning := tables.few_seeds(paired)):
        notes.append(warning)
    for note in notes:
        writer.say(f"note: {note}")
    told = len(notes)
    drawn: list[Path] = []
    with writer.warned(), disk_errors(folder / "figures"):
        drawn = figures.of_results(results, reference, folder / "figures", notes)
    notes = list(dict.fromkeys(notes))
    for note in notes[told:]:
        writer.say(f"note: {note}")
    writer.write(folder / "table.csv", tables.means_table(results).to_csv(index=False))
    if paired is not None:
        writer.write(folder / "paired.csv", paired.to_csv(index=False))
    return _finish(results.name, results, notes, [], shown, drawn, _keys(results), folder, writer)


def _tables(results: Results, reference: str | None, paired: "pd.DataFrame | None") -> list[Table]:
    """The tables in the order in which they are shown."""
    means = tables.means_table(results)
    chosen_on = tables.chosen_on(results.runs)
    shown = [tables.accuracy_table(means, chosen_on), tables.cost_table(means, results.target, chosen_on)]
    if results.runs["setting"].nunique() > 1 and results.runs["method"].nunique() > 1:
        shown.append(tables.rank_table(statistics.ranks(results.runs, tables.MAIN)))
    if paired is not None and reference is not None and len(paired):
        shown.append(tables.paired_table(paired, reference))
    return shown


def _print(shown: Sequence[Table], results: Results, form: str, writer: _Writer) -> None:
    if form == "csv":
        writer.display.line(tables.means_table(results).to_csv(index=False).rstrip())
    else:
        writer.display.line("\n".join(_drawn(table, form) for table in shown).rstrip())


def _drawn(table: Table, form: str) -> str:
    return {"text": table.text, "markdown": table.markdown, "latex": table.latex}[form]()


def _finish(
    title: str,
    results: Results,
    notes: Sequence[str],
    facts: Sequence[tuple[str, str]],
    shown: Sequence[Table],
    drawn: Sequence[Path],
    listings: Sequence[tuple[str, str]],
    folder: Path,
    writer: _Writer,
) -> list[Path]:
    """Write the tables and the page; returns figures, tables of text and the page."""
    written = [*drawn]
    for form, ending in _ENDINGS.items():
        writer.write(folder / f"table.{ending}", "\n".join(_drawn(table, form) for table in shown))
    finished = results.finished
    about = (
        f"{len(finished)} of {len(results.runs)} runs finished; made by raysim report on "
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    )
    html = page(
        f"raysim: {title}", about, warnings=notes, facts=facts, tables=shown, figures=drawn, listings=listings
    )
    writer.write(folder / PAGE, html)
    return [path for path in [*written, folder / PAGE] if path.is_file()]


def _keys(results: Results) -> list[tuple[str, str]]:
    """The keys that all runs share, for the page."""
    known = [keys for keys in map(result_keys, results.finished["folder"]) if keys]
    if not known:
        return []
    shared = {k: v for k, v in known[0].items() if all(keys.get(k) == v and k in keys for keys in known)}
    return [("Configuration that all runs share", "\n".join(f"{key}: {value}" for key, value in shared.items()))]
