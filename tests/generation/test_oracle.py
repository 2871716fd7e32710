"""The `oracle` generator: held-out real images, without repeats while they last."""

import numpy as np
import pytest

from raysim.core.errors import UserError
from raysim.core.records import Dataset
from raysim.data.datasets import digits
from raysim.data.splits import hold_out, subset
from raysim.generation.oracle import oracle


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return hold_out(digits(), 0.2)


def draw(dataset: Dataset, client: int, class_: int, count: int, seed: int = 0) -> np.ndarray:
    seeds_B = np.array([oracle.image_seed(seed, client, class_, i) for i in range(count)])
    return oracle(dataset, "cpu").sample(np.full(count, class_), seeds_B)


def rows(images: np.ndarray) -> set[bytes]:
    return {image.tobytes() for image in images}


def test_public_images_are_a_class_balanced_part_that_no_client_owns(dataset):
    """A fifth of each class of the 1,438 training digits; together with the rest they are the whole."""
    whole = digits()
    public_C, all_C = (np.bincount(labels, minlength=10) for labels in (dataset.public_labels_N, whole.train_labels_N))
    assert np.abs(public_C - 0.2 * all_C).max() <= 0.5
    assert len(dataset.train_labels_N) + len(dataset.public_labels_N) == len(whole.train_labels_N)
    assert rows(dataset.public_images) | rows(dataset.train_images) == rows(whole.train_images)
    assert not rows(dataset.public_images) & rows(dataset.train_images)


def test_a_smaller_training_set_keeps_the_same_public_images(dataset):
    cut = subset(dataset, 100, None)
    assert np.array_equal(cut.public_images, dataset.public_images)
    assert not rows(cut.public_images) & rows(cut.train_images)


def test_no_public_fraction_changes_nothing():
    whole = digits()
    assert hold_out(whole, 0.0) is whole


def test_a_class_of_one_image_cannot_be_shared():
    images = np.zeros((3, 1, 2, 2), np.uint8)
    tiny = Dataset("tiny", images, np.array([0, 0, 1]), images, np.array([0, 0, 1]), ("a", "b"), (0.5,), (0.5,))
    with pytest.raises(UserError, match=r"data.public_frac = 0.5: class 1 of tiny has 1 training image"):
        hold_out(tiny, 0.5)


def test_a_client_gets_different_real_images_of_its_class_while_they_last(dataset):
    pool = dataset.public_images[dataset.public_labels_N == 3]
    made = draw(dataset, 0, 3, len(pool))
    assert rows(made) == rows(pool)


def test_requests_beyond_the_pool_come_again_in_the_same_order(dataset):
    n = int((dataset.public_labels_N == 3).sum())
    made = draw(dataset, 0, 3, 2 * n + 5)
    assert np.array_equal(made[n : 2 * n], made[:n])
    assert np.array_equal(made[2 * n :], made[:5])


def test_a_larger_request_extends_a_smaller_one_and_clients_and_seeds_differ(dataset):
    assert np.array_equal(draw(dataset, 1, 4, 20)[:8], draw(dataset, 1, 4, 8))
    assert not np.array_equal(draw(dataset, 1, 4, 8), draw(dataset, 2, 4, 8))
    assert not np.array_equal(draw(dataset, 1, 4, 8), draw(dataset, 1, 4, 8, seed=1))


def test_images_do_not_depend_on_the_order_of_the_requests(dataset):
    labels_B = np.arange(30) % 10
    seeds_B = np.array([oracle.image_seed(0, i % 3, int(c), i) for i, c in enumerate(labels_B)])
    generator = oracle(dataset, "cpu")
    together = generator.sample(labels_B, seeds_B)
    assert np.array_equal(generator.sample(labels_B[::-1], seeds_B[::-1])[::-1], together)


def test_two_clients_that_want_80_of_a_pool_of_100_share_it_and_120_are_told_of():
    """Within a client nothing repeats up to 100; of 120, 20 do, and the note counts them."""
    images = np.arange(200, dtype=np.uint8).repeat(4).reshape(200, 1, 2, 2)
    labels_N = np.zeros(200, dtype=np.int64)
    pool = hold_out(Dataset("pool", images, labels_N, images[:1], labels_N[:1], ("a",), (0.5,), (0.3,)), 0.5)
    assert len(pool.public_images) == 100
    assert all(len(rows(draw(pool, k, 0, 80))) == 80 for k in (0, 1))
    assert oracle.notes(pool, np.array([[80], [80]])) == []
    (note,) = oracle.notes(pool, np.array([[120], [80]]))
    assert note.startswith("oracle: 20 of 200 images are repeats within a client")
    assert len(draw(pool, 0, 0, 120)) == 120


def test_without_public_images_it_says_what_to_set():
    with pytest.raises(UserError, match=r"generator.name = oracle: .* data.public_frac"):
        oracle(digits(), "cpu")


def test_the_fingerprint_is_that_of_the_pool(dataset):
    assert oracle(dataset, "cpu").fingerprint() == oracle(hold_out(digits(), 0.2), "cpu").fingerprint()
    assert oracle(dataset, "cpu").fingerprint() != oracle(hold_out(digits(), 0.3), "cpu").fingerprint()
