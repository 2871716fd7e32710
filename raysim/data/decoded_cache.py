"""Decoded images on disk, so that PNG and JPEG files are decoded once and every later run reads plain bytes.

A file holds the images of one split. Its name is a hash of what determines the pixels: the content of the encoded
files, wherever they lie, and the versions of the decoders. It is written whole and renamed into place, so runs that
write at once cannot disturb each other; one whose checksum is wrong is deleted and made again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.core.files import cannot_write, delete, file_bytes, map_checked, read_header, sweep, write_checked
from raysim.core.records import ByteArray

FOLDER = "decoded"  # in the folder of the image cache
LEAST_BYTES = 1_000_000  # fewer are decoded in an instant
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
        if images.nbytes >= LEAST_BYTES:
            self._keep(path, images)
        return images

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
        return np.array(body.reshape(header["count"], *header["shape"]))  # whatever becomes of the file

    def _keep(self, path: Path, images: ByteArray) -> None:
        try:
            write_checked(path, {"count": len(images), "shape": images.shape[1:]}, np.ascontiguousarray(images))
            sweep(self.folder)
        except OSError as error:
            told = cannot_write(path, error, "output.cache")
            what = f"{images.nbytes / 1e6:,.0f} MB of decoded images could not be kept"
            self.notes.append(f"{what}: {told}; the next run decodes them again")


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
