"""The same bits, whatever runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raysim import Result

Run = Callable[..., Result]

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"aggregation": {"name": "fedavg"}},
    "fedoui": {"aggregation": {"name": "fedoui"}},
    "fedalign with batch normalisation": {
        "aggregation": {"name": "fedalign"},
        "model": {"name": "tiny_models:batch_norm_cnn"},
    },
    "fedprox with server adam and augmentation": {
        "local": {"name": "fedprox", "mu": 0.1, "momentum": 0.9, "lr": 0.05},
        "server": {"name": "adam", "lr": 0.01},
        "data": {"name": "digits", "train_samples": 300, "test_samples": 100, "augment": ["crop", "flip"]},
    },
}
METHODS |= {
    "scaffold with images and fine-tuning": {
        "local": {"name": "scaffold", "lr": 0.05}, "aggregation": {"name": "uniform"},
        "allocation": {"name": "fedeas", "total": 20},
        "generator": {"name": "ddpm", "steps": 3, "batch_size": 16},
        "fine_tuning": {"every": 2},
    },
    "fedprox with fedoui and own statistics": {
        "local": {"name": "fedprox", "mu": 0.1, "lr": 0.05}, "aggregation": {"name": "fedoui", "buffers": "local"},
        "model": {"name": "tiny_models:batch_norm_cnn"},
    },
    "moon with fednova": {"local": {"name": "moon", "lr": 0.05}, "aggregation": {"name": "fednova"}},
    "feddyn": {"local": {"name": "feddyn", "lr": 0.05}, "aggregation": {"name": "uniform"}},
    "adamw with images": {
        "local": {"name": "adamw", "lr": 0.005},
        "allocation": {"name": "fedeas", "total": 40},
        "generator": {"name": "ddpm", "steps": 3, "batch_size": 16},
    },
}


THREE_POOLS = ("fedavg", "fedoui", "scaffold with images and fine-tuning")
"""Methods that also train with 2 workers: one of each way that updates are summed, and one with images and states."""


def timeless(frame: pd.DataFrame) -> pd.DataFrame:
    """Metrics but for wall times."""
    return frame.drop(columns=[c for c in frame if c.startswith("seconds")])


def outcome(run: Run, config: dict[str, Any], **keys: Any) -> tuple[str, str, pd.DataFrame, pd.DataFrame]:
    result = run({**config, **keys})
    clients = timeless(pd.read_parquet(Path(result.directory) / "clients.parquet"))
    return result.summary["model_sha256"], result.summary["synthetic_sha256"], timeless(result.metrics), clients


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_workers_changes_no_bit(run: Run, small: dict[str, Any], method: str):
    pools = (1, 2, 4) if method in THREE_POOLS else (1, 4)
    one, *others = (outcome(run, {**small, **METHODS[method]}, resources={"workers": n}) for n in pools)
    for other in others:
        assert other[:2] == one[:2]
        pd.testing.assert_frame_equal(other[2], one[2], check_exact=True)
        pd.testing.assert_frame_equal(other[3], one[3], check_exact=True)
    assert one[2]["accuracy"].nunique() > 1  # it did train


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The outcome of the small configuration as it is, once a test has needed it."""
    return {}


def outcome_of(plain: dict[str, Any], run: Run, small: dict[str, Any]) -> tuple[str, str, pd.DataFrame, pd.DataFrame]:
    if not plain:
        plain["outcome"] = outcome(run, small)
    return plain["outcome"]


def test_another_seed_gives_another_model(run: Run, small: dict[str, Any], plain: dict[str, Any]):
    assert outcome_of(plain, run, small)[0] != outcome(run, small, seed=1)[0]


def test_methods_are_compared_on_the_same_cohorts(run: Run, small: dict[str, Any], plain: dict[str, Any]):
    """Who takes part, and with which samples, is a function of the seed alone."""
    fedavg = outcome_of(plain, run, small)[3]
    prox, oui = (
        outcome(run, {**small, **change})[3]
        for change in ({"local": {"name": "fedprox", "mu": 1.0}}, {"aggregation": {"name": "fedoui"}})
    )
    for other in (prox, oui):
        assert other[["round", "client", "n_real"]].equals(fedavg[["round", "client", "n_real"]])
    for _, cohort in fedavg.groupby("round"):
        assert cohort["client"].is_unique


@pytest.mark.parametrize(
    "change",
    [
        {"local": {"name": "fedprox", "mu": 0.0, "epochs": 1, "batch_size": 16, "lr": 0.1}},
        {"aggregation": {"name": "fedoui", "gamma": 0.0}},
        {"aggregation": {"name": "fedalign", "eta": 0.0}},
        {"aggregation": {"name": "fedoui_align", "gamma": 0.0, "eta": 0.0}},
        {"allocation": {"name": "uniform", "total": 0}},
        {"evaluate_every": 3},
    ],
    ids=lambda change: str(next(iter(change.values()))),
)
def test_what_is_switched_off_leaves_fedavg_bit_for_bit(
    run: Run, small: dict[str, Any], plain: dict[str, Any], change: dict[str, Any]
):
    """mu = 0, gamma = 0, eta = 0, no images, fewer evaluations: the model is plain FedAvg's."""
    assert outcome(run, {**small, **change})[0] == outcome_of(plain, run, small)[0]
