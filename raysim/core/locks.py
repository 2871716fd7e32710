"""A folder belongs to one process at a time: a lock in it that the system takes away when the process ends.

The lock is `flock` on a file in the folder, so it also holds between containers, and between machines that share a file
system, where a process id means nothing. A folder on a file system without such locks is used without one.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Self

from raysim.core.errors import UserError

NAME = ".lock"
_NO_FILE = (errno.ELOOP, errno.EISDIR)  # a link, which would be written through, or a folder
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what file systems without locks answer


class Held(UserError):
    """The folder belongs to another process."""


class FolderLock:
    """The right of this process to change a folder, until `release` is called, or the process ends.

    A context manager, which releases the lock.  is_exclusive: whether the file system knows locks, so that no other
    process has this one, too.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder.

        Raises Held, naming the process that has it and since when; UserError where the folder cannot be written.
        """
        self._path = folder / NAME
        try:
            self._file, self.is_exclusive = _locked(self._path)
        except BlockingIOError:
            raise Held(f"{folder} is in use by {_holder(self._path)}; wait until that has ended, or stop it") from None
        except OSError as error:
            remedy = "free space there or make it writable, or name another folder"
            if error.errno in _NO_FILE:
                remedy = "it is no file of raysim's: delete it, or name another folder"
            raise UserError(f"cannot write {self._path} ({error.strerror}); {remedy}") from error
        _HELD.add(self)
        with contextlib.suppress(OSError):  # on a full disk, others are not told who has the lock
            os.truncate(self._file, 0)
            os.write(self._file, json.dumps(_this_process()).encode())

    def release(self) -> None:
        """Give the folder free; a second call does nothing."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # the folder may be gone
                self._path.unlink()
            self.forget()

    def forget(self) -> None:
        """Close the file without a change to the folder, as in a forked child, which does not own it."""
        _HELD.discard(self)
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_HELD: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


# A child that is forked without `exec`, for example by a plug-in, would keep the lock after the end of its parent.
os.register_at_fork(after_in_child=_forget_all)


def _locked(path: Path) -> tuple[int, bool]:
    """Open and lock a file; returns it, and whether it could be locked. BlockingIOError if another has the lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)  # less the umask
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file, True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return file, False
            os.close(file)
            raise
        os.close(file)  # its holder has just removed it


def _this_process() -> dict[str, str | int]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _holder(path: Path) -> str:
    """Who has the lock, for people."""
    try:
        found = json.loads(path.read_bytes())
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
