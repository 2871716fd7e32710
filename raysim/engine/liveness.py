"""Whether the Ray on this machine is still alive; without this check Ray would end the driver without any message."""

from pathlib import Path

from raysim.core.errors import RayLost, RunError, UserError
from raysim.engine.ray_private import dead_process, raylet_socket

_SOCKETS = Path("/proc/net/unix")


def lost_part() -> str:
    """The name of a process of Ray that this driver needs and that has died; empty if there is none.

    No process is asked: for a Ray that this driver started its child processes are checked, for one that it joined the
    raylet's socket (on Linux).
    """
    dead = dead_process()
    if dead:
        return dead
    socket = raylet_socket()
    if not socket or not _SOCKETS.exists():
        return ""
    return "" if socket in _SOCKETS.read_text(encoding="utf-8", errors="replace") else "raylet"


def check_ray() -> None:
    """Raise RayLost if the Ray on this machine has died."""
    part = lost_part()
    if part:
        raise RayLost(
            f"Ray on this machine has died: its process {part} is gone (killed by someone, or by the system for lack "
            "of memory). What was saved is kept: the same command with --resume goes on from there"
        )


def cause_of(error: BaseException) -> BaseException:
    """Return `error`, or RayLost where Ray has died and `error` is a consequence of that."""
    if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
        try:
            check_ray()
        except RayLost as lost:
            return lost
    return error
