"""The state of a run on disk: safetensors and JSON, written atomically and checked when read.

A checkpoint is a pair of files.  The arrays are written first, under a name that holds their checksum; the JSON that
refers to them is renamed into place last.  So a crash at any moment leaves either the old pair or the new one.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.core import files
from raysim.core.errors import DiskError
from raysim.core.files import atomically, write_atomic
from raysim.core.plain import Plain, PlainDict, PlainMapping

FORMAT = 3
Arrays = dict[str, NDArray[Any]]


class CheckpointError(DiskError):
    """A checkpoint could not be written, or checkpoints exist and none of them can be read."""


class _Damaged(Exception):
    """One checkpoint does not hold what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read.  notes: which newer checkpoints are damaged, and which one was used instead."""

    round: int
    arrays: Arrays
    meta: PlainDict
    path: Path
    notes: list[str] = field(default_factory=list)


def save(directory: Path, round: int, arrays: Mapping[str, NDArray[Any]], meta: PlainMapping, keep: int) -> Path:
    """Write the state after `round`, then delete all but the newest `keep` checkpoints.

    meta: plain data for JSON; its keys become texts.  Checkpoints of later rounds, which exist where a resumed run went
    back to an earlier one, are deleted, too.  Returns the path of the JSON file.
    Raises CheckpointError, with the earlier checkpoints intact, if the disk is full or cannot be written.
    """
    directory = Path(directory)
    path = directory / f"round-{round:06d}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        name, digest = _write_arrays(directory, round, arrays)
        plain = json.loads(json.dumps(meta, default=_plain))
        content = {"format": FORMAT, "round": round, "arrays": name, "arrays_sha256": digest, "meta": plain}
        write_atomic(path, json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())
        _prune(directory, round, keep)
    except OSError as error:
        raise cannot_write(directory, round, error) from error
    return path


def cannot_write(directory: Path, round_: int, error: OSError) -> CheckpointError:
    """The error that says which checkpoint the disk refused, and what to do."""
    kept = max((r for r in _list(directory) if r < round_), default=None)
    left = "there is no earlier one" if kept is None else f"that of round {kept} is intact"
    path = Path(error.filename or directory)
    return CheckpointError(f"checkpoint of round {round_}: {files.cannot_write(path, error)}; {left}")


def newest(directory: Path) -> int | None:
    """The round of the newest checkpoint in a folder that says so itself, its arrays unread; None if there is none."""
    for round_, path in sorted(_list(directory).items(), reverse=True):
        try:
            if json.loads(path.read_bytes())["round"] == round_:
                return round_
        except (OSError, ValueError, KeyError, TypeError):  # damaged: the one before it is used
            continue
    return None


def load_latest(directory: Path, damage_of: Callable[[PlainMapping], str] = lambda _: "") -> Checkpoint | None:
    """Read the newest checkpoint that is not damaged; None if there is no checkpoint.

    Instead of a damaged one (truncated, changed, incomplete) the one before it is read, and `notes` names both.
    damage_of: given a checkpoint's meta, returns what is wrong with other files that belong to it; empty if nothing is.
    Raises CheckpointError if there are checkpoints and every one of them is damaged.
    """
    notes: list[str] = []
    for round_, path in sorted(_list(Path(directory)).items(), reverse=True):
        try:
            found = _read(path)
            if damage := damage_of(found.meta):
                raise _Damaged(damage)
        except _Damaged as damage:
            notes.append(f"checkpoint of round {round_} is damaged ({damage}): {path}")
            continue
        if notes:
            notes.append(f"using the checkpoint of round {found.round} instead")
        return Checkpoint(found.round, found.arrays, found.meta, path, notes)
    if notes:
        remedy = "start a new run, or delete these files to begin this one again"
        raise CheckpointError("\n".join(["no checkpoint can be read:", *notes, remedy]))
    return None


def _write_arrays(directory: Path, round_: int, arrays: Mapping[str, NDArray[Any]]) -> tuple[str, str]:
    """Write the arrays under a name made of their round and checksum; returns (name, sha256 of the file)."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # safetensors writes memory in its present order, so a transposed or sliced view has to be copied first.
    contiguous = {key: np.asarray(array, order="C") for key, array in arrays.items()}
    digest = ""

    def write(temporary: Path) -> None:
        nonlocal digest
        try:
            save_file(contiguous, temporary)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from error
        digest = _file_sha256(temporary)

    atomically(directory / f"round-{round_:06d}.arrays", write)
    name = f"round-{round_:06d}-{digest[:16]}.safetensors"
    (directory / f"round-{round_:06d}.arrays").replace(directory / name)
    return name, digest


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        content = json.loads(path.read_bytes())
        declared = content.pop("sha256")
        if declared != _digest(content):
            raise _Damaged("the checksum of its JSON file does not match")
        if content["format"] != FORMAT:
            raise _Damaged(f"it has format {content['format']}, this version reads {FORMAT}")
        arrays = path.parent / content["arrays"]
        if _file_sha256(arrays) != content["arrays_sha256"]:
            raise _Damaged(f"the checksum of {arrays.name} does not match")
        return Checkpoint(content["round"], load_file(arrays), content["meta"], path)
    except FileNotFoundError as error:
        raise _Damaged(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise _Damaged(error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged("its JSON file cannot be read") from error
    except SafetensorError as error:
        raise _Damaged(str(error)) from error


def metas(directory: Path) -> list[PlainDict]:
    """The meta of every checkpoint whose JSON file can be read."""
    found = []
    for path in _list(directory).values():
        try:
            found.append(json.loads(path.read_bytes())["meta"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _list(directory: Path) -> dict[int, Path]:
    """The JSON file of each checkpoint, by round."""
    names = {path: re.fullmatch(r"round-(\d+)\.json", path.name) for path in directory.glob("round-*.json")}
    return {int(match[1]): path for path, match in names.items() if match and path.is_file()}


def _sweep(directory: Path) -> None:
    """Delete the files of a writer that crashed, among them temporary ones of safetensors (`.tmpXXXXXX`)."""
    for path in [*directory.glob(".*.tmp"), *directory.glob(".tmp*"), *directory.glob("round-*.arrays")]:
        path.unlink(missing_ok=True)


def _prune(directory: Path, newest: int, keep: int) -> None:
    """Delete old and superseded checkpoints, JSON first, and arrays that no checkpoint refers to."""
    rounds = _list(directory)
    kept = sorted(round_ for round_ in rounds if round_ <= newest)[-max(1, keep) :]
    for round_ in rounds.keys() - set(kept):
        rounds[round_].unlink(missing_ok=True)
    prefixes = tuple(f"round-{round_:06d}-" for round_ in kept)
    current = json.loads(rounds[newest].read_bytes())["arrays"]
    for path in directory.glob("round-*.safetensors"):
        stale = path.name.startswith(f"round-{newest:06d}-") and path.name != current
        if stale or not path.name.startswith(prefixes):
            path.unlink(missing_ok=True)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: PlainMapping) -> str:
    """The sha256 of JSON data, whatever its layout in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> Plain:
    """Convert numpy scalars and arrays to plain data."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a checkpoint's meta holds {type(value).__name__}, which is not JSON")
