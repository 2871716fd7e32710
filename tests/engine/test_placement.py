"""How many workers fit is arithmetic, done before anything starts."""

import pytest

from raysim.config.schema import Resources
from raysim.core.errors import UserError
from raysim.engine.placement import Node, Placement, crowding, place

TWO_GPUS = [Node("here", 16, 2)]
NO_GPU = [Node("here", 4, 0)]


def test_fractions_pack_within_a_gpu_never_across():
    """floor(1 / 0.4) = 2 a GPU, so 2 GPUs hold 4 workers; a fifth would need 0.2 of each, and wait for ever."""
    assert place(TWO_GPUS, "auto", 0.4) == Placement(4, 0.4)
    with pytest.raises(UserError, match=r"resources.workers = 5.*floor\(1 / 0.4\) = 2, so 4 fit.*at most 4"):
        place(TWO_GPUS, 5, 0.4)


@pytest.mark.parametrize(("fraction", "fit"), [(1.0, 2), (0.5, 4), (1 / 3, 6), (1 / 6, 12), (0.1, 20), (2.0, 1)])
def test_auto_fills_the_gpus(fraction: float, fit: int):
    """Where there are cores enough."""
    assert place([Node("here", 32, 2)], "auto", fraction).workers == fit


def test_auto_takes_no_more_workers_with_a_gpu_than_there_are_cores_and_memory_for():
    """floor(1 / 0.0375) = 26 on a GPU, but 2 cores hold 2; 16 cores hold 16; 6 GB hold 6 / 1.5 = 4."""
    assert place([Node("n", 2, 1)], "auto", 0.0375).workers == 2
    assert place([Node("n", 16, 1)], "auto", 0.0375).workers == 16
    assert place([Node("n", 32, 1)], "auto", 0.0375).workers == 26
    assert place([Node("n", 16, 1, memory_bytes=6_000_000_000)], "auto", 0.0375).workers == 4
    with pytest.raises(UserError, match=r"no node has 1\.5 GB of memory for a worker with a GPU"):
        place([Node("n", 16, 1, memory_bytes=1_000_000_000)], "auto", 1.0)


def test_workers_with_a_gpu_beyond_the_cores_need_to_be_allowed():
    """20 fit on the two GPUs, 16 on the cores."""
    with pytest.raises(UserError, match=r"workers = 20 .*room for 20, but each worker takes a CPU core too, so 16 fit"):
        place(TWO_GPUS, 20, 0.1)
    assert place(TWO_GPUS, 20, 0.1, more_than_cores=True).workers == 20
    small = [Node("here", 2, 1, memory_bytes=16_000_000_000)]
    said = r"workers = 20: .*1\.5 GB.* take 30 GB, and there are 16 GB.*at most 10; .* 2,"
    with pytest.raises(UserError, match=said):
        place(small, 20, 0.05, more_than_cores=True)


@pytest.mark.parametrize(("threads", "fit"), [(1, 16), (7, 2), (8, 2), (9, 1), (16, 1)])
def test_a_worker_takes_as_many_cores_as_it_has_threads(threads: int, fit: int):
    """floor(16 / threads), with or without a GPU."""
    assert place([Node("here", 16, 0)], "auto", 0, threads=threads).workers == fit
    assert place([Node("here", 16, 1)], "auto", 0.01, threads=threads).workers == fit


def test_more_threads_than_any_node_has_cores_are_refused_unless_workers_are_asked_for_by_number():
    for nodes in (NO_GPU, [Node("here", 4, 1)]):
        with pytest.raises(UserError, match=r"threads_per_worker = 7: no node has that many.*at most 4"):
            place(nodes, "auto", "auto", more_than_cores=True, threads=7)
    assert place(NO_GPU, 1, 0, more_than_cores=True, threads=7).workers == 1
    with pytest.raises(UserError, match=r"workers = 2: each worker takes 3 CPU cores \(resources.threads.*at most 1"):
        place(NO_GPU, 2, 0, threads=3)


@pytest.mark.parametrize("fraction", [0.00001, 0.000099])
def test_a_share_that_ray_cannot_count_is_refused(fraction: float):
    with pytest.raises(UserError, match=r"gpus_per_worker = .*Ray counts a GPU in units of 0\.0001; give at least"):
        place(TWO_GPUS, "auto", fraction)


@pytest.mark.parametrize(
    ("gpus", "workers", "fraction"), [(2, 3, 0.5), (2, 5, 0.3333), (1, 6, 0.1666), (4, 4, 1.0), (4, 3, 1.0)]
)
def test_auto_share_finds_the_largest_that_has_room_for_the_workers(gpus: int, workers: int, fraction: float):
    """3 on 2 GPUs: 2 on one and 1 on the other.  1/6 is 0.1666 of Ray's units: six times 0.1667 would be 1.0002."""
    assert place([Node("here", 16, gpus)], workers, "auto") == Placement(workers, fraction)


def test_whole_gpus_come_from_one_node():
    """Three nodes of one GPU hold no worker that needs two."""
    with pytest.raises(UserError, match="no node has that many GPUs"):
        place([Node(f"n{i}", 4, 1) for i in range(3)], "auto", 2.0)
    assert place([Node("a", 4, 5), Node("b", 4, 2)], "auto", 2.0).workers == 3


def test_a_share_above_one_must_be_whole():
    with pytest.raises(UserError, match="whole numbers"):
        place(TWO_GPUS, "auto", 1.5)


def test_a_gpu_share_without_a_gpu_is_refused_by_name():
    with pytest.raises(UserError, match=r"resources.gpus_per_worker = 0.5: no GPU was found.*set it to 0"):
        place(NO_GPU, "auto", 0.5)


def test_auto_share_takes_the_cpu_where_there_is_no_gpu():
    assert place(NO_GPU, "auto", "auto") == Placement(4, 0.0)
    assert place(NO_GPU, "auto", "auto").device == "cpu"
    assert place(TWO_GPUS, "auto", "auto") == Placement(2, 1.0)
    assert place(TWO_GPUS, 4, "auto") == Placement(4, 0.5)


def test_a_share_of_zero_is_the_cpu_even_beside_a_gpu():
    assert place(TWO_GPUS, "auto", 0) == Placement(16, 0.0)
    assert place(TWO_GPUS, "auto", 0).device == "cpu"


def test_cpu_workers_beyond_the_cores_need_to_be_allowed():
    assert place(NO_GPU, 9, 0, more_than_cores=True).workers == 9
    with pytest.raises(UserError, match=r"resources.workers = 9.*there are 4"):
        place(NO_GPU, 9, 0)


def test_cpu_workers_that_the_memory_cannot_hold_are_refused_with_the_arithmetic():
    """10 GB hold floor(10 / 0.4) = 25 workers; as many as there are cores are never refused."""
    here = [Node("here", 2, 0, memory_bytes=10_000_000_000)]
    assert place(here, 25, 0, more_than_cores=True).workers == 25
    said = r"workers = 100: .*0\.4 GB.* take 40 GB, and there are 10 GB and 2 cores; .*at most 25;"
    with pytest.raises(UserError, match=said):
        place(here, 100, 0, more_than_cores=True)
    assert place([Node("many", 64, 0, memory_bytes=10_000_000_000)], 64, 0, more_than_cores=True).workers == 64
    assert place([Node("unknown", 2, 0)], 100, 0, more_than_cores=True).workers == 100


def test_more_threads_than_cores_are_said_with_the_numbers_that_fit():
    """7 threads for each of 2 workers on 2 cores; one thread for each of 2 workers on 5 cores fits."""
    (note,) = crowding(Placement(2, 0.0), Resources(threads_per_worker=7), Node("this machine", 2, 0))
    assert "2 workers of 7 threads each share 2 cores" in note and "workers=2 threads_per_worker=1" in note
    assert crowding(Placement(2, 0.0), Resources(threads_per_worker=1), Node("this machine", 5, 0)) == []
