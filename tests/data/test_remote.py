"""Data at a URL is fetched once, again only where it changed, and refused with the remedy."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from raysim.core.errors import UserError
from raysim.data import remote
from raysim.data.files import npz


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An object store in memory, through fsspec as s3:// would be, and a cache of its own."""
    monkeypatch.setattr(remote, "CACHE", tmp_path / "cache")
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


def test_a_data_set_is_read_from_a_url(store, tmp_path: Path):
    images, labels = np.arange(2 * 5 * 4 * 4, dtype=np.uint8).reshape(10, 4, 4), np.arange(10) % 2
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=labels)
    store.pipe("/bucket/d.npz", (tmp_path / "d.npz").read_bytes())
    there, here = npz(path="memory://bucket/d.npz"), npz(path=str(tmp_path / "d.npz"))
    assert np.array_equal(there.train_images, here.train_images)
    assert np.array_equal(there.train_labels_N, here.train_labels_N)


def test_only_what_changed_is_fetched_again_and_what_went_is_gone(store, monkeypatch: pytest.MonkeyPatch):
    store.pipe({"/bucket/a/x.bin": b"one", "/bucket/a/sub/y.bin": b"two", "/bucket/a/z.bin": b"three"})
    folder = remote.local_copy("memory://bucket/a")
    fetched: list[str] = []
    get_file = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda s, path, to: (fetched.append(path), get_file(s, path, to)))
    assert remote.local_copy("memory://bucket/a") == folder
    assert fetched == []
    store.pipe("/bucket/a/x.bin", b"changed")
    store.rm("/bucket/a/z.bin")
    remote.local_copy("memory://bucket/a")
    assert fetched == ["/bucket/a/x.bin"]
    left = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.bin")}
    assert left == {"x.bin": b"changed", "sub/y.bin": b"two"}


@pytest.mark.parametrize(
    ("url", "cause"),
    [("memory://bucket/none", "is nothing"), ("nosuch://bucket/x", "nosuch"), ("file:///no/such/folder", "is nothing")],
)
def test_a_url_that_cannot_be_read_is_refused_by_name(store, url: str, cause: str):
    store.pipe("/bucket/a", b"")
    with pytest.raises(UserError, match=f"data.path = '{url}'.*{cause}"):
        npz(path=url)
