"""Images are decoded once: later they come from the cache, bit for bit, unless what they were decoded from changed."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from PIL import Image, features
from test_files import encode, pictures, write_parquet

from raysim.config.load import load_config
from raysim.core.records import Dataset
from raysim.data import decoded_cache, files, parquet
from raysim.data.reader import open_reader
from raysim.lifecycle.prepare import load_dataset


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 12 training images of 3 classes in two parquet files, and 3 test images."""
    monkeypatch.setattr(decoded_cache, "LEAST_BYTES", 1)
    folder = tmp_path / "data"
    folder.mkdir()
    blobs = [encode(pixels) for pixels in pictures(15)]
    for name, part in (("train-0", slice(6)), ("train-1", slice(6, 12)), ("test-0", slice(12, 15))):
        write_parquet(folder / f"{name}.parquet", blobs[part], [0, 1, 2] * (len(blobs[part]) // 3))
    return folder


def read(data: Path, cache: Path | None, name: str = "parquet") -> tuple[Dataset, list[str]]:
    """(the split, what there is to say), as a run with this cache reads it."""
    notes: list[str] = []
    output = {"cache": None if cache is None else str(cache)}
    config = load_config({"rounds": 1, "data": {"name": name, "path": str(data)}, "output": output})
    return load_dataset(config, notes), notes


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("decoded/*"))


def equal(a: Dataset, b: Dataset) -> bool:
    return np.array_equal(a.train_images, b.train_images) and np.array_equal(a.test_images, b.test_images)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    for module in (parquet, files):
        monkeypatch.setattr(module, "decode_images", refuse)
    return monkeypatch


def test_the_second_run_decodes_nothing_wherever_the_files_lie(
    data: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    first, notes = read(data, tmp_path / "cache")
    request.getfixturevalue("no_decoding")
    second, _ = read(shutil.copytree(data, tmp_path / "elsewhere"), tmp_path / "cache")
    assert equal(first, second) and second.train_labels_N.tolist() == [0, 1, 2] * 4 and not notes
    assert second.train_images.flags.writeable and len(kept(tmp_path / "cache")) == 2


def test_a_folder_of_images_is_kept_too_and_a_changed_picture_is_seen(data: Path, tmp_path: Path):
    for i, pixels in enumerate(pictures(6)):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    first, _ = read(tmp_path / "photos", tmp_path / "cache", "image_folder")
    again, _ = read(tmp_path / "photos", tmp_path / "cache", "image_folder")
    assert equal(first, again) and len(kept(tmp_path / "cache")) == 1
    Image.fromarray(pictures(1, seed=9)[0]).save(path)
    changed, _ = read(tmp_path / "photos", tmp_path / "cache", "image_folder")
    assert not equal(first, changed) and len(kept(tmp_path / "cache")) == 2


def test_other_content_column_or_decoder_is_another_entry(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each changes the test split's or both splits' keys: 2 files, then 1 more, then 2 more."""
    cache = tmp_path / "cache"
    read(data, cache)
    write_parquet(data / "test-0.parquet", [encode(p) for p in pictures(3, seed=5)], [0, 1, 2])
    assert np.array_equal(read(data, cache)[0].test_images, pictures(3, seed=5).transpose(0, 3, 1, 2))
    assert len(kept(cache)) == 3
    version = features.version
    monkeypatch.setattr(features, "version", lambda name: "0" if name == "jpg" else version(name))
    read(data, cache)
    assert len(kept(cache)) == 5


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "empty", "longer", "header"])
def test_a_damaged_file_is_deleted_and_named_and_made_again(data: Path, tmp_path: Path, damage: str):
    first, _ = read(data, tmp_path / "cache")
    path = kept(tmp_path / "cache")[0]
    raw = path.read_bytes()
    path.write_bytes({
        "flipped bit": raw[:-1] + bytes([raw[-1] ^ 1]), "cut": raw[:-5], "empty": b"", "longer": raw + b"0",
        "header": b"\xff" * 8 + raw[8:],
    }[damage])
    second, notes = read(data, tmp_path / "cache")
    assert equal(first, second) and path.read_bytes() == raw
    assert notes == [f"damaged file of decoded images {path} deleted; they are decoded again"]
    assert read(data, tmp_path / "cache")[1] == []


def test_a_full_disk_costs_the_cache_alone_and_is_said(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        dataset, notes = read(data, tmp_path / "cache")
    assert len(notes) == 2 and "could not be kept" in notes[0] and "No space left on device" in notes[0]
    assert kept(tmp_path / "cache") == [] and equal(dataset, read(data, None)[0])


def test_a_cache_that_cannot_be_a_folder_is_said_and_done_without(data: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    dataset, notes = read(data, tmp_path / "cache")
    assert len(notes) == 2 and "could not be kept" in notes[0] and dataset.train_images.shape == (12, 3, 6, 5)


def test_without_a_cache_nothing_is_kept_and_neither_are_small_data_sets(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Training images: 12 of 90 bytes; test images: 3."""
    monkeypatch.setenv("HOME", str(tmp_path))
    read(data, None)
    assert not (tmp_path / ".cache").exists()
    monkeypatch.setattr(decoded_cache, "LEAST_BYTES", 12 * 90)
    read(data, tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 1


def test_runs_that_decode_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All miss, all decode, all write the same file; what is there at the end is sound."""
    monkeypatch.setattr(decoded_cache, "LEAST_BYTES", 1)
    images, barrier = pictures(100).transpose(0, 3, 1, 2), Barrier(4)

    def decode() -> np.ndarray:
        barrier.wait(timeout=30)
        return images

    def one(_: int) -> np.ndarray:
        return open_reader(str(tmp_path), []).decoded(lambda: [b"same"], decode)

    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(found, images) for found in pool.map(one, range(4)))
    assert [path.suffix for path in kept(tmp_path)] == [".img"]
    assert np.array_equal(open_reader(str(tmp_path), []).decoded(lambda: [b"same"], lambda: images[:0]), images)


def test_large_images_are_decoded_by_threads_and_small_ones_alike(monkeypatch: pytest.MonkeyPatch):
    from raysim.data import decoding

    pixels = pictures(200)
    blobs = [encode(p) for p in pixels]
    for limit in (1, 10**9):
        monkeypatch.setattr(decoding, "_THREADED_BYTES", limit)
        found = decoding.decode_images(200, lambda i: blobs[i], str)
        assert np.array_equal(found, pixels.transpose(0, 3, 1, 2))
