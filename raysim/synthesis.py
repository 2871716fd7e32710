"""Phase 1: from a quota to images in the object store, made once by all workers, kept in the cache."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim import rng
from raysim.engine.messages import Plugin
from raysim.engine.pool import Item, Pool
from raysim.engine.store import put
from raysim.image_cache import ImageCache
from raysim.records import ByteArray, IntArray, Split, Synthetic, sha256

if TYPE_CHECKING:
    from raysim.display import Display

_FLUSH_S = 2.0  # how much generated work a crash may cost
_DEFAULT_BATCH = 64


def image_keys(quota_KC: IntArray) -> IntArray:
    """(client, class, index) of every image of a quota, in that order: M x 3."""
    flat = quota_KC.reshape(-1)
    cell = np.repeat(np.arange(flat.size), flat)
    index = np.arange(cell.size) - np.repeat(np.cumsum(flat) - flat, flat)
    return np.stack([cell // quota_KC.shape[1], cell % quota_KC.shape[1], index], axis=1).astype(np.int64)


def synthesise(
    pool: Pool,
    generator: Plugin,
    split: Split,
    quota_KC: IntArray,
    seed: int,
    cache_root: str | None,
    display: "Display",
) -> Synthetic:
    """Make the images of a quota, or take them from the cache, and put them into the object store.

    Image i of class c of client k depends on the generator, the seed and (k, c, i) alone, so neither the number of
    workers nor what was cached changes a pixel.
    """
    began = time.monotonic()
    keys_M3 = image_keys(quota_KC)
    images = np.empty((len(keys_M3), split.channels, *split.image_size), dtype=np.uint8)
    if not len(keys_M3):
        return Synthetic(quota_KC, {}, sha256(quota_KC, images))
    cache, missing = None, np.arange(len(keys_M3))
    fingerprint = pool.call_any(lambda actor, _: actor.fingerprint.remote(generator), "the check of the generator")
    if cache_root is not None:
        cache = ImageCache.open(cache_root, fingerprint, seed, images.shape[1:])
        missing = np.flatnonzero(~cache.fill(keys_M3, images))
    notes = _generate(pool, generator, keys_M3, missing, images, seed, cache, display)
    pool.tell(lambda actor: actor.release_generator.remote())
    ends = np.cumsum(quota_KC.sum(axis=1))
    refs = {
        k: put(images[ends[k] - n : ends[k]]) for k, n in enumerate(quota_KC.sum(axis=1).tolist()) if n
    }
    return Synthetic(
        quota_KC, refs, sha256(quota_KC, images), len(missing), time.monotonic() - began,
        notes + (cache.notes if cache else []), _examples(keys_M3, images),
    )


def _generate(
    pool: Pool, generator: Plugin, keys_M3: IntArray, missing: IntArray, images: ByteArray, seed: int,
    cache: ImageCache | None, display: "Display",
) -> list[str]:
    batch = int(generator.params.get("batch_size", _DEFAULT_BATCH))
    seeds_M = {int(i): rng.integer(seed, rng.SYNTHETIC, *keys_M3[i].tolist()) for i in missing}
    items = [
        Item(rows, len(rows), f"images of client {keys_M3[rows[0], 0]}")
        for rows in (missing[i : i + batch] for i in range(0, len(missing), batch))
    ]

    def submit(actor: Any, parts: list[IntArray]) -> Any:
        rows = np.concatenate(parts)
        return actor.generate.remote(generator, keys_M3[rows, 1], np.array([seeds_M[int(i)] for i in rows]))

    unsaved: list[IntArray] = []
    notes: list[str] = []
    done, flushed = 0, time.monotonic()
    for _, chunk, answer in pool.map(items, submit):
        rows = np.concatenate([item.payload for item in chunk])
        images[rows] = answer
        unsaved.append(rows)
        done += len(rows)
        display.advance(done, len(missing), "images")
        if time.monotonic() - flushed > _FLUSH_S:
            notes += _save(cache, keys_M3, images, unsaved)
            flushed = time.monotonic()
    return notes + _save(cache, keys_M3, images, unsaved)


def _save(cache: ImageCache | None, keys_M3: IntArray, images: ByteArray, unsaved: list[IntArray]) -> list[str]:
    if cache is None or not unsaved:
        return []
    rows = np.concatenate(unsaved)
    unsaved.clear()
    try:
        cache.add(keys_M3[rows], images[rows])
    except OSError as error:
        return [f"{len(rows)} images could not be kept in the cache {cache.folder}: {error.strerror}"]
    return []


def _examples(keys_M3: IntArray, images: ByteArray, per_class: int = 10) -> tuple[ByteArray, IntArray]:
    """The first few images of each class, for a figure."""
    classes_M = keys_M3[:, 1]
    rows = np.concatenate([np.flatnonzero(classes_M == c)[:per_class] for c in np.unique(classes_M)])
    return images[rows].copy(), classes_M[rows].copy()
