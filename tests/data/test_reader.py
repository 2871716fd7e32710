"""What a data set of anyone's own is given while it is read."""

import numpy as np

from raysim.core.records import Dataset
from raysim.data.datasets import labels
from raysim.data.reader import Reader, read_dataset


def takes_it(reader: Reader, *, classes: int = 2) -> Dataset:
    reader.notes.append("read")
    return labels(counts=[1] * classes)


def takes_it_not(*, classes: int = 2) -> Dataset:
    return labels(counts=[1] * classes)


def has_a_key_of_that_name(*, reader: str = "mine") -> Dataset:
    assert reader == "mine"
    return labels(counts=[1, 1])


def test_a_data_set_with_a_positional_parameter_reader_is_given_it():
    reader = Reader()
    assert read_dataset("mine", takes_it, {"classes": 3}, reader).classes == 3 and reader.notes == ["read"]
    assert read_dataset("mine", takes_it_not, {"classes": 3}, reader).classes == 3
    assert read_dataset("mine", has_a_key_of_that_name, {}, reader).classes == 2 and reader.notes == ["read"]


def test_without_a_cache_everything_is_decoded():
    images = np.zeros((1, 1, 2, 2), np.uint8)
    assert Reader().decoded(lambda: [b"same"], lambda: images) is images
