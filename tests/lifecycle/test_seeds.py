"""One seed for everything, or the partition and the initial model held fixed while the rest of the run moves."""

import numpy as np
import pytest

from raysim.commands.plan.plan import plan
from raysim.config.load import load_config
from raysim.core.errors import UserError
from raysim.core.records import ClientTask
from raysim.engine.client_runner import ClientRunner
from raysim.lifecycle.build import build_components, initial_model, worker_setup
from raysim.lifecycle.prepare import load_dataset, make_partition, prepare
from raysim.models.flat_model import FlatModel

BASE = {"data": {"name": "digits", "train_samples": 300, "test_samples": 100}, "rounds": 1, "model": {"name": "linear"}}
NOISY = (
    "partition={name: dirichlet, alpha: 1, clients: 5, rare: {fraction: 0.4, max_samples: 20}, "
    "label_noise: {fraction: 0.4}, input_noise: {fraction: 0.6}}"
)


def partition_sha256(*overrides: str) -> str:
    config = load_config(BASE, [NOISY, *overrides])
    return make_partition(config, load_dataset(config)).sha256()


def parameters(*overrides: str) -> np.ndarray:
    config = load_config(BASE, overrides)
    return initial_model(config, prepare(config)).params_P.detach().numpy().copy()


@pytest.mark.parametrize("stream", ["raysim", "numpy"])
def test_a_partition_with_a_seed_of_its_own_stays_while_the_seed_of_the_run_moves(stream):
    numbers = f"partition.stream={stream}"
    held = {partition_sha256(numbers, "partition.seed=7", f"seed={s}") for s in (0, 1)}
    assert held == {partition_sha256(numbers, "seed=7")}
    assert len({partition_sha256(numbers, f"partition.seed={s}") for s in (0, 1)}) == 2


def test_an_initial_model_with_a_seed_of_its_own_stays_while_the_seed_of_the_run_moves():
    held = [parameters("model.seed=7", f"seed={s}") for s in (0, 1)]
    assert np.array_equal(held[0], held[1]) and np.array_equal(held[0], parameters("seed=7"))
    assert not np.array_equal(parameters("model.seed=0"), parameters("model.seed=1"))


def test_each_moves_while_the_other_is_held():
    assert partition_sha256("seed=3") == partition_sha256("seed=3", "model.seed=9")
    assert np.array_equal(parameters("seed=3"), parameters("seed=3", "partition.seed=9"))


def worker(*overrides: str) -> tuple[ClientRunner, FlatModel]:
    """What a worker makes of a configuration, and the driver's initial model."""
    config = load_config(load_config(BASE, [NOISY]).resolved(), overrides)
    prepared = prepare(config)
    setup = worker_setup(config, build_components(config, prepared).rule)
    return ClientRunner(setup, prepared.dataset, prepared.partition, "cpu"), initial_model(config, prepared)


@pytest.mark.parametrize("override", ["seed=5", "model.seed=5", "partition.seed=5"])
def test_a_worker_builds_the_drivers_initial_model(override):
    runner, model = worker(override)
    assert np.array_equal(runner.model.params_P.detach(), model.params_P.detach())


def test_the_noise_on_a_clients_images_goes_with_the_partition():
    """Client 0's images, its noise included, are the same under two seeds, and others under another partition seed."""

    def images(*overrides: str) -> bytes:
        runner, model = worker("partition.input_noise.fraction=1", *overrides)
        runner.start_from(1, model.state())
        return runner.load(ClientTask(0, 1))[0].images.tobytes()

    assert images("partition.seed=5", "seed=1") == images("partition.seed=5", "seed=2") == images("seed=5")
    assert images("seed=1") != images("seed=1", "partition.seed=5")


def test_the_seeds_of_a_plan_are_those_of_the_partition():
    """--seeds 0-1 shows two partitions also where partition.seed holds the run's own fixed."""
    counts = {"data": {"name": "labels", "counts": [50, 50]}, "rounds": 1}
    free = plan(counts, ["allocation.name=full"], seeds="0-1", measure_speed=False).seeds
    held = plan(counts, ["allocation.name=full", "partition.seed=9"], seeds="0-1", measure_speed=False).seeds
    assert free is not None and held is not None
    assert free.images["full"].tolist() == held.images["full"].tolist()
    assert len(set(free.images["full"].tolist())) == 2


def test_a_seed_that_numpy_cannot_take_is_refused_by_its_own_name():
    with pytest.raises(UserError, match=r"^partition\.seed = 4294967296: partition\.stream = numpy takes seeds below"):
        partition_sha256("partition.stream=numpy", f"partition.seed={2**32}")
