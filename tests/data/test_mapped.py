"""A data set that is too large for the object store is mapped from files of the cache, and trains to the same bits."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim import Result
from raysim.core.errors import UserError
from raysim.data import decoded_cache
from raysim.data.datasets import digits
from raysim.data.decoded_cache import DecodedCache
from raysim.data.mapped import MappedDataset, MappedImages

Run = Callable[..., Result]
SHAPE = (5, 1, 2, 3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DecodedCache:
    """One that keeps splits of 1,000 bytes and more, and maps all of them."""
    monkeypatch.setattr(decoded_cache, "physical_bytes", lambda: 0)
    monkeypatch.setattr(decoded_cache, "LEAST_BYTES", 1000)
    return DecodedCache(tmp_path / "decoded", [])


def test_the_file_behind_an_array_and_behind_a_part_of_it(tmp_path: Path):
    """Rows 1 to 3 begin 6 bytes later; every second row, or a copy, is no map of the file."""
    images = np.arange(30, dtype=np.uint8).reshape(SHAPE)
    path = tmp_path / "file"
    path.write_bytes(b"head" + images.tobytes())
    mapped = np.asarray(np.memmap(path, np.uint8, "c", 4, SHAPE))
    assert MappedImages.behind(mapped) == MappedImages(path, 4, SHAPE)
    part = MappedImages.behind(mapped.reshape(SHAPE)[1:4])
    assert part == MappedImages(path, 10, (3, 1, 2, 3)) and np.array_equal(part.open(), images[1:4])
    assert not part.open().flags.writeable
    assert all(MappedImages.behind(array) is None for array in (images, mapped[::2], mapped[[0, 1]]))
    with pytest.raises(ValueError, match="greater than file size"):
        MappedImages(path, 4, (6, 1, 2, 3)).open()


def test_decoded_images_are_mapped_from_their_file_and_others_get_one(cache: DecodedCache):
    """The training images are cached under their key, the test images are not; the public ones are too few."""
    whole = digits()
    kept = cache.images("key", lambda: whole.train_images.copy())
    for images in (kept, cache.images("key", lambda: kept[:0])):
        assert np.array_equal(images, whole.train_images)
        assert MappedImages.behind(images) is not None
    dataset = replace(whole, train_images=kept, public_images=whole.train_images[:3])
    files = cache.files(dataset)
    assert set(files) == {"train_images", "test_images"} and files["train_images"].path == cache.folder / "key.img"
    assert len(list(cache.folder.glob("*.img"))) == 2
    assert cache.files(dataset) == files and len(list(cache.folder.glob("*.img"))) == 2
    mapped = MappedDataset.of(dataset, files)
    assert mapped.rest.nbytes == 3 * 64
    opened = mapped.open()
    for name in ("train_images", "test_images", "public_images"):
        assert np.array_equal(getattr(opened, name), getattr(dataset, name))


def test_what_would_fill_the_memory_is_decoded_into_a_file_and_into_memory_where_the_disk_is_full(
    cache: DecodedCache, monkeypatch: pytest.MonkeyPatch
):
    whole, rooms = digits().test_images, []

    def decode() -> np.ndarray:
        rooms.append(cache.room(whole.shape))
        rooms[-1][:] = whole
        return rooms[-1]

    monkeypatch.setattr(decoded_cache, "physical_bytes", lambda: 2 * whole.nbytes)
    assert np.array_equal(cache.images("key", decode), whole)
    assert isinstance(rooms[0].base, np.memmap) and [path.name for path in cache.folder.iterdir()] == ["key.img"]

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(decoded_cache.os, "posix_fallocate", full)
    assert np.array_equal(cache.images("other", decode), whole) and rooms[1].base is None
    (note,) = cache.notes
    assert "of images are decoded in memory: cannot write" in note and "No space left" in note


def test_what_is_written_to_a_mapped_data_set_changes_neither_the_file_nor_another_map(cache: DecodedCache):
    first = cache.images("key", lambda: digits().test_images.copy())
    first[:] = 7
    assert np.array_equal(cache.images("key", lambda: first), digits().test_images) and not cache.notes


def test_a_run_on_mapped_images_has_the_same_bits(
    run: Run, small: dict[str, Any], cache: DecodedCache, monkeypatch: pytest.MonkeyPatch
):
    """With public and validation images, and synthetic ones made of the public ones."""
    data = {**small["data"], "public_frac": 0.2, "validation_fraction": 0.2}
    config = {**small, "data": data, "allocation": {"name": "fedeas", "beta": 3.0}, "generator": {"name": "oracle"}}
    put = run(config).summary
    monkeypatch.setattr("raysim.lifecycle.worker_data.least_capacity_bytes", lambda: 1000)
    for workers in (1, 2):
        mapped = run({**config, "resources": {"workers": workers}})
        for key in ("model_sha256", "synthetic_sha256", "partition_sha256"):
            assert mapped.summary[key] == put[key]
        (note,) = [note for note in mapped.summary["notes"] if "mapped" in note]
        assert "its images are mapped from" in note and "decoded on every node" in note
    files = len(list((Path(config["output"]["cache"]) / "decoded").glob("*.img")))
    assert files == 4

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DecodedCache, "files", full)
    result = run(config).summary
    assert result["model_sha256"] == put["model_sha256"]
    assert any("cannot be mapped" in note and "free space there" in note for note in result["notes"])


def test_a_node_without_the_file_is_named_with_what_to_do(session: Any, tmp_path: Path):
    from raysim.aggregation.mean import fedavg
    from raysim.config.load import load_config
    from raysim.config.schema import Resources
    from raysim.engine.object_store import put
    from raysim.lifecycle.build import worker_setup
    from raysim.lifecycle.prepare import make_partition

    dataset = digits()
    config = load_config({"rounds": 1, "data": {"name": "digits"}, "partition": {"name": "iid", "clients": 2}})
    gone = MappedImages(tmp_path / "gone.img", 0, dataset.train_images.shape)
    pool = session.pool(Resources(workers=1))
    pool.configure(
        worker_setup(config, fedavg()), put(MappedDataset.of(dataset, {"train_images": gone})),
        put(make_partition(config, dataset)),
    )
    with pytest.raises(UserError, match=r"output.cache: the images of the data set cannot be mapped on .*gone.img"):
        pool.call_any(lambda actor, _: actor.where.remote(), "a question")
