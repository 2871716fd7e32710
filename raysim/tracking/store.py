"""The parts of tracking that need no MLflow: addresses of stores, the sqlite file, names, requests that wait."""

import contextlib
import errno
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from raysim import __version__
from raysim.core.errors import UserError
from raysim.core.persistent import persistent_folder
from raysim.core.plain import PlainMapping
from raysim.core.secrets import MASK, is_masked, without_secrets

NEW_STORE_BYTES = 2_000_000  # MLflow's tables take half of that, and as much again while they are made
VALUE_CHARACTERS = 1000  # of a parameter or tag; MLflow's own limits are 6,000 and 8,000
DATABASES = ("postgresql", "mysql", "mssql")
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # read-only or full, for now
_AS_EFFECTIVE = os.access in os.supports_effective_ids
_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR")


def check_uri(uri: str) -> str:
    """The address of the MLflow store that `tracking.uri` names; imports and opens nothing.

    "auto" is the environment's MLFLOW_TRACKING_URI, else mlflow.db in the working directory; "none" switches tracking
    off.  Relative sqlite paths become absolute.  An address whose secret is masked, as in the files of a run, gets it
    from the environment.  Raises UserError where it is not there, for a folder, which MLflow no longer accepts as a
    store, and for anything else that could not hold a run.
    """
    key = "tracking.uri"
    if uri == "auto":
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        key = "tracking.uri: auto, and MLFLOW_TRACKING_URI" if uri else key
        uri = uri or f"sqlite:///{persistent_folder() / 'mlflow.db'}"
    if is_masked(uri):
        uri = _unmasked(uri)
    scheme = uri.split(":", 1)[0].lower() if re.match(r"[A-Za-z][\w+.-]+:", uri) else ""
    if uri == "none" or scheme in ("http", "https") or scheme.split("+")[0] in DATABASES:
        return uri
    if scheme in ("", "file"):
        folder = Path(re.sub(r"^file:(//)?", "", uri)).expanduser().absolute()
        remedy = f"MLflow no longer keeps runs in a folder; use sqlite:///{folder / 'mlflow.db'}"
    elif scheme != "sqlite":
        remedy = "use auto, none, sqlite:///PATH, http(s)://SERVER or a postgresql, mysql or mssql address"
    else:
        path = uri.partition(":///")[2]
        if path and not path.startswith(":memory:"):
            return f"sqlite:///{Path(path).expanduser().absolute()}"
        remedy = "a sqlite address has three slashes and a file, as in sqlite:///mlflow.db"
    raise UserError(f"{key}: {without_secrets(uri)!r} cannot be used: {remedy}")


def _unmasked(uri: str) -> str:
    """The address that was masked, from the environment; UserError where that does not hold it."""
    whole = os.environ.get("MLFLOW_TRACKING_URI", "")
    if without_secrets(whole) == uri:
        return whole
    scheme, _, rest = uri.partition("://")
    has_login = os.environ.get("MLFLOW_TRACKING_TOKEN") or os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if scheme.lower() in ("http", "https") and rest.startswith(f"{MASK}@") and rest.count(MASK) == 1 and has_login:
        return f"{scheme}://{rest.removeprefix(f'{MASK}@')}"  # MLflow reads the login there
    raise UserError(
        f"tracking.uri: in {uri!r} the secret is masked, as in every file of a run; put the whole address into the "
        "environment as MLFLOW_TRACKING_URI, or the login of a server as MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD or as MLFLOW_TRACKING_TOKEN, or name another store"
    )


class SqliteFile:
    """The file of a sqlite address: finds problems at once that MLflow would find after 20 s or never.

    MLflow waits 20 s for a lock, repeats a failing first connection for minutes, and goes on writing into a file that
    was deleted.  For the address of a server every check passes.
    """

    def __init__(self, uri: str) -> None:
        self.path = Path(uri.removeprefix("sqlite:///").split("?")[0]) if uri.startswith("sqlite") else None
        self._inode: int | None = None
        with contextlib.suppress(OSError):  # no such file, or a path that can be none, which `check` will say
            self._inode = self.path.stat().st_ino if self.path else None

    @contextlib.contextmanager
    def alone(self, wait_s: float) -> Iterator[None]:
        """A context that locks out other runs while the store is opened: MLflow fails if two make its tables at once.

        The lock is on the folder, so that no file remains.  Raises TimeoutError after `wait_s`.
        """
        if self.path is None or sys.platform == "win32":
            yield
            return
        import fcntl

        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            give_up_at = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > give_up_at:
                        raise TimeoutError(f"another run has been opening it for {wait_s:g} s") from error
                    time.sleep(0.05)
            yield
        finally:
            os.close(folder)

    def check(self, wait_s: float) -> None:
        """Raise OSError or sqlite3.Error unless the file is still the same and can be locked within `wait_s`.

        A file that did not exist at the start is made.
        """
        if self.path is None:
            return
        if self._inode is None:
            folder = self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() and not os.access(folder, os.W_OK, effective_ids=_AS_EFFECTIVE):
                raise PermissionError(errno.EACCES, "the folder cannot be written to", str(folder))
            self._lock(self.path, "rwc", wait_s)
            self._inode = self.path.stat().st_ino
            return
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            raise FileNotFoundError(f"{self.path} was removed or replaced during the run")
        self._lock(self.path, "rw", wait_s)

    def check_room(self) -> None:
        """Raise OSError where the disk has no room for the tables of a new store.

        On a full disk, MLflow would make some of them, and later fail on those, even when there is room.
        """
        if self.path is None or (self.path.exists() and self.path.stat().st_size):
            return
        free = shutil.disk_usage(self.path.parent).free
        if free < NEW_STORE_BYTES:
            told = f"{os.strerror(errno.ENOSPC)}, {free:,} bytes are free and a new store takes {NEW_STORE_BYTES:,}"
            raise OSError(errno.ENOSPC, told, str(self.path.parent))

    def is_away(self, error: Exception) -> bool:
        """Whether the store exists but is locked, read-only, full or out of reach, so that it may work again later.

        Any other error, such as a file that is no database or a server that refuses the user, is permanent.
        """
        if isinstance(error, sqlite3.Error):
            name = getattr(error, "sqlite_errorname", "")
            unreadable = name == "SQLITE_CANTOPEN" and self.path is not None and self.path.is_file()
            return unreadable or name.startswith(_PASSING)
        if isinstance(error, OSError | ImportError):
            return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _DISK)
        code = getattr(error, "error_code", "")  # of MLflow; a database server's errors have none
        passing = code in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE") or type(error).__name__ == "OperationalError"
        return passing and "schema" not in str(error)

    @staticmethod
    def _lock(path: Path, mode: str, wait_s: float) -> None:
        address = f"{path.as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, timeout=wait_s, uri=True, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        finally:
            connection.close()


@dataclass
class Write:
    """One request to the store.

    what: its content, for messages.  send: sends it; may be repeated without harm.  rounds: those of metrics.
    error: why it was not sent, so far.
    """

    what: str
    send: Callable[[], object]
    rounds: tuple[int, ...] = ()
    error: str = ""


class Outbox:
    """Requests that have not reached the store, in order; their number and the time that they take are limited.

    Each failure is followed by a pause of ten times its duration.  errors: what a store may raise.  lost_codes: values
    of `error_code` with which trying again is useless.
    """

    limit = 1000

    def __init__(self, store: SqliteFile, errors: tuple[type[Exception], ...], lost_codes: frozenset[str]) -> None:
        self._store = store
        self._errors = errors
        self._lost_codes = lost_codes
        self._waiting: list[Write] = []
        self._lost: list[Write] = []
        self._try_again_at = 0.0

    def add(self, write: Write) -> None:
        """Queue a request; the oldest one is dropped when too many wait."""
        if self._waiting:
            write.error = self._waiting[-1].error
        self._waiting.append(write)
        if len(self._waiting) > self.limit:
            self.lose(self._waiting.pop(0))

    def lose(self, write: Write) -> None:
        """Record a request that will never be sent, without its data."""
        self._lost.append(Write(write.what, lambda: None, write.rounds, write.error))

    def submit(self, write: Write) -> None:
        """Queue a request, and send all that wait, unless the store has failed shortly before."""
        self.add(write)
        healthy = len(self._waiting) == 1
        if healthy or time.monotonic() >= self._try_again_at:
            self.flush(wait_s=1.0 if healthy else 0.05, budget_s=2.0, failures_allowed=2)

    def flush(self, wait_s: float, budget_s: float, failures_allowed: int) -> None:
        """Send the requests that wait, metrics first; stop after too many failures or `budget_s`.

        wait_s: seconds to wait for a lock of the store.
        """
        started = time.monotonic()
        failures = 0
        for write in sorted(self._waiting, key=lambda write: not write.rounds):
            try:
                self._store.check(wait_s)
                write.send()
                self._waiting.remove(write)
            except self._errors as error:
                failures += 1
                write.error = one_line(error)
                if getattr(error, "error_code", "") in self._lost_codes:
                    self._waiting.remove(write)
                    self.lose(write)
            if failures > failures_allowed or time.monotonic() - started > budget_s:
                break
        if failures:
            self._try_again_at = time.monotonic() + 10 * (time.monotonic() - started)

    def missing(self) -> list[Write]:
        """All requests that have not reached the store."""
        return [*self._lost, *self._waiting]


def flatten(params: PlainMapping, prefix: str = "") -> dict[str, str]:
    """A nested configuration as dotted keys and text; a long value ends in a note that says so."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[clean_name(name)] = short(value if isinstance(value, str) else json.dumps(value, default=str))
    return flat


@functools.cache
def environment_tags() -> dict[str, str]:
    """Versions, platform and the git commit of the working directory, as far as they are known."""
    tags = {"version.raysim": __version__, "version.python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "ray", "mlflow"):
        try:
            tags[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            tags[f"version.{package}"] = "not installed"
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return tags  # no git here, or not a repository
    commit = git.stdout.strip()
    return {"git_commit": commit[:10], **tags, "mlflow.source.git.commit": commit}


def clean_name(name: str) -> str:
    """`name` in the characters and the length that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def short(text: str) -> str:
    """`text`, or its beginning and a note that it was cut."""
    if len(text) <= VALUE_CHARACTERS:
        return text
    note = f"... (cut: {len(text)} characters in all)"
    return text[: VALUE_CHARACTERS - len(note)] + note


def one_line(error: Exception) -> str:
    """The cause of an error of a database, without its SQL, or of a server, on one line without secrets."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    cause = re.split(r"\n?\[SQL|\n\(Background", str(error))[0]
    if "(Caused by " in cause:  # the request, at length, and what became of it
        cause = cause.rpartition("(Caused by ")[2].strip().removesuffix(")")
    if re.search(r"table \w+ already exists", cause):
        return "it was left half-made, as by a disk that was full; delete the file, if no other run is in it"
    return without_secrets(" ".join(cause.split()))[:300].rstrip(" .") or type(error).__name__
