"""Weights say which images they were trained on, and a run whose test images are among them is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_pretrain import make_config
from toy_weights import make_dataset, make_folder

from raysim.core.errors import UserError
from raysim.core.records import Dataset
from raysim.data.datasets import digits
from raysim.generation import training_images
from raysim.generation.ddpm import ddpm
from raysim.generation.pretrain import pretrain
from raysim.generation.training_images import image_keys, record, seen
from raysim.generation.weights_folder import CARD, SHIPPED, read_json


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)


@pytest.fixture
def known(tmp_path: Path, images: np.ndarray) -> tuple[str, Dataset]:
    """Weights trained on the first ten images, and a data set of ten others."""
    folder = make_folder(tmp_path / "weights", make_dataset())
    card = {**read_json(folder / CARD), training_images.ENTRY: record(folder, images[:10])}
    (folder / CARD).write_text(json.dumps(card))
    labels_N = np.arange(5) % 3
    parts = {"train_images": images[10:15], "test_images": images[15:]}
    return str(folder), replace(make_dataset(), **parts, train_labels_N=labels_N, test_labels_N=labels_N)


def test_keys_tell_images_by_pixels_and_shape_alone(images):
    assert len(set(image_keys(images).tolist())) == 20
    assert (image_keys(np.asfortranarray(images)) == image_keys(images)).all()
    assert not np.isin(image_keys(images.reshape(20, 1, 4, 16)), image_keys(images)).any()
    changed = images.copy()
    changed[3, 0, 7, 7] ^= 1
    assert np.flatnonzero(image_keys(changed) != image_keys(images)).tolist() == [3]


def test_seen_images_are_counted_wherever_they_stand(images):
    keys = np.sort(image_keys(images[:10]))
    assert (seen(keys, images[5:]), seen(keys, images[10:]), seen(keys, images[:0])) == (5, 0, 0)


def test_test_images_among_the_training_images_are_refused_unless_allowed(known, images):
    weights, other = known
    ddpm(other, "cpu", weights=weights)  # none of its images was trained on
    leaky = replace(other, test_images=np.concatenate([images[15:18], images[:2]]))
    with pytest.raises(UserError, match=r"2 of the 5 test images of 'toy' .*data\.split_seed.*allow_seen_test: true"):
        ddpm(leaky, "cpu", weights=weights)
    allowed = ddpm(leaky, "cpu", weights=weights, allow_seen_test=True)
    assert allowed.fingerprint() == ddpm(other, "cpu", weights=weights).fingerprint()  # the images are the same
    quota_KC = np.ones((1, 3), dtype=np.int64)
    notes = ddpm.notes(leaky, quota_KC, weights=weights, allow_seen_test=True)
    assert notes == [f"generator.weights = {weights} were trained on 2 of the 5 test images, too "
                     "(generator.allow_seen_test)"]


def test_weights_trained_on_the_clients_images_say_so_and_others_say_that_they_do_not_know(known, images, tmp_path):
    weights, other = known
    quota_KC = np.ones((1, 3), dtype=np.int64)
    own = replace(other, train_images=images[8:13])
    assert ddpm.notes(own, quota_KC, weights=weights)[0].startswith(
        f"generator.weights = {weights} were trained on 2 of the 5 images of all clients"
    )
    assert ddpm.notes(other, quota_KC, weights=weights) == []
    unknown = str(make_folder(tmp_path / "unknown", make_dataset()))
    assert "do not say which images they were trained on" in ddpm.notes(other, quota_KC, weights=unknown)[0]


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_record_is_named(known, damage):
    weights, other = known
    path = Path(weights) / training_images.FILE
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-4] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"training_images\.npy is missing or damaged"):
        ddpm(other, "cpu", weights=weights)


def test_the_shipped_digits_were_trained_on_the_default_split_alone():
    """1,438 of 1,797 images; of another split's 359 test images, 289 are among them, of one of two fifths' 719, 571."""
    keys = training_images.recorded(SHIPPED / "digits", read_json(SHIPPED / "digits" / CARD))
    assert keys is not None and len(keys) == 1438 and seen(keys, digits().train_images) == 1438
    assert seen(keys, digits().test_images) == 0
    assert seen(keys, digits(split_seed=1).test_images) == 289
    assert seen(keys, digits(test_fraction=0.4).test_images) == 571
    with pytest.raises(UserError, match="289 of the 359 test images"):
        ddpm(digits(split_seed=1), "cpu", weights="digits")


def test_the_shipped_records_are_those_that_pretraining_writes(tmp_path):
    entry = record(tmp_path, digits().train_images)
    shipped = SHIPPED / "digits"
    assert (tmp_path / training_images.FILE).read_bytes() == (shipped / training_images.FILE).read_bytes()
    assert read_json(shipped / CARD)[training_images.ENTRY] == entry
    cifar10 = SHIPPED / "cifar10"
    keys = training_images.recorded(cifar10, read_json(cifar10 / CARD))
    assert keys is not None and len(keys) == 50_000 and (np.diff(keys) > 0).all()


def test_pretraining_records_its_images(tmp_path):
    dataset = digits()
    folder = pretrain(make_config(tmp_path / "w", steps=1), dataset, lambda _: None)
    keys = training_images.recorded(folder, read_json(folder / CARD))
    assert keys is not None and keys.tolist() == np.unique(image_keys(dataset.train_images)).tolist()
