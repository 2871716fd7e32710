"""Data at a URL (s3://, gs://, https:// and whatever fsspec reads), copied once to the machine of the driver."""

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raysim.core.errors import UserError
from raysim.core.files import FULL, write_atomic
from raysim.core.secrets import without_secrets

CACHE = Path("~/.cache/raysim/data")
_VALIDATORS = ("ETag", "Content-MD5", "Digest", "Last-Modified")  # headers of HTTP that change with the content


def is_url(path: str) -> bool:
    """Whether a path names a remote place."""
    return "://" in path


def local_copy(url: str) -> Path:
    """A file or folder on this machine with what is at a URL; only what is new or changed there is fetched.

    Raises UserError where there is nothing, where access is refused, or where the library for that kind of URL is
    missing.
    """
    import fsspec

    folder = CACHE.expanduser() / hashlib.sha256(without_secrets(url).encode()).hexdigest()[:16]
    try:
        system, root = fsspec.core.url_to_fs(url)
        system.invalidate_cache()  # of listings that are kept within one process
        found = {path: _mark(system, path) for path in _files(system, root)}
        if not found:
            raise FileNotFoundError("there is nothing")
        single = list(found) == [root]
        names = {path: _name(system, path) if single else path.removeprefix(root).strip("/") for path in found}
        names = {path: without_secrets(name) for path, name in names.items()}
        _fetch(system, folder, names, found)
    except ImportError as error:
        raise UserError(f"data.path = {url!r}: {without_secrets(str(error), url)}") from error
    except Exception as error:  # each kind of URL has a library of its own, with errors of its own
        if isinstance(error, OSError) and error.errno in FULL:
            told = f"{folder} has no room for a copy of it ({error.strerror}); free space there, or copy it yourself"
            raise UserError(f"data.path = {url!r}: {told}") from error
        cause = "" if str(error) == url else f": {without_secrets(str(error), url) or type(error).__name__}"
        raise UserError(
            f"data.path = {url!r} cannot be read{cause}; check the address, and what this machine may read there"
        ) from error
    return folder / names[root] if single else folder


def _name(system: Any, path: str) -> str:
    """The name of a file, without what follows a `?` on the web, where a token may stand."""
    return Path(urlsplit(path).path if _is_web(system) else path).name or "file"


def _is_web(system: Any) -> bool:
    protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
    return not {"http", "https"}.isdisjoint(protocols)


def _files(system: Any, root: str) -> list[str]:
    """The files at and below a place.  On the web only a page is searched for links; a file would be fetched for it."""
    if _is_web(system) and not str(system.info(root).get("mimetype", "text/html")).startswith("text/html"):
        return [root]
    return list(system.find(root))


def _mark(system: Any, path: str) -> str:
    """What changes when a file does; empty where nothing tells.

    For the web, fsspec's own mark is the address alone, so the server is asked: a length alone does not tell, since an
    array that is changed keeps its length.
    """
    if not _is_web(system):
        return str(system.ukey(path))
    info = system.info(path)
    told = {key: info[key] for key in _VALIDATORS if info.get(key)}
    return json.dumps({**told, "size": info.get("size")}, sort_keys=True) if told else ""


def _fetch(system: object, folder: Path, names: dict[str, str], marks: dict[str, str]) -> None:
    """Make the folder hold exactly these files.  marks: what changes when a file does; empty: always fetch it."""
    folder.mkdir(parents=True, exist_ok=True)
    ledger = folder / ".fetched.json"
    have = _read(ledger)
    for path, name in names.items():
        target = folder / name
        if not marks[path] or have.get(name) != marks[path] or not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.part")
            system.get_file(path, str(partial))  # type: ignore[attr-defined]
            partial.replace(target)
    for name in have.keys() - set(names.values()):
        (folder / name).unlink(missing_ok=True)
    write_atomic(ledger, json.dumps({name: marks[path] for path, name in names.items()}).encode())


def _read(ledger: Path) -> dict[str, str]:
    """The mark of each file that was fetched; none where the list is missing or damaged: all are fetched again."""
    try:
        have = json.loads(ledger.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return have if isinstance(have, dict) else {}
