"""Claims about every data set that `raysim list data` shows and that can be had without a download."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raysim.config.registry import available, parameters, resolve
from raysim.core.errors import UserError

CLASSES, PER_CLASS, SHAPE = 3, 20, (6, 5, 3)  # of the files made here; height, width, channels
WITHOUT_IMAGES = {"labels"}
DOWNLOADED = sorted(n for n in available("data") if "download" in parameters(resolve("data", n)).model_fields)
HERE = sorted(set(available("data")) - set(DOWNLOADED))
every = pytest.mark.parametrize("name", HERE)


def pixels(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images that all differ, and their labels."""
    generator = np.random.default_rng(seed)
    count = CLASSES * PER_CLASS
    return generator.integers(0, 256, (count, *SHAPE), dtype=np.uint8), np.arange(count) % CLASSES


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def keys_of(name: str, folder: Path) -> dict:
    """What a data set needs, with the files that it reads."""
    images, labels_N = pixels()
    if name == "npz":
        np.savez(folder / "data.npz", train_images=images, train_labels=labels_N)
        return {"path": str(folder / "data.npz")}
    if name == "parquet":
        table = {"image": [{"bytes": png(i), "path": None} for i in images], "label": labels_N.tolist()}
        pq.write_table(pa.table(table), folder / "data.parquet")
        return {"path": str(folder / "data.parquet")}
    if name == "image_folder":
        for i, (image, label) in enumerate(zip(images, labels_N, strict=True)):
            (folder / "classes" / f"class-{label}").mkdir(parents=True, exist_ok=True)
            (folder / "classes" / f"class-{label}" / f"{i:03}.png").write_bytes(png(image))
        return {"path": str(folder / "classes")}
    return {"digits": {}, "labels": {"counts": [5, 7, 3]}}[name]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, dict]:
    return {name: keys_of(name, tmp_path_factory.mktemp(name)) for name in HERE}


def make(name, keys, **more):
    return resolve("data", name)(**keys[name], **more)


def rows(images: np.ndarray, labels_N: np.ndarray) -> list[tuple[bytes, int]]:
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels_N, strict=True))


@every
def test_images_are_bytes_and_labels_are_classes(name, keys):
    found = make(name, keys)
    for images, labels_N in (
        (found.train_images, found.train_labels_N), (found.test_images, found.test_labels_N),
    ):
        assert images.dtype == np.uint8 and labels_N.dtype == np.int64
        assert images.shape == (len(labels_N), found.channels, *found.image_size) and labels_N.ndim == 1
        assert not len(labels_N) or (labels_N.min() >= 0 and labels_N.max() < found.classes)
    assert (np.bincount(found.train_labels_N, minlength=found.classes) > 0).all()


@every
def test_each_class_has_a_name_of_its_own(name, keys):
    found = make(name, keys)
    assert len(found.class_names) == found.classes == len(set(found.class_names))
    assert all(isinstance(class_name, str) and class_name for class_name in found.class_names)


@pytest.mark.parametrize("name", sorted(set(HERE) - WITHOUT_IMAGES))
def test_mean_and_deviation_are_those_of_the_training_images(name, keys):
    """Per channel, of pixels in [0, 1], with n in the denominator."""
    found = make(name, keys)
    scaled = found.train_images.astype(np.float64) / 255
    np.testing.assert_allclose(found.mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.std, scaled.std(axis=(0, 2, 3)), rtol=1e-12)


@pytest.mark.parametrize("name", sorted(set(HERE) - WITHOUT_IMAGES))
def test_the_test_split_is_apart_and_together_they_are_everything(name, keys):
    """Two split seeds set other images of each class apart, a fifth each time, of the same whole."""
    one, other = make(name, keys), make(name, keys, split_seed=1)
    wholes = []
    for found in (one, other):
        train, test = rows(found.train_images, found.train_labels_N), rows(found.test_images, found.test_labels_N)
        assert not set(train) & set(test)
        wholes.append(sorted(train + test))
        counts_C = np.bincount([label for _, label in train + test])
        assert (np.bincount(found.test_labels_N) == np.rint(counts_C / 5)).all()
    assert wholes[0] == wholes[1]
    assert rows(one.test_images, one.test_labels_N) != rows(other.test_images, other.test_labels_N)


@pytest.mark.parametrize("name", sorted(set(HERE) - WITHOUT_IMAGES - {"digits"}))
def test_what_was_written_is_what_is_read(name, keys):
    images, labels_N = pixels()
    found = make(name, keys)
    read = rows(found.train_images, found.train_labels_N) + rows(found.test_images, found.test_labels_N)
    assert sorted(read) == rows(images.transpose(0, 3, 1, 2), labels_N)


@every
def test_reading_again_gives_the_same(name, keys):
    one, again = make(name, keys), make(name, keys)
    for part in ("train_images", "train_labels_N", "test_images", "test_labels_N"):
        assert getattr(one, part).tobytes() == getattr(again, part).tobytes()
    assert (one.class_names, one.mean, one.std) == (again.class_names, again.mean, again.std)


@pytest.mark.parametrize("name", DOWNLOADED)
def test_a_data_set_that_is_not_there_says_where_it_was_looked_for(name, tmp_path):
    with pytest.raises(UserError, match=r"data\.root = .*absent or damaged; set data\.download=true"):
        resolve("data", name)(root=str(tmp_path))
    assert not list(tmp_path.rglob("*.gz"))
