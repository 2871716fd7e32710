"""Reading parquet files of encoded images and integer labels."""

import bisect
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.core.errors import UserError
from raysim.core.records import ByteArray, IntArray
from raysim.data.decoding import Room, decode_images
from raysim.data.folders import files, read_bytes, subfolders
from raysim.data.reader import Reader
from raysim.data.remote import is_url, local_copy
from raysim.data.split_names import Split, split_of

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
    if found.is_symlink() and not found.exists():
        raise UserError(f"data.path = {path!r}: it is a link to {found.readlink()}, where nothing is; mend the link")
    if not found.exists():
        raise UserError(f"data.path = {path!r}: {found.absolute()} does not exist; give the path of the data")
    return found


def parquet_files(path: str, notes: list[str]) -> dict[Split, list[Path]]:
    """The files of each split, in the order of their names; one file alone is the training split.

    notes: gets what was entered or passed over.
    Raises UserError where there is no training file, where shards of a split are missing, or where two names mean the
    same split.
    """
    root = existing(path)
    if root.is_file():
        total = _shard(root)[1]
        if total > 1:
            notes.append(f"{root} is one of {total} files of its split, and the others are not read")
        return {"train": [root]}
    folders = [root, root / "data"]
    inner = [root / name for name in subfolders(root)]
    if len(inner) == 1 and inner[0] not in folders:
        folders.append(inner[0])
    for folder in folders:
        found = [file for file in files(folder) if file.suffix == ".parquet"] if folder.is_dir() else []
        by_split = _by_split(found)
        if "train" in by_split:
            if folder not in (root, root / "data"):
                notes.append(f"data.path = {path!r}: the files are read from {folder}, the only folder in it")
            unread = [file.name for file in found if not any(file in used for used in by_split.values())]
            if folder == root and "data" in subfolders(root):
                unread += [f"data/{file.name}" for file in files(root / "data") if file.suffix == ".parquet"]
            if unread:
                notes.append(f"parquet files in {folder} that are not read: {', '.join(unread[:8])}")
            for split, used in by_split.items():
                _check_shards(split, used)
            return by_split
    present = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    raise UserError(
        f"data.path = {path!r}: no train-*.parquet in {root.absolute()} (it holds {present}); "
        "give a folder with train-*.parquet and test-*.parquet, or one parquet file"
    )


def _by_split(found: Sequence[Path]) -> dict[Split, list[Path]]:
    """Files by the split that their names start with: train-*.parquet or train.parquet; UserError for two names of one.

    Where there are both, such as train-0.parquet and train.parquet, only the former are taken.
    """
    by_name: dict[str, list[Path]] = {}
    for file in found:
        name, dash, _ = file.stem.partition("-")
        if split_of(name) is not None:
            by_name.setdefault(name + dash, []).append(file)
    by_split: dict[Split, list[Path]] = {}
    for name in sorted(by_name, key=lambda name: not name.endswith("-")):
        split = split_of(name.rstrip("-"))
        assert split is not None
        if split not in by_split:
            by_split[split] = sorted(by_name[name])
        elif by_split[split][0].stem.partition("-")[0] != name.rstrip("-"):
            raise UserError(
                f"data.path: {by_split[split][0]} and {by_name[name][0].name} both mean the {split} split; rename or "
                "remove one of them"
            )
    return by_split


def _shard(file: Path) -> tuple[int, int]:
    """(number, total) of a file such as train-00003-of-00040.parquet; (0, 0) for one without such numbers."""
    numbers = re.search(r"-(\d+)-of-(\d+)", file.stem)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _check_shards(split: Split, used: Sequence[Path]) -> None:
    """UserError where not all files of a split are there, or files of two exports lie together."""
    shards = [_shard(file) for file in used]
    totals = sorted({total for _, total in shards})
    if totals == [0]:
        return
    where = f"data.path: the {split} split in {used[0].parent}"
    if len(totals) > 1:
        named = ", ".join(f"{sum(t == total for _, t in shards)} of {total or 'no number'}" for total in totals)
        raise UserError(f"{where} mixes files of different exports ({named}); keep the files of one")
    numbers = [number for number, _ in shards]
    missing = sorted(set(range(totals[0])) - set(numbers))
    if missing:
        shown = ", ".join(f"{number:05}" for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise UserError(
            f"{where} lacks {len(missing)} of {totals[0]} files: number {shown} (-of-{totals[0]:05}); fetch them, or, "
            "if so few are meant, rename those that are there without -of-"
        )
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise UserError(f"{where} has two files of number {twice:05}; keep one of them")


def label_column_and_names(
    paths: Sequence[Path], wanted: str | None, notes: list[str]
) -> tuple[str, list[str] | None]:
    """(the column of labels of all files, the names of its classes or None where no file has them).

    wanted: the column that the user named; None: the usual one of the first file, which is then that of all files.
    notes: gets that a column is called `split`, since splits are told by the names of files alone.
    Raises UserError naming the file that lacks the column, that has it twice, or whose class names differ in content or
    order from those of another file: the same number would then mean two classes.
    """
    column, names, named_by = wanted, None, paths[0]
    for file in paths:
        with _opened(file) as opened:
            schema = opened.schema_arrow
        if column is not None and wanted is None and column not in schema.names:
            raise UserError(
                f"data.path: the labels of {paths[0]} are in its column {column!r}, which {file} lacks (its columns: "
                f"{', '.join(map(repr, schema.names))}); name a column that all files have with data.label_column"
            )
        column = _pick(column, _LABEL_COLUMNS, schema.names, f"data.path: {file}", "label_column")
        own = _hub_class_names(schema, column)
        if names is None and own is not None:
            names, named_by = own, file
        elif own is not None and own != names:
            assert names is not None
            raise UserError(
                f"data.path: {_name_difference(names, own)} in {named_by} and {file}, so one label would mean two "
                "classes; give files of one export"
            )
        if "split" in schema.names and not any("column 'split'" in note for note in notes):
            notes.append(
                f"data.path: {file} has a column 'split', which is not read: splits are told by the names of files, "
                "such as train-0.parquet and test-0.parquet; write one file per split if the column means that"
            )
    assert column is not None
    return column, names


def _name_difference(names: Sequence[str], others: Sequence[str]) -> str:
    if len(names) != len(others):
        return f"the class names differ: there are {len(names)} and {len(others)} of them"
    c = next(c for c, (name, other) in enumerate(zip(names, others, strict=True)) if name != other)
    return f"the class names differ: class {c} is {names[c]!r} and {others[c]!r}"


def read_parquet(
    paths: Sequence[Path], image_column: str | None, label_column: str, reader: Reader
) -> tuple[ByteArray, IntArray]:
    """(images, labels_N) of all files in order.  image_column: None for the usual one of each file."""
    labels: list[IntArray] = []
    sources: list[tuple[Path, str]] = []
    for file in paths:
        table, image = _read_labels(file, image_column, label_column)
        labels.append(_integer_labels(table[label_column], f"data.path: {file}: column {label_column!r}"))
        sources.append((file, image))
    images = reader.decoded(lambda: _content(sources), lambda: _decode(sources, reader.room))
    return images, np.concatenate(labels)


def _content(sources: Sequence[tuple[Path, str]]) -> Iterator[bytes]:
    """What determines the images in these columns of these files: their bytes, and those of files that they name."""
    for file, column in sources:
        yield column.encode()
        with file.open("rb") as opened:
            yield hashlib.file_digest(opened, "sha256").digest()
        if _may_name_files(file, column):
            named = (cell for cell in _cells(file, column) if isinstance(cell, Path) and cell.is_file())
            yield from (hashlib.sha256(read_bytes(cell)).digest() for cell in named)


def _may_name_files(file: Path, column: str) -> bool:
    """Whether some images of a column are not in the parquet file itself; read from its metadata where that says."""
    with _opened(file) as parquet:
        metadata = parquet.metadata
        leaves = [
            metadata.row_group(group).column(i)
            for group in range(metadata.num_row_groups)
            for i in range(metadata.num_columns)
        ]
    nulls = [
        leaf.statistics.null_count if leaf.statistics is not None and leaf.statistics.has_null_count else None
        for leaf in leaves
        if leaf.path_in_schema in (column, f"{column}.bytes")
    ]
    return not nulls or any(count != 0 for count in nulls)  # no such leaf: a struct of paths alone


def _decode(sources: Sequence[tuple[Path, str]], room: Room) -> ByteArray:
    cells: list[bytes | Path | None] = []
    starts: list[int] = []
    for file, column in sources:
        starts.append(len(cells))
        cells += _cells(file, column)

    def where(i: int) -> str:
        n = bisect.bisect_right(starts, i) - 1
        return f"data.path: {sources[n][0]}: row {i - starts[n]}"

    def read(i: int) -> bytes | None:
        cell = cells[i]
        if not isinstance(cell, Path):
            return cell
        if not cell.is_file():
            raise UserError(
                f"{where(i)} holds no image, only the path of a file, and {cell} is not there; put the image files "
                "beside the parquet file, or write their bytes into it"
            )
        return read_bytes(cell)

    return decode_images(len(cells), read, where, room)


@contextmanager
def _opened(file: Path) -> "Iterator[ParquetFile]":
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data.path: {file} cannot be read as parquet ({error}); give an intact file") from error


def _read_labels(file: Path, image_column: str | None, label_column: str) -> "tuple[pyarrow.Table, str]":
    """(the column of labels, the name of the column of images)."""
    with _opened(file) as opened:
        present = opened.schema_arrow.names
        image = _pick(image_column, _IMAGE_COLUMNS, present, f"data.path: {file}", "image_column")
        return opened.read(columns=[label_column]), image


def _pick(wanted: str | None, usual: Sequence[str], present: Sequence[str], where: str, key: str) -> str:
    for name in [wanted] if wanted is not None else usual:
        if present.count(name) > 1:
            raise UserError(
                f"{where} has {present.count(name)} columns named {name!r}; rename all but one, or name another column "
                f"with data.{key}"
            )
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
    whole: IntArray = labels.astype(np.int64)
    return whole


def _cells(file: Path, column: str) -> list[bytes | Path | None]:
    """Each row's encoded image, the path of its file where the row holds only that, or None for neither."""
    import pyarrow
    import pyarrow.compute

    with _opened(file) as parquet:
        values = parquet.read(columns=[column])[column]
    kind, paths = values.type, None
    if pyarrow.types.is_struct(kind):
        if kind.get_field_index("path") >= 0:
            paths = pyarrow.compute.struct_field(values, "path")
        if kind.get_field_index("bytes") >= 0:
            values = pyarrow.compute.struct_field(values, "bytes")
        has_paths = paths is not None and (
            pyarrow.types.is_string(paths.type) or pyarrow.types.is_large_string(paths.type)
        )
        if has_paths and (pyarrow.types.is_struct(values.type) or pyarrow.types.is_null(values.type)):
            values = pyarrow.nulls(len(values), pyarrow.binary())
        kind = values.type
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        raise UserError(
            f"data.path: {file}: column {column!r} holds {kind}, not image bytes; name the column of images with "
            "data.image_column"
        )
    blobs: list[bytes | Path | None] = values.to_pylist()
    if paths is None or not any(blob is None for blob in blobs):
        return blobs
    named = paths.to_pylist()
    return [
        file.parent / named[i] if blob is None and isinstance(named[i], str) and named[i] else blob
        for i, blob in enumerate(blobs)
    ]


def _hub_class_names(schema: "pyarrow.Schema", label_column: str) -> list[str] | None:
    """The names that the hub keeps in the file's metadata, or None."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label_column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(n) for n in names] if isinstance(names, list) else None
