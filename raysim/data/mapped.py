"""A data set whose images stay in files, which each process maps: it takes no memory but for what is in use."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.core.records import ByteArray, Dataset

IMAGES = ("train_images", "test_images", "public_images", "validation_images")


@dataclass(frozen=True)
class MappedImages:
    """Images in a file, one after another: uint8 of `shape` from byte `start` on."""

    path: Path
    start: int
    shape: tuple[int, ...]

    @classmethod
    def behind(cls, images: ByteArray) -> "MappedImages | None":
        """The file that an array is the map of, from its first byte to its last; None for an array in memory."""
        base: object = images
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        if not isinstance(base, np.memmap) or base.filename is None or not images.flags.c_contiguous:
            return None
        into = images.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return cls(Path(base.filename), base.offset + into, images.shape)

    def open(self) -> ByteArray:
        """Map the file, read-only.  Raises OSError where it is not there, ValueError where it is too short."""
        return np.asarray(np.memmap(self.path, np.uint8, "r", self.start, self.shape))


@dataclass(frozen=True)
class MappedDataset:
    """A data set of which some images are in files.  rest: all else; it holds none of those.  files: by name."""

    rest: Dataset
    files: dict[str, MappedImages]

    @classmethod
    def of(cls, dataset: Dataset, files: dict[str, MappedImages]) -> "MappedDataset":
        """The data set, with these of its images in files."""
        none: dict[str, Any] = {name: getattr(dataset, name)[:0].copy() for name in files}
        return cls(replace(dataset, **none), files)

    def open(self) -> Dataset:
        """The data set, its images mapped.  Raises OSError or ValueError for a file that cannot be."""
        mapped: dict[str, Any] = {name: file.open() for name, file in self.files.items()}
        return replace(self.rest, **mapped)
