"""Images are put together in blocks wherever they lie, and made again where what held them is lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from without_ray import assembly, pixels_of

from raysim.core.records import ImageBlocks, Synthetic, sha256
from raysim.federation import image_blocks
from raysim.federation.image_blocks import ImagePlaces
from raysim.federation.synthesis import _extend, image_keys, sample_of
from raysim.generation.image_cache import MOST_SEGMENTS, ImageCache

SHAPE = (1, 1, 2)


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return ImageCache.open(tmp_path, "ab" * 32, 0, SHAPE)


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_blocks, "BLOCK_BYTES", 8)


def pixels(keys_M3: np.ndarray) -> np.ndarray:
    """An image of two bytes that tells which key it belongs to."""
    client, class_, index = keys_M3.T
    return np.stack([client * 16 + class_, index], axis=1).astype(np.uint8).reshape(-1, *SHAPE)


def blocks_of(images: np.ndarray, size: int) -> ImageBlocks:
    """Blocks that are arrays of this process."""
    return ImageBlocks(tuple(images[i : i + size] for i in range(0, len(images), size)), size)


def test_images_of_workers_and_of_the_cache_in_any_order_are_in_the_order_of_the_keys(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
):
    """11 images in blocks of 4, 4 and 3: three are cached, eight come in answers that lie across blocks."""
    keys_M3 = image_keys(np.array([[4, 2], [3, 2]]))
    cache.add(keys_M3[[9, 0, 4]], pixels(keys_M3[[9, 0, 4]]))
    images = assembly(keys_M3, cache, monkeypatch)
    images.find()
    assert images.missing().tolist() == [1, 2, 3, 5, 6, 7, 8, 10]
    images.build()
    for rows in ([10, 2], [7, 8, 3], [1, 5], [6]):
        images.take(np.array(rows), pixels(keys_M3[rows]))
    images.save()
    assert np.array_equal(pixels_of(images), pixels(keys_M3))
    assert [len(block) for block in images.blocks().refs] == [4, 4, 3]
    assert len(images.places.sources) == 3  # nothing but the blocks is held
    quota_KC = np.array([[4, 2], [3, 2]])
    assert images.digest(quota_KC) == sha256(quota_KC, pixels(keys_M3))
    assert np.array_equal(images.some(np.array([10, 3, 4])), pixels(keys_M3[[10, 3, 4]]))
    again = assembly(keys_M3, cache, monkeypatch)
    again.find()
    again.build()
    assert np.array_equal(pixels_of(again), pixels(keys_M3))


def test_an_answer_that_is_lost_with_its_node_is_missing_and_no_other(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
):
    """The answer with images 3 to 5 of 8 is lost before a block is built or it is kept; then it is made again."""
    keys_M3 = image_keys(np.array([[8]]))
    images = assembly(keys_M3, cache, monkeypatch)
    monkeypatch.setattr(image_blocks, "get_if_there", lambda ref: None if isinstance(ref, str) else ref)
    images.take(np.array([0, 1, 2]), pixels(keys_M3[:3]))
    images.take(np.array([3, 4, 5]), "lost")
    assert images.missing().tolist() == [3, 4, 5, 6, 7]
    images.take(np.array([6, 7]), pixels(keys_M3[6:]))
    images.take(np.array([3, 4, 5]), "lost")
    assert images.missing().tolist() == [3, 4, 5]
    images.take(np.array([4, 5]), pixels(keys_M3[4:6]))
    images.take(np.array([3]), pixels(keys_M3[3:4]))
    images.save()
    assert not images.problem and np.array_equal(pixels_of(images), pixels(keys_M3))
    found = cache.find(keys_M3)
    assert sorted(np.concatenate([rows for _, rows, _ in found]).tolist()) == list(range(8))
    for path, rows, places in found:
        assert np.array_equal(cache.images(path, places), pixels(keys_M3[rows]))


def test_an_answer_that_is_lost_while_it_is_kept_is_made_again(cache: ImageCache, monkeypatch: pytest.MonkeyPatch):
    keys_M3 = image_keys(np.array([[8]]))
    images = assembly(keys_M3, cache, monkeypatch)
    monkeypatch.setattr(image_blocks, "get_if_there", lambda ref: None if isinstance(ref, str) else ref)
    images.take(np.array([0, 1]), pixels(keys_M3[:2]))
    images.take(np.array([5]), "lost")
    images.save()
    assert images.missing().tolist() == [2, 3, 4, 5, 6, 7] and not images.problem
    assert [rows.tolist() for _, rows, _ in cache.find(keys_M3)] == [[0, 1]]


def test_a_segment_that_another_run_merges_between_finding_and_reading_is_found_again(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
):
    keys_M3 = image_keys(np.array([[MOST_SEGMENTS + 1]]))
    for i in range(MOST_SEGMENTS + 1):
        cache.add(keys_M3[i : i + 1], pixels(keys_M3[i : i + 1]))
    images = assembly(keys_M3, cache, monkeypatch)
    images.find()
    ImageCache(cache.folder, SHAPE).merge()
    images.build()
    assert len(images.missing()) == len(keys_M3)
    images.find()
    images.build()
    assert np.array_equal(pixels_of(images), pixels(keys_M3)) and not cache.notes


def test_images_that_could_not_be_kept_hold_no_answer_once_they_are_in_a_block(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
):
    keys_M3 = image_keys(np.array([[8]]))
    images = assembly(keys_M3, cache, monkeypatch)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ImageCache, "add", full)
        for rows in ([0, 1, 2], [3, 4, 5], [6, 7]):
            images.take(np.array(rows), pixels(keys_M3[rows]))
        images.save()
        assert len(images.places.sources) == 2 and images.problem.startswith("8 images could not be kept: cannot write")
    images.save()
    assert not images.problem and len(cache.find(keys_M3)[0][1]) == 8


def test_what_an_earlier_date_made_is_found_in_its_blocks(monkeypatch: pytest.MonkeyPatch):
    """Two clients, two classes; the later date asks for more of three of the four cells."""
    before_KC, after_KC = np.array([[2, 1], [0, 3]]), np.array([[3, 1], [2, 5]])
    made, wanted = image_keys(before_KC), image_keys(after_KC)
    places = ImagePlaces.nowhere(len(wanted))
    _extend(places, wanted, Synthetic(before_KC, blocks_of(pixels(made), 4)))
    known = np.flatnonzero(places.source_M >= 0)
    assert wanted[known].tolist() == made.tolist()
    monkeypatch.setattr(image_blocks, "get_if_there", lambda block: block)
    pieces = places.pieces(known).values()
    images, gone = image_blocks.gather(list(pieces), SHAPE)[::-1]
    assert not gone and np.array_equal(images, pixels(made))


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_client_has_its_own_images_or_the_first_of_a_pool_wherever_blocks_end(
    size: int, monkeypatch: pytest.MonkeyPatch
):
    def of(synthetic: Synthetic, k: int) -> Any:
        stored = synthetic.of(k)
        return stored and np.concatenate([block[start:stop] for block, start, stop in stored.parts]).tolist()

    quota_KC = np.array([[2, 1], [0, 0], [3, 3]])
    keys_M3 = image_keys(quota_KC)
    own = Synthetic(quota_KC, blocks_of(pixels(keys_M3), size))
    for k in (0, 2):
        assert of(own, k) == pixels(keys_M3[keys_M3[:, 0] == k]).tolist()
    assert own.of(1) is None and own.images == 9
    pool_C = np.array([4, 3])
    keys_M3 = image_keys(pool_C[None])
    shared = Synthetic(quota_KC, blocks_of(pixels(keys_M3), size), pool_C=pool_C)
    for k in (0, 2):
        is_first_M = keys_M3[:, 2] < quota_KC[k, keys_M3[:, 1]]
        assert of(shared, k) == pixels(keys_M3[is_first_M]).tolist()
    assert shared.of(1) is None and shared.images == 7
    monkeypatch.setattr("raysim.federation.synthesis.get", lambda block: block)
    images, labels_M = sample_of(shared, 3)
    assert np.array_equal(images, pixels(keys_M3[[0, 3, 6]])) and labels_M.tolist() == [0, 0, 1]
