"""How a run is shown to a person: a live bar on a terminal, plain lines in a log, and the summary at the end."""

import math
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from raysim.core.plain import PlainMapping
from raysim.core.secrets import plain_without_secrets, without_secrets
from raysim.ui.notebook import CellBar, in_notebook

if TYPE_CHECKING:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

WIDTH = 100
PLAIN_EVERY_S = 1.0
PHASES = (
    "prepare", "start", "allocate", "generate", "train", "dispatch", "aggregate", "evaluate", "quality", "track",
    "checkpoint",
)  # fmt: skip
BAR_WIDTH = 24
BARS = "▁▂▃▄▅▆▇█"


class Display:
    """Progress of a run, on a terminal as one live bar below the lines, elsewhere as lines of their own.

    stream: standard output by default.  live: whether to draw the bar; by default, if the stream is a terminal.
    A context manager; `close` stops the bar.
    """

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._stream: TextIO = _ClosableStream(stream or sys.stdout)  # type: ignore[assignment]
        capable = self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._live = capable if live is None else live
        self._cell = CellBar() if stream is None and live is None and in_notebook() else None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._began_s = self._shown_s = -math.inf
        self._done_before = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self, text: str) -> None:
        """Print a line at once, with secrets masked; the bar stays below it."""
        text = _encodable(without_secrets(text), self._stream)
        if self._stream.isatty():
            text = _wrapped(text, shutil.get_terminal_size().columns)
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def phase(self, name: str) -> None:
        """Begin a phase, whose name begins the bar, or the lines, from now on."""
        self.close()
        self._phase = name
        self._began_s = time.monotonic()
        self._shown_s = -math.inf
        self._done_before = -1

    def advance(self, done: int, total: int, unit: str = "") -> None:
        """Show that `done` of `total` are done, with the time left and the units per second at the pace so far."""
        now_s = time.monotonic()
        if self._done_before < 0:
            self._done_before = done
            self._began_s = now_s
        pace = (now_s - self._began_s) / max(1, done - self._done_before)
        eta_s = pace * (total - done) if done > self._done_before else None
        rate = f"{1 / pace:,.0f} {unit} a second" if unit and eta_s is not None and pace > 0 else ""
        self._show(done, total, [rate] if rate else [], eta_s)

    def round(self, round: int, rounds: int, metrics: Mapping[str, float], eta_s: float | None) -> None:
        """Show a finished round with its metrics, for instance {"accuracy": 0.95, "loss": 0.1}.  eta_s: time left."""
        self._show(round, rounds, [f"{name} {_number(value)}" for name, value in metrics.items()], eta_s)

    def summary(self, summary: PlainMapping) -> None:
        """Print the results of the run, given the content of summary.json; keys that are missing are left out."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        self.close()
        summary = plain_without_secrets(dict(summary))
        console = Console(file=self._stream, force_jupyter=False, markup=False, highlight=False, emoji=False)
        console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
        blocks = not _encodable(BARS, self._stream).startswith("?")
        console.print()
        console.rule(Text(_encodable(_title(summary), self._stream), style="bold"), characters="─" if blocks else "-")
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in summary_rows(summary, blocks):
            table.add_row(Text(label), Text(_encodable(value, self._stream)))
        with console.capture() as captured:
            console.print(table)
        self._stream.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
        # Whole lines, never folded, so that they can be copied.
        for label, value in _locations(summary):
            console.print(Text.assemble((f"{label:<10}", "cyan"), _encodable(value, self._stream)), soft_wrap=True)
        self._stream.flush()

    def close(self) -> None:
        """Stop the bar and leave the cursor on a line of its own; a bar that is not full is wiped away."""
        if self._progress is not None:
            self._progress.live.transient = not self._progress.finished
            self._progress.stop()
        self._progress = self._task = None
        if self._cell is not None:
            self._cell.stop()

    def _show(self, done: int, total: int, parts: list[str], eta_s: float | None) -> None:
        left = "" if eta_s is None or done >= total or not math.isfinite(eta_s) else f"{duration(eta_s)} left"
        if self._cell is not None:
            self._cell.show(self._phase, done, total, parts, left)
            return
        if self._live:
            self._draw(done, total, parts, left)
            return
        now_s = time.monotonic()
        if now_s - self._shown_s < PLAIN_EVERY_S and done < total:
            return
        self._shown_s = now_s
        self.line(", ".join(part for part in (f"{self._phase} {done:,}/{total:,}", *parts, left) if part))

    def _draw(self, done: int, total: int, parts: list[str], left: str) -> None:
        if self._progress is None or self._task is None:
            self._progress = _progress(self._stream)
            self._task = self._progress.add_task(self._phase, total=total, note="", parts=[], left="")
        parts, left = [_encodable(part, self._stream) for part in parts], _encodable(left, self._stream)
        self._progress.update(self._task, completed=done, total=total, parts=parts, left=left)
        self._progress.start()  # which does nothing once it has begun


class Lines(Display):
    """A display that keeps its lines instead of showing them, for what goes on beside that which is shown.

    before: begins each line.  kept: the list to which they are added, from whichever thread.
    """

    def __init__(self, before: str, kept: list[str]) -> None:
        super().__init__(live=False)
        self._before = before
        self._kept = kept

    def line(self, text: str) -> None:
        """Keep a line."""
        self._kept.append(f"{self._before}{text}")

    def summary(self, summary: PlainMapping) -> None:
        """Keep nothing: the results have been shown."""


def fitting(parts: Sequence[str], left: str, room: int) -> str:
    """The parts and the time left, two spaces apart, as far as they fit into so many columns.

    Those at the end go first, but the accuracy goes last of them, and the time left only after it.
    """
    kept = list(parts)
    while len("  ".join([*kept, left] if left else kept)) > room and kept:
        others = [part for part in kept if not part.startswith("accuracy")]
        kept.remove(others[-1] if others else kept[-1])
    text = "  ".join([*kept, left] if left else kept)
    return text if len(text) <= room else ""


class _ClosableStream:
    """A stream whose reader may disappear: what is written to a closed terminal or pipe is dropped without an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open = True
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._open:
            try:
                self._stream.write(text)
            except OSError:
                self._open = False
        return len(text)

    def flush(self) -> None:
        if self._open:
            try:
                self._stream.flush()
            except OSError:
                self._open = False

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def duration(seconds: float) -> str:
    """A number of seconds as text: 4.2 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _progress(stream: TextIO) -> "Progress":
    from collections.abc import Iterable

    from rich.console import Console, RenderableType
    from rich.progress import Progress

    class FittingProgress(Progress):
        """Fits the bar into the terminal whenever it is drawn, as that may get another width between two rounds.

        The `^C` that a terminal echoes fits beside it: on a line of its own, it would leave the bar there for good.
        """

        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.tasks:
                room = self.console.width - len(f"{task.description} {task.total}/{task.total} ^C")
                task.fields["note"] = note = fitting(task.fields["parts"], task.fields["left"], room)
                bar_width = min(BAR_WIDTH, room - len(note) - 1)
                phase, bar, count, text = _columns(bar_width)
                self.columns = (phase, bar, count, text) if bar_width >= 4 else (phase, count, text)
                yield self.make_tasks_table([task])

    return FittingProgress(
        *_columns(BAR_WIDTH),
        console=Console(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False),
        refresh_per_second=5,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _columns(bar_width: int) -> "tuple[TextColumn, BarColumn, MofNCompleteColumn, TextColumn]":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    return (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=bar_width),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )


def _wrapped(text: str, columns: int) -> str:
    """The text in lines of at most so many columns, broken between words; a path stays whole."""
    wrapper = textwrap.TextWrapper(max(20, columns), break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def _title(summary: PlainMapping) -> str:
    policy = summary.get("policy")
    parts = [summary.get("dataset"), policy and ("no synthetic images" if policy == "none" else f"{policy} images")]
    parts += [summary.get("rule") and f"{summary['rule']} weights"]
    what = ", ".join(str(part) for part in parts if part)
    status = summary.get("status")
    return f"raysim: {what}" + (f" - {status}" if status and status != "FINISHED" else "")


def summary_rows(summary: PlainMapping, blocks: bool) -> list[tuple[str, str]]:
    """(label, value) of what summary.json says, for people.  blocks: whether bars can be drawn."""
    rows = [
        ("Accuracy", _accuracy(summary)),
        ("Clients", _clients(summary, blocks)),
        ("Skew", _skew(summary, blocks)),
        ("Images", _images(summary)),
        ("Privacy", _privacy(summary)),
        *_time(summary, blocks),
        ("Workers", _workers(summary)),
        ("Training", _batching(summary)),
        *(("Note", str(note)) for note in summary.get("notes") or []),
    ]
    return [(label, value) for label, value in rows if value]


def _accuracy(summary: PlainMapping) -> str:
    final, best, area = (summary.get(key) for key in ("final_accuracy", "best_accuracy", "accuracy_auc"))
    if final is None and best is None:
        return "not measured"
    parts = [f"{_number(final)} after round {summary.get('rounds')}"] if final is not None else []
    parts += [f"{_best(summary)} in round {summary.get('best_round')}"] if best is not None else []
    parts += [f"{_number(area)} on average over the rounds (AUC)"] if area is not None else []
    return ", ".join(parts)


def _best(summary: PlainMapping) -> str:
    """The best accuracy, and on which split its round was chosen, where that is known."""
    chosen_on = summary.get("best_chosen_on")
    on = f" (chosen on {'the test split' if chosen_on == 'test' else 'validation'})" if chosen_on else ""
    return f"best{on} {_number(summary['best_accuracy'])}"


def _clients(summary: PlainMapping, blocks: bool) -> str:
    sizes = [int(size) for size in summary.get("sizes_K") or []]
    text = f"{summary['clients']:,} with {summary.get('n_real', 0):,} real images" if "clients" in summary else ""
    if sizes:
        least, most = min(sizes), max(sizes)
        text += f"; smallest {least:,} (client {sizes.index(least)}), largest {most:,} (client {sizes.index(most)})"
        text += _profile(sizes, max(sizes), blocks)
    return text


def _skew(summary: PlainMapping, blocks: bool) -> str:
    entropy = sorted(float(value) for value in summary.get("entropy_K") or [])
    if not entropy:
        return ""
    middle = (entropy[(len(entropy) - 1) // 2] + entropy[len(entropy) // 2]) / 2
    text = f"label entropy {entropy[0]:.2f} min, {middle:.2f} median, {entropy[-1]:.2f} max"
    return f"{text} (0: one class, 1: all alike){_profile(entropy, 1.0, blocks)}"


def _images(summary: PlainMapping) -> str:
    made = summary.get("n_synthetic")
    full = summary.get("n_synthetic_full_balance")
    if made is None:
        return ""
    text = f"{made:,} synthetic" if made else "none made"
    if full:
        saved = f", {made / full:.1%} of the {full:,} that full balance takes" if made else f"; full balance: {full:,}"
        text += saved
    rate = summary.get("images_per_s")
    text += f", made at {rate:,.1f} a second" if made and rate else ""
    return text + _dates(summary)


def _dates(summary: PlainMapping) -> str:
    """How many images there were after each date at which the policy was asked, where it was asked during training."""
    dates = summary.get("allocations") or []
    if [date["round"] for date in dates] in ([], [0]):
        return ""
    return "; in all " + ", ".join(f"{date['images']:,} after round {date['round']}" for date in dates)


def _privacy(summary: PlainMapping) -> str:
    claim = summary.get("privacy")
    if not claim:
        return ""
    told = f"epsilon {claim['epsilon']:.4g} at delta {claim['delta']:g}"
    return f"{told}; summary.json says what lies outside this guarantee"


def _time(summary: PlainMapping, blocks: bool) -> list[tuple[str, str]]:
    seconds = {key: float(value) for key, value in (summary.get("seconds") or {}).items()}
    total = seconds.get("total") or sum(seconds.values())
    if not total:
        return []
    named = [phase for phase in PHASES if phase in seconds]
    named += sorted(seconds.keys() - {*named, "total"})
    other = total - sum(seconds[phase] for phase in named)
    parts = [(phase, seconds[phase]) for phase in named] + ([("other", other)] if other > 0.05 * total else [])
    full = "█" if blocks else "#"
    rows = [("Time", duration(total))]
    return rows + [("", f"{name:<9}{duration(s):>14}  {full * round(40 * min(1.0, s / total))}") for name, s in parts]


def _workers(summary: PlainMapping) -> str:
    idle = sorted(float(worker["idle_frac"]) for worker in summary.get("workers") or [])
    if not idle:
        return ""
    least, most = (f"{fraction:.0%}" for fraction in (idle[0], idle[-1]))
    return f"{len(idle)}, idle for {least if least == most else f'{least} to {most}'} of the time of the rounds"


def _batching(summary: PlainMapping) -> str:
    """How clients were trained, where the run had a choice that changes bits."""
    choice = summary.get("client_batching")
    if not choice:
        return ""
    return f"{'several clients at once' if choice['at_once'] else 'one client after another'}: {choice['why']}"


def _locations(summary: PlainMapping) -> list[tuple[str, str]]:
    rows = [("Files", near(summary["run_directory"]))] if summary.get("run_directory") else []
    uri = str(summary.get("mlflow_uri") or "none")
    if summary.get("mlflow_page"):
        rows.append(("MLflow", str(summary["mlflow_page"])))
        if not uri.startswith("http"):
            rows.append(("", f"which this serves: {ui_command(summary['run_directory'])}"))
    elif uri != "none":  # a store that has not answered has no page
        rows.append(("MLflow", uri))
    return rows


def ui_command(folder: str | Path) -> str:
    """The command that serves the page of a run or a sweep in MLflow."""
    return f"python -m raysim ui {shlex.quote(near(folder))}"


def near(path: str | Path) -> str:
    """The path as seen from the working directory, if it is below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _profile(values: Sequence[float], most: float, blocks: bool) -> str:
    """A bar for each value, sorted, at most 40 of them; empty where the terminal cannot draw bars."""
    if not blocks or len(values) < 2 or most <= 0:
        return ""
    ordered = sorted(values)
    picked = [ordered[i * (len(ordered) - 1) // min(39, len(ordered) - 1)] for i in range(min(40, len(ordered)))]
    return "\n" + "".join(BARS[min(7, max(0, round(7 * value / most)))] for value in picked)


def _number(value: float | None) -> str:
    """Four decimals for a number between -10 and 10, four figures beyond."""
    number = math.nan if value is None else float(value)
    return f"{number:.4f}" if abs(number) < 10 else f"{number:.4g}"


def _encodable(text: str, stream: TextIO) -> str:
    """The text with what the stream cannot write replaced by question marks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
