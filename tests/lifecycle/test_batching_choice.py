"""How clients are trained where that changes bits is chosen once, recorded, and kept.

On a CPU nothing that is chosen changes bits; here the CPU is treated as a GPU, whose way of training several clients at
once, `VmapTrainer`, runs on both.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysim import Result
from raysim.core.errors import UserError
from raysim.engine import batching
from raysim.lifecycle.directory import RunDirectory
from raysim.ui.display import summary_rows

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "CHANGES_BITS_ON", ("cpu", "cuda"))
    monkeypatch.setattr(batching, "TIMED_S", 0.05)


@pytest.fixture
def tiny(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "rounds": 2, "model": {"name": "cnn", "width": 4, "hidden": 8}}


def prefer(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Whatever the workers time, this way wins."""
    monkeypatch.setattr(batching, "WORTH", 0.0 if at_once else float("inf"))


def choice(result: Result) -> dict[str, Any]:
    """What the summary says, which run.json says, too."""
    kept: dict[str, Any] = result.summary["client_batching"]
    assert json.loads((result.directory / "run.json").read_text())["client_batching"] == kept
    return kept


def test_what_the_workers_time_decides_for_all_of_them_and_is_recorded(
    run: Run, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`auto` has the bits of `on` or of `off`, for any number of workers, and says which."""
    models = {}
    for asked, at_once, workers in (("on", True, 1), ("off", False, 2), ("auto", True, 2), ("auto", False, 1)):
        prefer(monkeypatch, at_once)
        capsys.readouterr()
        result = run({**tiny, "rounds": 1, "resources": {"workers": workers, "client_batching": asked}})
        models[asked, at_once] = result.summary["model_sha256"]
        kept = choice(result)
        assert kept["at_once"] is at_once
        assert [kept[name] is not None for name in ("alone_s", "at_once_s")] == [asked == "auto"] * 2
        way = "several at once" if at_once else "one after another"
        assert capsys.readouterr().out.count(f"clients train {way}: {kept['why']}\n") == 1
        assert any(label == "Training" and kept["why"] in text for label, text in summary_rows(result.summary, True))
    assert models["on", True] == models["auto", True] != models["off", False] == models["auto", False]


def test_a_resume_keeps_the_choice_and_times_nothing(
    run: Run, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    tiny["model"]["hidden"] = 9  # another key: what an earlier run has timed does not count
    prefer(monkeypatch, at_once=True)
    whole = run(tiny)
    tiny["output"] = {**tiny["output"], "dir": f"{tiny['output']['dir']}-in-parts"}
    first = run(tiny, rounds=1)
    prefer(monkeypatch, at_once=False)
    monkeypatch.setattr(batching, "_timed", lambda *_: pytest.fail("timed again"))
    resumed = run(tiny, resume=True)
    assert resumed.directory == first.directory
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert choice(resumed) == first.summary["client_batching"] and choice(resumed)["at_once"]


def test_on_for_a_network_that_has_one_way_is_said_to_have_no_effect(
    run: Run, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """On a GPU as the choice, on a CPU as a note."""
    tiny |= {"rounds": 1, "resources": {"workers": 2, "client_batching": "on"}}
    shuffled = {**tiny, "data": {**tiny["data"], "augment": ["flip"]}}
    assert choice(run(shuffled)) == {
        "at_once": False, "why": "images are augmented (data.augment)", "alone_s": None, "at_once_s": None,
    }
    monkeypatch.setattr(batching, "CHANGES_BITS_ON", ("cuda",))
    result = run(tiny)
    assert result.summary["client_batching"] is None
    assert "resources.client_batching = on has no effect: on a CPU only" in str(result.summary["notes"])


def test_a_damaged_record_of_the_choice_is_named(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"config_hash": "0", "client_batching": {"fast": true}}')
    with pytest.raises(UserError, match=r"run\.json is damaged or was changed: .*fast"):
        RunDirectory(tmp_path).identity()
