"""Whether the Ray on this machine is still there: without it, Ray would end the driver's process without a word."""

from pathlib import Path

from raysim.core.errors import RayLost, RunError, UserError
from raysim.engine.ray_private import dead_process, raylet_socket

_SOCKETS = Path("/proc/net/unix")


def lost_part() -> str:
    """The process of Ray that has died, of those that this driver cannot do without; empty if there is none.

    Asks no process: a Ray started here is known by its children, one that was joined by the raylet's socket (on Linux).
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
    """What went wrong: `error`, or RayLost where the death of Ray shows as an error of another kind."""
    if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
        try:
            check_ray()
        except RayLost as lost:
            return lost
    return error
