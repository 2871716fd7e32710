"""How many workers fit is arithmetic, done before anything starts."""

import pytest

from raysim.core.errors import UserError
from raysim.engine.placement import Node, Placement, place

TWO_GPUS = [Node("here", 16, 2)]
NO_GPU = [Node("here", 4, 0)]


def test_fractions_pack_within_a_gpu_never_across():
    """floor(1 / 0.4) = 2 a GPU, so 2 GPUs hold 4 workers; a fifth would need 0.2 of each, and wait for ever."""
    assert place(TWO_GPUS, "auto", 0.4) == Placement(4, 0.4)
    with pytest.raises(UserError, match=r"resources.workers = 5.*floor\(1 / 0.4\) = 2, so 4 fit.*at most 4"):
        place(TWO_GPUS, 5, 0.4)


@pytest.mark.parametrize(("share", "fit"), [(1.0, 2), (0.5, 4), (1 / 3, 6), (0.1, 20), (2.0, 1)])
def test_auto_fills_the_gpus(share: float, fit: int):
    assert place(TWO_GPUS, "auto", share).workers == fit


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
