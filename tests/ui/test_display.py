"""What a person reads: at once, not too often, within 100 columns, and exactly what is in the summary."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.ui import display
from raysim.ui.display import Display, duration

SUMMARY = {
    "run_directory": "/data/runs/[quick]start-7",
    "final_accuracy": 0.96712,
    "best_accuracy": 0.97,
    "best_round": 27,
    "accuracy_auc": 0.931,
    "rounds": 30,
    "clients": 4,
    "n_real": 1437,
    "n_synthetic": 1503,
    "n_synthetic_full_balance": 6012,
    "entropy_K": [0.5, 0.0, 0.25, 1.0],
    "sizes_K": [400, 37, 600, 400],
    "seconds": {"start": 3.0, "generate": 12.0, "train": 80.0, "evaluate": 2.0, "track": 1.0, "total": 100.0},
    "workers": [{"worker": 0, "busy_s": 80.0, "idle_frac": 0.2}, {"worker": 1, "busy_s": 70.0, "idle_frac": 0.3}],
    "model_sha256": "1",
    "synthetic_sha256": "2",
    "mlflow_run_id": "3",
    "mlflow_page": "http://127.0.0.1:5000/#/experiments/1/runs/3",
    "mlflow_uri": "sqlite:////data/my runs/mlflow.db",
    "config_hash": "4",
    "policy": "fedeas",
    "rule": "fedoui",
    "dataset": "digits",
    "images_per_s": 55.125,
    "status": "FINISHED",
    "notes": ["one [red]client[/red] was dropped :boom:"],
}


def summary_of(content: dict, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Display(stream).summary(content)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize(
    "fact",
    [
        "raysim: digits, fedeas images, fedoui weights",
        "0.9671 after round 30, best 0.9700 in round 27, 0.9310 on average over the rounds (AUC)",
        "4 with 1,437 real images; smallest 37 (client 1), largest 600 (client 2)",
        "label entropy 0.00 min, 0.38 median, 1.00 max",  # the middle two are 0.25 and 0.5
        "1,503 synthetic, 25.0% of the 6,012 that full balance takes, made at 55.1 a second",  # 1503 / 6012 = 1 / 4
        "1 min 40 s",
        "train              1 min 20 s",
        "Workers 2, idle for 20% to 30% of the time of the rounds",
        "one [red]client[/red] was dropped :boom:",
        "/data/runs/[quick]start-7",
        "MLflow http://127.0.0.1:5000/#/experiments/1/runs/3",
        "python -m raysim ui '/data/runs/[quick]start-7'",
    ],
)
def test_the_summary_tells(fact):
    assert " ".join(fact.split()) in " ".join(summary_of(SUMMARY).split())


def test_the_summary_fits_100_columns_and_has_no_trailing_blanks():
    many = {**SUMMARY, "clients": 500, "sizes_K": list(range(1, 501)), "entropy_K": [k / 500 for k in range(500)]}
    for content in (SUMMARY, many, {**SUMMARY, "notes": ["a long note " * 30]}):
        lines = summary_of(content).splitlines()
        assert max(len(line) for line in lines) <= 100
        assert all(line == line.rstrip() for line in lines)


def test_lines_to_copy_are_never_folded():
    uri = f"sqlite:////{'deep/' * 40}mlflow.db"
    page = f"http://127.0.0.1:5000/#/experiments/1/runs/{'f' * 32}"
    folder = f"/{'deep/' * 40}run"
    text = summary_of({**SUMMARY, "mlflow_uri": uri, "mlflow_page": page, "run_directory": folder})
    assert f"MLflow    {page}\n" in text and f"raysim ui {folder}\n" in text


def test_a_server_is_shown_as_an_address_and_no_tracking_not_at_all():
    page = "http://host:5000/#/experiments/1/runs/3"
    text = summary_of({**SUMMARY, "mlflow_uri": "http://host:5000", "mlflow_page": page})
    assert page in text and "raysim ui" not in text
    assert "MLflow" not in summary_of({**SUMMARY, "mlflow_uri": "none", "mlflow_page": ""})


def test_a_run_that_failed_early_still_has_a_summary():
    text = summary_of({"status": "FAILED", "run_directory": "/r", "final_accuracy": None, "notes": ["boom"]})
    assert "FAILED" in text and "not measured" in text and "boom" in text and "/r" in text


def test_a_run_without_images_names_what_full_balance_would_take():
    assert "none made; full balance: 6,012" in summary_of({**SUMMARY, "n_synthetic": 0})


def test_a_terminal_without_unicode_gets_ascii():
    text = summary_of({**SUMMARY, "dataset": "données"}, encoding="ascii")
    assert "donn?es" in text and "####" in text and "train" in text


def test_lines_away_from_a_terminal_are_the_first_the_last_and_one_a_second(monkeypatch):
    """2,001 calls in 4 s: one at 0 s, then one as each further second is full, the last at 4.0 s: 5 lines."""
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = Display(stream)
    shown.phase("generate")
    for done in range(2001):
        clock[0] = done / 500
        shown.advance(done, 2000, "images")
    lines = stream.getvalue().splitlines()
    assert lines == [
        "generate 0/2,000",
        "generate 500/2,000, 500 images a second, 3.0 s left",  # 1 s for 500, 1,500 to go
        "generate 1,000/2,000, 500 images a second, 2.0 s left",
        "generate 1,500/2,000, 500 images a second, 1.0 s left",
        "generate 2,000/2,000, 500 images a second",
    ]


def test_the_time_left_of_a_resumed_phase_counts_only_what_was_done_now(monkeypatch):
    """1,000 of 2,000 were there before; 100 took 10 s, so the other 900 take 90 s."""
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = Display(stream)
    shown.phase("generate")
    shown.advance(1000, 2000)
    clock[0] = 10.0
    shown.advance(1100, 2000)
    assert stream.getvalue().splitlines()[1] == "generate 1,100/2,000, 1 min 30 s left"


def test_rounds_show_their_metrics_and_the_time_left():
    stream = io.StringIO()
    shown = Display(stream)
    shown.phase("train")
    shown.round(1, 30, {"accuracy": 0.5, "loss": 123.456}, eta_s=200.0)
    shown.round(30, 30, {"accuracy": 0.97}, eta_s=0.0)
    assert stream.getvalue().splitlines() == [
        "train 1/30, accuracy 0.5000, loss 123.5, 3 min 20 s left",
        "train 30/30, accuracy 0.9700",
    ]


def test_a_terminal_gets_a_bar_and_keeps_the_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    with Display(stream, live=True) as shown:
        shown.phase("train [x]")
        shown.round(1, 2, {"accuracy": 0.5}, eta_s=1.0)
        shown.line("worker [3] died :boom:")
        shown.round(2, 2, {"accuracy": 0.75}, eta_s=0.0)
    text = stream.getvalue()
    assert "worker [3] died :boom:" in text and "train [x]" in text
    assert "accuracy 0.7500" in text and "━" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_the_first_line_is_out_before_rich_is_imported():
    """A line must not wait in a buffer, nor for an import: the child sleeps after it, and the parent reads it."""
    code = (
        "import sys, time; from raysim.ui.display import Display; d = Display(); d.line('here'); d.phase('p');"
        "d.advance(1, 2); sys.stderr.write(str('rich' in sys.modules)); sys.stderr.flush(); time.sleep(60)"
    )
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    with child.stdout, child.stderr:
        lines = [child.stdout.readline(), child.stdout.readline()]
        imported = child.stderr.read(5)
        child.kill()
    child.wait()
    assert lines == [b"here\n", b"p 1/2\n"]
    assert imported == b"False"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("live", [False, True])
def test_a_terminal_that_is_gone_takes_nothing_more_and_costs_no_run(live):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    with Display(Gone(), live=live) as display:
        display.line("a line")
        display.phase("round")
        display.round(1, 2, {"accuracy": 0.5}, 3.0)
        display.summary({"dataset": "digits", "rounds": 1, "final_accuracy": 0.5})


def test_epsilon_is_told_in_one_line_where_noise_is_added():
    claim = {"epsilon": 19.0536, "delta": 1e-5, "outside_guarantee": ["sizes"]}
    lines = summary_of({**SUMMARY, "privacy": claim}).splitlines()
    told = "Privacy   epsilon 19.05 at delta 1e-05; summary.json says what lies outside this guarantee"
    assert " ".join(told.split()) in [" ".join(line.split()) for line in lines]
    assert "Privacy" not in summary_of(SUMMARY) and "Privacy" not in summary_of({**SUMMARY, "privacy": None})


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (80, "train_loss 0.0451  accuracy 0.9638  loss 0.0848  2 min 10 s left"),  # 64 signs
        (63, "train_loss 0.0451  accuracy 0.9638  2 min 10 s left"),
        (50, "accuracy 0.9638  2 min 10 s left"),
        (31, "2 min 10 s left"),
        (14, ""),
    ],
)
def test_what_does_not_fit_is_left_out_whole_and_the_accuracy_and_the_time_left_go_last(room, shown):
    assert display.fitting(["train_loss 0.0451", "accuracy 0.9638", "loss 0.0848"], "2 min 10 s left", room) == shown


class Screen(io.StringIO):
    """A terminal to write to."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "bar"), [(120, True), (50, False)])
def test_a_narrow_terminal_keeps_the_round_the_accuracy_and_the_time_left(monkeypatch, columns, bar):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Screen()
    with Display(stream, live=True) as shown:
        shown.phase("round")
        shown.round(12, 1000, {"train_loss": 0.05, "accuracy": 0.9638, "loss": 0.08}, eta_s=130.0)
    text = stream.getvalue()
    assert "12/1000" in text and "accuracy 0.9638" in text and "2 min 10 s left" in text
    assert ("━" in text) == bar == ("train_loss" in text)


def test_a_terminal_that_gets_narrower_between_rounds_has_room_for_the_bar_and_the_sign_of_an_interrupt(monkeypatch):
    """The terminal writes ^C behind the bar: on a line of its own, rich would wipe that one, and the bar would stay."""
    monkeypatch.setenv("COLUMNS", "120")
    stream = Screen()
    with Display(stream, live=True) as shown:
        shown.phase("round")
        shown.round(12, 1000, {"train_loss": 0.05, "accuracy": 0.9638, "loss": 0.08}, eta_s=130.0)
        for columns in (80, 69, 68, 50):
            begun = len(stream.getvalue())
            shown._progress.console.width = columns  # type: ignore[union-attr]
            shown._progress.refresh()  # type: ignore[union-attr]
            drawn = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()[begun:])
            (plain,) = [line.rstrip() for line in re.split(r"\x1b\[[\d;]*[A-Z]|[\r\n]", drawn) if "12" in line]
            assert len(plain) <= columns - 2
            assert "12/1000" in plain and "accuracy 0.9638" in plain and plain.endswith("2 min 10 s left")
            assert ("train_loss" in plain) == (columns > 68)


def test_a_bar_that_is_not_full_is_wiped_away_and_a_full_one_stays(monkeypatch):
    """Rich wipes a line with ESC [2K after the bar was stopped; a bar that stays is followed by a new line."""
    monkeypatch.setenv("COLUMNS", "100")
    ends = {}
    for done in (1, 2):
        stream = Screen()
        with Display(stream, live=True) as shown:
            shown.phase("round")
            shown.round(done, 2, {"accuracy": 0.5}, eta_s=1.0)
        ends[done] = stream.getvalue().rpartition("accuracy 0.5000")[2]
    assert "\x1b[2K" in ends[1] and "\x1b[2K" not in ends[2]


def test_long_lines_on_a_terminal_are_broken_between_words_and_paths_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream, path = Screen(), "/a/path/that/is/longer/than/the/forty/columns/of/this/terminal.yaml"
    Display(stream, live=False).line(f"note: eight words that do not fit on one line, and {path}")
    assert stream.getvalue().splitlines() == ["note: eight words that do not fit on one", "line, and", path]
