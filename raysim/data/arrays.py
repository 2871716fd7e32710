"""Data sets from numpy arrays, as other code keeps them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.core.errors import UserError
from raysim.core.records import Dataset, IntArray
from raysim.data.parquet import check_labels
from raysim.data.splits import Labelled, build_dataset


def dataset_from_arrays(
    name: str,
    train: tuple[NDArray[Any], NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]] | None = None,
    *,
    class_names: Sequence[str] | None = None,
    flips: bool = False,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Dataset:
    """A checked data set: what `data` plug-ins return.

    train, test: (images, labels) each.  Images are uint8, N x H x W, N x H x W x channels or N x channels x H x W with
    1 or 3 channels; labels are integers 0..C-1, N or N x 1.  Without a test split, `test_fraction` of each class is set
    apart, the same samples for equal `split_seed`.  flips: whether a mirrored image keeps its label.
    Raises UserError for other types or shapes, unequal lengths, a class without a training image, a label without name.
    """
    trained = labelled(*train, f"{name}: training ")
    tested = None if test is None else labelled(*test, f"{name}: test ")
    return build_dataset(
        name, trained, tested, class_names, flips=flips, test_fraction=test_fraction, split_seed=split_seed, key="data"
    )


def labelled(images: NDArray[Any], labels: NDArray[Any], where: str) -> Labelled:
    """(images N x channels x H x W, labels N) of one split.  where: what begins a message of UserError."""
    labels_N = _flat_labels(np.asarray(labels), f"{where}labels")
    images, where = np.asarray(images), f"{where}images"
    if images.dtype != np.uint8:
        raise UserError(f"{where} holds {images.dtype}; images must be uint8, 0..255")
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] in (1, 3):
        raise UserError(
            f"{where} has shape {images.shape}, which can be read with the channels second or last; make the images "
            "wider than 3 pixels, or give grey ones without an axis for channels"
        )
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        raise UserError(f"{where} has shape {images.shape}; must be N x H x W, with 1 or 3 channels last or second")
    if len(images) != len(labels_N):
        raise UserError(f"{where} holds {len(images)} images for {len(labels_N)} labels; the numbers must be equal")
    return np.ascontiguousarray(images), labels_N


def _flat_labels(labels: NDArray[Any], where: str) -> IntArray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise UserError(f"{where} has shape {labels.shape}; labels must be one number for each image")
    return check_labels(labels, where)
