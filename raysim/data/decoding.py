"""PNG, JPEG and other encoded images to one uint8 array."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from raysim.core.errors import UserError
from raysim.core.records import ByteArray

_CHUNK = 64
_THREADED_BYTES = 40_000  # of an image; threads that decode smaller ones wait for each other longer than they decode
_GREY = {"1", "L", "LA"}
_DEEP = {"I", "F", "I;16", "I;16B", "I;16L", "I;16N"}
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


Room = Callable[[tuple[int, ...]], ByteArray]
"""(shape) -> an array for images, whatever it holds."""


def room_in_memory(shape: tuple[int, ...]) -> ByteArray:
    """An array of this process."""
    return np.empty(shape, dtype=np.uint8)


class _ColourFound(Exception):
    """A colour image among grey ones: all are read as colour."""


def decode_images(
    count: int, read: Callable[[int], bytes | None], where: Callable[[int], str], room: Room = room_in_memory
) -> ByteArray:
    """`count` encoded images as uint8 N x channels x H x W, one channel if all are grey, else three.

    Images are turned as their EXIF data say, and laid on white where they are transparent.  Of an animation, the first
    image is taken.
    read: the bytes of image i.  where: its name, for messages.  room: makes the array that they are decoded into.
    Raises UserError that names the first image that is missing, cannot be read, has more than 8 bits a channel, or
    differs in size from the first one.
    """
    if count == 0:
        return np.empty((0, 3, 0, 0), dtype=np.uint8)
    try:
        return _decode_as("L", count, read, where, room)
    except _ColourFound:
        return _decode_as("RGB", count, read, where, room)


def _decode_as(
    mode: str, count: int, read: Callable[[int], bytes | None], where: Callable[[int], str], room: Room
) -> ByteArray:
    first = _decode(read(0), mode, where(0))
    images = room((count, *first.shape))

    def decode_chunk(start: int) -> None:
        for i in range(start, min(start + _CHUNK, count)):
            image = _decode(read(i), mode, where(i))
            if image.shape != first.shape:
                raise UserError(
                    f"{where(i)}: the image is {_size(image)} pixels, the first one {_size(first)}; "
                    "bring all images to one size"
                )
            images[i] = image

    # pillow decodes without holding the interpreter's lock; map re-raises the error of the earliest chunk.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        each = map if first.nbytes < _THREADED_BYTES else pool.map
        list(each(decode_chunk, range(0, count, _CHUNK)))
    return images


def _size(image: ByteArray) -> str:
    return f"{image.shape[1]} x {image.shape[2]}"


def _decode(blob: bytes | None, mode: str, where: str) -> ByteArray:
    if blob is None:
        raise UserError(f"{where}: there is no image (null); remove the row")
    try:
        with Image.open(io.BytesIO(blob)) as opened:
            if opened.mode in _DEEP or _bits(opened, blob) > 8:
                raise UserError(f"{where}: more than 8 bits a channel ({opened.mode}); convert the image to 8 bits")
            if mode == "L" and opened.mode not in _GREY:
                raise _ColourFound
            image = _on_white(_upright(opened))
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except UnidentifiedImageError as error:
        raise UserError(f"{where}: the image cannot be read (no known format); replace or remove it") from error
    except _UNREADABLE as error:
        raise UserError(f"{where}: the image cannot be read ({error}); replace or remove it") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _bits(image: Image.Image, blob: bytes) -> int:
    """Bits a channel in the file, which pillow cuts to 8 in colour images: of PNG (in its header) and TIFF; else 8."""
    if image.format == "PNG":
        return blob[24]
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(258, (8,))))  # type: ignore[attr-defined]  # BitsPerSample
    return 8


def _upright(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it: turned as the camera noted in its EXIF data."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except _UNREADABLE:  # broken EXIF data around a sound image
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _on_white(image: Image.Image) -> Image.Image:
    """The image on a white ground where it is transparent; what lies under transparent pixels is arbitrary."""
    if not image.has_transparency_data:
        return image
    layered = image.convert("RGBA")
    if layered.getchannel("A").getextrema() == (255, 255):
        return image
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
