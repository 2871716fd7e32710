"""What is said of memory that ran out: on the GPU, in a worker, in the object store."""

from typing import Any

import pytest
import ray
from ray.exceptions import ObjectStoreFullError, OutOfMemoryError, RayTaskError

from raysim.core.errors import RunError, UserError
from raysim.engine import object_store, session
from raysim.engine.failures import death, plain
from raysim.engine.schedule import Item


class Torch(RuntimeError):
    """As torch's own, which only CUDA raises."""


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (Torch("CUDA out of memory. Tried to allocate 2.00 GiB"), "give each worker a GPU"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "use fewer workers"),
        (MemoryError(), "use fewer workers"),
        (ObjectStoreFullError("Failed to put object"), "raise resources.object_store_bytes"),
        (ValueError("5 is too small"), None),
    ],
)
def test_a_clients_failure_for_lack_of_memory_says_what_to_change(cause: Exception, remedy: str | None):
    told = plain(RayTaskError("train", "traceback", cause), [Item(None, 1.0, "client 3 in round 2")])
    assert isinstance(told, RunError) and str(told).startswith(f"client 3 in round 2 failed: {type(cause).__name__}")
    assert (remedy in str(told)) if remedy else str(told).endswith("5 is too small")


def test_a_worker_that_was_killed_for_lack_of_memory_says_what_to_change():
    assert "use fewer workers" in death(OutOfMemoryError("Task was killed due to the node running low on memory."))


def test_a_full_object_store_ends_with_a_message(monkeypatch: pytest.MonkeyPatch):
    def full(_: object) -> None:
        raise ObjectStoreFullError("Failed to put object 12 in object store")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(RunError, match=r"ObjectStoreFullError: .*; the object store is full.*object_store_bytes"):
        object_store.put(b"")


def test_too_few_addresses_are_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch):
    """With 24 GB of memory the object store takes 0.3 x 24 = 7.2 GB, and a process 5 GB more: 12.2 GB."""
    from raysim.config.schema import Resources

    none = session.resource.RLIM_INFINITY

    def limited(addresses: int, file: int = none) -> Any:
        limits = {session.resource.RLIMIT_AS: (addresses, none), session.resource.RLIMIT_FSIZE: (file, none)}
        monkeypatch.setattr(session.resource, "getrlimit", limits.__getitem__)
        return session.placement_before_start(Resources(workers=1))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "starts_here", lambda _: True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session, "physical_bytes", lambda: 24_000_000_000)
    with pytest.raises(UserError, match=r"`ulimit -v` allows a process 4\.0 GB of addresses.* need 12\.2 GB.*7\.2 GB"):
        limited(4_000_000_000)
    assert limited(12_300_000_000).workers == 1 and limited(none).workers == 1
    with pytest.raises(UserError, match=r"`ulimit -f` allows files of up to 7\.1 GB, .* one of 7\.2 GB in shared"):
        limited(none, file=7_100_000_000)
    assert limited(none, file=7_300_000_000).workers == 1
