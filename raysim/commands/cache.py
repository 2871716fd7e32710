"""The commands `raysim cache list` and `raysim cache clear`, for both caches of images."""

from pathlib import Path

from raysim.core.errors import UserError
from raysim.data import decoded_cache
from raysim.generation import image_cache


def show(folder: str | None) -> list[str]:
    """List the cache: a line per generator and seed and per decoded data set, with images and size, and the totals.

    folder: the folder of the cache; None for the default of `output.cache`.
    """
    root = _root(folder)
    made = image_cache.entries(root)
    decoded = decoded_cache.entries(root)
    if not made and not decoded:
        return [f"{root}: no cached images"]
    lines = [f"{'generator':<32}  {'seed':>10}  {'images':>11}  {'size':>12}"]
    for entry in made:
        damaged = f"{entry.damaged} damaged, deleted when met" if entry.damaged else ""
        lines.append(_line(entry.fingerprint, entry.seed, entry.images, entry.size_bytes, damaged))
    for data in decoded:
        damaged = "damaged, deleted when met" if data.images is None else ""
        lines.append(_line(data.key, "decoded", data.images or 0, data.size_bytes, damaged))
    images = sum(e.images for e in made) + sum(e.images or 0 for e in decoded)
    size = sum(e.size_bytes for e in made) + sum(e.size_bytes for e in decoded)
    return [*lines, f"{root}: {images:,} images, {_size(size)}"]


def _line(name: str, seed: str, images: int, size_bytes: int, remark: str) -> str:
    return f"{name:<32}  {seed:>10}  {images:>11,}  {_size(size_bytes):>12}  {remark}".rstrip()


def clear(folder: str | None) -> str:
    """Delete every cached image; returns a message with the bytes freed.  Raises UserError if that is impossible."""
    root = _root(folder)
    try:
        return f"{root}: {_size(image_cache.clear(root) + decoded_cache.clear(root))} freed"
    except OSError as error:
        raise UserError(f"--dir = {root}: {error.filename} cannot be deleted: {error.strerror}") from error


def _root(folder: str | None) -> Path:
    from raysim.config.schema import Output

    root = Path(folder or Output().cache or ".").expanduser()
    if folder is not None and not root.is_dir():
        raise UserError(f"--dir = {folder}: no such folder; name the one in output.cache")
    return root


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
