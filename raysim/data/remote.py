"""Data at a URL (s3://, gs://, https:// and whatever fsspec reads), copied once to the machine of the driver."""

import hashlib
import json
from pathlib import Path

from raysim.core.errors import UserError

CACHE = Path("~/.cache/raysim/data")


def is_url(path: str) -> bool:
    """Whether a path names a remote place."""
    return "://" in path


def local_copy(url: str) -> Path:
    """A file or folder on this machine with what is at a URL; only what is new or changed there is fetched.

    Raises UserError where there is nothing, where access is refused, or where the library for that kind of URL is
    missing.
    """
    import fsspec

    folder = CACHE.expanduser() / hashlib.sha256(url.encode()).hexdigest()[:16]
    try:
        system, root = fsspec.core.url_to_fs(url)
        found = {path: str(system.ukey(path)) for path in system.find(root)}
        if not found:
            raise FileNotFoundError("there is nothing")
        single = list(found) == [root]
        names = {path: Path(path).name if single else path.removeprefix(root).strip("/") for path in found}
        _fetch(system, folder, names, found)
    except ImportError as error:
        raise UserError(f"data.path = {url!r}: {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.path = {url!r} cannot be read: {error or type(error).__name__}; check the address, and what "
            "this machine may read there"
        ) from error
    return folder / names[root] if single else folder


def _fetch(system: object, folder: Path, names: dict[str, str], marks: dict[str, str]) -> None:
    """Make the folder hold exactly these files.  marks: what changes when a file does."""
    folder.mkdir(parents=True, exist_ok=True)
    ledger = folder / ".fetched.json"
    have = json.loads(ledger.read_text()) if ledger.exists() else {}
    for path, name in names.items():
        target = folder / name
        if have.get(name) != marks[path] or not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.part")
            system.get_file(path, str(partial))  # type: ignore[attr-defined]
            partial.replace(target)
    for name in have.keys() - set(names.values()):
        (folder / name).unlink(missing_ok=True)
    ledger.write_text(json.dumps({name: marks[path] for path, name in names.items()}))
