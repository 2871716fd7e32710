"""The object store: what the driver puts there belongs to the driver and outlives every worker."""

from typing import Any

import ray


def put(value: Any) -> Any:
    """A reference to a value, readable by every worker as shared memory."""
    return ray.put(value)


def put_shared(value: Any) -> tuple[Any, Any]:
    """(a reference to a value, the value as all workers see it): arrays in shared memory, not to be written to.

    Whoever goes on with the second one needs no memory of its own for them.
    """
    reference = put(value)
    return reference, get(reference)


def capacity_bytes() -> int:
    """What the object stores of all nodes hold in memory; more than that spills to disk."""
    return int(ray.cluster_resources().get("object_store_memory", 0))


def get(reference: Any) -> Any:
    """The value of a reference; its arrays are shared memory, not to be written to."""
    return ray.get(reference)
