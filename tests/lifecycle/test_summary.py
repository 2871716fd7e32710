"""What a run says of its accuracy."""

import numpy as np
import pandas as pd
import pytest

from raysim.evaluation.accuracy import ChunkResult, summarise
from raysim.lifecycle import summary as results


def test_the_accuracy_of_each_class_and_of_the_worst_in_two_chunks():
    """Class 0: 1 of 2 and 2 of 2 right, 3/4; class 1: 1 of 5; class 2 has no image; 4 of 9 in all; loss 18 / 9."""
    chunks = [
        ChunkResult(1, np.array([2, 0, 0]), np.array([2, 0, 0]), 6.0),
        ChunkResult(0, np.array([1, 1, 0]), np.array([2, 5, 0]), 12.0),
    ]
    assert summarise(chunks) == {
        "accuracy": 4 / 9, "loss": 2.0, "worst_class_accuracy": 0.2, "evaluated_classes": 2,
        "accuracy_class_0": 0.75, "accuracy_class_1": 0.2,
    }


def test_of_many_classes_only_the_worst_is_a_metric_of_its_own():
    one_each = np.ones(101, dtype=np.int64)
    metrics = set(summarise([ChunkResult(0, one_each, one_each, 1.0)]))
    assert metrics == {"accuracy", "loss", "worst_class_accuracy", "evaluated_classes"}


def test_the_last_five_evaluated_rounds_are_averaged():
    """Rounds 2, 4, ... 12 were evaluated: (0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5 = 0.4; best and final 0.6 in round 12."""
    rounds = np.arange(1, 13)
    accuracy = np.where(rounds % 2 == 0, rounds / 20, np.nan)
    summary = results.accuracy_summary(pd.DataFrame({"round": rounds, "accuracy": accuracy}))
    assert summary["accuracy_last5"] == pytest.approx(0.4)
    assert (summary["final_accuracy"], summary["best_round"]) == (0.6, 12)


def test_fewer_than_five_rounds_are_all_averaged():
    summary = results.accuracy_summary(pd.DataFrame({"round": [1, 2], "accuracy": [0.1, 0.3]}))
    assert summary["accuracy_last5"] == pytest.approx(0.2)


def test_with_a_validation_split_the_best_round_is_chosen_on_it_and_the_test_split_is_only_read_there():
    """Validation is best in round 2, where the test accuracy is 0.4; the test split alone would have chosen round 3."""
    metrics = pd.DataFrame({"round": [0, 1, 2, 3], "accuracy": [0.9, 0.3, 0.4, 0.6]})
    on_test = results.accuracy_summary(metrics)
    found = results.accuracy_summary(metrics.assign(validation_accuracy=[0.9, 0.3, 0.7, 0.5]))
    assert (on_test["best_accuracy"], on_test["best_round"], on_test["best_chosen_on"]) == (0.6, 3, "test")
    assert (found["best_accuracy"], found["best_round"], found["best_chosen_on"]) == (0.4, 2, "validation")
    assert (found["final_validation_accuracy"], found["best_validation_accuracy"]) == (0.5, 0.7)
    assert on_test.keys() == found.keys() - {"final_validation_accuracy", "best_validation_accuracy"}


def test_the_final_accuracy_of_each_class_is_that_of_the_last_evaluated_round():
    metrics = pd.DataFrame({"accuracy": [0.1, 0.2, np.nan], "accuracy_class_0": [0.5, 0.6, np.nan]})
    assert results.accuracy_by_class(metrics, 2) == [0.6, None]
    assert results.accuracy_by_class(metrics[["accuracy"]], 2) is None


def test_a_loss_that_is_not_finite_is_noted_and_a_round_that_was_not_evaluated_is_not():
    """Round 1 is not evaluated; rounds 2 and 4 have a loss of nan and of infinity, round 3 trains to nan."""
    nan, inf = np.nan, np.inf
    metrics = pd.DataFrame({
        "round": [1, 2, 3, 4], "accuracy": [nan, 0.1, 0.1, 0.1], "loss": [nan, nan, 2.0, inf],
        "train_loss": [1.0, 1.0, nan, 1.0],
    })
    loss, train_loss = results.not_finite(metrics)
    assert loss.startswith("loss is not finite in round 2, 4: the model has diverged")
    assert train_loss.startswith("train_loss is not finite in round 3")
    assert results.not_finite(metrics.iloc[:1]) == []


def test_an_evaluation_of_what_was_the_last_round_is_not_one_of_the_longer_run():
    """Evaluated every 2 rounds, first 3 rounds, then 5: round 3 is not due any more, round 5 is the last."""
    from raysim.config.load import load_config

    metrics = pd.DataFrame({"round": range(6), "accuracy": 0.5, "loss": 1.0, "train_loss": 2.0})
    metrics.loc[1, ["accuracy", "loss"]] = np.nan
    config = load_config({"rounds": 5, "evaluate_every": 2, "data": {"name": "digits"}})
    found = results.as_uninterrupted(metrics, config)
    assert found["accuracy"].notna().tolist() == [True, False, True, False, True, True]
    assert found["train_loss"].notna().all() and metrics["accuracy"].notna().sum() == 5


def test_clients_that_were_left_out_are_counted_in_a_note():
    dropped = pd.DataFrame({"dropped": [np.nan, 0, 2, 1]})
    assert results.left_out(dropped) == ["clients that failed or diverged were left out 3 times, in 2 rounds"]
    assert results.left_out(dropped[:2]) == []
