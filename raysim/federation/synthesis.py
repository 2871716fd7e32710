"""Phase 1: from a quota to images in the object store, made once by all workers, kept in the cache."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.config.plugin_source import with_source
from raysim.config.protocols import ImageGenerator
from raysim.config.registry import resolve
from raysim.core.files import cannot_write
from raysim.core.records import (
    Allocation,
    ByteArray,
    Candidates,
    Chosen,
    Dataset,
    FloatArray,
    IntArray,
    Synthetic,
    sha256,
)
from raysim.engine.beside import Beside
from raysim.engine.messages import Plugin
from raysim.engine.object_store import get
from raysim.engine.pool import Pool
from raysim.engine.schedule import Item
from raysim.evaluation.candidates import best
from raysim.federation.image_blocks import OWN_PROCESS_BYTES, Assembly, ImagePlaces
from raysim.generation.image_cache import ImageCache

if TYPE_CHECKING:
    from raysim.ui.display import Display

POOL = -1  # in place of a client: whose images all clients share

Judge = Callable[[Sequence[Candidates]], dict[int, FloatArray]]
"""(candidates of some clients) -> how good each is, by client; the larger, the sooner it is kept."""


def image_keys(quota_KC: IntArray) -> IntArray:
    """(client, class, index) of every image of a quota, in that order: M x 3."""
    flat = quota_KC.reshape(-1)
    cell = np.repeat(np.arange(flat.size), flat)
    index = np.arange(cell.size) - np.repeat(np.cumsum(flat) - flat, flat)
    return np.stack([cell // quota_KC.shape[1], cell % quota_KC.shape[1], index], axis=1).astype(np.int64)


@dataclass(frozen=True)
class Synthesis:
    """Makes the images of a run, or takes them from the cache, and leaves them in the object store.

    Image i of class c of client k depends on the generator, the seed and (k, c, i) alone, so neither the number of
    workers nor what was cached changes a pixel.  Images that clients share are made once, for the client POOL.
    cache_root: the folder of the cache; None: none is kept.
    """

    pool: Pool
    generator: Plugin[ImageGenerator]
    dataset: Dataset
    seed: int
    cache_root: str | None
    display: "Display"

    def make(self, allocation: Allocation, earlier: Synthetic | None = None) -> Synthetic:
        """The images of an allocation.

        earlier: images of the same run that it extends; they are neither made nor read again.
        """
        began = time.monotonic()
        quota_KC = allocation.quota_KC
        if not quota_KC.any():
            return Synthetic(quota_KC, sha256=sha256(quota_KC, self.dataset.train_images[:0]))
        keys_M3 = image_keys(allocation.to_make_KC)
        places = ImagePlaces.nowhere(len(keys_M3))
        if earlier is not None:
            _extend(places, keys_M3, earlier)
        if allocation.shared:
            keys_M3[:, 0] = POOL
        images, made, told = self._assemble(keys_M3, places)
        return Synthetic(
            quota_KC, images.blocks(), images.digest(quota_KC), made + (earlier.made if earlier else 0),
            time.monotonic() - began + (earlier.seconds if earlier else 0.0),
            [*self._notes(quota_KC), *told], _examples(images),
            allocation.to_make_KC[0] if allocation.shared else None,
        )

    def make_and_choose(self, allocation: Allocation, judge: Judge, earlier: Synthetic | None = None) -> Synthetic:
        """Make the candidates that an allocation adds, and leave the best of each client and class in the object store.

        Candidate i of a cell is the same image as in `make`; what an earlier date made is not judged again, and the
        candidates of this one follow it.  judge: says how good they are.  earlier: what was chosen before.
        """
        assert allocation.candidates_KC is not None
        began = time.monotonic()
        had = earlier if earlier is not None and earlier.chosen is not None else None
        before = Chosen(np.empty((0, 3), dtype=np.int64), np.zeros_like(allocation.quota_KC))
        before = had.chosen if had is not None and had.chosen is not None else before
        keys_M3 = image_keys(allocation.candidates_KC - before.candidates_KC)
        keys_M3[:, 2] += before.candidates_KC[keys_M3[:, 0], keys_M3[:, 1]]
        images, made, told = self._assemble(keys_M3, ImagePlaces.nowhere(len(keys_M3)))
        candidates = images.blocks()
        ends_K1 = np.searchsorted(keys_M3[:, 0], np.arange(len(allocation.quota_KC) + 1)).tolist()
        owned = {k: (ends_K1[k], ends_K1[k + 1]) for k in np.unique(keys_M3[:, 0]).tolist()}
        scores = judge([
            Candidates(k, candidates.rows(rows), keys_M3[slice(*rows), 1]) for k, rows in owned.items()
        ])
        score_M = np.concatenate([scores[k] for k in owned]) if owned else np.empty(0)
        rows_M = best(keys_M3, score_M, allocation.quota_KC - (0 if had is None else had.quota_KC))
        kept_M3 = np.concatenate([before.keys_M3, keys_M3[rows_M]])
        order = np.lexsort((kept_M3[:, 2], kept_M3[:, 1], kept_M3[:, 0]))
        at = np.argsort(order)  # the row of each once they are sorted
        places = ImagePlaces.nowhere(len(kept_M3))
        if had is not None:
            places.set_blocks(at[: len(before.keys_M3)], had.blocks, np.arange(len(before.keys_M3)))
        places.set_blocks(at[len(before.keys_M3) :], candidates, rows_M)
        return self._chosen(
            allocation, kept_M3[order], places, made + (had.made if had else 0), began, told,
            had.seconds if had else 0.0,
        )

    def make_chosen(self, allocation: Allocation, keys_M3: IntArray) -> Synthetic:
        """The images that a run before had chosen, made again or taken from the cache.  keys_M3: which, sorted."""
        return self._chosen(allocation, keys_M3, ImagePlaces.nowhere(len(keys_M3)), 0, time.monotonic(), [])

    def _chosen(
        self, allocation: Allocation, keys_M3: IntArray, places: ImagePlaces, made: int, began: float,
        told: Sequence[str], seconds: float = 0.0,
    ) -> Synthetic:
        """The images of these keys; those that do not lie at `places` are made now.

        made, began, told, seconds: images made for them before, when this date began, notes, what earlier dates took.
        """
        assert allocation.candidates_KC is not None
        quota_KC = allocation.quota_KC
        images, more, further = self._assemble(keys_M3, places)
        return Synthetic(
            quota_KC, images.blocks(), images.digest(quota_KC, keys_M3), made + more,
            time.monotonic() - began + seconds,
            [*(self._notes(quota_KC) if len(keys_M3) else []), *told, *further],
            _examples(images) if len(keys_M3) else None, chosen=Chosen(keys_M3, allocation.candidates_KC),
        )

    def _notes(self, quota_KC: IntArray) -> list[str]:
        generator = self.generator
        notes: list[str] = resolve("generator", generator.name).notes(self.dataset, quota_KC, **generator.params)
        return notes

    def _assemble(self, keys_M3: IntArray, places: ImagePlaces) -> tuple[Assembly, int, list[str]]:
        """Put images together in blocks: (the blocks, how many images were made, notes).

        places: where those lie that had been made before; the others are in the cache, or the workers make them.
        """
        shape = (self.dataset.channels, *self.dataset.image_size)
        beside = Beside(self.pool, len(keys_M3) * self.dataset.image_bytes > OWN_PROCESS_BYTES)
        images = Assembly(beside, keys_M3, shape, places)
        wanted = len(images.missing())
        told: list[str] = []
        is_made_M = np.zeros(len(keys_M3), dtype=np.bool_)
        if wanted:
            images.cache, told = (None, []) if self.cache_root is None else open_cache(
                self.cache_root, with_source(self.generator.name, self._fingerprint()), self.seed, shape
            )
            images.find()
            self.display.line(_describe(images.cache, wanted, len(images.missing())))
        images.build()
        while len(missing := images.missing()):  # again, where what was found or made has been lost
            is_made_M[missing] = True
            self._generate(images, missing)
            images.find()
            images.build()
        if wanted:
            images.merge()
            self.pool.tell(lambda actor: actor.release_generator.remote())
        if images.problem:
            told.append(images.problem)
        return images, int(is_made_M.sum()), [*told, *(images.cache.notes if images.cache else [])]

    def _fingerprint(self) -> str:
        """What identifies the generator's images: on CPU worked out here, so that a full cache waits for no worker."""
        generator = self.generator
        if self.pool.placement.device == "cpu":
            return generator.build(self.dataset, "cpu").fingerprint()
        told: str = self.pool.call_any(
            lambda actor, _: actor.fingerprint.remote(generator), "the check of the generator"
        )
        return told

    def _generate(self, images: Assembly, missing: IntArray) -> None:
        """Let the workers make these images."""
        kind = resolve("generator", self.generator.name)
        batch = kind.images_per_call(**self.generator.params)
        keys_M3 = images.keys_M3
        image_seed = kind.image_seed

        def item(rows: IntArray) -> Item:
            client = keys_M3[rows[0], 0]
            return Item(rows, len(rows), "images of " + ("the shared pool" if client == POOL else f"client {client}"))

        def submit(actor: Any, several: list[IntArray]) -> Any:
            rows = np.concatenate(several)
            seeds_B = np.array([int(image_seed(self.seed, *key)) for key in keys_M3[rows].tolist()])
            return actor.generate.remote(self.generator, keys_M3[rows, 1], seeds_B)

        parts = [missing[i : i + batch] for i in range(0, len(missing), batch)]
        done = 0
        try:
            for _, chunk, (_, answer) in self.pool.map(map(item, parts), submit, largest=1, kind="generate"):
                rows = np.concatenate([item.payload for item in chunk])
                images.take(rows, answer)
                done += len(rows)
                self.display.advance(done, len(missing), "images")
        finally:
            images.save()


def open_cache(
    root: str, fingerprint: str, seed: int, shape: tuple[int, int, int]
) -> tuple[ImageCache | None, list[str]]:
    """(the cache of a generator and seed, []), or (None, why there is none)."""
    try:
        return ImageCache.open(root, fingerprint, seed, shape), []
    except OSError as error:
        told = cannot_write(Path(error.filename or root), error, "output.cache")
        return None, [f"no image is kept in the cache: {told}"]
    except RuntimeError as error:  # a `~` without a home
        return None, [f"output.cache = {root} cannot be used ({error}); no image is kept"]


def _describe(cache: ImageCache | None, total: int, missing: int) -> str:
    """What is said of `total` images of which so many are to be made."""
    if cache is None:
        return f"{total:,} synthetic images to make; no cache"
    where = f"{cache.folder} ({cache.size_bytes() / 1e6:,.1f} MB)"
    return f"{total:,} synthetic images: {total - missing:,} from the cache {where}, {missing:,} to make"


def _extend(places: ImagePlaces, keys_M3: IntArray, earlier: Synthetic) -> None:
    """Say of the images that were made before where they lie.  keys_M3: the row of the owner, class, index of each."""
    owned_KC = earlier.owned_KC
    flat = owned_KC.reshape(-1)
    starts = np.cumsum(flat) - flat
    cell, index = keys_M3[:, 0] * owned_KC.shape[1] + keys_M3[:, 1], keys_M3[:, 2]
    rows = np.flatnonzero(index < flat[cell])
    places.set_blocks(rows, earlier.blocks, (starts[cell] + index)[rows])


def _examples(images: Assembly, per_class: int = 10) -> tuple[ByteArray, IntArray]:
    """The first few images of each class, for a figure."""
    classes_M = images.keys_M3[:, 1]
    rows = np.concatenate([np.flatnonzero(classes_M == c)[:per_class] for c in np.unique(classes_M)])
    return images.some(rows), classes_M[rows].copy()


def sample_of(synthetic: Synthetic, most: int) -> tuple[ByteArray, IntArray]:
    """At most `most` different synthetic images, spread evenly over clients and classes, and their labels.

    Raises ValueError where there is none.
    """
    labels_M = image_keys(synthetic.owned_KC)[:, 1]
    rows = np.unique(np.linspace(0, len(labels_M) - 1, min(most, len(labels_M))).round().astype(np.int64))
    blocks = synthetic.blocks
    cuts = np.searchsorted(rows, np.arange(1, len(blocks.refs)) * blocks.size)
    parts = zip(blocks.refs, np.split(rows, cuts), strict=True)
    return np.concatenate([get(reference)[of_block % blocks.size] for reference, of_block in parts]), labels_M[rows]
