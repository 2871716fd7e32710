"""Local algorithms that misbehave on purpose, found by their dotted names as a user's would be."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from raysim.local.contract import Job
from raysim.local.sgd import sgd


@dataclass
class raises(sgd):
    """Client 3 raises in round 2."""

    def start(self, job: Job) -> None:
        if (job.client, job.round) == (3, 2):
            raise ZeroDivisionError("no luck today")


@dataclass
class hangs(sgd):
    """Client 3 never ends in round 2."""

    def start(self, job: Job) -> None:
        if (job.client, job.round) == (3, 2):
            time.sleep(600)


@dataclass
class dies(sgd):
    """Client 3 takes its process down in round 2, as often as the file has lines left to give."""

    lives: str = ""

    def finish(self, job: Job) -> None:
        if (job.client, job.round) != (3, 2):
            return
        file = Path(self.lives)
        left = int(file.read_text())
        if left > 0:
            file.write_text(str(left - 1))
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class diverges(sgd):
    """Client 3 returns a model that is not a number in round 2."""

    def finish(self, job: Job) -> None:
        if (job.client, job.round) == (3, 2):
            job.model.params_P.fill_(float("nan"))


def by_square_of_size(table):
    """An aggregation rule that is a plain function."""
    return table.n_K.astype(float) ** 2


@dataclass
class slow_in_one_process(sgd):
    """Plain SGD, whose clients each take `seconds` longer in the process that trains the first of them.

    folder: where that process leaves its number.
    """

    folder: str = ""
    seconds: float = 0.2

    def start(self, job: Job) -> None:
        """Wait, in the slow process."""
        owner = Path(self.folder) / "slow"
        with contextlib.suppress(FileExistsError), owner.open("x") as file:
            file.write(str(os.getpid()))
        if owner.read_text() == str(os.getpid()):
            time.sleep(self.seconds)
