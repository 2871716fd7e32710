"""Synthetic images on disk, so that none is made twice: by no later run, larger budget, other policy or resumed run.

An image is identified by (generator fingerprint, seed, client, class, index). A folder per fingerprint and seed holds
segments, each written whole and renamed into place, so runs that write at once cannot disturb each other, and what was
made before a crash is kept. A segment whose checksum is wrong is deleted, and its images are made again.
"""

import hashlib
import json
import shutil
import struct
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raysim.checkpoint import write_atomic
from raysim.records import BoolArray, ByteArray, IntArray

_KEY = np.dtype([("client", "<i8"), ("class", "<i8"), ("index", "<i8")])


@dataclass
class ImageCache:
    """The cached images of one generator and seed.  notes: what was found damaged."""

    folder: Path
    shape: tuple[int, int, int]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, root: str | Path, fingerprint: str, seed: int, shape: tuple[int, int, int]) -> "ImageCache":
        """root: the cache folder.  shape: channels, height, width."""
        folder = Path(root).expanduser() / fingerprint[:32] / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, shape)

    def fill(self, keys_M3: IntArray, images: ByteArray) -> BoolArray:
        """Copy the images that are cached into their rows of `images`; returns which were (M).

        keys_M3: client, class, index of each row, in any order, no key twice.
        """
        wanted = _as_keys(keys_M3)
        order = np.argsort(wanted)
        found_M = np.zeros(len(wanted), dtype=bool)
        for path in sorted(self.folder.glob("*.seg")):
            segment = self._read(path)
            if segment is None or not len(wanted):
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
        body = _as_keys(keys_M3).tobytes() + np.ascontiguousarray(images).tobytes()
        header = json.dumps({"count": len(images), "shape": self.shape, "sha256": hashlib.sha256(body).hexdigest()})
        write_atomic(self.folder / f"{uuid.uuid4().hex}.seg", struct.pack("<I", len(header)) + header.encode() + body)

    def _read(self, path: Path) -> tuple[np.ndarray, ByteArray] | None:
        """(keys, images) of a segment, or None for one that is damaged, which is then deleted."""
        raw = path.read_bytes()
        try:
            size = struct.unpack("<I", raw[:4])[0]
            header, body = json.loads(raw[4 : 4 + size]), raw[4 + size :]
            sound = hashlib.sha256(body).hexdigest() == header["sha256"] and tuple(header["shape"]) == self.shape
        except (ValueError, KeyError, struct.error):
            sound = False
        if not sound:
            self.notes.append(f"damaged cache file {path.name} deleted; its images are made again")
            path.unlink(missing_ok=True)
            return None
        count = header["count"]
        keys = np.frombuffer(body, _KEY, count)
        return keys, np.frombuffer(body, np.uint8, offset=count * _KEY.itemsize).reshape(count, *self.shape)


def _as_keys(keys_M3: IntArray) -> np.ndarray:
    return np.ascontiguousarray(keys_M3, dtype="<i8").view(_KEY).reshape(-1)


@dataclass(frozen=True)
class CacheEntry:
    """One generator and seed in the cache."""

    fingerprint: str
    seed: str
    images: int
    size_bytes: int


def entries(root: str | Path) -> list[CacheEntry]:
    """What the cache holds, one entry per generator and seed."""
    found = []
    for folder in sorted(Path(root).expanduser().glob("*/*")):
        paths, images = list(folder.glob("*.seg")), 0
        for path in paths:
            with path.open("rb") as file:
                images += json.loads(file.read(struct.unpack("<I", file.read(4))[0]))["count"]
        found.append(CacheEntry(folder.parent.name, folder.name, images, sum(p.stat().st_size for p in paths)))
    return found


def clear(root: str | Path) -> int:
    """Delete the whole cache; returns how many bytes that freed."""
    size = sum(entry.size_bytes for entry in entries(root))
    for folder in Path(root).expanduser().glob("*"):
        if folder.is_dir():
            shutil.rmtree(folder)
    return size
