"""A process of raysim's own beside the driver, and the connection to it."""

import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

NICENESS = 19  # of a process that takes what the workers leave of the processors; Ray gives workers 15
END_S = 5.0  # seconds that a process has to end by itself


def start_beside(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start `python -m MODULE FD`, where FD is the file descriptor of its end of a connection; returns both.

    Signals that a terminal sends do not reach the process.  It stays in the driver's session, as Linux shares
    processors out by session first; it sees the end of its connection when the driver ends, in whichever way.
    """
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], process_group=0, stdout=subprocess.DEVNULL
        )
    return process, ours


def end_beside(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process whose connection is closed has ended; kill one that takes longer than END_S."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
