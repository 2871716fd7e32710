"""Whatever dies, however often: the same bits. Run with `python -m pytest -m slow`."""

import os
import random
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from processes import Killer, Outcome, finish, run, start

from raysim.generation.image_cache import entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def job(folder: Path, rule: str, rounds: int = 30) -> dict[str, Any]:
    """30 rounds on all digits, some hundreds of generated images, no cache: about half a minute on 2 cores."""
    return {
        "rounds": rounds,
        "clients_per_round": 8,
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.1, "min_samples": 5},
        "allocation": {"name": "fedeas", "total": 400},
        "generator": {"name": "ddpm", "weights": "digits", "steps": 20},
        "local": {"name": "sgd", "epochs": 8, "lr": 0.02},
        "aggregation": {"name": rule},
        "resources": {"workers": 2},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
        "output": {"dir": str(folder / "runs"), "checkpoint_every": 2, "cache": None},
    }


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.hashes == other.hashes
    pd.testing.assert_frame_equal(one.metrics, other.metrics, check_exact=True)


@pytest.mark.parametrize("rule", ["fedavg", "fedoui"])
def test_twenty_killed_workers_change_no_bit_and_cost_at_most_the_time_again(tmp_path: Path, rule: str):
    """One every second or two; forty would cost more: a new worker takes 2 s of CPU time, mostly to import torch."""
    calm = run(job(tmp_path / "calm", rule), tmp_path / "calm")
    began = time.monotonic()
    config = job(tmp_path / "chaos", rule) | {"resources": {"workers": 2, "max_retries": 20}}
    process = start(config, tmp_path / "chaos")
    killer = Killer(process.pid, interval_s=1.6, most=20)
    killer.start()
    chaos = finish(process, tmp_path / "chaos", began)
    print(f"{rule}: calm {calm.seconds:.1f} s, {len(killer.kills)} kills {chaos.seconds:.1f} s; {killer.kills}")
    assert len(killer.kills) >= 15
    assert any("generate" in title for title in killer.kills) or chaos.summary["n_synthetic_made"]
    assert_same(chaos, calm)
    assert chaos.seconds <= 2 * calm.seconds


@pytest.mark.parametrize("rule", ["fedavg", "fedoui"])
def test_a_driver_killed_ten_times_and_resumed_is_a_run_undisturbed(tmp_path: Path, rule: str):
    """SIGKILL at random moments, every other one after a further round; one MLflow run, each round once."""
    rounds = 60
    calm = run(job(tmp_path / "calm", rule, rounds), tmp_path / "calm")
    folder, chance = tmp_path / "killed", random.Random(1)
    config = job(folder, rule, rounds)
    config["output"]["cache"] = str(folder / "cache")
    process, families = start(config, folder), []
    for i in range(10):
        done = last_round(folder)
        while i % 2 and process.poll() is None and last_round(folder) == done:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 3) if i % 2 else chance.uniform(3, 15))
        assert process.poll() is None, "the run ended before it was killed ten times; give it more rounds"
        families += psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resumable = list((folder / "runs").glob("*/run.json"))
        process = start(config, folder, *(["--resume"] if resumable else []))
    began = time.monotonic()
    resumed = finish(process, folder, began)
    assert_same(resumed, calm)
    assert not psutil.wait_procs(families, timeout=60)[1]
    assert len(list((folder / "runs").iterdir())) == 1
    with sqlite3.connect(folder / "mlflow.db") as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        steps = [s for (s,) in store.execute("select step from metrics where key = 'train_loss' order by step")]
    assert steps == list(range(1, rounds + 1))


def test_a_driver_killed_in_mid_generation_makes_nothing_twice_after_the_resume(tmp_path: Path):
    """What was in the cache when it was killed is taken from there; the images are those of an undisturbed run."""
    calm = run(job(tmp_path / "calm", "fedavg", 1), tmp_path / "calm")
    folder = tmp_path / "killed"
    config = job(folder, "fedavg", 1)
    config["output"]["cache"] = str(folder / "cache")
    process = start(config, folder)
    while not list((folder / "cache").glob("*/*/*.seg")):
        assert process.poll() is None, "the images were all made before it could be killed"
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family, timeout=120)
    (entry,) = entries(folder / "cache")
    began = time.monotonic()
    resumed = finish(start(config, folder, "--resume"), folder, began)
    assert 0 < entry.images < resumed.summary["n_synthetic"]
    assert resumed.summary["n_synthetic_made"] == resumed.summary["n_synthetic"] - entry.images
    assert_same(resumed, calm)
    assert entries(folder / "cache")[0].images == resumed.summary["n_synthetic"]


def test_memory_is_flat_over_200_rounds(tmp_path: Path):
    """Resident memory of every process after round 195 is within 5 % of after round 20.

    But for Ray's node manager, small and slow to fill its caches: 30 MB at round 20, 34 MB from round 600 to 800.
    """
    config = job(tmp_path, "fedoui", rounds=200)
    config |= {"allocation": {"name": "none"}, "local": {"name": "sgd", "epochs": 1, "lr": 0.02}}
    process = start(config, tmp_path)
    sizes: dict[int, dict[int, int]] = {}
    raylets: set[int] = set()

    def look(round_: int) -> None:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        sizes[round_] = {p.pid: p.memory_info().rss for p in family if p.is_running()}
        raylets.update(p.pid for p in family if p.name() == "raylet")

    for wanted in (20, 195):
        while process.poll() is None and last_round(tmp_path) < wanted:
            time.sleep(0.02)
        look(wanted)
    finish(process, tmp_path, time.monotonic())
    growth = {pid: sizes[195][pid] / size for pid, size in sizes[20].items() if pid in sizes[195]}
    print({pid: (sizes[20][pid] >> 20, sizes[195][pid] >> 20) for pid in growth})
    assert set(sizes[20]) == set(sizes[195])
    assert max(grown for pid, grown in growth.items() if pid not in raylets) < 1.05
    assert all(sizes[195][pid] - sizes[20][pid] < 4 * 2**20 for pid in raylets)


def last_round(folder: Path) -> int:
    lines = [line for line in (folder / "output.txt").read_text().splitlines() if line.startswith("round ")]
    return int(lines[-1].split()[1].split("/")[0]) if lines else 0
