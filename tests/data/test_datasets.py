"""Named data sets and their splits."""

import gzip
import hashlib
import importlib.util
import pickle
import struct

import numpy as np
import pytest

from raysim.config.registry import check_parameters
from raysim.core.errors import UserError
from raysim.data import datasets
from raysim.data.datasets import digits, labels
from raysim.data.splits import channel_statistics, subset


def pictures(count: int, shape: tuple[int, ...] = (6, 5, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(count, *shape), dtype=np.uint8)


def test_digits_are_the_1797_images_in_a_fixed_balanced_split():
    """174..183 images a class; round(0.2 * n) is 35..37 of each, and the rest trains."""
    dataset = digits()
    assert dataset.train_images.shape == (len(dataset.train_labels_N), 1, 8, 8)
    assert len(dataset.train_labels_N) + len(dataset.test_labels_N) == 1797
    test_C, train_C = np.bincount(dataset.test_labels_N), np.bincount(dataset.train_labels_N)
    assert test_C.tolist() == np.rint(0.2 * (test_C + train_C)).astype(int).tolist()
    images = dataset.train_images
    assert images.dtype == np.uint8 and images.max() == 255 and images.min() == 0
    assert dataset.train_labels_N.dtype == np.int64
    assert dataset.class_names == tuple("0123456789") and not dataset.flips
    assert (digits().test_images == dataset.test_images).all()
    assert not np.array_equal(digits(split_seed=1).test_images, dataset.test_images)


def test_digits_train_and_test_together_are_the_whole_data_set():
    from sklearn.datasets import load_digits

    dataset = digits()
    both = np.concatenate([dataset.train_images, dataset.test_images]).reshape(1797, 64)
    original = np.rint(load_digits().images * 255 / 16).reshape(1797, 64).astype(np.uint8)
    assert sorted(map(bytes, both)) == sorted(map(bytes, original))


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_read_as_scikit_learn_reads_them_also_where_its_file_has_moved(monkeypatch, found):
    from sklearn.datasets import load_digits

    if not found:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    bunch = load_digits()
    assert (datasets._digits_rows() == np.column_stack([bunch.data, bunch.target])).all()


def test_statistics_are_those_of_the_scaled_training_images():
    images = pictures(50).transpose(0, 3, 1, 2)
    images[:, 2] = 51
    mean, std = channel_statistics(images)
    assert mean == pytest.approx((images / 255).mean(axis=(0, 2, 3)))
    assert std[:2] == pytest.approx((images / 255).std(axis=(0, 2, 3))[:2])
    assert std[2] == 1.0  # constant: nothing to scale


@pytest.mark.parametrize("shape", [(7, 3, 5, 5), (1, 1, 1, 1), (4, 2, 8, 8)])
def test_the_statistics_of_odd_and_even_numbers_of_pixels_are_those_of_all_of_them(shape):
    """7 x 25 pixels a channel are an odd number, one pixel has no neighbour to be counted with."""
    images = np.random.default_rng(0).integers(0, 256, size=shape, dtype=np.uint8)
    mean, std = channel_statistics(images)
    scaled = images / 255
    assert mean == pytest.approx(scaled.mean(axis=(0, 2, 3)))
    assert std == pytest.approx([s or 1.0 for s in scaled.std(axis=(0, 2, 3))])


# --- subsets


def test_a_subset_is_balanced_exact_and_the_same_every_time():
    dataset = labels(counts=[50, 100, 350])
    part = subset(dataset, 100, None)
    assert np.bincount(part.train_labels_N).tolist() == [11, 20, 69]  # 1 + 97 * (49, 99, 349) / 497
    real = subset(digits(), 103, 31)
    assert len(real.train_labels_N) == 103 and len(real.test_labels_N) == 31
    assert set(np.bincount(real.train_labels_N)) <= {10, 11}
    assert (subset(digits(), 103, 31).train_images == real.train_images).all()
    assert real.mean != digits().mean
    assert subset(dataset, None, None) is dataset


def test_a_subset_keeps_at_least_one_image_of_each_class():
    assert np.bincount(subset(labels(counts=[1, 1, 998]), 10, None).train_labels_N).tolist() == [1, 1, 8]


@pytest.mark.parametrize("samples", [0, 2, 501, -1])
def test_a_subset_of_impossible_size_is_refused_by_name(samples):
    with pytest.raises(UserError, match=rf"data\.train_samples = {samples}: .* 3\.\.500"):
        subset(labels(counts=[50, 100, 350]), samples, None)
    with pytest.raises(UserError, match=r"data\.test_samples = 400"):
        subset(digits(), None, 400)


# --- labels


def test_labels_alone_take_no_image_memory():
    dataset = labels(counts={"classes": 10, "per_class": 5000})
    assert len(dataset.train_labels_N) == 50_000 and dataset.classes == 10
    assert dataset.train_images.nbytes == 0 and len(dataset.train_images) == 50_000 and len(dataset.test_labels_N) == 0


@pytest.mark.parametrize("counts", [[], [5, 0], {"classes": 3}, {"classes": 0, "per_class": 5}])
def test_label_counts_without_a_sample_are_refused(counts):
    with pytest.raises(UserError, match=r"data\.counts"):
        labels(counts=counts)


@pytest.mark.parametrize("counts", [[1.5, 2], "10", [-1], {"classes": 3, "each": 2}, None])
def test_label_counts_of_another_type_are_refused_by_the_configuration(counts):
    assert check_parameters(labels, {"counts": counts}, "data")[1]


# --- torchvision


def write_idx(path, array: np.ndarray) -> None:
    """The format of MNIST's files: a magic number with the number of dimensions, the sizes, the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_files_are_read_through_torchvision(tmp_path, name, folder):
    images, values = pictures(20, (28, 28)), np.arange(20, dtype=np.uint8) % 10
    for prefix, part in (("train", slice(0, 10)), ("t10k", slice(10, 20))):
        write_idx(tmp_path / folder / f"raw/{prefix}-images-idx3-ubyte", images[part])
        write_idx(tmp_path / folder / f"raw/{prefix}-labels-idx1-ubyte", values[part])
    dataset = getattr(datasets, name)(root=str(tmp_path))
    assert (dataset.train_images == images[:10, None]).all() and (dataset.test_images == images[10:, None]).all()
    assert dataset.train_labels_N.tolist() == list(range(10)) and dataset.classes == 10
    assert dataset.flips == (name == "fashion_mnist")


def test_emnist_letters_start_at_0_and_stand_upright(tmp_path):
    images, values = pictures(26, (28, 28)), np.arange(1, 27, dtype=np.uint8)
    for part in ("train", "test"):
        write_idx(tmp_path / f"EMNIST/raw/emnist-letters-{part}-images-idx3-ubyte", images)
        write_idx(tmp_path / f"EMNIST/raw/emnist-letters-{part}-labels-idx1-ubyte", values)
    dataset = datasets.emnist(root=str(tmp_path), split="letters")
    assert dataset.train_labels_N.tolist() == list(range(26))
    assert dataset.class_names[0] == "a" and dataset.class_names[-1] == "z"
    assert (dataset.train_images[:, 0] == images.transpose(0, 2, 1)).all() and not dataset.flips


def test_a_truncated_archive_is_named_with_both_checksums(tmp_path):
    """The MD5 sum of a million zero bytes is 879f4bdf...; that of the archive is the one torchvision expects."""
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(bytes(1_000_000))
    with pytest.raises(UserError) as caught:
        datasets.cifar10(root=str(tmp_path))
    md5 = hashlib.md5(bytes(1_000_000), usedforsecurity=False).hexdigest()
    for part in (
        "cifar-10-python.tar.gz (1,000,000 bytes)", f"has the MD5 sum {md5}",
        "should have c58f30108f718f92721af3b95e74349a", "data.download=true to fetch it again",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("read", "file"),
    [
        (datasets.cifar100, "cifar-100-python/train"),
        (datasets.mnist, "MNIST/raw/train-images-idx3-ubyte.gz"),
        (datasets.fashion_mnist, "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"),
        (datasets.emnist, "EMNIST/raw/gzip.zip"),
        (datasets.svhn, "train_32x32.mat"),
    ],
)
def test_every_named_data_set_says_which_of_its_files_is_damaged(tmp_path, read, file):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"cut short")
    with pytest.raises(UserError, match=rf"is damaged: {(tmp_path / file).name} \(9 bytes\) has the MD5 sum"):
        read(root=str(tmp_path))


def test_an_absent_data_set_is_said_to_be_absent(tmp_path):
    with pytest.raises(UserError, match=r"mnist in .* is absent or damaged .*data\.download=true"):
        datasets.mnist(root=str(tmp_path))


def test_cifar_batches_are_read_through_torchvision(tmp_path, monkeypatch):
    """Small batches in CIFAR's own format; only the checksum of the published files is switched off."""
    import torchvision.datasets.cifar as module

    monkeypatch.setattr(module, "check_integrity", lambda *_: True)
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    images = pictures(60, (3, 32, 32))
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for i, name in enumerate(names):
        rows = images[10 * i : 10 * i + 10].reshape(10, -1)
        (root / name).write_bytes(pickle.dumps({"data": rows, "labels": list(range(10))}))
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class{c}" for c in range(10)]}))
    dataset = datasets.cifar10(root=str(tmp_path))
    assert (dataset.train_images == images[:50]).all() and (dataset.test_images == images[50:]).all()
    assert dataset.class_names[3] == "class3" and dataset.flips


def test_svhn_files_are_read_through_torchvision(tmp_path, monkeypatch):
    """SVHN keeps height x width x channels x N and calls the digit 0 class 10; the checksum is switched off."""
    import torchvision.datasets.svhn as module
    from scipy.io import savemat

    monkeypatch.setattr(module, "check_integrity", lambda *_: True)
    images, values = pictures(20, (3, 32, 32)), np.arange(1, 21) % 10
    for name, part in (("train", slice(0, 10)), ("test", slice(10, 20))):
        stored = np.where(values[part] == 0, 10, values[part])[:, None]
        savemat(tmp_path / f"{name}_32x32.mat", {"X": images[part].transpose(2, 3, 1, 0), "y": stored})
    dataset = datasets.svhn(root=str(tmp_path))
    assert (dataset.train_images == images[:10]).all() and (dataset.test_images == images[10:]).all()
    assert dataset.train_labels_N.tolist() == values[:10].tolist() and not dataset.flips


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist", "emnist", "svhn"])
def test_a_data_set_that_is_absent_is_not_fetched_unasked(tmp_path, name):
    with pytest.raises(UserError, match=rf"data\.root = .*{name}.*set data\.download=true"):
        getattr(datasets, name)(root=str(tmp_path))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_damaged_data_set_is_refused(tmp_path):
    for prefix in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            path = tmp_path / f"MNIST/raw/{prefix}-{kind}-ubyte"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(b"not what it says"))
    with pytest.raises(UserError, match=r"absent or damaged"):
        datasets.mnist(root=str(tmp_path))
