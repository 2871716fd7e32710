"""The image cache as a person sees it: `raysim cache list` and `raysim cache clear`."""

from pathlib import Path

from raysim import image_cache
from raysim.errors import UserError


def show(folder: str | None) -> list[str]:
    """One line a generator and seed, with its images and size, and a line with the totals.

    folder: of the cache; None for the default of `output.cache`.
    """
    root = _root(folder)
    entries = image_cache.entries(root)
    if not entries:
        return [f"{root}: no cached images"]
    lines = [f"{'generator':<32}  {'seed':>10}  {'images':>11}  {'size':>12}"]
    for entry in entries:
        damaged = f"  {entry.damaged} damaged, deleted when met" if entry.damaged else ""
        lines.append(
            f"{entry.fingerprint:<32}  {entry.seed:>10}  {entry.images:>11,}  {_size(entry.size_bytes):>12}{damaged}"
        )
    images, size = sum(e.images for e in entries), sum(e.size_bytes for e in entries)
    return [*lines, f"{root}: {images:,} images, {_size(size)}"]


def clear(folder: str | None) -> str:
    """Delete every cached image; says how much that freed.  Raises UserError where it may not be deleted."""
    root = _root(folder)
    try:
        return f"{root}: {_size(image_cache.clear(root))} freed"
    except OSError as error:
        raise UserError(f"--dir = {root}: {error.filename} cannot be deleted: {error.strerror}") from error


def _root(folder: str | None) -> Path:
    from raysim.config import Output

    root = Path(folder or Output().cache or ".").expanduser()
    if folder is not None and not root.is_dir():
        raise UserError(f"--dir = {folder}: no such folder; name the one in output.cache")
    return root


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
