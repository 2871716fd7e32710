"""Robust rules through real workers: the same bits for any workers, and what numpy makes of the updates themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysim import Result
from raysim.config.load import load_config
from raysim.core.errors import UserError
from raysim.engine import rounds
from raysim.engine.rounds import Round

Run = Callable[..., Result]
RULES: dict[str, dict[str, Any]] = {
    "median": {"name": "median"},
    "trimmed_mean": {"name": "trimmed_mean", "trim": 0.2},
    "krum": {"name": "krum", "byzantine": 1},
    "multi_krum": {"name": "multi_krum", "byzantine": 1, "keep": 3},
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a thousand coordinates, so that a small model has many."""

    def cut(parameters: int, clients: int) -> list[tuple[int, int]]:
        return [(start, min(start + 1000, parameters)) for start in range(0, parameters, 1000)]

    monkeypatch.setattr(rounds.slices, "slices", cut)


def robust(small: dict[str, Any], rule: str, **keys: Any) -> dict[str, Any]:
    few = {"workers": 3}
    return {**small, "rounds": 2, "clients_per_round": 1.0, "resources": few, "aggregation": RULES[rule], **keys}


def outcome(result: Result) -> tuple[str, list[float]]:
    return result.summary["model_sha256"], result.metrics["loss"].tolist()


def test_the_number_of_workers_changes_no_bit(run: Run, small: dict[str, Any], narrow: None):
    one, three = (
        {rule: outcome(run(robust(small, rule, resources={"workers": n}))) for rule in RULES} for n in (1, 3)
    )
    assert one == three
    assert len({model for model, _ in one.values()}) == len(RULES)


def test_a_worker_that_dies_while_training_changes_nothing(
    run: Run, small: dict[str, Any], tmp_path: Path, narrow: None
):
    rule, lives = "multi_krum", tmp_path / "lives"
    config = robust(small, rule, local={"name": "tiny_algorithms:dies", "lives": str(lives), "lr": 0.1})
    lives.write_text("0")
    calm = outcome(run(config))
    lives.write_text("1")
    disturbed = run(config)
    assert lives.read_text() == "0"
    assert outcome(disturbed) == calm
    assert any(note.startswith("1 workers were lost") for note in disturbed.summary["notes"])


@pytest.fixture(scope="module")
def calm() -> list[Any]:
    """The outcome of the median where no worker dies, once a test has needed it."""
    return []


@pytest.mark.parametrize("moment", ["before they are asked", "with slices in the object store"])
def test_a_worker_that_dies_between_training_and_aggregation_changes_nothing(
    run: Run, small: dict[str, Any], narrow: None, monkeypatch: pytest.MonkeyPatch, calm: list[Any], moment: str
):
    """A worker is killed once, from outside, at the given moment of round 1."""
    import ray

    if not calm:
        calm.append(outcome(run(robust(small, "median"))))
    killed: list[int] = []
    each = Round._each

    def kill_one(self: Round) -> None:
        if not killed:
            killed.append(min(self.owner.values()))
            ray.kill(self.pool.members[killed[0]].actor)

    def disturbed_each(self: Round, clients: Any, asking: Any, sums: bool = False) -> Any:
        slices_wanted = "_cutting" in asking.__qualname__
        if slices_wanted and moment == "before they are asked":
            kill_one(self)
        answers = each(self, clients, asking, sums)
        if slices_wanted and moment == "with slices in the object store":
            kill_one(self)
        return answers

    monkeypatch.setattr(Round, "_each", disturbed_each)
    result = run(robust(small, "median"))
    assert killed
    assert outcome(result) == calm[0]


def updates_seen(run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Result, np.ndarray]:
    """A run of one round, and the updates of its clients (K x P), which the test alone asks the workers for."""
    seen: list[np.ndarray] = []
    sums = Round.sums

    def watched(self: Round, sum_weights: Any) -> Any:
        if not seen:
            wanted = np.eye(len(self.clients))
            seen.append(np.array([[]]))
            seen[0] = np.array([self.weighted_sum(w_K) for w_K in wanted])
        return sums(self, sum_weights)

    monkeypatch.setattr(Round, "sums", watched)
    return run({**config, "rounds": 1}), seen[0]


def step(run: Run, result: Result, config: dict[str, Any]) -> np.ndarray:
    """What round 1 added to the initial model: P."""
    from raysim.lifecycle.build import initial_model
    from raysim.lifecycle.client_file import ClientFile
    from raysim.lifecycle.history import History
    from raysim.lifecycle.prepare import prepare
    from raysim.lifecycle.state_io import load

    checked = load_config(config)
    start = initial_model(checked, prepare(checked)).state().params_P
    history = History(result.directory / "history")
    folder = result.directory / "checkpoints"
    restored = load(folder, history, ClientFile(folder)) or pytest.fail("no checkpoint")
    return restored.state.model.params_P.astype(np.float64) - start


@pytest.mark.parametrize("rule", RULES)
def test_the_global_step_is_what_numpy_makes_of_the_updates(
    run: Run, small: dict[str, Any], narrow: None, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """6 clients: the median; the mean without one value at each end; Krum's choice by its 6 - 1 - 2 = 3 nearest."""
    config = robust(small, rule)
    result, updates_KP = updates_seen(run, config, monkeypatch)
    distance_KK = np.square(updates_KP[:, None] - updates_KP[None]).sum(axis=2)
    order = np.argsort(np.sort(distance_KK, axis=1)[:, 1:4].sum(axis=1))
    expected = {
        "median": np.median(updates_KP, axis=0),
        "trimmed_mean": np.sort(updates_KP, axis=0)[1:-1].mean(axis=0),
        "krum": updates_KP[order[0]],
        "multi_krum": updates_KP[order[:3]].mean(axis=0),
    }[rule]
    np.testing.assert_allclose(step(run, result, config), expected, atol=2e-7)
    assert np.abs(expected).max() > 1e-3
    weights = pd.read_parquet(result.directory / "clients.parquet")["weight"].to_numpy()
    chosen = {"krum": 1, "multi_krum": 3}.get(rule, 6)
    assert sorted(np.flatnonzero(weights)) == (sorted(order[:chosen]) if chosen < 6 else list(range(6)))


def test_krum_with_too_few_clients_is_refused_before_anything_starts(run: Run, small: dict[str, Any]):
    with pytest.raises(UserError, match=r"aggregation\.byzantine: 2 needs at least 7 clients per round, there are 6"):
        run(robust(small, "krum", aggregation={"name": "krum", "byzantine": 2}))
