"""Phase 1: from a quota to images in the object store, made once by all workers, kept in the cache."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.config.plugin_source import with_source
from raysim.config.protocols import ImageGenerator
from raysim.config.registry import resolve
from raysim.core.files import cannot_write
from raysim.core.records import (
    Allocation,
    BoolArray,
    ByteArray,
    Candidates,
    Chosen,
    Dataset,
    FloatArray,
    IntArray,
    Synthetic,
    sha256,
)
from raysim.engine.messages import Plugin
from raysim.engine.object_store import get, put
from raysim.engine.pool import Pool
from raysim.engine.schedule import Item
from raysim.evaluation.candidates import best
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
    earlier: Synthetic | None = None,
) -> Synthetic:
    """Make the images of an allocation, or take them from the cache, and put them into the object store.

    Image i of class c of client k depends on the generator, the seed and (k, c, i) alone, so neither the number of
    workers nor what was cached changes a pixel.  Images that clients share are made once, for the client POOL.
    earlier: images of the same run that this allocation extends; they are neither made nor read again.
    """
    began = time.monotonic()
    quota_KC = allocation.quota_KC
    if not quota_KC.any():
        return Synthetic(quota_KC, {}, sha256(quota_KC, dataset.train_images[:0]))
    keys_M3 = image_keys(allocation.to_make_KC)
    if allocation.shared:
        keys_M3[:, 0] = POOL
    images = _room(dataset, len(keys_M3))
    wanted = np.flatnonzero(~_fill(images, keys_M3, earlier))
    made, told = _make(pool, generator, dataset, keys_M3, images, wanted, seed, cache_root, display)
    pool_ref = put(images) if allocation.shared else None
    refs = _own(images, quota_KC) if pool_ref is None else _dealt(images, keys_M3, quota_KC, pool_ref)
    notes = resolve("generator", generator.name).notes(dataset, quota_KC, **generator.params)
    return Synthetic(
        quota_KC, refs, sha256(quota_KC, images), made + (earlier.made if earlier else 0),
        time.monotonic() - began + (earlier.seconds if earlier else 0.0),
        [*notes, *told], _examples(keys_M3, images),
        None if pool_ref is None else (pool_ref, allocation.to_make_KC[0]),
    )


Judge = Callable[[Sequence[Candidates]], dict[int, FloatArray]]
"""(candidates of some clients) -> how good each is, by client; the larger, the sooner it is kept."""


def synthesise_and_choose(
    pool: Pool,
    generator: Plugin[ImageGenerator],
    dataset: Dataset,
    allocation: Allocation,
    seed: int,
    cache_root: str | None,
    display: "Display",
    judge: Judge,
    earlier: Synthetic | None = None,
) -> Synthetic:
    """Make the candidates that an allocation adds, and put the best of each client and class into the object store.

    Candidate i of a cell is the same image as in `synthesise`; what an earlier date made is not judged again, and the
    candidates of this one follow it.  judge: says how good they are.  earlier: what was chosen before.
    """
    assert allocation.candidates_KC is not None
    began = time.monotonic()
    had = earlier if earlier is not None and earlier.chosen is not None else None
    before = Chosen(np.empty((0, 3), dtype=np.int64), np.zeros_like(allocation.quota_KC))
    before = had.chosen if had is not None and had.chosen is not None else before
    keys_M3 = image_keys(allocation.candidates_KC - before.candidates_KC)
    keys_M3[:, 2] += before.candidates_KC[keys_M3[:, 0], keys_M3[:, 1]]
    images = _room(dataset, len(keys_M3))
    every = np.arange(len(keys_M3))
    made: int = 0
    told: list[str] = []
    if len(every):
        made, told = _make(pool, generator, dataset, keys_M3, images, every, seed, cache_root, display)
    ends_K1 = np.searchsorted(keys_M3[:, 0], np.arange(len(allocation.quota_KC) + 1)).tolist()
    owned = {k: slice(ends_K1[k], ends_K1[k + 1]) for k in np.unique(keys_M3[:, 0]).tolist()}
    scores = judge([Candidates(k, put(images[rows]), keys_M3[rows, 1]) for k, rows in owned.items()])
    score_M = np.concatenate([scores[k] for k in owned]) if owned else np.empty(0)
    rows_M = best(keys_M3, score_M, allocation.quota_KC - (0 if had is None else had.quota_KC))
    kept_M3, kept = np.concatenate([before.keys_M3, keys_M3[rows_M]]), images[rows_M]
    if had is not None and had.refs:
        kept = np.concatenate([*(get(had.refs[k]) for k in sorted(had.refs)), kept])
    order = np.lexsort((kept_M3[:, 2], kept_M3[:, 1], kept_M3[:, 0]))
    return _chosen(
        generator, dataset, allocation, kept_M3[order], kept[order], made + (had.made if had else 0),
        time.monotonic() - began + (had.seconds if had else 0.0), told,
    )


def make_chosen(
    pool: Pool,
    generator: Plugin[ImageGenerator],
    dataset: Dataset,
    allocation: Allocation,
    keys_M3: IntArray,
    seed: int,
    cache_root: str | None,
    display: "Display",
) -> Synthetic:
    """The images that a run before had chosen, made again or taken from the cache.  keys_M3: which, sorted."""
    began = time.monotonic()
    images = _room(dataset, len(keys_M3))
    made: int = 0
    told: list[str] = []
    if len(keys_M3):
        rows = np.arange(len(keys_M3))
        made, told = _make(pool, generator, dataset, keys_M3, images, rows, seed, cache_root, display)
    return _chosen(generator, dataset, allocation, keys_M3, images, made, time.monotonic() - began, told)


def _chosen(
    generator: Plugin[ImageGenerator], dataset: Dataset, allocation: Allocation, keys_M3: IntArray, images: ByteArray,
    made: int, seconds: float, told: list[str],
) -> Synthetic:
    assert allocation.candidates_KC is not None
    quota_KC = allocation.quota_KC
    notes = resolve("generator", generator.name).notes(dataset, quota_KC, **generator.params) if len(images) else []
    return Synthetic(
        quota_KC, _own(images, quota_KC), sha256(quota_KC, keys_M3, images), made, seconds, [*notes, *told],
        _examples(keys_M3, images) if len(images) else None, chosen=Chosen(keys_M3, allocation.candidates_KC),
    )


def _room(dataset: Dataset, images: int) -> ByteArray:
    return np.empty((images, dataset.channels, *dataset.image_size), dtype=np.uint8)


def _make(
    pool: Pool, generator: Plugin[ImageGenerator], dataset: Dataset, keys_M3: IntArray, images: ByteArray,
    wanted: IntArray, seed: int, cache_root: str | None, display: "Display",
) -> tuple[int, list[str]]:
    """Fill these rows of `images`, from the cache or by the workers; (how many were made, notes)."""
    fingerprint = with_source(generator.name, _fingerprint(pool, generator, dataset))
    keeper = _Keeper.open(cache_root, fingerprint, seed, keys_M3, images)
    missing = keeper.missing(wanted)
    display.line(keeper.describe(len(wanted), len(missing)))
    _generate(pool, generator, keeper, missing, seed, display)
    pool.tell(lambda actor: actor.release_generator.remote())
    return len(missing), keeper.notes()


def _fill(images: ByteArray, keys_M3: IntArray, earlier: Synthetic | None) -> BoolArray:
    """Copy the images that were made before into their rows; returns for each row whether it was: M."""
    made_before_M = np.zeros(len(keys_M3), dtype=np.bool_)
    if earlier is None:
        return made_before_M
    quota_KC, refs = earlier.by_owner()
    first = int(keys_M3[0, 0]) if earlier.pool is not None else 0
    ends_K1 = np.searchsorted(keys_M3[:, 0], first + np.arange(len(quota_KC) + 1))
    for k, reference in refs.items():
        rows = np.arange(ends_K1[k], ends_K1[k + 1])
        classes, index = keys_M3[rows, 1], keys_M3[rows, 2]
        had = index < quota_KC[k, classes]
        starts_C = np.cumsum(quota_KC[k]) - quota_KC[k]
        images[rows[had]] = get(reference)[(starts_C[classes] + index)[had]]
        made_before_M[rows[had]] = True
    return made_before_M


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

    def missing(self, wanted: IntArray) -> IntArray:
        """Of these rows, those whose images are not in the cache; the others are filled in."""
        if self.cache is None:
            return wanted
        if len(wanted) == len(self.keys_M3):
            return np.flatnonzero(~self.cache.fill(self.keys_M3, self.images))
        part = self.images[wanted]
        found = self.cache.fill(self.keys_M3[wanted], part)
        self.images[wanted[found]] = part[found]
        return wanted[~found]

    def describe(self, total: int, missing: int) -> str:
        """What is said of `total` images of which so many are to be made."""
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
    quota_KC, refs = synthetic.by_owner()
    labels_M = image_keys(quota_KC)[:, 1]
    rows = np.unique(np.linspace(0, len(labels_M) - 1, min(most, len(labels_M))).round().astype(np.int64))
    starts = np.cumsum(quota_KC.sum(axis=1)) - quota_KC.sum(axis=1)
    parts = []
    for k, reference in refs.items():
        images = get(reference)
        parts.append(images[rows[(rows >= starts[k]) & (rows < starts[k] + len(images))] - starts[k]])
    return np.concatenate(parts), labels_M[rows]
