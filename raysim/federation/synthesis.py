"""Phase 1: from a quota to images in the object store, made once by all workers, kept in the cache."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.config.plugin_source import with_source
from raysim.config.protocols import ImageGenerator
from raysim.config.registry import resolve
from raysim.core.files import cannot_write
from raysim.core.records import Allocation, ByteArray, Dataset, IntArray, Synthetic, sha256
from raysim.engine.messages import Plugin
from raysim.engine.object_store import get, put
from raysim.engine.pool import Pool
from raysim.engine.schedule import Item
from raysim.generation.image_cache import ImageCache

if TYPE_CHECKING:
    from raysim.ui.display import Display

POOL = -1  # in place of a client: whose images all clients share
_FLUSH_S = 2.0  # how much generated work a crash may cost


def image_keys(quota_KC: IntArray) -> IntArray:
    """(client, class, index) of every image of a quota, in that order: M x 3."""
    flat = quota_KC.reshape(-1)
    cell = np.repeat(np.arange(flat.size), flat)
    index = np.arange(cell.size) - np.repeat(np.cumsum(flat) - flat, flat)
    return np.stack([cell // quota_KC.shape[1], cell % quota_KC.shape[1], index], axis=1).astype(np.int64)


def synthesise(
    pool: Pool,
    generator: Plugin[ImageGenerator],
    dataset: Dataset,
    allocation: Allocation,
    seed: int,
    cache_root: str | None,
    display: "Display",
) -> Synthetic:
    """Make the images of an allocation, or take them from the cache, and put them into the object store.

    Image i of class c of client k depends on the generator, the seed and (k, c, i) alone, so neither the number of
    workers nor what was cached changes a pixel.  Images that clients share are made once, for the client POOL.
    """
    began = time.monotonic()
    quota_KC = allocation.quota_KC
    if not quota_KC.any():
        return Synthetic(quota_KC, {}, sha256(quota_KC, dataset.train_images[:0]))
    keys_M3 = image_keys(allocation.to_make_KC)
    if allocation.shared:
        keys_M3[:, 0] = POOL
    images = np.empty((len(keys_M3), dataset.channels, *dataset.image_size), dtype=np.uint8)
    fingerprint = with_source(generator.name, _fingerprint(pool, generator, dataset))
    keeper = _Keeper.open(cache_root, fingerprint, seed, keys_M3, images)
    missing = keeper.missing()
    display.line(keeper.describe(len(missing)))
    _generate(pool, generator, keeper, missing, seed, display)
    pool.tell(lambda actor: actor.release_generator.remote())
    pool_ref = put(images) if allocation.shared else None
    refs = _own(images, quota_KC) if pool_ref is None else _dealt(images, keys_M3, quota_KC, pool_ref)
    notes = resolve("generator", generator.name).notes(dataset, quota_KC, **generator.params)
    return Synthetic(
        quota_KC, refs, sha256(quota_KC, images), len(missing), time.monotonic() - began,
        [*notes, *keeper.notes()], _examples(keys_M3, images),
        None if pool_ref is None else (pool_ref, allocation.to_make_KC[0]),
    )


def _own(images: ByteArray, quota_KC: IntArray) -> dict[int, Any]:
    """A reference to the images of each client that has any, which are its own."""
    sizes_K = quota_KC.sum(axis=1)
    ends = np.cumsum(sizes_K)
    return {k: put(images[ends[k] - n : ends[k]]) for k, n in enumerate(sizes_K.tolist()) if n}


def _dealt(images: ByteArray, keys_M3: IntArray, quota_KC: IntArray, pool_ref: Any) -> dict[int, Any]:
    """A reference to the images that each client has of the pool; those with equal quotas have the same."""
    put_already = {quota_KC.max(axis=0).tobytes(): pool_ref}
    refs = {}
    for k in np.flatnonzero(quota_KC.any(axis=1)).tolist():
        quota = quota_KC[k].tobytes()
        if quota not in put_already:
            put_already[quota] = put(images[keys_M3[:, 2] < quota_KC[k, keys_M3[:, 1]]])
        refs[k] = put_already[quota]
    return refs


def _fingerprint(pool: Pool, generator: Plugin[ImageGenerator], dataset: Dataset) -> str:
    """What identifies the generator's images: on CPU worked out here, so that a full cache waits for no worker."""
    if pool.placement.device == "cpu":
        return generator.build(dataset, "cpu").fingerprint()
    asked: str = pool.call_any(lambda actor, _: actor.fingerprint.remote(generator), "the check of the generator")
    return asked


@dataclass
class _Keeper:
    """The images of a run, and the cache that they come from and go to.  unsaved: rows that are not in it yet."""

    keys_M3: IntArray
    images: ByteArray
    cache: ImageCache | None
    problem: str = ""
    unsaved: list[IntArray] = field(default_factory=list)
    saved_at: float = field(default_factory=time.monotonic)

    @classmethod
    def open(
        cls, root: str | None, fingerprint: str, seed: int, keys_M3: IntArray, images: ByteArray
    ) -> "_Keeper":
        if root is None:
            return cls(keys_M3, images, None)
        try:
            return cls(keys_M3, images, ImageCache.open(root, fingerprint, seed, images.shape[1:]))
        except OSError as error:
            told = cannot_write(Path(error.filename or root), error, "output.cache")
            return cls(keys_M3, images, None, f"no image is kept in the cache: {told}")
        except RuntimeError as error:  # a `~` without a home
            return cls(keys_M3, images, None, f"output.cache = {root} cannot be used ({error}); no image is kept")

    def missing(self) -> IntArray:
        """Rows whose images are not in the cache; the others are filled in."""
        if self.cache is None:
            return np.arange(len(self.keys_M3))
        return np.flatnonzero(~self.cache.fill(self.keys_M3, self.images))

    def describe(self, missing: int) -> str:
        total = len(self.keys_M3)
        if self.cache is None:
            return f"{total:,} synthetic images to make; no cache"
        size = self.cache.size_bytes() / 1e6
        where = f"{self.cache.folder} ({size:,.1f} MB)"
        return f"{total:,} synthetic images: {total - missing:,} from the cache {where}, {missing:,} to make"

    def take(self, rows: IntArray, answer: ByteArray) -> None:
        """Keep what a worker made; now and then write it to the cache."""
        self.images[rows] = answer
        if self.cache is not None:
            self.unsaved.append(rows)
            if time.monotonic() - self.saved_at > _FLUSH_S:
                self.save()

    def save(self) -> None:
        """Write what is unsaved; what a full disk refuses stays unsaved, and is tried again with the next."""
        if self.cache is None or not self.unsaved:
            return
        self.unsaved = [np.concatenate(self.unsaved)]
        try:
            self.cache.add(self.keys_M3[self.unsaved[0]], self.images[self.unsaved[0]])
            self.unsaved, self.problem = [], ""
        except OSError as error:
            told = cannot_write(self.cache.folder, error, "output.cache")
            self.problem = f"{len(self.unsaved[0]):,} images could not be kept: {told}"
        self.saved_at = time.monotonic()

    def notes(self) -> list[str]:
        return [*([self.problem] if self.problem else []), *(self.cache.notes if self.cache else [])]


def _generate(
    pool: Pool, generator: Plugin[ImageGenerator], keeper: _Keeper, missing: IntArray, seed: int, display: "Display"
) -> None:
    kind = resolve("generator", generator.name)
    batch = kind.images_per_call(**generator.params)
    keys_M3 = keeper.keys_M3
    image_seed = kind.image_seed
    items = [
        Item(rows, len(rows), f"images of client {keys_M3[rows[0], 0]}".replace(f"client {POOL}", "the shared pool"))
        for rows in (missing[i : i + batch] for i in range(0, len(missing), batch))
    ]

    def submit(actor: Any, parts: list[IntArray]) -> Any:
        rows = np.concatenate(parts)
        seeds_B = np.array([int(image_seed(seed, *key)) for key in keys_M3[rows].tolist()])
        return actor.generate.remote(generator, keys_M3[rows, 1], seeds_B)

    done = 0
    try:
        for _, chunk, answer in pool.map(items, submit, largest=1, kind="generate"):
            rows = np.concatenate([item.payload for item in chunk])
            keeper.take(rows, answer)
            done += len(rows)
            display.advance(done, len(missing), "images")
    finally:
        keeper.save()
    if keeper.cache is not None:
        keeper.cache.merge()


def _examples(keys_M3: IntArray, images: ByteArray, per_class: int = 10) -> tuple[ByteArray, IntArray]:
    """The first few images of each class, for a figure."""
    classes_M = keys_M3[:, 1]
    rows = np.concatenate([np.flatnonzero(classes_M == c)[:per_class] for c in np.unique(classes_M)])
    return images[rows].copy(), classes_M[rows].copy()


def sample_of(synthetic: Synthetic, most: int) -> tuple[ByteArray, IntArray]:
    """At most `most` different synthetic images, spread evenly over clients and classes, and their labels.

    Raises ValueError where there is none.
    """
    quota_KC, refs = synthetic.quota_KC, synthetic.refs
    if synthetic.pool is not None:
        quota_KC, refs = synthetic.pool[1][None], {0: synthetic.pool[0]}
    labels_M = image_keys(quota_KC)[:, 1]
    rows = np.unique(np.linspace(0, len(labels_M) - 1, min(most, len(labels_M))).round().astype(np.int64))
    starts = np.cumsum(quota_KC.sum(axis=1)) - quota_KC.sum(axis=1)
    parts = []
    for k, reference in refs.items():
        images = get(reference)
        parts.append(images[rows[(rows >= starts[k]) & (rows < starts[k] + len(images))] - starts[k]])
    return np.concatenate(parts), labels_M[rows]
