"""What a round's metrics and per-client table say of noisy and rare clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysim import Result
from raysim.core.records import ModelState
from raysim.federation.cohort import cohort, cohort_size
from raysim.federation.metrics import weight_ratio

Run = Callable[..., Result]


def test_the_weight_ratio_compares_means_of_noisy_and_clean_clients():
    """Noisy 0.1 and 0.3, mean 0.2; clean 0.6: a third.  Without either group, or without clean weight: nothing."""
    w_K = np.array([0.1, 0.6, 0.3])
    ratio = weight_ratio(w_K, np.array([True, False, True]))
    assert list(ratio) == ["weight_ratio_noisy"]
    assert round(ratio["weight_ratio_noisy"], 12) == round(1 / 3, 12)
    assert weight_ratio(w_K, np.zeros(3, dtype=np.bool_)) == {}
    assert weight_ratio(w_K, np.ones(3, dtype=np.bool_)) == {}
    assert weight_ratio(np.array([1.0, 0.0]), np.array([True, False])) == {}


def test_a_fraction_of_the_clients_is_rounded_and_stands_for_at_least_one():
    """0.01 of 20 is 0.2, hence 1; 0.25 of 10 is 2.5, rounded to the even 2; a number is a number."""
    assert [cohort_size(0.01, 20), cohort_size(0.25, 10), cohort_size(1.0, 7), cohort_size(3, 20)] == [1, 2, 7, 3]


def test_a_cohort_is_drawn_without_replacement_and_depends_on_seed_and_round_alone():
    drawn = [cohort(0, round_, 20, 10) for round_ in range(1, 30)]
    assert all(len(set(ids)) == 10 and set(ids) <= set(range(20)) for ids in drawn)
    assert cohort(0, 5, 20, 10) == drawn[4] and len({tuple(ids) for ids in drawn}) > 20
    assert cohort(1, 5, 20, 10) != drawn[4]


def test_the_global_model_is_put_into_the_object_store_once_a_round(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Three rounds, each evaluated: the model before round 1 and those after rounds 1, 2 and 3."""
    from raysim.federation import server

    put, models = server.put, []

    def counted(value: Any) -> Any:
        if isinstance(value, ModelState):
            models.append(value)
        return put(value)

    monkeypatch.setattr(server, "put", counted)
    run(small)
    assert len(models) == 4
    assert len({id(model) for model in models}) == 4


@pytest.mark.drawn
def test_the_table_of_clients_says_who_is_rare_and_whose_labels_or_images_are_noisy(run: Run, small: dict[str, Any]):
    small |= {"clients_per_round": 1.0, "aggregation": {"name": "fedoui"}}
    small["partition"] |= {
        "rare": {"fraction": 0.34, "max_samples": 20},
        "label_noise": {"fraction": 0.5, "rate": 0.4},
        "input_noise": {"fraction": 0.17, "std": 0.2},
    }
    result = run(small)
    clients = pd.read_parquet(result.directory / "clients.parquet")
    saved = np.load(result.directory / "partition.npz")
    for column, name in (("rare", "rare"), ("noisy", "noisy"), ("input_noise", "input_noise")):
        assert clients.groupby("client")[column].first().tolist() == saved[name].astype(float).tolist()
        assert clients[column].gt(0).any()
    assert clients[clients["rare"] == 1]["n_real"].max() <= 20
    last = clients[clients["round"] == 3]
    noisy = (last["noisy"] == 1) | (last["input_noise"] > 0)
    expected = last[noisy]["weight"].mean() / last[~noisy]["weight"].mean()
    assert np.isclose(result.metrics["weight_ratio_noisy"].iloc[-1], expected)
    assert result.metrics["fit_mode_moments"].iloc[1] == 1
    assert len(list(result.directory.glob("figures/oui_*.png"))) == 3
    assert result.summary["accuracy_by_class"][0] == result.metrics["accuracy_class_0"].iloc[-1]
