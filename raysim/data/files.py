"""Data sets in files of the user's own: parquet, folders of images, numpy archives."""

import hashlib
import zipfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raysim.core.errors import UserError
from raysim.core.records import Dataset, IntArray
from raysim.data.decoded_cache import decoded
from raysim.data.decoding import decode_images
from raysim.data.parquet import check_labels, existing, parquet_files, read_parquet
from raysim.data.splits import Labelled, build_dataset

__all__ = ["image_folder", "npz", "parquet"]

TestFraction = Annotated[
    float, Field(gt=0, lt=1, description="Share of each class set apart for testing, where there is no test split")
]
SplitSeed = Annotated[int, Field(ge=0, description="Which samples are set apart; not the seed of the run")]


def parquet(
    *,
    path: str,
    image_column: str | None = None,
    label_column: str | None = None,
    flips: bool = True,
    test_fraction: TestFraction = 0.2,
    split_seed: SplitSeed = 0,
) -> Dataset:
    """Parquet files in the layout of the Hugging Face hub: encoded images and integer labels.

    path: a folder with train-*.parquet and, if there is a test split, test-*.parquet (also in its sub-folder data), or
    one file.  Columns: `image` or `img`, the PNG or JPEG bytes alone or in a struct's field `bytes`; `label` or
    `fine_label`.  Class names are taken from the hub's metadata where present.
    Raises UserError for a missing path or column, no file, labels that are not integers 0..C-1, unreadable images.
    """
    train_files, test_files = parquet_files(path)
    columns = (image_column, label_column)
    images, labels_N, names = read_parquet(train_files, columns)
    test: Labelled | None = None
    if test_files:
        test_images, test_labels_N, _ = read_parquet(test_files, columns)
        test = (test_images, test_labels_N)
    return build_dataset(
        "parquet", (images, labels_N), test, names, flips=flips, test_fraction=test_fraction, split_seed=split_seed
    )


_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def image_folder(
    *, path: str, flips: bool = True, test_fraction: TestFraction = 0.2, split_seed: SplitSeed = 0
) -> Dataset:
    """A folder with one sub-folder of images per class, or with such folders in train/ and test/.

    Classes are numbered in the order of their names.  All images must have one size; grey ones beside colour ones are
    read as colour.  Files of other types are passed over.
    Raises UserError for a missing path, no image, an unreadable image, differing sizes, or a class unknown in training.
    """
    root = existing(path)
    train_root = root / "train" if (root / "train").is_dir() else root
    names = sorted(p.name for p in train_root.iterdir() if p.is_dir()) if train_root.is_dir() else []
    if not names:
        raise UserError(f"data.path = {path!r}: no folder in {train_root.absolute()}; give one sub-folder per class")
    test: Labelled | None = None
    if train_root != root and (root / "test").is_dir():
        unknown = sorted({p.name for p in (root / "test").iterdir() if p.is_dir()} - set(names))
        if unknown:
            raise UserError(f"data.path = {path!r}: class {unknown[0]!r} is in test/, but not in train/; remove it")
        test = _read_folder(root / "test", names, required=False)
    return build_dataset(
        "image_folder",
        _read_folder(train_root, names),
        test,
        names,
        flips=flips,
        test_fraction=test_fraction,
        split_seed=split_seed,
    )


def _read_folder(root: Path, class_names: list[str], required: bool = True) -> Labelled:
    """The images of all classes, each of which must have some if `required`."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        found = sorted(p for p in (root / name).glob("**/*") if p.suffix.lower() in _IMAGE_SUFFIXES)
        files += found
        labels += [label] * len(found)
    if not files:
        raise UserError(f"data.path: no image in the class folders of {root.absolute()}; put PNG or JPEG files there")
    empty = sorted(set(range(len(class_names))) - set(labels))
    if empty and required:
        folder = (root / class_names[empty[0]]).absolute()
        raise UserError(f"data.path: the class folder {folder} holds no image; put images there, or remove it")
    images = decoded(
        lambda: (hashlib.sha256(file.read_bytes()).digest() for file in files),
        lambda: decode_images(len(files), lambda i: files[i].read_bytes(), lambda i: f"data.path: {files[i]}"),
    )
    return images, np.array(labels, dtype=np.int64)


def npz(*, path: str, flips: bool = False, test_fraction: TestFraction = 0.2, split_seed: SplitSeed = 0) -> Dataset:
    """A numpy archive with train_images, train_labels and, if there is a test split, test_images, test_labels.

    Images: uint8, N x H x W, N x H x W x channels or N x channels x H x W with 1 or 3 channels.  Labels: integers, N or
    N x 1.  Raises UserError for a missing path or array, other types and shapes, unequal lengths, or labels below 0.
    """
    source = existing(path)
    arrays, present = _read_archive(source, path)
    has_test = "test_images" in arrays or "test_labels" in arrays
    wanted = ["train_images", "train_labels", *(["test_images", "test_labels"] if has_test else [])]
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise UserError(
            f"data.path = {path!r}: no array {missing[0]!r}; the arrays are {', '.join(map(repr, present)) or 'none'}"
        )
    test = _from_arrays(arrays, "test", path) if has_test else None
    return build_dataset(
        "npz",
        _from_arrays(arrays, "train", path),
        test,
        None,
        flips=flips,
        test_fraction=test_fraction,
        split_seed=split_seed,
    )


def _read_archive(source: Path, path: str) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """(the arrays of the two splits, the names of all arrays)."""
    try:
        archive = np.load(source, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with archive:
            wanted = [name for name in archive.files if name.startswith(("train_", "test_"))]
            return {name: archive[name] for name in wanted}, archive.files
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"data.path = {path!r}: cannot be read as an npz archive of plain arrays ({error}); "
            "save it with numpy.savez(path, train_images=..., train_labels=...)"
        ) from error


def _from_arrays(arrays: dict[str, NDArray[Any]], part: str, path: str) -> Labelled:
    images, where = arrays[f"{part}_images"], f"data.path = {path!r}: {part}_images"
    labels_N = _flat_labels(arrays[f"{part}_labels"], f"data.path = {path!r}: {part}_labels")
    if images.dtype != np.uint8:
        raise UserError(f"{where} holds {images.dtype}; images must be uint8, 0..255")
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
