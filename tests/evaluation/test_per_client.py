"""Accuracy over clients: by hand, and told apart from the global accuracy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raysim import Result
from raysim.core.records import Dataset, Partition
from raysim.evaluation.accuracy import ChunkResult, by_class, summarise
from raysim.evaluation.per_client import by_client, class_counts, spread

Run = Callable[..., Result]


def test_a_client_is_judged_by_its_own_mix_of_classes():
    """Accuracies 0.9, 0.5, 0.2. All of class 0: 0.9; 3 to 1 of classes 0 and 2: 0.675 + 0.05; even: 1.6 / 3."""
    a_K = by_client(np.array([[7, 0, 0], [3, 0, 1], [2, 2, 2]]), np.array([0.9, 0.5, 0.2]))
    assert a_K == pytest.approx([0.9, 0.725, 1.6 / 3], rel=1e-12)


def test_a_class_without_test_images_is_left_out():
    """Class 1 has none: client 0 is judged on class 0 alone, client 1 has nothing to be judged on."""
    a_K = by_client(np.array([[5, 5], [0, 4]]), np.array([0.6, np.nan]))
    assert a_K[0] == 0.6
    assert np.isnan(a_K[1])
    assert spread("a", a_K, np.array([10, 4])) == {
        "a_clients": 1, "a_mean": 0.6, "a_weighted_mean": 0.6, "a_worst": 0.6, "a_sd": 0.0
    }
    assert spread("a", a_K[1:], np.array([4])) == {}


def test_weighted_and_plain_means_have_their_own_names():
    """n = 10 and 90, accuracies 1 and 0.5: weighted 0.1 + 0.45 = 0.55, plain 0.75; sd over the two 0.25; worst 0.5."""
    found = spread("client_accuracy", np.array([1.0, 0.5]), np.array([10, 90]))
    assert found == pytest.approx({
        "client_accuracy_clients": 2,
        "client_accuracy_mean": 0.75, "client_accuracy_weighted_mean": 0.55, "client_accuracy_worst": 0.5,
        "client_accuracy_sd": 0.25,
    })


def test_global_accuracy_is_not_a_mean_over_clients():
    """A model that always says class 0 of ten: 0.1 on balanced test data; 1 for a client that has only class 0."""
    correct_C, total_C = np.zeros(10, dtype=np.int64), np.full(10, 20)
    correct_C[0] = 20
    chunks = [ChunkResult(0, correct_C, total_C, 1.0)]
    assert summarise(chunks)["accuracy"] == 0.1
    counts_KC = np.array([[50] + [0] * 9, [5] * 10])
    a_K = by_client(counts_KC, by_class(chunks))
    assert a_K == pytest.approx([1.0, 0.1])
    assert "accuracy" not in spread("client_accuracy", a_K, counts_KC.sum(axis=1))


def test_label_noise_does_not_change_a_clients_mix_of_classes():
    """Client 0 owns images of classes 1 and 0, whatever the labels that it trains on."""
    images = np.zeros((3, 1, 4, 4), np.uint8)
    labels_N = np.array([0, 1, 1])
    dataset = Dataset("tiny", images, labels_N, images, labels_N, ("a", "b"), (0.5,), (0.5,))
    none_K = np.zeros(2, dtype=np.bool_)
    partition = Partition(
        np.array([1, 0, 2]), np.array([0, 2, 3]), np.array([0, 0, 0]), 2, none_K, none_K, np.zeros(2)
    )
    assert class_counts(partition, dataset).tolist() == [[1, 1], [0, 1]]


def test_a_run_reports_both_and_each_client_by_its_id(run: Run, small: dict[str, Any]):
    """The summary's values follow from the accuracies of the classes; tuning the model changes no bit of the run."""
    plain = run(small)
    tuned = run({**small, "fine_tuning": {"every": 2, "lr": 0.1, "epochs": 3, "clients": 4}})
    assert tuned.summary["model_sha256"] == plain.summary["model_sha256"]
    shared = [name for name in plain.metrics if not name.startswith("seconds")]
    assert tuned.metrics[shared].equals(plain.metrics[shared])
    assert not any(name.startswith("tuned") for name in plain.metrics)
    assert tuned.metrics["tuned_client_accuracy_mean"].notna().tolist() == [False, False, True, True]
    assert tuned.summary["tuned_client_accuracy_mean"] > tuned.summary["client_accuracy_worst"]
    counts_KC = np.load(plain.directory / "partition.npz")["counts"]
    a_K = by_client(counts_KC, np.array(plain.summary["accuracy_by_class"]))
    assert plain.summary["client_accuracy_K"] == a_K.tolist()
    final = plain.metrics.iloc[-1]
    for what, value in spread("client_accuracy", a_K, counts_KC.sum(axis=1)).items():
        assert final[what] == plain.summary[what] == pytest.approx(value, rel=1e-12)
    assert plain.summary["worst_class_accuracy"] == final["worst_class_accuracy"]
