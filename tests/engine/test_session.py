"""What a Ray that is started for a run leaves to others: no folder, no port, no token; whose folders it removes.

And what a session leaves to the next run: its workers.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from warm_session import WarmSession

from raysim import Result
from raysim.config.schema import Resources
from raysim.core import locks
from raysim.core.errors import ClientError, DiskError, UserError
from raysim.core.locks import FolderLock
from raysim.engine import session as module
from raysim.engine.calls import Call
from raysim.engine.pool import Pool
from raysim.engine.session import clean_up
from raysim.ui.display import Display

LISTENING = """
import json, os, sys
from pathlib import Path
import psutil
from ray._private.state import state
from raysim.config.schema import Resources
from raysim.engine.session import Session
ours = []
for number in range(2):  # the second has another token
    with Session(Resources(workers=1)) as session:
        if number == 0:
            session.pool(Resources(workers=1)).call_any(lambda actor, _: actor.where.remote(), "one")
        me = psutil.Process()
        sockets = [c for p in [me, *me.children(recursive=True)] for c in p.net_connections("inet")]
        (folder,) = Path("/tmp").glob(f"raysim-{os.getpid()}-*")
        ours.append({
            "addresses": sorted({c.laddr.ip for c in sockets if c.status == "LISTEN"}),
            "mode": oct(folder.stat().st_mode)[-3:], "token": os.environ["RAY_AUTH_TOKEN"], "where": session.where,
            "commands": [job["Entrypoint"].split()[-1] for job in state.job_table()],
        })
print(json.dumps(ours + [[os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_MODE")]]))
"""


def test_a_ray_started_here_listens_on_loopback_alone_in_a_closed_folder_with_a_token_in_memory(tmp_path: Path):
    """Also where the home directory cannot be written, where Ray would keep its token.  It is told no password."""
    (tmp_path / "file").touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH") and k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING, "tracking.uri=http://me:pa55w0rd@host"],
        env={**environment, "HOME": str(tmp_path / "file" / "home")},
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second, after = json.loads(done.stdout.splitlines()[-1])
    for one in (first, second):
        assert {address.removeprefix("::ffff:") for address in one["addresses"]} == {"127.0.0.1"}
        assert (one["mode"], one["where"]) == ("700", "Ray started on this machine")
        assert one["commands"] == ["tracking.uri=http://***@host"]
    assert first["token"] != second["token"] and after == [None, None]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /tmp."""
    monkeypatch.setattr(module, "_PARENT", tmp_path)
    return tmp_path


def left(folders: Path, name: str) -> Path:
    path = folders / name
    (path / "ray" / "logs").mkdir(parents=True)
    return path


def test_a_folder_is_removed_once_its_lock_is_free_whatever_its_process_id(folders: Path):
    """In a container of its own, a driver that lives has an id that is not there, or that is another's, outside."""
    gone, here = 4_194_300, os.getpid()
    assert not psutil.pid_exists(gone)
    alive, dead = left(folders, f"raysim-{gone}-a"), left(folders, f"raysim-{here}-b")
    other = left(folders, "raysim-test-c")
    with FolderLock(alive):
        clean_up()
        assert alive.exists() and not dead.exists() and other.exists()
    clean_up()
    assert not alive.exists()


def test_a_folder_of_the_users_own_with_such_a_name_stays(folders: Path):
    own = left(folders, "raysim-2-fixes")
    (own / "results").write_text("of a week")
    with (own / "ray" / "logs" / "mine").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    clean_up()
    assert (own / "results").read_text() == "of a week" and process.poll() is None
    process.communicate(b"\n", timeout=60)


def test_the_processes_of_a_driver_that_is_gone_are_ended_with_its_folder(folders: Path):
    stale = left(folders, "raysim-1-a")
    with (stale / "ray" / "logs" / "raylet.out").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    clean_up()
    assert process.wait(timeout=60) == -9 and not stale.exists()


def test_folders_of_other_users_are_neither_touched_nor_waited_for(folders: Path, monkeypatch: pytest.MonkeyPatch):
    stale = left(folders, "raysim-1-a")
    monkeypatch.setattr(module.os, "getuid", lambda: stale.stat().st_uid + 1)
    monkeypatch.setattr(module, "_remove", lambda _: pytest.fail("it was tried"))
    clean_up()
    assert [path.name for path in stale.iterdir()] == ["ray"]


def test_where_there_are_no_locks_no_folder_is_taken_for_a_dead_one(folders: Path, monkeypatch: pytest.MonkeyPatch):
    stale = left(folders, "raysim-1-a")

    def no_locks(*_: object) -> None:
        raise OSError(locks._NO_LOCKS[0], "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    clean_up()
    assert stale.exists()


def test_where_no_folder_can_be_made_the_message_says_which_and_it_is_tried_once(
    folders: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(module, "_PARENT", folders / "gone")
    tried: list[bool] = []
    said = rf"objects in {folders}/gone, where no folder can be made \(No such file or directory\); free space there"
    with (
        pytest.raises(UserError, match=said),
        module.Session(Resources(workers=1), unwanted=lambda: bool(tried.append(True))),
    ):
        pytest.fail("there is no Ray")
    assert not tried


def test_a_folder_that_another_removes_before_it_is_locked_is_made_again(
    folders: Path, monkeypatch: pytest.MonkeyPatch
):
    make, made = module.tempfile.mkdtemp, []

    def taken(**arguments: str) -> str:
        made.append(make(**arguments))
        if len(made) == 1:
            clean_up()
        return made[-1]

    monkeypatch.setattr(module.tempfile, "mkdtemp", taken)
    with contextlib.ExitStack() as stack:
        folder = module._own_folder(stack)
        assert made[1:] == [str(folder)] and folder.stat().st_mode & 0o777 == 0o700
    assert list(folders.iterdir()) == []


# The workers of a session, when a run has failed


def wait_for_all(pool: Pool) -> None:
    while not all(member.ready for member in pool.members.values()):
        pool.call_any(lambda actor, _: actor.where.remote(), "one")


def workers(session: WarmSession, number: int = 2) -> set[str]:
    """The names that Ray has for workers, once all have started and answered, as one may have been killed."""
    pool = session.pool(Resources(workers=number))
    while True:
        wait_for_all(pool)
        _, lost = pool.ask(dict.fromkeys(pool.members, lambda actor: actor.where.remote()))
        if not lost:
            break
    handles: list[Any] = [member.actor for member in pool.members.values()]
    return {handle._actor_id.hex() for handle in handles}


def test_a_failure_of_the_driver_leaves_the_workers_to_the_next_run(
    run: Callable[..., Result], session: WarmSession, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """As when its disk is full after round 1: no worker has caused it, and all of them wait for work.

    One round may be over before the other worker is up, and would have been ended.
    """
    before = workers(session)

    def fails(*_: object) -> None:
        assert session._pool is not None
        wait_for_all(session._pool)
        raise DiskError("no room")

    with monkeypatch.context() as patch, pytest.raises(DiskError, match="no room"):
        patch.setattr(Display, "round", fails)
        run(small)
    assert run(small).summary["status"] == "FINISHED"
    assert workers(session) == before


def test_a_failure_of_a_client_or_while_a_worker_is_busy_ends_the_workers(session: WarmSession):
    before = workers(session, 1)
    session.after_failure(ClientError(3, 2, "no luck"))
    after = workers(session, 1)
    assert not before & after
    next(iter(session.pool(Resources(workers=1)).members.values())).chunks.append(Call([]))
    session.after_failure(ValueError())
    assert not after & workers(session, 1)


def test_workers_of_an_earlier_run_find_a_plugin_whose_folder_was_added_since(
    run: Callable[..., Result], session: WarmSession, small: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    before = workers(session)
    (tmp_path / "of_a_later_folder.py").write_text("from raysim.local.sgd import sgd\n\n\nclass mine(sgd):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(small, local={"name": "of_a_later_folder:mine"}).summary["status"] == "FINISHED"
    assert workers(session) == before
