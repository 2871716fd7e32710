"""The process beside the driver: what it answers, what it leaves in the object store, and what if it fails."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysim.config.schema import Resources
from raysim.core.errors import RunError
from raysim.engine.beside import Beside
from raysim.engine.object_store import get


def beside(own_process: bool, **limits: Any) -> Beside:
    import ray

    here = ray.get_runtime_context().get_node_id()
    return Beside(SimpleNamespace(here=here, resources=Resources(**limits)), own_process)  # type: ignore[arg-type]


def test_a_value_stays_in_the_store_and_the_driver_need_not_hold_it(ray_here: None):
    """Once in a process of its own and once here, from an array that is in the store already."""
    import ray

    def double(several: list[Any]) -> tuple[int, np.ndarray]:
        return os.getpid(), np.concatenate([ray.get(one) for one in several]) * 2

    array = np.arange(50_000)
    for own_process in (True, False):
        pid, value = beside(own_process).call(double, [ray.put(array), ray.put(array)])
        assert (pid != os.getpid()) == own_process
        assert np.array_equal(get(value), np.concatenate([array, array]) * 2)


def test_a_process_that_dies_is_replaced_and_one_that_always_dies_ends_the_run(ray_here: None, tmp_path: Path):
    def dies(times: int, folder: Path) -> tuple[str, None]:
        before = len(list(folder.iterdir()))
        (folder / str(before)).touch()
        if before < times:
            os._exit(1)
        return f"call {before + 1}", None

    for name in ("once", "always"):
        (tmp_path / name).mkdir()
    assert beside(True, max_retries=1).call(dies, 1, tmp_path / "once")[0] == "call 2"
    with pytest.raises(RunError, match=r"the process that keeps the driver's images failed; the last time .*died"):
        beside(True, max_retries=1).call(dies, 9, tmp_path / "always")
    assert len(list((tmp_path / "always").iterdir())) == 2


def test_what_a_function_raises_and_one_that_takes_too_long_end_the_run_with_a_message(ray_here: None):
    def fails() -> Any:
        raise MemoryError("no room")

    with pytest.raises(RunError, match=r"the driver's images: MemoryError: no room.*memory is full"):
        beside(True).call(fails)
    with pytest.raises(RunError, match=r"it took longer than 2 s \(resources.task_timeout_s\)"):
        beside(True, max_retries=0, task_timeout_s=1.0).call(lambda: time.sleep(600), items=2)
