"""Quality measurements tell good images from bad ones, and copies from new ones."""

from dataclasses import replace

import numpy as np
import pytest

from raysim.core.records import Split
from raysim.data.datasets import digits
from raysim.data.splits import hold_out
from raysim.generation import quality
from raysim.generation.quality import measure, nearest, table


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quality, "STEPS", 150)


@pytest.fixture(scope="module")
def split() -> Split:
    return hold_out(digits(), 0.3)


def test_real_images_are_as_good_as_real_ones_and_no_copies(split: Split):
    """Held-out real images in place of synthetic ones: equal accuracy, recognised, as far as test images are."""
    result = measure(split, split.public_images, split.public_labels_N)
    accuracy, distance = result["accuracy"], result["distance"]
    assert accuracy["from_real"] > 0.85 and abs(accuracy["from_synthetic"] - accuracy["from_real"]) < 0.05
    assert result["recognised"] > 0.85
    assert distance["synthetic_to_train"] == pytest.approx(distance["test_to_train"], rel=0.1)
    assert distance["nearer_than_99_of_test"] < 0.05
    assert result["images"] == result["real_images"] == len(split.public_labels_N)


def test_copies_and_wrong_labels_are_seen(split: Split):
    """Training images themselves, each with the label of the next class."""
    wrong_M = (split.train_labels_N + 1) % 10
    result = measure(split, split.train_images, wrong_M)
    assert result["recognised"] < 0.1 and result["accuracy"]["from_synthetic"] < 0.1
    assert result["distance"]["synthetic_to_train"] == pytest.approx(0, abs=1e-3)
    assert result["distance"]["nearer_than_99_of_test"] == 1.0


def test_a_class_that_is_missing_is_never_learned(split: Split):
    keep = split.public_labels_N != 4
    result = measure(split, split.public_images[keep], split.public_labels_N[keep])
    assert result["per_class"]["from_synthetic"][4] == result["per_class"]["from_real"][4] == 0.0
    assert result["per_class"]["recognised"][4] is None
    assert any(line.startswith("| 4 ") and line.rstrip(" |").endswith("-") for line in table(result))


def test_it_is_the_same_twice_and_plain_data(split: Split):
    import json

    results = [json.dumps(measure(split, split.public_images[:100], split.public_labels_N[:100])) for _ in range(2)]
    assert results[0] == results[1]


def test_nearest_is_the_root_mean_square_difference():
    """Four pixels that differ by 51 of 255 are 0.2 apart; of two references the nearer counts."""
    query = np.full((1, 1, 2, 2), 51, np.uint8)
    references = np.stack([np.zeros((1, 2, 2)), np.full((1, 2, 2), 255)]).astype(np.uint8)
    assert nearest(query, references) == pytest.approx([0.2])


def test_without_images_it_is_an_error(split: Split):
    with pytest.raises(ValueError, match="0 synthetic"):
        measure(split, split.public_images[:0], split.public_labels_N[:0])
    with pytest.raises(ValueError, match="0 test images"):
        measure(replace(split, test_images=split.test_images[:0], test_labels_N=split.test_labels_N[:0]),
                split.public_images, split.public_labels_N)
