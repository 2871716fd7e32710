"""What generators that sample with torch share: one thread, clamped pixels, checked labels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raysim.core.errors import RunError, UserError
from raysim.core.records import ByteArray, IntArray

LANES = 16  # batches are padded to a multiple of this, so that no image is in the remainder of a vectorised loop


def to_uint8(x: Tensor) -> ByteArray:
    """Convert images in [-1, 1] to pixels 0..255, same shape; values outside are clamped, so that they do not overflow.

    Raises RunError if a value is not finite.
    """
    if not bool(torch.isfinite(x).all()):
        raise RunError("generator: sampling gave NaN or infinity; check generator.weights (or folder), guidance and "
                       "precision")
    pixels: ByteArray = ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    return pixels


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """A context in which torch uses one thread if the device is a CPU; afterwards as many as before."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_labels(labels_B: NDArray[Any], classes: int) -> IntArray:  # Any: the dtype is what is checked
    """Return the labels as int64; UserError for labels that are not integers or not in 0 to classes - 1."""
    if labels_B.ndim != 1 or labels_B.dtype.kind not in "iu":
        raise UserError(
            f"labels must be whole numbers, one an image, not {labels_B.dtype} of shape {labels_B.shape}; "
            "cast them to an integer type where they are read"
        )
    outside = np.unique(labels_B[(labels_B < 0) | (labels_B >= classes)])
    if len(outside):
        raise UserError(f"labels {outside[:5].tolist()} are not among the generator's classes 0 to {classes - 1}")
    return labels_B.astype(np.int64)
