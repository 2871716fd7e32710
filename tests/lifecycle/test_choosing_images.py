"""`generator.keep`: of more candidates than are used the best are kept; all of them are paid for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysim import Result
from raysim.allocation.schedule import AllocationSchedule
from raysim.config.load import load_config
from raysim.config.schema import AllocationSection
from raysim.core.errors import ConfigError, RunError, UserError
from raysim.core.records import Synthetic
from raysim.engine.object_store import images_of
from raysim.evaluation.candidates import confidence
from raysim.federation.synthesis import Synthesis
from raysim.lifecycle.kept_model import load_model
from raysim.lifecycle.prepare import prepare

Run = Callable[..., Result]


@pytest.fixture
def config(small: dict[str, Any]) -> dict[str, Any]:
    """All 6 clients in each of 4 rounds; 90 candidates by `uniform` after round 1, of which 30 are kept."""
    return {
        **small,
        "rounds": 4,
        "clients_per_round": 1.0,
        "allocation": {"name": "random", "total": 90, "at": [1, 2]},
        "generator": {"name": "ddpm", "steps": 2, "batch_size": 16, "keep": {"rule": "discrepancy", "ratio": 3.0}},
    }


def elsewhere(config: dict[str, Any], tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {**config, "output": {**config["output"], "dir": str(tmp_path / "elsewhere"), "cache": None}, **changes}


def test_candidates_are_what_a_budget_counts():
    """20 images at 2.5 candidates each: 8 are kept, and the 12 further ones are spread in proportion to the 8."""
    counts_KC = np.array([[6, 0], [1, 4]])
    asked = AllocationSchedule.of(AllocationSection(name="uniform", total=20), counts_KC, ratio=2.5)
    start = asked.start(counts_KC, 0)
    assert start.quota_KC.tolist() == [[2, 2], [2, 2]] and start.candidates_KC.tolist() == [[5, 5], [5, 5]]
    assert start.images == 20
    filled = AllocationSchedule.of(AllocationSection(name="full"), counts_KC, ratio=1.5).start(counts_KC, 0)
    assert filled.quota_KC.tolist() == [[0, 6], [3, 0]] and filled.candidates_KC.tolist() == [[0, 9], [5, 0]]
    with pytest.raises(UserError, match=r"allocation.total = 3: with generator.keep.ratio = 4 none of the 3 cand"):
        AllocationSchedule.of(AllocationSection(name="uniform", total=3), counts_KC, ratio=4.0)
    with pytest.raises(UserError, match=r"the images of `server_pool` are shared by all clients, and these are not"):
        AllocationSchedule.of(AllocationSection(name="server_pool", total=9), counts_KC, ratio=2.0).start(counts_KC, 0)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ({"rule": "discrepancy", "ratio": 0.5}, r"generator.keep.ratio = 0.5: must be a number of at least 1"),
        ({"rule": "discrepancy"}, r"generator.keep.ratio = 1: the rule discrepancy has nothing to choose from"),
        ({"rule": "luck", "ratio": 2.0}, r"generator.keep.rule = luck: must be none, confidence or discrepancy"),
    ],
)
def test_a_filter_that_chooses_nothing_is_refused(small: dict[str, Any], keep: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        load_config({**small, "generator": {"name": "ddpm", "keep": keep}})


def test_a_filter_without_a_classifier_is_refused_and_one_without_images_is_said_to_be_idle(small: dict[str, Any]):
    first = {**small, "allocation": {"name": "fedeas"}}
    for rule in ("confidence", "discrepancy"):
        keep = {"rule": rule, "ratio": 2.0}
        with pytest.raises(UserError, match=rf"generator.keep.rule = {rule}: before round 1 there is no classifier"):
            prepare(load_config({**first, "generator": {"name": "ddpm", "keep": keep}}))
        idle = prepare(load_config({**small, "generator": {"name": "ddpm", "keep": keep}}))
        assert any("generator.keep" in note and "no synthetic image is asked for" in note for note in idle.notes)
    unread = load_config({**first, "generator": {"name": "ddpm", "keep": {"ratio": 2.0}}}).unread
    assert any(line.startswith("generator.keep.ratio = 2.0 has no effect") for line in unread)


def test_the_same_images_are_chosen_by_any_number_of_workers_and_after_a_kill(
    run: Run, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At both dates 45 candidates are made and 15 kept; killed while those of the second date are made."""
    whole = run(config)
    summary = whole.summary
    assert (summary["n_synthetic"], summary["n_synthetic_held"]) == (90, 30)
    assert summary["allocations"] == [{"round": 1, "images": 45}, {"round": 2, "images": 90}]
    one = run(elsewhere(config, tmp_path, resources={"workers": 1}))
    for key in ("model_sha256", "synthetic_sha256", "allocations"):
        assert one.summary[key] == summary[key]
    assert one.summary["n_synthetic_made"] == 90
    choose, calls = Synthesis.make_and_choose, []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RunError("the power went")
        return choose(*arguments)

    monkeypatch.setattr(Synthesis, "make_and_choose", fails)
    config["output"] = {**config["output"], "dir": str(tmp_path / "killed"), "cache": None}
    with pytest.raises(RunError, match="the power went"):
        run(config)
    resumed = run(config, resume=True)
    assert [resumed.summary[key] for key in ("model_sha256", "synthetic_sha256")] == [
        summary[key] for key in ("model_sha256", "synthetic_sha256")
    ]
    later = run(config, rounds=5, resume=True)  # from the last checkpoint: what was chosen is made again, and no more
    assert later.summary["n_synthetic_held"] == 30 and later.summary["n_synthetic"] == 90


def test_a_given_classifier_keeps_what_it_is_surest_of(
    run: Run, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before round 1, by the model of another run: one of 4 candidates of each of 60 cells.

    Without the filter, a cell gets the first of them. So the model, asked here, finds none of those better than the one
    that was kept, and most of them worse.
    """
    judge = run(elsewhere(small, tmp_path)).directory
    seen: list[Any] = []

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*arguments: Any) -> Any:
            seen.append(make(*arguments))
            return seen[-1]

        return kept

    for name in ("make", "make_and_choose"):
        monkeypatch.setattr(Synthesis, name, watched(getattr(Synthesis, name)))
    keep = {"rule": "confidence", "ratio": 4.0, "classifier": str(judge)}
    generator = {"name": "ddpm", "steps": 2, "batch_size": 16}
    config = {**small, "rounds": 1, "allocation": {"name": "uniform", "total": 240}}
    filtered = run({**config, "generator": {**generator, "keep": keep}})
    plain = run({**config, "allocation": {"name": "uniform", "total": 60}, "generator": generator})
    assert filtered.summary["n_synthetic"] == 240 and filtered.summary["n_synthetic_held"] == 60
    assert plain.summary["n_synthetic_made"] == 0  # all of them were candidates
    best, first = (scores(load_model(judge), synthetic) for synthetic in seen)
    assert (best >= first - 1e-6).all() and (best > first + 1e-6).mean() > 0.5
    with pytest.raises(UserError, match=r"generator.keep.classifier = .*nowhere: .*this is no folder"):
        run({**config, "generator": {**generator, "keep": {**keep, "classifier": str(tmp_path / "nowhere")}}})


def scores(model: torch.nn.Module, synthetic: Synthetic) -> np.ndarray:
    """How sure a model is of one image of each of 10 classes, client after client."""
    found = []
    for k in np.flatnonzero(synthetic.quota_KC.any(axis=1)).tolist():
        stored = synthetic.of(k)
        assert stored is not None
        with torch.inference_mode():
            logits = model(torch.from_numpy(images_of(stored).copy())).double()
        found.append(confidence(torch.log_softmax(logits, dim=1).numpy(), np.arange(10)))
    return np.concatenate(found)
