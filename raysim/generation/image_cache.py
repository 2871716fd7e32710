"""Synthetic images on disk, so that later runs, larger budgets, other policies and resumed runs do not make them again.

An image is identified by (generator fingerprint, seed, client, class, index). A folder per fingerprint and seed holds
segments, each written whole and renamed into place, so runs that write at the same time cannot disturb each other, and
images made before a crash are kept. A segment whose checksum is wrong is deleted, and its images are made again. Where
there are many small segments they are merged into larger ones.
"""

import hashlib
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raysim.core.files import delete, file_bytes, map_checked, read_header, sweep, write_checked
from raysim.core.records import ByteArray, IntArray

MOST_SEGMENTS = 64  # how many small segments a folder may have before they are merged
LARGE_BYTES = 64_000_000  # a segment of this size is not merged again
_KEY = np.dtype([("client", "<i8"), ("class", "<i8"), ("index", "<i8")])

Keys = NDArray[np.void]
"""Records of (client, class, index), dtype `_KEY`."""
Segment = tuple[Keys, ByteArray]
"""Keys, and the image of each."""


@dataclass
class ImageCache:
    """The cached images of one generator and seed.

    shape: channels, height, width.  notes: messages about files that are damaged, and about what could not be done.
    """

    folder: Path
    shape: tuple[int, int, int]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, root: str | Path, fingerprint: str, seed: int, shape: tuple[int, int, int]) -> "ImageCache":
        """Open the cache of one generator and seed, below the folder `root`.

        shape: channels, height, width.  Raises OSError where the folder cannot be made.
        """
        folder = Path(root).expanduser() / _folder_name(fingerprint) / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        return cls(folder, tuple(int(side) for side in shape))  # type: ignore[arg-type]

    def find(self, keys_M3: IntArray) -> list[tuple[Path, IntArray, IntArray]]:
        """Where the images that are cached lie: (segment, rows of `keys_M3`, places in the segment) of each segment.

        keys_M3: client, class, index of each row, in any order, no key twice.  No row is named twice.
        """
        wanted = _as_keys(keys_M3)
        order = np.argsort(wanted)
        is_left_M = np.ones(len(wanted), dtype=bool)
        found = []
        seen: set[Path] = set()
        # Another run may merge segments meanwhile: the new segment exists before the old ones are deleted.
        while len(wanted) and (paths := sorted(set(self.folder.glob("*.seg")) - seen)):
            seen.update(paths)
            for path in paths:
                segment = self._read(path)
                if segment is None:
                    continue
                keys, _ = segment
                rows = order[np.searchsorted(wanted, keys, sorter=order).clip(max=len(wanted) - 1)]
                places = np.flatnonzero((wanted[rows] == keys) & is_left_M[rows])
                if len(places):
                    is_left_M[rows[places]] = False
                    found.append((path, rows[places], places))
        return found

    def images(self, path: Path, places: IntArray) -> ByteArray | None:
        """The images at some places of a segment that `find` has named; None where it has gone meanwhile."""
        try:
            with path.open("rb") as file:
                header = read_header(file)
                if header is None:
                    return None
                start = file.tell() + header["count"] * _KEY.itemsize
                pixels = np.memmap(file, np.uint8, "r", start, (header["count"], *self.shape))
                images: ByteArray = np.asarray(pixels)[places]
                return images
        except OSError:  # another run has merged it
            return None

    def add(self, keys_M3: IntArray, images: ByteArray) -> None:
        """Store images in the cache.

        keys_M3: client, class, index of each.  Raises OSError where the disk is full; what was stored before is kept.
        """
        self._write(_as_keys(keys_M3), images)

    def merge(self) -> None:
        """Replace small segments by large ones if there are more than MOST_SEGMENTS; no image is lost at any moment."""
        small = [path for path in sorted(self.folder.glob("*.seg")) if file_bytes(path) < LARGE_BYTES]
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
        """How many bytes the images of this generator and seed take on disk."""
        return sum(file_bytes(path) for path in self.folder.glob("*.seg"))

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
            delete(path)  # if one cannot be deleted, its images are stored twice, which does no harm

    def _write(self, keys: Keys, images: ByteArray) -> None:
        described = {"count": len(images), "shape": self.shape}
        arrays = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (keys, images))
        write_checked(self.folder / f"{uuid.uuid4().hex}.seg", described, *arrays)

    def _read(self, path: Path) -> Segment | None:
        """(keys, images) of a segment, or None for one that is gone, or damaged, which is then deleted."""
        try:
            found = map_checked(path, _KEY.itemsize)
        except FileNotFoundError:  # another run has merged it, or found it damaged
            return None
        except OSError as error:
            self.notes.append(f"cache file {path.name} cannot be read ({error.strerror}); its images are made again")
            return None
        if found is None:
            problem = delete(path)
            self.notes.append(f"damaged cache file {path.name} {problem or 'deleted'}; its images are made again")
            return None
        header, body = found
        size = header["count"] * _KEY.itemsize
        if tuple(header["shape"]) != self.shape:  # intact, but the generator has one fingerprint for several sizes
            return None
        return body[:size].view(_KEY), body[size:].reshape(header["count"], *self.shape)


def _folder_name(fingerprint: str) -> str:
    """32 hexadecimal digits for any fingerprint."""
    plain = re.fullmatch(r"[0-9a-f]{32,}", fingerprint)
    return fingerprint[:32] if plain else hashlib.sha256(fingerprint.encode()).hexdigest()[:32]


def _folders(root: str | Path) -> list[Path]:
    """The folders below `root` whose names have the form that this module gives them; others are not touched."""
    found = sorted(Path(root).expanduser().glob("*/*"))
    return [p for p in found if re.fullmatch(r"[0-9a-f]{32}/\d+", f"{p.parent.name}/{p.name}") and p.is_dir()]


def _as_keys(keys_M3: IntArray) -> Keys:
    return np.ascontiguousarray(keys_M3, dtype="<i8").view(_KEY).reshape(-1)


@dataclass(frozen=True)
class CacheEntry:
    """One generator and seed in the cache.

    images, size_bytes: how many it has, and what they take on disk.  damaged: segments whose header cannot be read.
    """

    fingerprint: str
    seed: str
    images: int
    size_bytes: int
    damaged: int = 0


def entries(root: str | Path) -> list[CacheEntry]:
    """List the cache, one entry per generator and seed, from the headers alone; sizes include temporary files."""
    found = []
    for folder in _folders(root):
        images = damaged = 0
        for path in folder.glob("*.seg"):
            try:
                with path.open("rb") as file:
                    header = read_header(file)
            except FileNotFoundError:
                continue
            except OSError:
                header = None
            images += header["count"] if header else 0
            damaged += header is None
        size = sum(file_bytes(path) for path in folder.iterdir())
        if size:
            found.append(CacheEntry(folder.parent.name, folder.name, images, size, damaged))
    return found


def clear(root: str | Path) -> int:
    """Delete everything that this module wrote below `root`; returns how many bytes that freed.

    Raises OSError where something cannot be deleted.
    """
    freed = sum(entry.size_bytes for entry in entries(root))
    for folder in _folders(root):
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    return freed
