"""An assembly of image blocks without Ray: what it would put into the object store are arrays in this process."""

from typing import Any

import numpy as np
import pytest

from raysim.federation import image_blocks
from raysim.federation.image_blocks import Assembly, ImagePlaces
from raysim.generation.image_cache import ImageCache


class Here:
    """In place of `raysim.engine.beside.Beside`."""

    def call(self, function: Any, *arguments: Any, items: int = 1) -> Any:
        return function(*arguments)


def assembly(keys_M3: np.ndarray, cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> Assembly:
    """Of images that lie nowhere yet."""
    for name in ("get", "get_if_there"):
        monkeypatch.setattr(image_blocks, name, lambda array: array)
    return Assembly(Here(), keys_M3, cache.shape, ImagePlaces.nowhere(len(keys_M3)), cache)  # type: ignore[arg-type]


def pixels_of(images: Assembly) -> np.ndarray:
    """All images, when all blocks are built."""
    return np.concatenate(images.blocks().refs)
