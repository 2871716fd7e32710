"""A folder belongs to one process, and is free again as soon as that process is gone, however it ended."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysim.core import locks
from raysim.core.errors import UserError
from raysim.core.locks import NAME, FolderLock, Held

HOLD = """
import os, sys, time
from pathlib import Path
from raysim.core.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if sys.argv[2] != "with a child":
    print("held", flush=True)
elif not os.fork():
    print("held", flush=True)  # by the child, which has then forgotten the lock
    os.close(1)
    time.sleep(600)
    os._exit(0)
sys.stdin.read()
"""


def holder(folder: Path, how: str) -> subprocess.Popen[str]:
    """A process that has the lock of a folder until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of `tmp_path`, and a forked child."""
    process = holder(tmp_path, "with a child")
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_second_process_is_told_who_has_the_folder(tmp_path: Path, other: subprocess.Popen[str]):
    with pytest.raises(Held, match=f"{tmp_path} is in use by process {other.pid} on {socket.gethostname()} since 2"):
        FolderLock(tmp_path)


def test_a_killed_process_leaves_the_folder_free_although_its_forked_child_lives(
    tmp_path: Path, other: subprocess.Popen[str]
):
    other.kill()
    other.wait()
    FolderLock(tmp_path).release()


def test_a_program_that_the_holder_has_started_does_not_keep_the_folder(tmp_path: Path):
    """As Ray's processes and that of MLflow, which may live a little longer than the driver."""
    with FolderLock(tmp_path):
        started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    FolderLock(tmp_path).release()
    started.communicate(b"\n")
    assert started.returncode == 0


def test_a_folder_is_free_after_its_release_and_holds_no_file_of_the_lock(tmp_path: Path):
    with FolderLock(tmp_path) as lock:
        with pytest.raises(Held, match=f"process {os.getpid()} on"):
            FolderLock(tmp_path)
        lock.release()
        with FolderLock(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_removed_while_another_waits_at_its_file_is_not_had_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second opens the file before the first removes it, and locks it afterwards: it must look for the new one."""
    first = FolderLock(tmp_path)
    take, opened = os.open, []

    def slow_open(*arguments: object) -> int:
        file = take(*arguments)  # type: ignore[arg-type]
        if not opened:
            first.release()
        opened.append(file)
        return file

    monkeypatch.setattr(locks.os, "open", slow_open)
    with FolderLock(tmp_path):
        monkeypatch.undo()
        assert len(opened) == 2
        with pytest.raises(Held):
            FolderLock(tmp_path)


def test_others_of_a_group_can_take_the_lock_that_a_killed_process_has_left(tmp_path: Path):
    before = os.umask(0o007)
    try:
        with FolderLock(tmp_path):
            assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(before)


def test_a_folder_without_locks_is_used_without_and_one_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Some file systems on a network know no locks."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with FolderLock(tmp_path), FolderLock(tmp_path):
        pass
    with pytest.raises(UserError, match=r"cannot write .*gone.* \(No such file or directory\)"):
        FolderLock(tmp_path / "gone")


def test_a_link_or_a_folder_in_place_of_the_lock_is_refused_and_what_it_leads_to_stays(tmp_path: Path):
    (tmp_path / "precious").write_text("of a week")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(tmp_path / "precious")
    (tmp_path / "b" / ".lock").mkdir(parents=True)
    for folder in (tmp_path / "a", tmp_path / "b"):
        with pytest.raises(UserError, match=r"\.lock \(.*\); it is no file of raysim's: delete it, or"):
            FolderLock(folder)
    assert (tmp_path / "precious").read_text() == "of a week"
