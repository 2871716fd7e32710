"""The split on which rounds and values of keys are chosen: class-balanced, owned by nobody, the same for every seed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim.config.load import load_config
from raysim.core.errors import UserError
from raysim.core.records import Dataset
from raysim.data.datasets import digits
from raysim.data.digest import digest
from raysim.data.splits import hold_out, subset, validation_split
from raysim.lifecycle.prepare import load_dataset, prepare


def rows(images: np.ndarray | None) -> set[bytes]:
    assert images is not None
    return {image.tobytes() for image in images}


def test_it_is_a_balanced_part_of_the_training_images_beside_the_public_ones():
    """A tenth of each class of what the public images leave; together, the parts are the whole."""
    public = hold_out(digits(), 0.2)
    split = validation_split(public, 0.1)
    assert split.validation_labels_N is not None
    before_C = np.bincount(public.train_labels_N, minlength=10)
    taken_C = np.bincount(split.validation_labels_N, minlength=10)
    assert np.abs(taken_C - 0.1 * before_C).max() <= 0.5
    parts = [rows(images) for images in (split.train_images, split.validation_images, split.public_images)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(rows(digits().train_images))
    assert np.array_equal(split.test_images, digits().test_images)


def test_a_smaller_training_set_keeps_the_same_validation_images_and_none_changes_nothing():
    whole = digits()
    split = validation_split(whole, 0.1)
    cut = subset(split, 100, None)
    assert np.array_equal(cut.validation_images, split.validation_images) and len(cut.train_labels_N) == 100
    assert validation_split(whole, 0.0) is whole
    names = set(digest(split)) - set(digest(whole))
    assert names == {"validation_images", "validation_labels"}
    assert split.nbytes == whole.nbytes


def of_counts(*counts: int) -> Dataset:
    labels_N = np.repeat(np.arange(len(counts)), counts)
    images = np.zeros((len(labels_N), 1, 2, 2), np.uint8)
    names = tuple(map(str, range(len(counts))))
    return Dataset("tiny", images, labels_N, images[:1], labels_N[:1], names, (0.5,), (0.5,))


@pytest.mark.parametrize(
    ("fraction", "said"),
    [
        (0.1, r"data.validation_fraction = 0.1: of the 4 training images of class 1 of tiny, 0 .* no validation image"),
        (0.95, r"data.validation_fraction = 0.95: of the 4 training .* class 1 .* no training image; use a smaller"),
    ],
)
def test_a_fraction_that_leaves_a_class_without_images_is_refused(fraction: float, said: str):
    with pytest.raises(UserError, match=said):
        validation_split(of_counts(100, 4), fraction)


def configuration(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    return {
        "rounds": 1, "data": {"name": "digits", "validation_fraction": 0.95}, "output": {"cache": str(tmp_path)},
        "partition": {"name": "dirichlet", "clients": 10, "min_samples": 20}, **keys,
    }


def test_a_fraction_that_leaves_clients_without_samples_is_refused_and_named(tmp_path: Path):
    """Of 1,438 images, 95 % of each class of 142 to 146: 7 or 8 a class are left, 10 clients of 20 need 200."""
    with pytest.raises(UserError, match=r"min_samples = 20.*\(data.validation_fraction = 0.95 leaves 7\d training"):
        prepare(load_config(configuration(tmp_path)))
    partition = {"name": "dirichlet", "clients": 60, "alpha": 0.02, "min_samples": 0}
    with pytest.raises(UserError, match=r"clients have no sample.*\(data.validation_fraction = 0.95 leaves 7\d"):
        prepare(load_config(configuration(tmp_path, partition=partition)))


def test_more_training_images_than_are_left_are_refused_and_it_says_where_they_are(tmp_path: Path):
    data = {"name": "digits", "validation_fraction": 0.5, "train_samples": 1000}
    with pytest.raises(UserError, match=r"has 7\d\d such images .* beside those of data.validation_fraction"):
        load_dataset(load_config(configuration(tmp_path, data=data)))


def test_the_fraction_is_in_the_hash_of_a_configuration(tmp_path: Path):
    plain = configuration(tmp_path)
    without = load_config({**plain, "data": {"name": "digits"}})
    assert load_config(plain).hash() != without.hash()
    assert without.hash() == load_config({**plain, "data": {"name": "digits", "validation_fraction": 0.0}}).hash()
