"""The digests of a data set: each names the part that changed, and nothing else changes them."""

from dataclasses import replace

import numpy as np
import pytest

from raysim.core.records import Dataset
from raysim.data.digest import digest
from raysim.data.splits import hold_out


@pytest.fixture
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(
        "mine",
        rng.integers(0, 256, (12, 3, 4, 4), dtype=np.uint8),
        np.arange(12) % 2,
        rng.integers(0, 256, (6, 3, 4, 4), dtype=np.uint8),
        np.arange(6) % 2,
        ("cat", "dog"),
        (0.5,) * 3,
        (0.2,) * 3,
    )


def _changed(before: Dataset, after: Dataset) -> set[str]:
    old, new = digest(before), digest(after)
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("train_images", "train_images"),
        ("test_images", "test_images"),
        ("train_labels_N", "train_labels"),
        ("test_labels_N", "test_labels"),
    ],
)
def test_one_changed_value_changes_the_digest_of_its_part_alone(dataset: Dataset, field: str, name: str) -> None:
    changed = getattr(dataset, field).copy()
    changed.flat[-1] ^= 1
    assert _changed(dataset, replace(dataset, **{field: changed})) == {name}


def test_a_renamed_class_and_a_shorter_test_split_are_seen(dataset: Dataset) -> None:
    assert _changed(dataset, replace(dataset, class_names=("cat", "cow"))) == {"class_names"}
    # "a", "bc" and "ab", "c" are other names though their letters are the same.
    assert digest(replace(dataset, class_names=("a", "bc"))) != digest(replace(dataset, class_names=("ab", "c")))
    short = replace(dataset, test_images=dataset.test_images[:4], test_labels_N=dataset.test_labels_N[:4])
    assert _changed(dataset, short) == {"test_images", "test_labels"}


def test_public_images_have_digests_of_their_own(dataset: Dataset) -> None:
    held = hold_out(dataset, 0.5)
    assert {"public_images", "public_labels"} <= digest(held).keys()
    assert held.public_images is not None
    assert _changed(held, replace(held, public_images=255 - held.public_images)) == {"public_images"}


def test_the_order_in_memory_and_the_shape_of_equal_bytes_are_told_apart(dataset: Dataset) -> None:
    """A Fortran-ordered copy has equal values, so an equal digest; 12 x 3 x 2 x 8 has these bytes in other images."""
    assert digest(replace(dataset, train_images=np.asfortranarray(dataset.train_images))) == digest(dataset)
    reshaped = replace(dataset, train_images=dataset.train_images.reshape(12, 3, 2, 8))
    assert _changed(dataset, reshaped) == {"train_images"}
