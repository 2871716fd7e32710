"""Files that exist complete or not at all, and cache files with a description and a checksum."""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from raysim.core.errors import DiskError
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import ByteArray

STALE_S = 3600.0  # a temporary file older than this belongs to no living writer
_HEADER_LIMIT = 65_536
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the error numbers of a disk without room
_SHUT = (errno.EACCES, errno.EPERM, errno.EROFS)


def cannot_write(path: Path, error: OSError, key: str = "output.dir") -> str:
    """The message on a file that could not be written: the file, the cause, and the remedy.

    key: the key of the configuration that names another folder.
    """
    remedy = "free space there or" if error.errno in FULL else "make it writable or" if error.errno in _SHUT else ""
    return f"cannot write {path}: {error.strerror or error}; {f'{remedy} set'.strip()} {key} to another disk"


@contextlib.contextmanager
def disk_errors(path: Path, key: str = "output.dir") -> Iterator[None]:
    """A context in which a write to `path` that fails raises DiskError, whose message is that of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise DiskError(cannot_write(path, error, key)) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, even after a crash, finds the old content or the new one, never a part of it.

    Raises OSError, with the old content intact.
    """
    atomically(path, lambda temporary: temporary.write_bytes(data))


def write_file(path: Path, data: bytes, key: str = "output.dir") -> None:
    """Write a file as `write_atomic` does, but raise DiskError with the message of `cannot_write`."""
    with disk_errors(path, key):
        write_atomic(path, data)


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path beside `path`, force it to the disk, and rename it into place.

    Its permissions are those that the umask leaves, also where a library would give it others (safetensors: 0600).
    Raises OSError that names `path`, with the old content intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            if temporary.stat().st_mode != mode:
                temporary.chmod(stat.S_IMODE(mode))
            _sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checked(path: Path, described: PlainMapping, *arrays: ByteArray) -> None:
    """Write a cache file: a description, and the bytes of `arrays` one after another, with their checksum.

    described: plain data for JSON.  Raises OSError, with nothing left behind.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    header = json.dumps({**described, "sha256": digest.hexdigest()}).encode()

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(struct.pack("<I", len(header)) + header)
            for array in arrays:
                file.write(array.data)

    atomically(path, write)


def read_header(file: BinaryIO) -> PlainDict | None:
    """Read the description at the start of a cache file; None if it is damaged.

    It is damaged, too, if `count` or one of the 3 sides of `shape` is not a whole number of at least 0.
    """
    try:
        size = struct.unpack("<I", file.read(4))[0]
        header = json.loads(file.read(size)) if size <= _HEADER_LIMIT else None
    except (ValueError, struct.error):
        return None
    if not isinstance(header, dict) or not isinstance(header.get("sha256"), str):
        return None
    numbers = [header.get("count"), *header["shape"]] if isinstance(header.get("shape"), list) else [None]
    is_valid = len(numbers) == 4 and all(isinstance(n, int) and 0 <= n < 2**40 for n in numbers)
    return header if is_valid else None


def map_checked(path: Path, extra_bytes: int = 0) -> tuple[PlainDict, ByteArray] | None:
    """Map (description, bytes) of a cache file of `count` images of a `shape`; None for one that is damaged.

    The bytes are read once for their checksum, a piece at a time; after that they are in memory only where they are
    used, and stay at hand where the file is deleted. Who writes to them changes a copy, never the file.
    extra_bytes: how many bytes each image has besides its pixels.  Raises OSError where the file cannot be read.
    """
    with path.open("rb") as file:
        header = read_header(file)
        if header is None:
            return None
        start = file.tell()
        expected = header["count"] * (extra_bytes + math.prod(header["shape"]))
        if path.stat().st_size - start != expected:
            return None
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
        if digest.hexdigest() != header["sha256"]:
            return None
        body = np.memmap(file, np.uint8, "c", start, (expected,)) if expected else np.empty(0, np.uint8)
    return header, np.asarray(body)


def delete(path: Path) -> str:
    """Delete a file; returns the reason if that is impossible, else an empty text."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be deleted ({error.strerror})"
    return ""


def file_bytes(path: Path) -> int:
    """The size of a file; 0 for one that another run has deleted since it was listed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sweep(folder: Path) -> None:
    """Delete the temporary files that killed writers left in a folder."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)
        except OSError:  # another run has deleted it, or another user owns it: nothing depends on it
            continue
