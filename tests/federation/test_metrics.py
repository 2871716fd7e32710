"""Every metric of a run is in the documented list."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from raysim import Result
from raysim.federation.metrics import COLUMNS, METRICS, described


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("accuracy_class_7", METRICS["accuracy_class_{class}"]),
        ("client_accuracy_weighted_mean", METRICS["client_accuracy_{mean|weighted_mean|worst|sd}"]),
        ("fit_mode_mle", METRICS["fit_mode_{moments|mle|ranks|single}"]),
        ("oui.features.3_mean", METRICS["oui.{layer}_mean"]),
        ("accuracy_class_x", None),
        ("fit_mode_other", None),
        ("my_statistic_mean", None),
    ],
)
def test_a_name_is_found_by_its_pattern_and_one_of_a_plugin_is_not(name: str, meaning: str | None):
    assert described(name) == meaning


def test_every_metric_and_column_of_a_run_is_described(run: Callable[..., Result], small: dict[str, Any]):
    """With a validation split, an OUI rule, noise on labels, clipping and fine-tuning, so that most of them appear."""
    small["data"] |= {"validation_fraction": 0.1}
    small["partition"] |= {"label_noise": {"fraction": 0.5, "rate": 0.4}}
    small |= {
        "aggregation": {"name": "fedoui"},
        "update": {"clip": 1.0},
        "fine_tuning": {"every": 3, "clients": 2},
    }
    result = run(small)
    assert [name for name in result.metrics if described(name) is None] == []
    clients = pd.read_parquet(result.directory / "clients.parquet")
    assert [name for name in clients if described(name, COLUMNS | {"clipped": ""}) is None] == []


def test_round_0_is_the_initial_model_evaluated_and_nothing_else(run: Callable[..., Result], small: dict[str, Any]):
    """It counts neither as a round nor for the best accuracy, and says over how many classes and clients figures go."""
    result = run(small | {"rounds": 2})
    first = result.metrics.iloc[0]
    assert first["round"] == 0 and 0 <= first["accuracy"] <= 1 and pd.isna(first["train_loss"])
    assert result.summary["rounds"] == 2 and result.summary["best_round"] > 0
    assert (first["evaluated_classes"], first["client_accuracy_clients"]) == (10, 6)
    again = run(small | {"rounds": 1, "local": {**small["local"], "lr": 0.2}})
    assert again.metrics["accuracy"][0] == first["accuracy"]
