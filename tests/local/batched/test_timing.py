"""A local step is timed at the shapes of the run, alone and at once, and leaves the model as it was."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

from raysim.local.batched.on_gpu import VmapTrainer
from raysim.local.batched.timing import median_s, step_s, steps_of
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

SCALE, SHAPE = ImageScale((0.5,), (0.25,)), (1, 8, 8)


class Clock:
    """Stands still but for the work that is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: Iterator[float]) -> Callable[[], None]:
        def once() -> None:
            self.now += next(seconds)

        return once


def test_the_median_is_taken_after_what_loads():
    """3 s: 9 s of loading are enough; then 1, 5 and 1 s, of which the median is 1, until 3 s are over."""
    clock = Clock()
    assert median_s(clock.work(iter([9.0, 1.0, 1.0, 5.0])), 3.0, clock) == 1.0
    assert clock.now == 16.0


def test_slow_work_is_done_once_to_load_and_once_to_time():
    clock = Clock()
    assert median_s(clock.work(iter([70.0, 60.0])), 0.5, clock) == 60.0


def ticks() -> Callable[[], float]:
    """A second later whenever it is looked at: any work takes one."""
    counted = count()
    return lambda: float(next(counted))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("local", "n", "steps"),
    [(sgd(batch_size=4), 10, 3), (sgd(batch_size=4, epochs=2), 10, 6), (sgd(batch_size=4, steps=2), 100, 2),
     (sgd(batch_size=4, epochs=9, momentum=0.9), 1000, 10)],
)
def test_a_step_takes_what_a_client_takes_by_its_steps(local: sgd, n: int, steps: int, at_once: bool):
    torch.manual_seed(0)
    model = FlatModel(architectures.cnn(1, (8, 8), 10, width=4, hidden=8))
    before = model.params_P.clone()
    trainer = VmapTrainer(model, local, SCALE, False, 8)
    assert step_s(trainer, n, SHAPE, 3.0, at_once=at_once, clock=ticks()) == pytest.approx(1 / steps)
    assert torch.equal(model.params_P, before)


def test_steps_are_those_of_the_local_loop():
    assert steps_of(sgd(batch_size=10, epochs=3), 25) == 9
    assert steps_of(sgd(batch_size=10, steps=7), 25) == 7
