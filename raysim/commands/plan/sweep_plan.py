"""What a whole sweep would cost: images, steps, time and disk of all its runs, before any of them starts."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from raysim.commands.plan.speed import Speed, bytes_per_image, measure
from raysim.commands.plan.table import size
from raysim.commands.plan.training import TrainingSpeed, local_steps
from raysim.commands.plan.training import measure as measure_training
from raysim.commands.sweep.grid import read_sweep
from raysim.config.schema import Config
from raysim.core.records import IntArray
from raysim.core.secrets import plain_without_secrets
from raysim.federation.cohort import cohort_size
from raysim.lifecycle.inputs import Inputs
from raysim.lifecycle.prepare import Prepared
from raysim.ui.display import duration

START_S = 10.0  # until the first run of a sweep begins, and from the end of the last one: Ray, torch, MLflow
RUN_S = 0.5  # what a run takes beside images, rounds and evaluations,
ROUND_S = 0.02  # and a round, of a few clients: messages, sums, a checkpoint now and then


@dataclass(frozen=True)
class CellPlan:
    """One run of a sweep.

    images: how many its clients get.  new_images: those that no run before it has made.  steps: local steps of a round,
    the mean where not all clients take part.  rounds: how many.  generation_s, training_s: estimated; None where they
    were not measured.
    """

    name: str
    images: int
    new_images: int
    steps: float
    rounds: int
    generation_s: float | None
    training_s: float | None


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, in their order.  image_bytes: of one image in the cache; None for data without images."""

    cells: list[CellPlan]
    image_bytes: int | None
    notes: list[str]

    @property
    def new_images(self) -> int:
        """Distinct images of all runs."""
        return sum(cell.new_images for cell in self.cells)

    @property
    def generation_s(self) -> float | None:
        """Estimated seconds to make the distinct images; None where they were not measured."""
        return _sum([cell.generation_s for cell in self.cells])

    @property
    def training_s(self) -> float | None:
        """Estimated seconds of all rounds and evaluations; None where they were not measured."""
        return _sum([cell.training_s for cell in self.cells])

    @property
    def around_s(self) -> float:
        """Seconds of everything else: the start and the end of the sweep, what each run and each round adds."""
        return START_S + sum(RUN_S + ROUND_S * cell.rounds for cell in self.cells)

    @property
    def total_s(self) -> float | None:
        """Estimated seconds of the whole sweep; None where they were not measured."""
        return _sum([self.generation_s, self.training_s, self.around_s])

    def as_json(self) -> str:
        """The plan as one JSON object, with secrets masked."""
        plain = {
            "runs": [vars(cell) for cell in self.cells], "new_images": self.new_images, "image_bytes": self.image_bytes,
            "generation_s": self.generation_s, "training_s": self.training_s, "total_s": self.total_s,
            "notes": self.notes,
        }  # fmt: skip
        return json.dumps(plain_without_secrets(plain), indent=2)


def plan_sweep(
    file: str | Path, overrides: Iterable[str] = (), *, measure_speed: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> SweepPlan:
    """Plan every run of a sweep file; images in the cache count as not yet made.

    measure_speed: time a batch of each generator and a few steps of each kind of training.  say: told of code that the
    file names, before it runs.  Raises ConfigError or UserError for input that cannot work in any run.
    """
    grid = read_sweep(file, overrides, say)
    made: dict[str, IntArray] = {}
    inputs = Inputs()
    speeds: dict[str, Speed] = {}
    trainings: dict[str, TrainingSpeed] = {}
    cells = []
    unforeseen = []
    for cell in grid.cells:
        config = cell.config
        prepared = inputs.prepare(config)
        dataset = prepared.dataset
        new = _new_images(config, prepared, made)
        unforeseen.append(prepared.foreseen is None)
        speed = training = None
        if measure_speed:
            if new:
                if (key := _key(config, "data", "generator", "resources")) not in speeds:
                    speeds[key] = measure(config, dataset)
                speed = speeds[key]
            key = _key(config, "data", "model", "local", "aggregation", "server", "resources")
            if key not in trainings:
                trainings[key] = measure_training(config, dataset)
            training = trainings[key]
        quota_KC = prepared.quota_KC if prepared.foreseen is None else prepared.foreseen.quota_KC
        sizes_K = prepared.partition.sizes_K + quota_KC.sum(axis=1)
        part = cohort_size(config.clients_per_round, len(sizes_K)) / len(sizes_K)
        cells.append(
            CellPlan(
                cell.name, prepared.images, new, part * float(local_steps(config, sizes_K).sum()), config.rounds,
                (speed.seconds(new) if speed else 0.0 if measure_speed else None),
                training.seconds(config, dataset, sizes_K, prepared.schedule) if training else None,
            )
        )
    measured = [*(s.note for s in speeds.values()), *(t.note for t in trainings.values())]
    notes = [*grid.notes, *dict.fromkeys(measured)]
    if any(unforeseen):
        notes.append("steps and times of runs whose policy looks at training are those before its first images")
    return SweepPlan(cells, bytes_per_image(inputs.dataset(grid.cells[0].config)), notes)


def print_sweep_plan(planned: SweepPlan, stream: TextIO | None = None) -> None:
    """Print a line for each run, and the sums."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream or sys.stdout, markup=False, highlight=False, emoji=False)
    console.width = console.width if console.is_terminal else 120
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for heading in ("images", "new", "steps a round", "images take", "rounds take"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in planned.cells:
        table.add_row(
            cell.name, f"{cell.images:,}", f"{cell.new_images:,}", f"{cell.steps:,.0f}", _time(cell.generation_s),
            _time(cell.training_s),
        )
    images_s, rounds_s = planned.generation_s, planned.training_s
    table.add_row(f"{len(planned.cells)} runs", "", f"{planned.new_images:,}", "", _time(images_s), _time(rounds_s))
    console.print(table)
    if planned.total_s is not None:
        around = duration(planned.around_s)
        console.print(f"in all {duration(planned.total_s)} on this machine, {around} of it around images and rounds")
    if planned.image_bytes is not None:
        console.print(f"images take {size(planned.new_images * planned.image_bytes)} of the cache; new: those that no "
                      "run before has made")
    for note in planned.notes:
        console.print(note)


def _new_images(config: Config, prepared: Prepared, made: dict[str, IntArray]) -> int:
    """How many images of a run no run before it has made; `made`, by generator and seed, takes them in.

    All images of a policy that decides during training count as new.
    """
    if prepared.foreseen is None:
        return prepared.images
    quota_KC = prepared.foreseen.to_make_KC
    key = f"{_key(config, 'generator', 'data', seed=config.seed)}{' pool' * prepared.allocation.shared}"
    before_KC = made.get(key, np.zeros((0, quota_KC.shape[1]), dtype=np.int64))
    K = max(len(before_KC), len(quota_KC))
    before_KC, wanted_KC = (np.pad(a, ((0, K - len(a)), (0, 0))) for a in (before_KC, quota_KC))
    made[key] = np.maximum(before_KC, wanted_KC)
    return int((made[key] - before_KC).sum())


def _key(config: Config, *sections: str, seed: int | None = None) -> str:
    plain = config.resolved()
    return json.dumps([seed, *(plain[section] for section in sections)], sort_keys=True)


def _sum(seconds: list[float | None]) -> float | None:
    known = [s for s in seconds if s is not None]
    return sum(known) if len(known) == len(seconds) else None


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
