"""Data sets in files of the user's own: parquet, folders of images, numpy archives."""

import hashlib
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raysim.core.errors import UserError
from raysim.core.records import Dataset
from raysim.data.arrays import labelled
from raysim.data.decoding import decode_images
from raysim.data.folders import count_note, files, find_layout, images_in, is_image, read_bytes
from raysim.data.parquet import existing, label_column_and_names, parquet_files, read_parquet
from raysim.data.reader import Reader
from raysim.data.split_names import Split, Validation, split_of, used_splits
from raysim.data.splits import Labelled, build_dataset

__all__ = ["image_folder", "npz", "parquet"]

_UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # what a damaged npz raises

TestFraction = Annotated[
    float, Field(gt=0, lt=1, description="Share of each class set apart for testing, where there is no test split")
]
SplitSeed = Annotated[int, Field(ge=0, description="Which samples are set apart; not the seed of the run")]
Classes = Annotated[
    list[str] | None, Field(description="Folders that are classes, in the order of their numbers; null: all of them")
]
Splits = Annotated[
    dict[Split, str] | None,
    Field(description="Folder of each split, such as {train: photos, test: held_out}; null: by their names"),
]


def parquet(
    reader: Reader | None = None,
    *,
    path: str,
    image_column: str | None = None,
    label_column: str | None = None,
    flips: bool = True,
    test_fraction: TestFraction = 0.2,
    split_seed: SplitSeed = 0,
    validation: Validation = "ignore",
) -> Dataset:
    """Parquet files in the layout of the Hugging Face hub: encoded images and integer labels.

    path: one file, or a folder with train-*.parquet and, if there are such splits, test-*.parquet and
    validation-*.parquet (also in its sub-folder data, or in its only folder).  Columns: `image` or `img`, the PNG or
    JPEG bytes alone or in a struct's field `bytes`, or the path of an image file, relative to the parquet file, in its
    field `path`; `label` or `fine_label`.  Class names are taken from the hub's metadata where present.
    Raises UserError for a missing path or column, no file, a missing shard (`train-00003-of-00040`), files whose label
    columns or class names differ, labels that are not integers 0..C-1, unreadable images.
    """
    reader = reader or Reader()
    by_split = parquet_files(path, reader.notes)
    called = {split: ", ".join(file.name for file in found[:2]) for split, found in by_split.items()}
    train, test = used_splits(called, validation, reader.notes, path)
    trained_on = [file for split in train for file in by_split[split]]
    tested_on = [file for split in test for file in by_split[split]]
    label, names = label_column_and_names([*trained_on, *tested_on], label_column, reader.notes)
    trained = read_parquet(trained_on, image_column, label, reader)
    tested = read_parquet(tested_on, image_column, label, reader) if tested_on else None
    return build_dataset(
        "parquet", trained, tested, names, flips=flips, test_fraction=test_fraction, split_seed=split_seed
    )


def image_folder(
    reader: Reader | None = None,
    *,
    path: str,
    classes: Classes = None,
    splits: Splits = None,
    flips: bool = True,
    test_fraction: TestFraction = 0.2,
    split_seed: SplitSeed = 0,
    validation: Validation = "ignore",
) -> Dataset:
    """A folder with one sub-folder of images per class, or with such folders in train/ and test/.

    `training`, `Test`, `val` and the like are read as splits, too.  Hidden folders and files are passed over, and a
    folder that only wraps another one is entered.  Classes are numbered in the order of their names, or of `classes`.
    All images must have one size; grey ones beside colour ones are read as colour.  Files of other types are passed
    over.
    Raises UserError for a missing path, no image, an unreadable image, differing sizes, a class unknown in training,
    one class only, or a class named like a split; `classes` and `splits` settle the last two.
    """
    reader = reader or Reader()
    layout = find_layout(path, existing(path), classes, splits, reader.notes)
    called = {split: str(root) for split, root in layout.roots.items()}
    train, test = used_splits(called, validation, reader.notes, path)
    names = layout.class_names
    trained = _read_folders([layout.roots[split] for split in train], names, reader)
    tested = _read_folders([layout.roots[split] for split in test], names, reader, required=False) if test else None
    counts = {"train": np.bincount(trained[1], minlength=len(names)).tolist()}
    if tested is not None:
        counts["test"] = np.bincount(tested[1], minlength=len(names)).tolist()
    reader.notes.append(f"{path}: {count_note(names, counts)}")
    return build_dataset(
        "image_folder", trained, tested, names, flips=flips, test_fraction=test_fraction, split_seed=split_seed
    )


def _read_folders(roots: list[Path], class_names: list[str], reader: Reader, required: bool = True) -> Labelled:
    """The images of all classes in all these folders, each of which must have some if `required`."""
    paths: list[Path] = []
    labels: list[int] = []
    others: Counter[str] = Counter()
    for root in roots:
        _note_beside(root, reader.notes)
        for label, name in enumerate(class_names):
            found = images_in(root / name, others) if (root / name).is_dir() else []
            paths += found
            labels += [label] * len(found)
    where = " and ".join(str(root.absolute()) for root in roots)
    if not paths:
        raise UserError(
            f"data.path: no image in the class folders of {where}{_unread(others, '; put PNG or JPEG files there')}"
        )
    empty = sorted(set(range(len(class_names))) - set(labels))
    if empty and required:
        folder = (roots[0] / class_names[empty[0]]).absolute()
        there: Counter[str] = Counter()
        images_in(folder, there)
        raise UserError(
            f"data.path: the class folder {folder} holds no image{_unread(there, '; put images there')}, remove it, or "
            "name the classes with data.classes"
        )
    if others:
        reader.notes.append(f"files in {where} of types that are not read: {_counted(others)}")
    images = reader.decoded(
        lambda: (hashlib.sha256(read_bytes(file)).digest() for file in paths),
        lambda: decode_images(
            len(paths), lambda i: read_bytes(paths[i]), lambda i: f"data.path: {paths[i]}", reader.room
        ),
    )
    return images, np.array(labels, dtype=np.int64)


def _counted(others: Counter[str]) -> str:
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))


def _unread(others: Counter[str], remedy: str) -> str:
    """For a message about a lack of images: what is there in their place, with its remedy; else `remedy`."""
    return f", but {_counted(others)}, which are not read; convert these to PNG or JPEG" if others else remedy


def _note_beside(root: Path, notes: list[str]) -> None:
    beside = [file for file in files(root) if is_image(file)]
    if beside:
        notes.append(f"{len(beside)} images in {root.absolute()} itself, in no class folder, are not read")


def npz(
    reader: Reader | None = None,
    *,
    path: str,
    flips: bool = False,
    test_fraction: TestFraction = 0.2,
    split_seed: SplitSeed = 0,
    validation: Validation = "ignore",
) -> Dataset:
    """A numpy archive with train_images, train_labels and, if there are such splits, test_images, val_images, ...

    Images: uint8, N x H x W, N x H x W x channels or N x channels x H x W with 1 or 3 channels.  Labels: integers, N or
    N x 1.  Raises UserError for a missing path or array, other types and shapes, unequal lengths, or labels below 0.
    """
    reader = reader or Reader()
    source = existing(path)
    archive = _open_archive(source, path)
    with archive:
        present, names = archive.files, _split_arrays(archive.files)
        if "train" not in names:
            names["train"] = "train"
        called = {split: f"{name}_images in {path}" for split, name in names.items()}
        train, test = used_splits(called, validation, reader.notes, path)
        known = {f"{name}_{part}" for name in names.values() for part in ("images", "labels")}
        unread = [name for name in present if name not in known]
        if "train_images" in present and unread:
            reader.notes.append(f"arrays in {path} that are not read: {', '.join(unread)}")
        trained = _join([_from_archive(archive, names[split], path) for split in train], path)
        tested = _join([_from_archive(archive, names[split], path) for split in test], path) if test else None
    highest = max(int(labels_N.max(initial=0)) for _, labels_N in (trained, *([tested] if tested else [])))
    if len(trained[1]) and highest == 0:
        raise UserError(f"data.path = {path!r}: there is one class only, all labels are 0; give labels of two or more")
    return build_dataset(
        "npz", trained, tested, None, flips=flips, test_fraction=test_fraction, split_seed=split_seed
    )


def _split_arrays(present: list[str]) -> dict[Split, str]:
    """The prefix of the arrays of each split, such as {validation: val} for val_images; train_ and test_ first."""
    found: dict[Split, str] = {}
    for name in sorted(present, key=lambda name: not name.startswith(("train_", "test_"))):
        prefix, _, part = name.rpartition("_")
        split = split_of(prefix) if part in ("images", "labels") else None
        if split is not None:
            found.setdefault(split, prefix)
    return found


def _open_archive(source: Path, path: str) -> "np.lib.npyio.NpzFile":
    try:
        archive = np.load(source, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
    except _UNREADABLE as error:
        raise _no_archive(path, error) from error
    return archive


def _no_archive(path: str, error: Exception) -> UserError:
    return UserError(
        f"data.path = {path!r}: cannot be read as an npz archive of plain arrays ({error}); "
        "save it with numpy.savez(path, train_images=..., train_labels=...)"
    )


def _from_archive(archive: "np.lib.npyio.NpzFile", prefix: str, path: str) -> Labelled:
    arrays: dict[str, NDArray[Any]] = {}
    for name in (f"{prefix}_images", f"{prefix}_labels"):
        if name not in archive.files:
            present = ", ".join(map(repr, archive.files)) or "none"
            raise UserError(f"data.path = {path!r}: no array {name!r}; the arrays are {present}")
        try:
            arrays[name] = archive[name]
        except _UNREADABLE as error:
            raise _no_archive(path, error) from error
    return labelled(arrays[f"{prefix}_images"], arrays[f"{prefix}_labels"], f"data.path = {path!r}: {prefix}_")


def _join(parts: list[Labelled], path: str) -> Labelled:
    """One split from several arrays of images of one size."""
    if len({images.shape[1:] for images, _ in parts}) > 1:
        sizes = " and ".join(str(images.shape[1:]) for images, _ in parts)
        raise UserError(f"data.path = {path!r}: the images have shapes {sizes}; bring them to one size")
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels_N for _, labels_N in parts])
