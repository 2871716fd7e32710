"""Images on their way into blocks of the object store: from workers' answers, from the cache, from earlier blocks.

The driver knows where each image lies, and no pixel of it. What copies pixels are the functions at the end, which
`engine.beside` calls: they run in a process of their own, or in the driver where all images together are few.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raysim.core.errors import RunError
from raysim.core.files import cannot_write
from raysim.core.records import ByteArray, ImageBlocks, IntArray, Ref, sha256
from raysim.engine.beside import Beside
from raysim.engine.object_store import get, get_if_there
from raysim.generation.image_cache import ImageCache

BLOCK_BYTES = 16_000_000  # of images in a block; a process that copies one has little more in memory
OWN_PROCESS_BYTES = 32_000_000  # fewer are copied in the driver: starting a process takes longer
FLUSH_S = 2.0  # how much generated work a crash may cost

Shape = tuple[int, int, int]
Source = Ref | Path
"""Where images lie: a worker's answer or a block in the object store, or a segment of the cache."""
Piece = tuple[Source, IntArray, IntArray]
"""(source, rows of the images that are put together, places in the source that they come from)."""


@dataclass
class ImagePlaces:
    """Where each of some images lies, in sources that are dropped once no image is taken from them any more.

    source_M: the number of its source; -1 for an image that lies nowhere yet.  place_M: its place there.
    """

    source_M: IntArray
    place_M: IntArray
    sources: dict[int, Source] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    @classmethod
    def nowhere(cls, images: int) -> "ImagePlaces":
        return cls(np.full(images, -1, dtype=np.int64), np.zeros(images, dtype=np.int64))

    def set(self, rows: IntArray, source: Source, places: IntArray) -> None:
        """These images lie there from now on."""
        self._leave(rows)
        self.sources[self._next], self._left[self._next] = source, len(rows)
        self.source_M[rows], self.place_M[rows] = self._next, places
        self._next += 1

    def set_blocks(self, rows: IntArray, blocks: ImageBlocks, at: IntArray) -> None:
        """These images lie in blocks from now on.  at: where in their order."""
        numbers = at // blocks.size
        for number in np.unique(numbers).tolist():
            here = numbers == number
            self.set(rows[here], blocks.refs[number], at[here] % blocks.size)

    def forget(self, numbers: Iterable[int]) -> None:
        """The images of these sources lie nowhere any more."""
        for number in numbers:
            rows = np.flatnonzero(self.source_M == number)
            self._leave(rows)
            self.source_M[rows] = -1

    def pieces(self, rows: IntArray) -> dict[int, Piece]:
        """Where to take these images from, by source; none of them may lie nowhere."""
        numbers = self.source_M[rows]
        assert (numbers >= 0).all()
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        return {
            int(numbers[part[0]]): (self.sources[int(numbers[part[0]])], part, self.place_M[rows[part]])
            for part in np.split(order, cuts) if len(part)
        }

    def _leave(self, rows: IntArray) -> None:
        numbers, counts = np.unique(self.source_M[rows], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                self._left[number] -= count
                if not self._left[number]:
                    del self._left[number], self.sources[number]


class Assembly:
    """Puts images together in blocks as soon as all images of a block are there, and keeps new ones in the cache.

    keys_M3: client, class and index of each image, in the order of the blocks.  places: where those lie that had been
    made before.  problem: why images that were made could not be kept, so far as that is not made good.
    """

    def __init__(
        self, beside: Beside, keys_M3: IntArray, shape: Shape, places: ImagePlaces, cache: ImageCache | None = None
    ) -> None:
        self.beside = beside
        self.keys_M3 = keys_M3
        self.shape = shape
        self.places = places
        self.cache = cache
        self.problem = ""
        self.size = max(1, BLOCK_BYTES // int(np.prod(shape)))
        self._blocks: list[Ref] = [None] * -(-len(keys_M3) // self.size)
        self._left_B = self._count()  # images of each block that lie nowhere yet
        self._unsaved: list[IntArray] = []
        self._saved_at = time.monotonic()

    def find(self) -> None:
        """Look in the cache for the images that lie nowhere yet."""
        missing = self.missing()
        if self.cache is not None and len(missing):
            for path, rows, places in self.cache.find(self.keys_M3[missing]):
                self._put(missing[rows], path, places)

    def missing(self) -> IntArray:
        """The rows of the images that lie nowhere yet."""
        return np.flatnonzero(self.places.source_M < 0)

    def _count(self) -> IntArray:
        return np.bincount(self.missing() // self.size, minlength=len(self._blocks))

    def take(self, rows: IntArray, answer: Ref) -> None:
        """Take in what a worker made; build the blocks that are complete, now and then write to the cache."""
        self._put(rows, answer, np.arange(len(rows)))
        if self.cache is not None:
            self._unsaved.append(rows)
        self.build(np.unique(rows // self.size).tolist())
        if time.monotonic() - self._saved_at > FLUSH_S:
            self.save()

    def _put(self, rows: IntArray, source: Source, places: IntArray) -> None:
        self.places.set(rows, source, places)
        self._left_B -= np.bincount(rows // self.size, minlength=len(self._blocks))

    def build(self, numbers: Sequence[int] | None = None) -> None:
        """Build these blocks (by default all), as far as their images are all there and they are not built yet.

        Images whose source is gone, a lost answer or a segment that another run has merged, lie nowhere afterwards.
        """
        for i in range(len(self._blocks)) if numbers is None else numbers:
            if self._blocks[i] is not None or self._left_B[i]:
                continue
            rows = np.arange(i * self.size, min((i + 1) * self.size, len(self.keys_M3)))
            pieces = self.places.pieces(rows)
            gone, block = self.beside.call(gather, list(pieces.values()), self.shape)
            if gone:
                self._forget([number for number, is_gone in zip(pieces, gone, strict=True) if is_gone])
                continue
            self._blocks[i] = block
            self.places.set(rows, block, np.arange(len(rows)))

    def _forget(self, numbers: list[int]) -> None:
        self.places.forget(numbers)
        self._left_B = self._count()
        self._unsaved = [rows[self.places.source_M[rows] >= 0] for rows in self._unsaved]

    def save(self) -> None:
        """Write what is unsaved; what a full disk refuses stays unsaved, and is tried again with the next."""
        rows = np.concatenate(self._unsaved) if self._unsaved else np.empty(0, dtype=np.int64)
        if self.cache is None or not len(rows):
            return
        self._unsaved = [rows]
        pieces = self.places.pieces(rows)
        try:
            (gone, problem), _ = self.beside.call(keep, self.cache, self.keys_M3[rows], list(pieces.values()))
        except RunError as error:
            gone, problem = [], str(error)
        if gone:
            self._forget([number for number, is_gone in zip(pieces, gone, strict=True) if is_gone])
            self.save()
            return
        self.problem = f"{len(rows):,} images could not be kept: {problem}" if problem else ""
        self._unsaved = [rows] if problem else []
        self._saved_at = time.monotonic()

    def merge(self) -> None:
        """Merge small segments of the cache into larger ones, where there are many."""
        if self.cache is not None:
            notes, _ = self.beside.call(merge, self.cache)
            self.cache.notes += notes

    def blocks(self) -> ImageBlocks:
        """The blocks, when all are built."""
        assert all(block is not None for block in self._blocks)
        return ImageBlocks(tuple(self._blocks), self.size)

    def digest(self, *arrays: IntArray) -> str:
        """The sha256 of these arrays and of all images, in order, when all blocks are built."""
        shape = (len(self.keys_M3), *self.shape)
        told, _ = self.beside.call(digest_of, arrays, shape, self._blocks, items=max(1, len(self._blocks)))
        return told

    def some(self, rows: IntArray) -> ByteArray:
        """A few of the images, in memory of their own, when all blocks are built."""
        pieces = self.places.pieces(rows).values()
        _, images = self.beside.call(gather, list(pieces), self.shape)
        return np.array(get(images))


def gather(pieces: Sequence[Piece], shape: Shape) -> tuple[list[bool], ByteArray | None]:
    """Put images together: ([], the images), or, where sources are gone, (which are, None)."""
    images = np.empty((sum(len(rows) for _, rows, _ in pieces), *shape), dtype=np.uint8)
    gone = [not _copy(images, piece) for piece in pieces]
    return (gone, None) if any(gone) else ([], images)


def _copy(images: ByteArray, piece: Piece) -> bool:
    """Copy the images of one source into their rows; returns whether it was there."""
    source, rows, places = piece
    if isinstance(source, Path):
        found = ImageCache(source.parent, images.shape[1:]).images(source, places)
    else:
        there = get_if_there(source)
        found = None if there is None else there[places]
    if found is not None:
        images[rows] = found
    return found is not None


def keep(cache: ImageCache, keys_M3: IntArray, pieces: Sequence[Piece]) -> tuple[tuple[list[bool], str], None]:
    """Write images to the cache: ((which of the sources are gone, why they could not be written), None)."""
    gone, images = gather(pieces, cache.shape)
    if images is None:
        return (gone, ""), None
    try:
        cache.add(keys_M3, images)
    except OSError as error:
        return ([], cannot_write(cache.folder, error, "output.cache")), None
    return ([], ""), None


def merge(cache: ImageCache) -> tuple[list[str], None]:
    """Merge the cache's segments; returns (what could not be done, None)."""
    before = len(cache.notes)
    cache.merge()
    return cache.notes[before:], None


def digest_of(arrays: Sequence[IntArray], shape: tuple[int, ...], blocks: Sequence[Ref]) -> tuple[str, None]:
    """(the sha256 of some arrays and of images of this shape in blocks, None)."""
    return sha256(*arrays, images=(shape, (get(block) for block in blocks))), None
