"""Every data set that `raysim list` shows keeps the promises of its kind, whatever is in its files.

A new data set needs an entry in FILES that writes a small one; the battery fails until there is one.
"""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_datasets import write_idx
from test_files import encode, write_parquet

from raysim.config.plugin_guard import checked_dataset
from raysim.config.registry import available, check_parameters, resolve
from raysim.core.records import Dataset
from raysim.data.digest import digest
from raysim.data.reader import Reader, open_reader, read_dataset
from raysim.data.splits import channel_statistics, hold_out, subset

NAMES = sorted(available("data"))
Labelled = tuple[np.ndarray, np.ndarray]


def _drawn(seed: int, shape: tuple[int, ...], classes: int, each: int) -> Labelled:
    """`each` images of each class, channels first, and their labels, mixed."""
    rng = np.random.default_rng(seed)
    labels_N = rng.permutation(np.repeat(np.arange(classes), each))
    return rng.integers(0, 256, (len(labels_N), *shape), dtype=np.uint8), labels_N


def _last(images: np.ndarray) -> np.ndarray:
    """Channels last, without an axis for grey."""
    return images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)


def _folder(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
    for part, (images, labels_N) in (("train", train), *((("test", test),) if test is not None else ())):
        for i, (pixels, label) in enumerate(zip(_last(images), labels_N, strict=True)):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return {"path": str(root)}


def _parquet(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
    for part, (images, labels_N) in (("train", train), *((("test", test),) if test is not None else ())):
        write_parquet(root / f"{part}-0.parquet", [encode(pixels) for pixels in _last(images)], labels_N.tolist())
    return {"path": str(root)}


def _npz(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
    arrays = {"train_images": train[0], "train_labels": train[1]}
    if test is not None:
        arrays |= {"test_images": test[0], "test_labels": test[1]}
    np.savez(root / "d.npz", **arrays)
    return {"path": str(root / "d.npz")}


def _idx(folder: str, prefixes: tuple[str, str]) -> Callable[..., dict[str, Any]]:
    def write(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
        assert test is not None
        for prefix, (images, labels_N) in zip(prefixes, (train, test), strict=True):
            write_idx(root / folder / f"raw/{prefix}-images-idx3-ubyte", images[:, 0])
            write_idx(root / folder / f"raw/{prefix}-labels-idx1-ubyte", labels_N.astype(np.uint8))
        return {"root": str(root)}

    return write


def _cifar10(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
    assert test is not None
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    parts = {f"data_batch_{i + 1}": (train[0][i::5], train[1][i::5]) for i in range(5)} | {"test_batch": test}
    for name, (images, labels_N) in parts.items():
        content = {"data": images.reshape(len(images), -1), "labels": labels_N.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class{c}" for c in range(10)]}))
    return {"root": str(root)}


def _cifar100(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
    assert test is not None
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, (images, labels_N) in (("train", train), ("test", test)):
        content = {"data": images.reshape(len(images), -1), "fine_labels": labels_N.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class{c}" for c in range(100)]}))
    return {"root": str(root)}


def _svhn(root: Path, train: Labelled, test: Labelled | None) -> dict[str, Any]:
    from scipy.io import savemat

    assert test is not None
    for part, (images, labels_N) in (("train", train), ("test", test)):
        stored = np.where(labels_N == 0, 10, labels_N)[:, None]
        savemat(root / f"{part}_32x32.mat", {"X": images.transpose(2, 3, 1, 0), "y": stored})
    return {"root": str(root)}


# What writes a data set of each kind, and the shape and number of classes of its images where they are fixed.
Writer = Callable[[Path, Labelled, Labelled | None], dict[str, Any]]
FILES: dict[str, tuple[Writer, tuple[int, int, int] | None, int | None]] = {
    "image_folder": (_folder, None, None),
    "parquet": (_parquet, None, None),
    "npz": (_npz, None, None),
    "mnist": (_idx("MNIST", ("train", "t10k")), (1, 28, 28), 10),
    "fashion_mnist": (_idx("FashionMNIST", ("train", "t10k")), (1, 28, 28), 10),
    "emnist": (_idx("EMNIST", ("emnist-balanced-train", "emnist-balanced-test")), (1, 28, 28), 47),
    "cifar10": (_cifar10, (3, 32, 32), 10),
    "cifar100": (_cifar100, (3, 32, 32), 100),
    "svhn": (_svhn, (3, 32, 32), 10),
}
WITHOUT_FILES: dict[str, dict[str, Any]] = {"digits": {}, "labels": {"counts": [3, 5, 4]}}


@pytest.fixture(autouse=True, scope="module")
def no_checksums():
    """torchvision checks the sums of the published files; small ones of the same format have others."""
    import torchvision.datasets.cifar
    import torchvision.datasets.svhn

    with pytest.MonkeyPatch.context() as patch:
        for module in (torchvision.datasets.cifar, torchvision.datasets.svhn):
            patch.setattr(module, "check_integrity", lambda *_: True)
        yield


def test_the_battery_knows_every_data_set():
    assert sorted({*FILES, *WITHOUT_FILES}) == NAMES


def check(dataset: Dataset, name: str) -> None:
    """What every data set promises."""
    assert checked_dataset(dataset, name) is not None  # types, shapes, ranges, statistics
    assert dataset.train_images.dtype == dataset.test_images.dtype == np.uint8
    assert dataset.train_labels_N.dtype == dataset.test_labels_N.dtype == np.int64
    assert dataset.train_images.flags.c_contiguous and dataset.test_images.flags.c_contiguous
    assert dataset.channels in (1, 3) and len(set(dataset.class_names)) == dataset.classes
    assert set(dataset.train_labels_N.tolist()) == set(range(dataset.classes))
    assert dataset.public_images is None and dataset.public_labels_N is None
    if dataset.train_images.size:
        assert (dataset.mean, dataset.std) == channel_statistics(dataset.train_images)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99), grey=st.booleans(), classes=st.integers(2, 4), has_test=st.booleans(), data=st.data())
def test_every_data_set_keeps_the_promises_of_its_kind(name, seed, grey, classes, has_test, data):
    with tempfile.TemporaryDirectory() as folder:
        train = test = None
        keys = WITHOUT_FILES.get(name, {})
        if name in FILES:
            write, shape, fixed = FILES[name]
            has_test = has_test or shape is not None
            size = data.draw(st.tuples(st.integers(1, 6), st.integers(4, 7)))
            shape, classes = shape or ((1 if grey else 3), *size), fixed or classes
            train = _drawn(seed, shape, classes, each=3)
            test = _drawn(seed + 100, shape, classes, each=1) if has_test else None
            keys = write(Path(folder), train, test)
        plugin = resolve("data", name)
        keys, problems = check_parameters(plugin, keys, "data")
        assert not problems
        before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        reader = Reader()
        dataset = read_dataset(name, plugin, keys, reader)
        check(dataset, name)
        # The same again, with or without a cache; no file is changed; notes are lines.
        cached = read_dataset(name, plugin, keys, open_reader(f"{folder}/cache", []))
        assert digest(dataset) == digest(read_dataset(name, plugin, keys, Reader())) == digest(cached)
        assert {path: path.read_bytes() for path in before} == before
        assert all(isinstance(note, str) and "\n" not in note for note in reader.notes)
        if train is not None:
            _check_content(name, dataset, train, test)
        _check_parts(dataset)


def _check_content(name: str, dataset: Dataset, train: Labelled, test: Labelled | None) -> None:
    """Every image comes with its label, once, in the split that it was written to."""

    def written(images: np.ndarray, labels_N: np.ndarray) -> list[tuple[bytes, int]]:
        return _pairs(images.transpose(0, 1, 3, 2) if name == "emnist" else images, labels_N)

    found_train = _pairs(dataset.train_images, dataset.train_labels_N)
    found_test = _pairs(dataset.test_images, dataset.test_labels_N)
    if test is not None:
        assert (found_train, found_test) == (written(*train), written(*test))
    else:  # of 3 images of each class, round(0.2 * 3) = 1 is set apart
        assert sorted(found_train + found_test) == written(*train)
        assert np.bincount(dataset.test_labels_N).tolist() == [1] * dataset.classes


def _pairs(images: np.ndarray, labels_N: np.ndarray) -> list[tuple[bytes, int]]:
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels_N, strict=True))


def _check_parts(dataset: Dataset) -> None:
    """Public images and subsets can be taken from it."""
    held = hold_out(dataset, 0.4)
    assert held.public_labels_N is not None and len(np.unique(held.public_labels_N)) == dataset.classes
    assert len(held.train_labels_N) + len(held.public_labels_N) == len(dataset.train_labels_N)
    part = subset(dataset, dataset.classes, None)
    assert sorted(part.train_labels_N.tolist()) == list(range(dataset.classes))
