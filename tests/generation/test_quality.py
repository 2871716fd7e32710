"""Quality measurements tell good images from bad ones, and copies from new ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raysim.core.records import Dataset
from raysim.data.datasets import digits
from raysim.data.splits import hold_out
from raysim.generation import quality
from raysim.generation.quality import measure, nearest, table
from raysim.ui.quality_plots import nearest_pairs, quality_figure


@pytest.fixture(autouse=True, scope="module")
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "STEPS", 150)
        yield


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return hold_out(digits(), 0.3)


@pytest.fixture(scope="module")
def real(dataset: Dataset) -> dict[str, Any]:
    """What is measured of held-out real images in place of synthetic ones."""
    return measure(dataset, dataset.public_images, dataset.public_labels_N)


def test_real_images_are_as_good_as_real_ones_and_no_copies(dataset: Dataset, real: dict[str, Any]):
    """Held-out real images in place of synthetic ones: equal accuracy, recognised, as far as test images are."""
    accuracy, distance = real["accuracy"], real["distance"]
    assert accuracy["from_real"] > 0.85 and abs(accuracy["from_synthetic"] - accuracy["from_real"]) < 0.05
    assert real["recognised"] > 0.85
    assert distance["synthetic_to_train"] == pytest.approx(distance["test_to_train"], rel=0.1)
    assert distance["nearer_than_99_of_test"] < 0.05
    features = real["features"]
    assert features["images"] >= 150
    assert abs(features["synthetic"]["coverage"] - features["real"]["coverage"]) < 0.15
    assert features["synthetic"]["frechet"] < 2 * features["real"]["frechet"]
    assert real["images"] == real["real_images"] == len(dataset.public_labels_N)


def test_copies_and_wrong_labels_are_seen(dataset: Dataset, tmp_path):
    """Training images themselves, each with the label of the next class."""
    wrong_M = (dataset.train_labels_N + 1) % 10
    result = measure(dataset, dataset.train_images, wrong_M)
    assert result["recognised"] < 0.1 and result["accuracy"]["from_synthetic"] < 0.1
    assert result["distance"]["synthetic_to_train"] == pytest.approx(0, abs=1e-3)
    assert result["distance"]["nearer_than_99_of_test"] == 1.0
    pairs = result["distance"]["closest"]
    assert len(pairs) == 10
    assert all(np.array_equal(dataset.train_images[made], dataset.train_images[real]) for made, real, _ in pairs)
    drawn = nearest_pairs(dataset.train_images, dataset.train_images, pairs, tmp_path / "pairs.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_noise_is_far_and_one_image_a_class_covers_little(dataset: Dataset):
    labels_M = dataset.public_labels_N
    noise = np.random.default_rng(0).integers(0, 256, dataset.public_images.shape, np.uint8)
    far = measure(dataset, noise, labels_M)["features"]
    assert far["synthetic"]["frechet"] > 5 * far["real"]["frechet"] and far["synthetic"]["recall"] < 0.3
    one_each = np.array([np.flatnonzero(labels_M == c)[0] for c in labels_M])
    collapsed = measure(dataset, dataset.public_images[one_each], labels_M)["features"]
    assert collapsed["synthetic"]["coverage"] < 0.5 * collapsed["real"]["coverage"]
    assert collapsed["synthetic"]["precision"] > collapsed["synthetic"]["recall"]


def test_the_images_compared_have_the_classes_of_the_synthetic_ones(dataset: Dataset):
    """Zeros alone: the distances are to zeros of the test split, of which there are about 36, halved."""
    zeros = dataset.public_labels_N == 0
    features = measure(dataset, dataset.public_images[zeros], dataset.public_labels_N[zeros])["features"]
    assert features["images"] == (dataset.test_labels_N == 0).sum() // 2
    assert features["synthetic"]["precision"] > 0.5


def test_too_few_images_have_no_distance_in_features(dataset: Dataset, real: dict[str, Any], tmp_path):
    result = measure(dataset, dataset.public_images[:3], dataset.public_labels_N[:3])
    assert result["features"] is None
    assert not any("against" in line for line in table(result))
    for name, found in (("few", result), ("many", real)):
        assert quality_figure(found, tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sum("Fréchet" in line for line in table(found)) == 1


def test_a_class_that_is_missing_is_never_learned(dataset: Dataset):
    keep = dataset.public_labels_N != 4
    result = measure(dataset, dataset.public_images[keep], dataset.public_labels_N[keep])
    assert result["per_class"]["from_synthetic"][4] == result["per_class"]["from_real"][4] == 0.0
    assert result["per_class"]["recognised"][4] is None
    assert any(line.startswith("| 4 ") and line.rstrip(" |").endswith("-") for line in table(result))


def test_it_is_the_same_twice_and_plain_data(dataset: Dataset, monkeypatch: pytest.MonkeyPatch):
    import json

    images, labels_N = dataset.public_images[:100], dataset.public_labels_N[:100]
    monkeypatch.setattr(quality, "STEPS", 20)
    results = [json.dumps(measure(dataset, images, labels_N)) for _ in range(2)]
    assert results[0] == results[1]


def test_nearest_is_the_root_mean_square_difference():
    """Four pixels that differ by 51 of 255 are 0.2 apart; of two references the nearer counts."""
    query = np.full((1, 1, 2, 2), 51, np.uint8)
    references = np.stack([np.zeros((1, 2, 2)), np.full((1, 2, 2), 255)]).astype(np.uint8)
    distances, rows = nearest(query, references[::-1])
    assert distances == pytest.approx([0.2]) and rows.tolist() == [1]


def test_without_images_it_is_an_error(dataset: Dataset):
    with pytest.raises(ValueError, match="0 synthetic"):
        measure(dataset, dataset.public_images[:0], dataset.public_labels_N[:0])
    with pytest.raises(ValueError, match="0 test images"):
        measure(replace(dataset, test_images=dataset.test_images[:0], test_labels_N=dataset.test_labels_N[:0]),
                dataset.public_images, dataset.public_labels_N)
