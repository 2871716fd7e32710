"""Runs of the command line in processes of their own, and ways to hurt them."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import yaml


@dataclass
class Outcome:
    """What a run left behind."""

    directory: Path
    summary: dict[str, Any]
    metrics: pd.DataFrame
    seconds: float
    output: str

    @property
    def hashes(self) -> tuple[str, str]:
        return self.summary["model_sha256"], self.summary["synthetic_sha256"]


def start(config: dict[str, Any], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `python -m raysim run` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "raysim", "run", str(path), *arguments],
            stdout=output, stderr=subprocess.STDOUT, text=True, cwd=folder,
        )


def finish(process: subprocess.Popen[str], folder: Path, began: float, timeout_s: float = 600) -> Outcome:
    """Wait for a run that must succeed."""
    process.wait(timeout=timeout_s)
    output = (folder / "output.txt").read_text()
    assert process.returncode == 0, output
    directory = Path(output.rstrip().splitlines()[-1])
    metrics = pd.read_parquet(directory / "metrics.parquet")
    summary = json.loads((directory / "summary.json").read_text())
    metrics = metrics[[column for column in metrics if not column.startswith("seconds")]]
    return Outcome(directory, summary, metrics, time.monotonic() - began, output)


def run(config: dict[str, Any], folder: Path, *arguments: str) -> Outcome:
    """A whole run, undisturbed."""
    began = time.monotonic()
    return finish(start(config, folder, *arguments), folder, began)


def workers(driver: int) -> list[psutil.Process]:
    """The worker actors of a driver, by process title."""
    found = []
    for child in psutil.Process(driver).children(recursive=True):
        try:
            if child.cmdline() and child.cmdline()[0].startswith("ray::Worker"):
                found.append(child)
        except psutil.Error:
            continue
    return found


class Killer(threading.Thread):
    """Kills a random worker of a driver with SIGKILL every `interval_s` seconds, up to `most` times."""

    def __init__(self, driver: int, interval_s: float, most: int, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.driver, self.interval_s, self.most = driver, interval_s, most
        self.kills: list[str] = []
        self._random = random.Random(seed)

    def run(self) -> None:
        while len(self.kills) < self.most and psutil.pid_exists(self.driver):
            time.sleep(self.interval_s * self._random.uniform(0.5, 1.5))
            try:
                alive = workers(self.driver)
                if alive:
                    victim = self._random.choice(alive)
                    title = victim.cmdline()[0]
                    os.kill(victim.pid, signal.SIGKILL)
                    self.kills.append(title)
            except (psutil.Error, ProcessLookupError, IndexError):
                continue
