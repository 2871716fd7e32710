"""The image cache keeps what was written, notices what was damaged, and lets writers share it."""

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raysim.generation import image_cache
from raysim.generation.image_cache import MOST_SEGMENTS, ImageCache, clear, entries

SHAPE = (1, 2, 3)
FINGERPRINT = "ab" * 32


def keys(count: int, client: int = 0, start: int = 0) -> np.ndarray:
    """`count` keys of one client and class 1."""
    return np.stack([np.full(count, client), np.ones(count), np.arange(start, start + count)], axis=1).astype(np.int64)


def pixels(keys_M3: np.ndarray) -> np.ndarray:
    """An image that tells which key it belongs to."""
    value = (keys_M3[:, 0] * 50 + keys_M3[:, 2]).astype(np.uint8)
    return np.broadcast_to(value[:, None, None, None], (len(value), *SHAPE)).copy()


def fill(cache: ImageCache, keys_M3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(for each key whether the cache has it, the images)."""
    found_M, images = np.zeros(len(keys_M3), bool), np.zeros((len(keys_M3), *SHAPE), np.uint8)
    for path, rows, places in cache.find(keys_M3):
        assert not found_M[rows].any()
        made = cache.images(path, places)
        assert made is not None
        found_M[rows], images[rows] = True, made
    return found_M, images


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return ImageCache.open(tmp_path, FINGERPRINT, 7, SHAPE)


def segments(cache: ImageCache) -> list[Path]:
    return sorted(cache.folder.glob("*.seg"))


def test_what_was_added_is_found_in_any_order_and_nothing_else(tmp_path: Path, cache: ImageCache):
    cache.add(keys(5), pixels(keys(5)))
    cache.add(keys(3, client=2), pixels(keys(3, client=2)))
    wanted = np.concatenate([keys(3, client=2)[::-1], keys(8)])
    found_M, images = fill(ImageCache.open(tmp_path, FINGERPRINT, 7, SHAPE), wanted)
    assert found_M.tolist() == [True] * 8 + [False] * 3
    assert np.array_equal(images[:8], pixels(wanted)[:8])
    assert not images[8:].any()


def test_other_seeds_and_generators_have_other_images(tmp_path: Path, cache: ImageCache):
    cache.add(keys(2), pixels(keys(2)))
    for fingerprint, seed in ((FINGERPRINT, 8), ("cd" * 32, 7), ("../mine", 7)):
        assert not fill(ImageCache.open(tmp_path, fingerprint, seed, SHAPE), keys(2))[0].any()
    assert all(path.is_relative_to(tmp_path) for path in tmp_path.rglob("*"))


def test_a_sound_segment_of_another_image_size_is_left_alone(tmp_path: Path, cache: ImageCache):
    cache.add(keys(2), pixels(keys(2)))
    other = ImageCache.open(tmp_path, FINGERPRINT, 7, (3, 4, 4))
    assert not other.find(keys(2))
    assert not other.notes and len(segments(cache)) == 1


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "cut header", "empty", "huge header", "no object", "longer"])
def test_a_damaged_segment_is_deleted_and_named_and_the_others_serve(cache: ImageCache, damage: str):
    cache.add(keys(4), pixels(keys(4)))
    (path,) = segments(cache)
    raw = path.read_bytes()
    path.write_bytes({
        "flipped bit": raw[:-1] + bytes([raw[-1] ^ 1]), "cut": raw[:-5], "cut header": raw[:20], "empty": b"",
        "huge header": b"\xff" * 8 + raw[8:], "no object": b"\x02\x00\x00\x0042", "longer": raw + b"0",
    }[damage])
    cache.add(keys(2, client=1), pixels(keys(2, client=1)))
    assert entries(cache.folder.parent.parent)[0].images in (2, 6)  # headers only; never raises
    found_M, _ = fill(cache, np.concatenate([keys(4), keys(2, client=1)]))
    assert found_M.tolist() == [False] * 4 + [True] * 2
    assert cache.notes == [f"damaged cache file {path.name} deleted; its images are made again"]
    assert not path.exists()
    cache.add(keys(4), pixels(keys(4)))
    assert fill(cache, keys(4))[0].all()


def test_a_full_disk_is_reported_and_keeps_what_was_there(cache: ImageCache, monkeypatch: pytest.MonkeyPatch):
    cache.add(keys(3), pixels(keys(3)))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # where a disk says at last that it has no room
        with pytest.raises(OSError, match="No space left"):
            cache.add(keys(3, start=3), pixels(keys(3, start=3)))
    found_M, _ = fill(cache, keys(6))
    assert found_M.tolist() == [True] * 3 + [False] * 3
    assert [path.suffix for path in cache.folder.iterdir()] == [".seg"]


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that a user without root may enter, and that user for the time of the test."""
    with tempfile.TemporaryDirectory(prefix="raysim-test-", dir="/tmp") as folder:
        root = os.geteuid() == 0
        Path(folder).chmod(0o755)
        yield Path(folder)
        if root:
            os.seteuid(0)


def give_up_root() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_a_cache_that_may_only_be_read_serves_and_says_what_it_cannot_keep(
    as_nobody: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three images are there, three are to be kept; a damaged file can be neither used nor deleted."""
    from without_ray import assembly, pixels_of

    from raysim.federation.synthesis import open_cache

    cache = ImageCache.open(as_nobody, FINGERPRINT, 7, SHAPE)
    cache.add(keys(3), pixels(keys(3)))
    (cache.folder / "damaged.seg").write_bytes(b"x")
    for folder in (cache.folder, cache.folder.parent, as_nobody):
        folder.chmod(0o555)
    give_up_root()
    found, _ = open_cache(str(as_nobody), FINGERPRINT, 7, SHAPE)
    assert found is not None
    images = assembly(keys(6), found, monkeypatch)
    images.find()
    assert images.missing().tolist() == [3, 4, 5]
    images.take(np.array([3, 4, 5]), pixels(keys(3, start=3)))
    images.save()
    images.merge()
    unkept, (damaged,) = images.problem, found.notes
    told = f"cannot write {cache.folder}: Permission denied; make it writable or set output.cache to another disk"
    assert unkept == f"3 images could not be kept: {told}"
    assert damaged == "damaged cache file damaged.seg cannot be deleted (Permission denied); its images are made again"
    assert np.array_equal(pixels_of(images), pixels(keys(6)))
    other, (told,) = open_cache(str(as_nobody), "cd" * 32, 7, SHAPE)
    assert other is None and "no image is kept in the cache: cannot write" in told


def test_a_cache_below_the_home_of_a_user_who_has_none_is_done_without(monkeypatch: pytest.MonkeyPatch):
    from raysim.federation.synthesis import open_cache

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    cache, (told,) = open_cache("~/cache", FINGERPRINT, 7, SHAPE)
    assert cache is None and "output.cache = ~/cache cannot be used" in told


def test_temporary_files_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path: Path, cache: ImageCache):
    old, new = cache.folder / ".a.seg.1-ff.tmp", cache.folder / ".b.seg.2-ff.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    ImageCache.open(tmp_path, FINGERPRINT, 7, SHAPE)
    assert not old.exists() and new.exists()


def test_many_small_segments_become_one_with_every_image_once(tmp_path: Path, cache: ImageCache):
    for i in range(MOST_SEGMENTS):
        cache.add(keys(2, start=2 * i), pixels(keys(2, start=2 * i)))
    cache.merge()
    assert len(segments(cache)) == MOST_SEGMENTS
    cache.add(keys(3, start=0), pixels(keys(3, start=0)))  # a second writer made these, too
    cache.merge()
    assert len(segments(cache)) == 1
    found_M, images = fill(cache, keys(2 * MOST_SEGMENTS))
    assert found_M.all() and np.array_equal(images, pixels(keys(2 * MOST_SEGMENTS)))
    assert entries(tmp_path)[0].images == 2 * MOST_SEGMENTS


def test_a_merge_leaves_large_segments_alone(cache: ImageCache, monkeypatch: pytest.MonkeyPatch):
    """At 30 bytes an image (24 of them the key), 40 images are large where the limit is 1,000 bytes."""
    monkeypatch.setattr(image_cache, "LARGE_BYTES", 1000)
    cache.add(keys(40), pixels(keys(40)))
    (large,) = segments(cache)
    for i in range(MOST_SEGMENTS + 1):
        cache.add(keys(1, client=1, start=i), pixels(keys(1, client=1, start=i)))
    cache.merge()
    assert large in segments(cache) and len(segments(cache)) == 2


def test_a_merge_on_a_full_disk_loses_nothing(cache: ImageCache, monkeypatch: pytest.MonkeyPatch):
    for i in range(MOST_SEGMENTS + 1):
        cache.add(keys(1, start=i), pixels(keys(1, start=i)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(image_cache, "write_checked", full)
    cache.merge()
    assert "could not be merged (No space left on device)" in cache.notes[0]
    assert fill(cache, keys(MOST_SEGMENTS + 1))[0].all()


def test_a_reader_finds_images_that_another_run_merges_meanwhile(cache: ImageCache, monkeypatch: pytest.MonkeyPatch):
    """The first file is read, then all are replaced by one: the reader looks again and finds it."""
    for i in range(MOST_SEGMENTS + 1):
        cache.add(keys(1, start=i), pixels(keys(1, start=i)))
    other, read, merged = ImageCache(cache.folder, SHAPE), ImageCache._read, []

    def read_then_merge(self: ImageCache, path: Path):
        segment = read(self, path)
        if self is cache and not merged:
            merged.append(other.merge())
        return segment

    monkeypatch.setattr(ImageCache, "_read", read_then_merge)
    found = cache.find(keys(MOST_SEGMENTS + 1))
    assert sorted(np.concatenate([rows for _, rows, _ in found]).tolist()) == list(range(MOST_SEGMENTS + 1))
    assert merged and found[-1][0].exists() and not cache.notes


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from test_image_cache import FINGERPRINT, SHAPE, ImageCache, keys, pixels
cache = ImageCache.open(sys.argv[1], FINGERPRINT, 7, SHAPE)
for i in range(50):
    cache.add(keys(2, client=int(sys.argv[2]), start=2 * i), pixels(keys(2, client=int(sys.argv[2]), start=2 * i)))
    cache.merge()
"""


def test_two_processes_write_and_merge_at_once(tmp_path: Path, cache: ImageCache):
    here = str(Path(__file__).parent)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(k), here]) for k in (0, 1)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    wanted = np.concatenate([keys(100), keys(100, client=1)])
    found_M, images = fill(cache, wanted)
    assert found_M.all() and np.array_equal(images, pixels(wanted)) and not cache.notes


def test_entries_and_clear_tell_the_size_and_touch_nothing_else(tmp_path: Path, cache: ImageCache):
    cache.add(keys(5), pixels(keys(5)))
    ImageCache.open(tmp_path, "mine", 0, SHAPE).add(keys(1), pixels(keys(1)))
    mine = tmp_path / "photos" / "2020" / "a.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"x")
    found = entries(tmp_path)
    assert sorted((e.seed, e.images) for e in found) == [("0", 1), ("7", 5)]
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.seg"))
    assert sum(e.size_bytes for e in found) == size
    assert clear(tmp_path) == size
    assert entries(tmp_path) == [] and mine.exists() and list(tmp_path.iterdir()) == [tmp_path / "photos"]


def test_a_cache_that_does_not_exist_is_empty(tmp_path: Path):
    assert entries(tmp_path / "none") == [] and clear(tmp_path / "none") == 0
