"""Synthetic images on disk, so that none is made twice: by no later run, larger budget, other policy or resumed run.

An image is identified by (generator fingerprint, seed, client, class, index). A folder per fingerprint and seed holds
segments, each written whole and renamed into place, so runs that write at once cannot disturb each other, and what was
made before a crash is kept. A segment whose checksum is wrong is deleted, and its images are made again. Where many
small segments have gathered they are merged into larger ones.
"""

import hashlib
import json
import re
import shutil
import struct
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raysim.checkpoint import write_atomic
from raysim.records import BoolArray, ByteArray, IntArray

MOST_SEGMENTS = 64  # small ones in a folder, before they are merged
LARGE_BYTES = 64_000_000  # a segment of this size is left alone by later merges
STALE_S = 3600.0  # a temporary file older than this belongs to no living writer
_KEY = np.dtype([("client", "<i8"), ("class", "<i8"), ("index", "<i8")])
_HEADER_LIMIT = 65_536

Keys = NDArray[Any]
Segment = tuple[Keys, ByteArray]


@dataclass
class ImageCache:
    """The cached images of one generator and seed.  notes: what was found damaged, or could not be done."""

    folder: Path
    shape: tuple[int, int, int]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, root: str | Path, fingerprint: str, seed: int, shape: tuple[int, int, int]) -> "ImageCache":
        """root: the cache folder.  shape: channels, height, width.  Raises OSError where it cannot be made."""
        folder = Path(root).expanduser() / _folder_name(fingerprint) / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        return cls(folder, tuple(int(side) for side in shape))  # type: ignore[arg-type]

    def fill(self, keys_M3: IntArray, images: ByteArray) -> BoolArray:
        """Copy the images that are cached into their rows of `images`; returns which were (M).

        keys_M3: client, class, index of each row, in any order, no key twice.
        """
        wanted = _as_keys(keys_M3)
        order = np.argsort(wanted)
        found_M = np.zeros(len(wanted), dtype=bool)
        seen: set[Path] = set()
        # Another run may merge segments meanwhile: what replaces them is there before they go.
        while len(wanted) and (paths := sorted(set(self.folder.glob("*.seg")) - seen)):
            seen.update(paths)
            for path in paths:
                segment = self._read(path)
                if segment is None:
                    continue
                keys, made = segment
                place = np.searchsorted(wanted, keys, sorter=order).clip(max=len(wanted) - 1)
                rows = order[place]
                hit = wanted[rows] == keys
                images[rows[hit]] = made[hit]
                found_M[rows[hit]] = True
        return found_M

    def add(self, keys_M3: IntArray, images: ByteArray) -> None:
        """Store images for good; OSError where the disk is full (what was stored before stays)."""
        self._write(_as_keys(keys_M3), images)

    def merge(self) -> None:
        """Replace small segments by large ones if there are more than MOST_SEGMENTS; no image is lost at any moment."""
        small = [path for path in sorted(self.folder.glob("*.seg")) if _size(path) < LARGE_BYTES]
        if len(small) <= MOST_SEGMENTS:
            return
        group: dict[Path, Segment] = {}
        for path in small:
            segment = self._read(path)
            if segment is not None:
                group[path] = segment
            if sum(made.nbytes for _, made in group.values()) >= LARGE_BYTES:
                self._replace(group)
                group = {}
        self._replace(group)

    def size_bytes(self) -> int:
        """What the images of this generator and seed take on disk."""
        return sum(_size(path) for path in self.folder.glob("*.seg"))

    def _replace(self, group: dict[Path, Segment]) -> None:
        if len(group) < 2:
            return
        keys, first = np.unique(np.concatenate([keys for keys, _ in group.values()]), return_index=True)
        images = np.concatenate([made for _, made in group.values()])[first]
        try:
            self._write(keys, images)
        except OSError as error:
            self.notes.append(f"{len(group)} cache files could not be merged ({error.strerror}); they stay as they are")
            return
        for path in group:
            _delete(path)  # one that stays holds images that are there twice, which does no harm

    def _write(self, keys: Keys, images: ByteArray) -> None:
        body = keys.tobytes() + np.ascontiguousarray(images).tobytes()
        described = {"count": len(images), "shape": self.shape, "sha256": hashlib.sha256(body).hexdigest()}
        header = json.dumps(described).encode()
        write_atomic(self.folder / f"{uuid.uuid4().hex}.seg", struct.pack("<I", len(header)) + header + body)

    def _read(self, path: Path) -> Segment | None:
        """(keys, images) of a segment, or None for one that is gone, or damaged, which is then deleted."""
        try:
            with path.open("rb") as file:
                header, body = _header(file), file.read()
        except FileNotFoundError:  # another run has merged it, or found it damaged
            return None
        except OSError as error:
            self.notes.append(f"cache file {path.name} cannot be read ({error.strerror}); its images are made again")
            return None
        if header is None or not _is_sound(header, body):
            kept = _delete(path)
            self.notes.append(f"damaged cache file {path.name} {kept or 'deleted'}; its images are made again")
            return None
        count, shape = header["count"], tuple(header["shape"])
        if shape != self.shape:  # sound, but of a generator that does not tell its image sizes apart
            return None
        keys = np.frombuffer(body, _KEY, count)
        return keys, np.frombuffer(body, np.uint8, offset=count * _KEY.itemsize).reshape(count, *self.shape)


def _folder_name(fingerprint: str) -> str:
    """32 hexadecimal digits, whatever a generator calls itself."""
    plain = re.fullmatch(r"[0-9a-f]{32,}", fingerprint)
    return fingerprint[:32] if plain else hashlib.sha256(fingerprint.encode()).hexdigest()[:32]


def _folders(root: str | Path) -> list[Path]:
    """The folders that this module made below `root`; others there are none of its business."""
    found = sorted(Path(root).expanduser().glob("*/*"))
    return [p for p in found if re.fullmatch(r"[0-9a-f]{32}/\d+", f"{p.parent.name}/{p.name}") and p.is_dir()]


def _header(file: BinaryIO) -> dict[str, Any] | None:
    """The header at the start of a segment, with `count`, `shape` and `sha256` of the right types; None if damaged."""
    try:
        size = struct.unpack("<I", file.read(4))[0]
        header = json.loads(file.read(size)) if size <= _HEADER_LIMIT else None
    except (ValueError, struct.error):
        return None
    if not isinstance(header, dict) or not isinstance(header.get("sha256"), str):
        return None
    numbers = [header.get("count"), *header["shape"]] if isinstance(header.get("shape"), list) else [None]
    sane = len(numbers) == 4 and all(isinstance(n, int) and 0 <= n < 2**40 for n in numbers)
    return header if sane else None


def _is_sound(header: dict[str, Any], body: bytes) -> bool:
    channels, height, width = header["shape"]
    expected = header["count"] * (_KEY.itemsize + channels * height * width)
    return len(body) == expected and hashlib.sha256(body).hexdigest() == header["sha256"]


def _as_keys(keys_M3: IntArray) -> Keys:
    return np.ascontiguousarray(keys_M3, dtype="<i8").view(_KEY).reshape(-1)


def _delete(path: Path) -> str:
    """Delete a file; returns why it stays, or an empty text."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be deleted ({error.strerror})"
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted by another run since it was listed
        return 0


def _sweep(folder: Path) -> None:
    """Delete what a killed writer left behind."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)
        except OSError:  # another run was quicker, or owns it: nothing depends on it
            continue


@dataclass(frozen=True)
class CacheEntry:
    """One generator and seed in the cache.  damaged: segments whose header cannot be read."""

    fingerprint: str
    seed: str
    images: int
    size_bytes: int
    damaged: int = 0


def entries(root: str | Path) -> list[CacheEntry]:
    """What the cache holds, one entry per generator and seed, from the headers alone; sizes with temporary files."""
    found = []
    for folder in _folders(root):
        images = damaged = 0
        for path in folder.glob("*.seg"):
            try:
                with path.open("rb") as file:
                    header = _header(file)
            except FileNotFoundError:
                continue
            except OSError:
                header = None
            images += header["count"] if header else 0
            damaged += header is None
        size = sum(_size(path) for path in folder.iterdir())
        if size:
            found.append(CacheEntry(folder.parent.name, folder.name, images, size, damaged))
    return found


def clear(root: str | Path) -> int:
    """Delete everything in the cache that the cache made; returns how many bytes that freed.

    Raises OSError where something may not be deleted.
    """
    freed = sum(entry.size_bytes for entry in entries(root))
    for folder in _folders(root):
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    return freed
