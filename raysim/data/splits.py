"""From images and labels to a Dataset: checks, statistics, and fixed class-balanced choices of samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.records import ByteArray, Dataset, FloatArray, IntArray
from raysim.core.rounding import fraction_of, largest_remainder

Labelled = tuple[ByteArray, IntArray]  # images N x channels x H x W, labels_N


def build_dataset(
    name: str,
    train: Labelled,
    test: Labelled | None,
    class_names: Sequence[str] | None,
    *,
    flips: bool,
    test_fraction: float,
    split_seed: int,
    key: str = "data.path",
) -> Dataset:
    """A checked Dataset; without a test split, `test_fraction` of each class is set apart, the same for equal seeds.

    Raises UserError (naming `key`) where there is no image, a class has no training image, or a label has no name.
    """
    unread = () if test is None else ("test_fraction", "split_seed")
    if test is None:
        train, test = _set_apart(train, test_fraction, split_seed)
    if len(train[1]) == 0:
        raise UserError(f"{key}: {name} holds no training image; give a data set that has some")
    if test[0].shape[1:] != train[0].shape[1:] and len(test[1]):
        raise UserError(
            f"{key}: training images are {_size(train[0])} and test images {_size(test[0])}; bring them to one size"
        )
    highest = int(max(train[1].max(), test[1].max(initial=0)))
    names = tuple(class_names) if class_names is not None else tuple(str(c) for c in range(highest + 1))
    if highest >= len(names):
        raise UserError(f"{key}: label {highest} has no name; the data set names only {len(names)} classes (0..)")
    missing = np.flatnonzero(np.bincount(train[1], minlength=len(names)) == 0)
    if len(missing):
        raise UserError(
            f"{key}: {name} has no training image of class {', '.join(map(str, missing[:5]))}"
            f"{' ...' if len(missing) > 5 else ''} of its {len(names)} classes; number classes 0, 1, ... without gaps"
        )
    mean, std = channel_statistics(train[0])
    return Dataset(name, train[0], train[1], test[0], test[1], names, mean, std, flips, unread=unread)


def _size(images: ByteArray) -> str:
    return " x ".join(map(str, images.shape[1:]))


def _set_apart(data: Labelled, fraction: float, seed: int) -> tuple[Labelled, Labelled]:
    """(train, test): round(fraction * n) of each class of n go to the test split, but never all of a class."""
    images, labels_N = data
    counts_C = np.bincount(labels_N)
    take_C = np.array([max(0, min(fraction_of(fraction, int(n)), int(n) - 1)) for n in counts_C], dtype=np.int64)
    chosen = choose(labels_N, take_C, rng.stream(seed, rng.SPLIT, 0))
    rest = np.setdiff1d(np.arange(len(labels_N)), chosen)
    return (images[rest], labels_N[rest]), (images[chosen], labels_N[chosen])


def choose(labels_N: IntArray, take_C: IntArray, generator: np.random.Generator) -> IntArray:
    """Rows, in ascending order, with take_C[c] samples of each class c, drawn without replacement."""
    rows = [
        generator.choice(np.flatnonzero(labels_N == c), size=int(take), replace=False) for c, take in enumerate(take_C)
    ]
    return np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)


def subset(dataset: Dataset, train_samples: int | None, test_samples: int | None) -> Dataset:
    """A fixed, class-balanced part of a data set: the same rows for every seed of a run.

    Classes keep their proportions (equal numbers where the data set is balanced), at least one sample each in training.
    Mean and standard deviation are those of the smaller training split.  None keeps a split whole.
    Raises UserError naming `data.train_samples` or `data.test_samples` if there are fewer, or fewer than classes.
    """
    changed = dataset
    if train_samples is not None:
        rows = _subset_rows(
            dataset.train_labels_N, dataset.classes, train_samples, "data.train_samples", at_least=1,
            apart=[key for key, labels_N in _apart(dataset).items() if labels_N is not None],
        )
        changed = _reduced_to(dataset, rows)
    if test_samples is not None:
        rows = _subset_rows(dataset.test_labels_N, dataset.classes, test_samples, "data.test_samples", at_least=0)
        changed = replace(changed, test_images=dataset.test_images[rows], test_labels_N=dataset.test_labels_N[rows])
    return changed


def hold_out(dataset: Dataset, fraction: float) -> Dataset:
    """Set a class-balanced fraction of the training images apart as public ones: no client ever owns them.

    The rows are the same for every seed, and chosen before `subset` cuts the rest, so a generator trained on the public
    part of a data set has seen no client's image.  Of a class of n, round(fraction * n) are public, at least one and
    never all; mean and standard deviation are those of the rest.  0 changes nothing.
    Raises UserError for a class of a single image.
    """
    if fraction == 0:
        return dataset
    counts_C = np.bincount(dataset.train_labels_N, minlength=dataset.classes)
    if counts_C.min() < 2:
        raise UserError(
            f"data.public_frac = {fraction}: class {int(counts_C.argmin())} of {dataset.name} has "
            f"{int(counts_C.min())} training image, which cannot be both public and a client's; use 0"
        )
    take_C = np.array([min(max(1, fraction_of(fraction, int(n))), int(n) - 1) for n in counts_C], dtype=np.int64)
    public = choose(dataset.train_labels_N, take_C, rng.stream(0, rng.SPLIT, 3))
    rest = np.setdiff1d(np.arange(len(dataset.train_labels_N)), public)
    return replace(
        _reduced_to(dataset, rest),
        public_images=dataset.train_images[public], public_labels_N=dataset.train_labels_N[public],
    )


def validation_split(dataset: Dataset, fraction: float) -> Dataset:
    """Set a class-balanced fraction of the training images apart, to choose rounds and hyper-parameters on.

    The rows are the same for every seed, and chosen before `subset` cuts the rest.  Of a class of n,
    round(fraction * n) are for validation; mean and standard deviation are those of the rest.  0 changes nothing.
    Raises UserError for a class that would have no validation image, or no training image.
    """
    if fraction == 0:
        return dataset
    counts_C = np.bincount(dataset.train_labels_N, minlength=dataset.classes)
    take_C = np.array([fraction_of(fraction, int(n)) for n in counts_C], dtype=np.int64)
    for what, left_C in (("validation", take_C), ("training", counts_C - take_C)):
        if left_C.min() == 0:
            c = int(left_C.argmin())
            raise UserError(
                f"data.validation_fraction = {fraction:g}: of the {int(counts_C[c])} training images of class {c} of "
                f"{dataset.name}, {int(take_C[c])} would be for validation, so the class would have no {what} image; "
                f"use a {'larger' if what == 'validation' else 'smaller'} fraction"
            )
    rows = choose(dataset.train_labels_N, take_C, rng.stream(0, rng.SPLIT, 4))
    return replace(
        _reduced_to(dataset, np.setdiff1d(np.arange(len(dataset.train_labels_N)), rows)),
        validation_images=dataset.train_images[rows], validation_labels_N=dataset.train_labels_N[rows],
    )


def _reduced_to(dataset: Dataset, rows: IntArray) -> Dataset:
    """The data set with these training images alone, and their mean and standard deviation."""
    images = dataset.train_images[rows]
    mean, std = channel_statistics(images)
    return replace(dataset, train_images=images, train_labels_N=dataset.train_labels_N[rows], mean=mean, std=std)


def _apart(dataset: Dataset) -> dict[str, IntArray | None]:
    return {"data.public_frac": dataset.public_labels_N, "data.validation_fraction": dataset.validation_labels_N}


def _subset_rows(
    labels_N: IntArray, classes: int, samples: int, key: str, at_least: int, apart: Sequence[str] = ()
) -> IntArray:
    """apart: the keys that have set training images apart."""
    least = max(1, classes * at_least)
    if not least <= samples <= len(labels_N):
        raise UserError(
            f"{key} = {samples}: the data set has {len(labels_N)} such images of {classes} classes"
            f"{' beside those of ' + ' and '.join(apart) if apart else ''}; use a number in {least}..{len(labels_N)}"
        )
    counts_C = np.bincount(labels_N, minlength=classes).astype(np.int64)
    take_C = at_least + largest_remainder(counts_C - at_least, samples - classes * at_least)
    return choose(labels_N, take_C, rng.stream(0, rng.SPLIT, 1 + at_least))


def channel_statistics(images: ByteArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, standard deviation) per channel of uint8 images scaled to [0, 1], exact, without a float copy of them.

    A constant channel has standard deviation 1, so that dividing by it changes nothing.
    """
    value_256: FloatArray = np.arange(256) / 255.0
    means, stds = [], []
    for channel in range(images.shape[1]):
        histogram = np.zeros(256, dtype=np.int64)
        for start in range(0, len(images), 256):
            histogram += _byte_counts(images[start : start + 256, channel].ravel())
        pixels = max(int(histogram.sum()), 1)
        mean = float(histogram @ value_256) / pixels
        std = float(np.sqrt(histogram @ (value_256 - mean) ** 2 / pixels))
        means.append(mean)
        stds.append(std if std > 0 else 1.0)
    return tuple(means), tuple(stds)


def _byte_counts(values_N: ByteArray) -> IntArray:
    """How often each byte occurs; pairs of bytes are counted, in half the time."""
    even = len(values_N) // 2 * 2
    pairs = np.bincount(values_N[:even].view(np.uint16), minlength=2**16).reshape(256, 256)
    counts: IntArray = pairs.sum(axis=0) + pairs.sum(axis=1) + np.bincount(values_N[even:], minlength=256)
    return counts
