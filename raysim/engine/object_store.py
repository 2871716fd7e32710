"""The object store: what the driver puts there belongs to the driver and outlives every worker."""

from typing import Any, TypeVar

import ray

from raysim.engine.calls import Ref

T = TypeVar("T")


def put(value: object) -> Ref:
    """A reference to a value, readable by every worker as shared memory."""
    return ray.put(value)


def put_shared(value: T) -> tuple[Ref, T]:
    """(a reference to a value, the value as all workers see it): arrays in shared memory, not to be written to.

    Whoever uses the second one from then on needs no memory of its own for its arrays.
    """
    reference = put(value)
    return reference, get(reference)


def capacity_bytes() -> int:
    """What the object stores of all nodes hold in memory; more than that spills to disk."""
    return int(ray.cluster_resources().get("object_store_memory", 0))


def get(reference: Ref) -> Any:
    """The value of a reference; its arrays are shared memory, not to be written to."""
    return ray.get(reference)
