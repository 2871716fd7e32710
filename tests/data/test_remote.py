"""Data at a URL is fetched once, again only where it changed, and refused with the remedy."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


Headers = Callable[[bytes], dict[str, str]]


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, Headers], tuple[str, list[str]]]]:
    """Puts one file on a server of this machine: (its address, the requests so far)."""
    monkeypatch.setattr(remote, "CACHE", tmp_path / "cache")
    content: dict[str, object] = {}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            blob: bytes = content["blob"]  # type: ignore[assignment]
            asked.append(self.command)
            self.send_response(200)
            for name, value in content["headers"](blob).items():  # type: ignore[operator]
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(blob)))
            self.send_header("Content-Type", "application/octet-stream")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(blob)

        do_GET = do_HEAD

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def put(blob: bytes, headers: Headers) -> tuple[str, list[str]]:
        content.update(blob=blob, headers=headers)
        asked.clear()
        return f"http://127.0.0.1:{server.server_port}/d.bin", asked

    yield put
    server.shutdown()
    server.server_close()


def etag(blob: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.sha256(blob).hexdigest()}"'}


def last_modified(blob: bytes) -> dict[str, str]:
    return {"Last-Modified": f"Wed, 21 Oct 2015 07:28:{blob[0] % 60:02} GMT"}


@pytest.mark.parametrize("headers", [etag, last_modified])
def test_a_file_on_the_web_is_fetched_again_where_it_changed_alone(web, headers: Headers):
    """The new content is of the same length, at the same address."""
    url, asked = web(b"one", headers)
    assert remote.local_copy(url).read_bytes() == b"one" and "GET" in asked
    url, asked = web(b"one", headers)
    assert remote.local_copy(url).read_bytes() == b"one" and "GET" not in asked
    url, asked = web(b"two", headers)
    assert remote.local_copy(url).read_bytes() == b"two"


def test_a_file_on_the_web_without_date_or_digest_is_always_fetched(web):
    for blob in (b"one", b"two"):
        url, _ = web(blob, lambda _: {})
        assert remote.local_copy(url).read_bytes() == blob


def test_a_disk_without_room_for_the_copy_is_named(store, disk, tmp_path: Path):
    store.pipe("/bucket/d.npz", b"content")
    (tmp_path / "cache").mkdir()
    disk.full_after(tmp_path / "cache", 0, only_once=True)
    with pytest.raises(UserError, match=r"cache/\w+ has no room for a copy of it \(No space left on device\); free sp"):
        remote.local_copy("memory://bucket/d.npz")


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_damaged_list_of_what_was_fetched_has_everything_fetched_again(store, content: str):
    store.pipe({"/bucket/a/x.bin": b"one"})
    folder = remote.local_copy("memory://bucket/a")
    (folder / "x.bin").write_bytes(b"changed by hand")
    (folder / ".fetched.json").write_text(content)
    assert (remote.local_copy("memory://bucket/a") / "x.bin").read_bytes() == b"one"
