"""Reading parquet files of encoded images and integer labels."""

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.core.errors import UserError
from raysim.core.records import ByteArray, IntArray
from raysim.data.decoded_cache import decoded
from raysim.data.decoding import decode_images
from raysim.data.remote import is_url, local_copy

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label")


def existing(path: str) -> Path:
    """The path, or a copy of what is at a URL; it must exist. A UserError names `data.path` and where it looked."""
    if is_url(path):
        return local_copy(path)
    found = Path(path).expanduser()
    if not found.exists():
        raise UserError(f"data.path = {path!r}: {found.absolute()} does not exist; give the path of the data")
    return found


def parquet_files(path: str) -> tuple[list[Path], list[Path]]:
    """(training files, test files)."""
    root = existing(path)
    if root.is_file():
        return [root], []
    for folder in (root, root / "data"):
        train = sorted(folder.glob("train-*.parquet")) or sorted(folder.glob("train.parquet"))
        if train:
            return train, sorted(folder.glob("test-*.parquet")) or sorted(folder.glob("test.parquet"))
    present = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    raise UserError(
        f"data.path = {path!r}: no train-*.parquet in {root.absolute()} (it holds {present}); "
        "give a folder with train-*.parquet and test-*.parquet, or one parquet file"
    )


def read_parquet(
    files: Sequence[Path], columns: tuple[str | None, str | None]
) -> tuple[ByteArray, IntArray, list[str] | None]:
    """(images, labels_N, class names if the file has them) of all files in order."""
    labels: list[IntArray] = []
    sources: list[tuple[Path, str]] = []
    names: list[str] | None = None
    for file in files:
        table, image_column, label_column = _read_labels(file, columns)
        labels.append(_integer_labels(table[label_column], f"data.path: {file}: column {label_column!r}"))
        sources.append((file, image_column))
        names = names or _hub_class_names(table, label_column)
    images = decoded(lambda: _content(sources), lambda: _decode(sources))
    return images, np.concatenate(labels), names


def _content(sources: Sequence[tuple[Path, str]]) -> Iterator[bytes]:
    """What determines the images in these columns of these files."""
    for file, column in sources:
        yield column.encode()
        with file.open("rb") as opened:
            yield hashlib.file_digest(opened, "sha256").digest()


def _decode(sources: Sequence[tuple[Path, str]]) -> ByteArray:
    blobs: list[bytes | None] = []
    starts: list[int] = []
    for file, column in sources:
        starts.append(len(blobs))
        with _opened(file) as parquet:
            blobs += _blobs(parquet.read(columns=[column])[column], f"data.path: {file}: column {column!r}")

    def where(i: int) -> str:
        n = bisect.bisect_right(starts, i) - 1
        return f"data.path: {sources[n][0]}: row {i - starts[n]}"

    return decode_images(len(blobs), lambda i: blobs[i], where)


@contextmanager
def _opened(file: Path) -> "Iterator[ParquetFile]":
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data.path: {file} cannot be read as parquet ({error}); give an intact file") from error


def _read_labels(file: Path, columns: tuple[str | None, str | None]) -> "tuple[pyarrow.Table, str, str]":
    """(the column of labels, the name of the column of images, that of the labels)."""
    with _opened(file) as opened:
        present = opened.schema_arrow.names
        image = _pick(columns[0], _IMAGE_COLUMNS, present, f"data.path: {file}", "image_column")
        label = _pick(columns[1], _LABEL_COLUMNS, present, f"data.path: {file}", "label_column")
        return opened.read(columns=[label]), image, label


def _pick(wanted: str | None, usual: Sequence[str], present: Sequence[str], where: str, key: str) -> str:
    for name in [wanted] if wanted is not None else usual:
        if name in present:
            return name
    looked_for = repr(wanted) if wanted is not None else " or ".join(map(repr, usual))
    raise UserError(
        f"{where}: no column {looked_for}; the columns are {', '.join(map(repr, present))}; name one with data.{key}"
    )


def _integer_labels(column: "pyarrow.ChunkedArray", where: str) -> IntArray:
    import pyarrow

    if not pyarrow.types.is_integer(column.type):
        raise UserError(f"{where} holds {column.type}, not integers; labels must be whole numbers 0, 1, ..., C-1")
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise UserError(f"{where}: row {row} has no label (null); remove the row or give it a label")
    return check_labels(np.from_dlpack(column.combine_chunks()), where)  # its to_numpy would import pandas


def check_labels(labels: Any, where: str) -> IntArray:
    """int64 labels_N from any integer array; UserError that names the row of a negative or huge one."""
    labels = np.asarray(labels)
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{where} holds {labels.dtype}, not integers; labels must be whole numbers 0, 1, ..., C-1")
    wrong = np.flatnonzero((labels < 0) | (labels > 1_000_000))
    if len(wrong):
        raise UserError(f"{where}: row {wrong[0]} has label {labels[wrong[0]]}; labels must be 0, 1, ..., C-1")
    return labels.astype(np.int64)


def _blobs(column: "pyarrow.ChunkedArray", where: str) -> list[bytes | None]:
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        column = pyarrow.compute.struct_field(column, "bytes")
        kind = column.type
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        raise UserError(f"{where} holds {kind}, not image bytes; name the column of images with data.image_column")
    blobs: list[bytes | None] = column.to_pylist()
    return blobs


def _hub_class_names(table: "pyarrow.Table", label_column: str) -> list[str] | None:
    """The names that the hub keeps in the file's metadata, or None."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label_column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(n) for n in names] if isinstance(names, list) else None
