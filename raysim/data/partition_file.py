"""Partitions in files: explicit lists of training rows, as JSON that a person can write or as numpy arrays."""

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config.plugin_guard import partition_problem
from raysim.core.errors import UserError
from raysim.core.records import IntArray, Partition, sha256
from raysim.data.assigning import from_indices

_ARRAYS = {
    "indices": np.int64,
    "offsets_K1": np.int64,
    "labels": np.int64,
    "rare_K": np.bool_,
    "noisy_K": np.bool_,
    "input_noise_K": np.float64,
}
_DIGEST = "labels_sha256"  # of the training labels of the data set, before any label noise


def check_target(path: str | Path) -> None:
    """UserError unless a partition can be saved there; makes the folder."""
    target = Path(path).expanduser()
    if target.suffix not in (".json", ".npz"):
        raise UserError(f"--save-partition = {path}: a partition is saved as .json or .npz; name the file so")
    make_folder(target.parent, "--save-partition")


def make_folder(folder: Path, key: str) -> None:
    """Make a folder that is to be written to; UserError naming `key` if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}: the folder {folder} cannot be made ({error.strerror}); name another") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{key}: the folder {folder} cannot be written to; name another")


def save_partition(partition: Partition, path: str | Path, labels_N: IntArray) -> None:
    """Write a partition to a .json or .npz file; the partition `file` reads it back with the same hash.

    labels_N: the data set's own training labels, int64.  Their digest is kept in the file, so that the partition is
    refused for other data.  Raises UserError where it cannot be written.
    """
    target = Path(path).expanduser()
    if partition.drawn is not None:
        raise UserError(f"{target}: {partition.clients:,} clients drawn one by one are not saved; use under 100,000")
    arrays = {name: getattr(partition, name) for name in _ARRAYS}
    arrays["classes"] = np.int64(partition.classes)
    arrays["replacement"] = np.bool_(len(np.unique(partition.indices)) < len(partition.indices))
    check_target(target)
    digest = sha256(labels_N)
    try:
        if target.suffix == ".npz":
            np.savez_compressed(target, **{**arrays, _DIGEST: np.str_(digest)})
        else:
            content = {name: value.tolist() for name, value in arrays.items()}
            target.write_text(json.dumps({_DIGEST: digest, **content}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save-partition = {path}: it cannot be written ({error.strerror}); name another") from error


def read_partition(path: str, labels_N: IntArray, classes: int) -> Partition:
    """The partition in a .json or .npz file, checked against the labels of the training split."""
    source = Path(path).expanduser()
    where = f"partition.path = {path!r}"
    if not source.is_file():
        raise UserError(f"{where}: {source.absolute()} does not exist or is not a file; give the path of index lists")
    content = _load(source, where)
    if isinstance(content, list):
        return _from_lists(content, labels_N, classes, where)
    missing = [name for name in (*_ARRAYS, "classes", "replacement") if name not in content]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing; save it again, or give one list of rows per client")
    try:
        arrays = {name: _as(content[name], dtype) for name, dtype in _ARRAYS.items()}
        saved_classes, replacement = int(content["classes"]), bool(content["replacement"])
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: not arrays of numbers ({error}); save the partition again") from error
    partition = _checked(Partition(classes=saved_classes, **arrays), len(labels_N), classes, replacement, where)
    _check_labels(partition, labels_N, content.get(_DIGEST), where)
    return partition


def _check_labels(partition: Partition, labels_N: IntArray, saved: object, where: str) -> None:
    """UserError where the partition was made for other training labels.  saved: their digest; None: not in the file.

    Without a digest, and without label noise, the partition's own labels must be those of its rows.
    """
    if saved is not None:
        differ = str(saved) != sha256(labels_N)
    else:
        differ = not partition.noisy_K.any() and bool((partition.labels != labels_N[partition.indices]).any())
    if differ:
        raise UserError(
            f"{where}: it was made for other training labels than those of this data set (their digests or values "
            "differ), so its rows mean other images; use the data set, data.train_samples, data.public_frac and "
            "data.validation_fraction that it was made for, or make it again with `raysim plan --save-partition`"
        )


def unchecked_note(path: str) -> list[str]:
    """A note where nothing in a file of a partition tells for which training labels it was made; else no note."""
    content = _load(Path(path).expanduser(), f"partition.path = {path!r}")
    if isinstance(content, dict) and _DIGEST in content:
        return []
    return [
        f"partition.path = {path!r}: it holds no digest of training labels ({_DIGEST}), so whether it was made for "
        "this data set cannot be checked; `raysim plan --save-partition` writes one"
    ]


def _load(source: Path, where: str) -> Any:
    try:
        if source.suffix == ".npz":
            with np.load(source, allow_pickle=False) as archive:
                return dict(archive)
        content = json.loads(source.read_text(encoding="utf-8"))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{where}: cannot be read ({error}); give a .json or .npz file of index lists") from error
    if isinstance(content, dict) and isinstance(content.get("clients"), list):
        content = content["clients"]
    if not isinstance(content, list | dict):
        raise UserError(f"{where}: should hold one list of training rows per client")
    return content


def _as(value: Any, dtype: type) -> Any:
    array = np.asarray(value)
    if array.ndim != 1 or (len(array) and not np.can_cast(array.dtype, dtype, casting="safe")):
        raise ValueError(f"{array.dtype} array of {array.ndim} dimensions")
    return array.astype(dtype)


def _from_lists(lists: list[Any], labels_N: IntArray, classes: int, where: str) -> Partition:
    for k, rows in enumerate(lists):
        if not (isinstance(rows, list) and rows and all(type(row) is int for row in rows)):
            raise UserError(f"{where}: client {k} should be a non-empty list of whole numbers, its training rows")
        beyond = [row for row in rows if not -(2**63) <= row < 2**63]
        if beyond:
            raise UserError(f"{where}: client {k} names row {beyond[0]}, and there are {len(labels_N):,} training rows")
    if not lists:
        raise UserError(f"{where}: there is no client in it; give one list of training rows per client")
    indices = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in lists])
    sizes_K = np.array([len(rows) for rows in lists])
    inside = np.clip(indices, 0, len(labels_N) - 1)  # so that what is outside is reported in one place, below
    partition = replace(from_indices(inside, sizes_K, labels_N, classes), indices=indices)
    return _checked(partition, len(labels_N), classes, False, where)


def _checked(partition: Partition, samples: int, classes: int, shared: bool, where: str) -> Partition:
    problem = partition_problem(partition, samples, classes, shared)
    if problem:
        raise UserError(f"{where}: {problem}; save it again, or use the data set it was made for")
    return partition
