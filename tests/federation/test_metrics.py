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
    """With an OUI rule, noise on labels, clipping and fine-tuning, so that most of them appear."""
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
