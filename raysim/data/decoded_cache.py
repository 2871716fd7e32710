"""Decoded images on disk, so that PNG and JPEG files are decoded once and every later run reads plain bytes.

A file holds the images of one split. Its name is a hash of what determines the pixels: the content of the encoded
files, wherever they lie, and the versions of the decoders; or of the pixels, for a split that is too large for the
object store and lies in no such file. It is written whole and renamed into place, so runs that write at once cannot
disturb each other; one whose checksum is wrong is deleted and made again.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.core.files import cannot_write, delete, file_bytes, map_checked, read_header, sweep, write_checked
from raysim.core.host import physical_bytes
from raysim.core.records import ByteArray, Dataset, sha256
from raysim.data.decoding import room_in_memory
from raysim.data.mapped import IMAGES, MappedImages

FOLDER = "decoded"  # in the folder of the image cache
LEAST_BYTES = 1_000_000  # fewer are decoded in an instant
MEMORY_SHARE = 0.25  # of this machine's memory; images that take more are decoded into a file and mapped
_FORMAT = 2  # of what `decode_images` makes of a file
_DECODERS = ("pil", "jpg", "libjpeg_turbo", "jpg_2000", "webp", "libtiff")


@dataclass(frozen=True)
class DecodedCache:
    """A folder of decoded images.  notes: what was found damaged, or could not be done."""

    folder: Path
    notes: list[str]

    def images(self, key: str, decode: Callable[[], ByteArray]) -> ByteArray:
        """The images of this key, from the cache or from `decode`, whose answer is then kept."""
        path = self.folder / f"{key}.img"
        images = self._read(path)
        if images is not None:
            return images
        images = decode()
        if images.nbytes >= LEAST_BYTES and self._keep(path, images) and _is_large(images.nbytes):
            kept = self._read(path)
            return images if kept is None else kept
        return images

    def room(self, shape: tuple[int, ...]) -> ByteArray:
        """An array to decode images into, in memory; where it would fill much of it, in a file that goes with it."""
        size = math.prod(shape)
        if _is_large(size) and hasattr(os, "posix_fallocate"):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder) as file:
                    os.posix_fallocate(file.fileno(), 0, size)  # a map without room on the disk would end the process
                    return np.asarray(np.memmap(file, np.uint8, "r+", shape=shape))
            except OSError as error:
                told = cannot_write(self.folder, error, "output.cache")
                self.notes.append(f"{size / 1e6:,.0f} MB of images are decoded in memory: {told}")
        return room_in_memory(shape)

    def files(self, dataset: Dataset) -> dict[str, MappedImages]:
        """The files of a data set's images, by name; what is in none yet is written to one of its own.

        Raises OSError where there is no room for that.
        """
        found = {}
        for name in IMAGES:
            images = getattr(dataset, name)
            if images is None or images.nbytes < LEAST_BYTES:
                continue
            file = MappedImages.behind(images)
            if file is None:
                path = (self.folder / f"{sha256(images)[:32]}.img").absolute()
                if self._read(path) is None:
                    self._write(path, images)
                with path.open("rb") as opened:
                    read_header(opened)
                    file = MappedImages(path, opened.tell(), images.shape)
            found[name] = file
        return found

    def _read(self, path: Path) -> ByteArray | None:
        try:
            found = map_checked(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.notes.append(f"decoded images {path} cannot be read ({error.strerror}); they are decoded again")
            return None
        if found is None:
            kept = delete(path)
            self.notes.append(f"damaged file of decoded images {path} {kept or 'deleted'}; they are decoded again")
            return None
        header, body = found
        images = body.reshape(header["count"], *header["shape"])
        return images if _is_large(images.nbytes) else np.array(images)  # in memory, whatever becomes of the file

    def _write(self, path: Path, images: ByteArray) -> None:
        write_checked(path, {"count": len(images), "shape": images.shape[1:]}, np.ascontiguousarray(images))
        sweep(self.folder)

    def _keep(self, path: Path, images: ByteArray) -> bool:
        try:
            self._write(path, images)
        except OSError as error:
            told = cannot_write(path, error, "output.cache")
            what = f"{images.nbytes / 1e6:,.0f} MB of decoded images could not be kept"
            self.notes.append(f"{what}: {told}; the next run decodes them again")
            return False
        return True


def _is_large(size: int) -> bool:
    """Whether images of so many bytes are rather in a file than in memory."""
    return size > MEMORY_SHARE * physical_bytes()


def open_cache(root: str, notes: list[str]) -> DecodedCache | None:
    """The cache of decoded images below `root`; None, with a note, where that names no folder.

    notes: gets what was found damaged, or could not be done.
    """
    try:
        return DecodedCache(Path(root).expanduser() / FOLDER, notes)
    except RuntimeError as error:  # a `~` without a home
        notes.append(f"output.cache = {root} cannot be used ({error}); decoded images are not kept")
        return None


def content_key(content: Iterable[bytes]) -> str:
    """The key of images that are determined by `content`, the versions of the decoders and this package's decoding."""
    from PIL import features

    versions = {name: features.version(name) for name in _DECODERS}
    digest = hashlib.sha256(json.dumps([_FORMAT, versions]).encode())
    for part in content:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class DecodedEntry:
    """One file of the cache.  images: None where its header cannot be read."""

    key: str
    images: int | None
    size_bytes: int


def entries(root: str | Path) -> list[DecodedEntry]:
    """What the cache holds, from the headers alone."""
    found = []
    for path in sorted((Path(root).expanduser() / FOLDER).glob("*.img")):
        try:
            with path.open("rb") as file:
                header = read_header(file)
        except OSError:  # deleted since it was listed, or not ours to read
            continue
        found.append(DecodedEntry(path.stem, header["count"] if header else None, file_bytes(path)))
    return found


def clear(root: str | Path) -> int:
    """Delete all decoded images; returns how many bytes that freed.  Raises OSError where one may not be deleted."""
    folder = Path(root).expanduser() / FOLDER
    freed = 0
    for path in [*folder.glob("*.img"), *folder.glob(".*.img.*.tmp")]:
        size = file_bytes(path)
        path.unlink(missing_ok=True)
        freed += size
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return freed
