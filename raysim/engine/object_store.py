"""The object store: the driver owns what it puts there, so it remains when a worker dies."""

from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError

from raysim.core.errors import RunError
from raysim.core.records import ByteArray, StoredImages
from raysim.engine.calls import Ref
from raysim.engine.cluster import alive_nodes
from raysim.engine.failures import first_line, with_remedy

T = TypeVar("T")


def put(value: object) -> Ref:
    """Put a value into the object store, where every worker can read it as shared memory; returns its reference.

    Raises RunError where neither the store nor the disk that it spills to has room.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise RunError(with_remedy(f"{type(error).__name__}: {first_line(error)}")) from error


def put_shared(value: T) -> tuple[Ref, T]:
    """Put a value; returns (its reference, the value as all workers see it: arrays in shared memory, read-only).

    A caller that goes on with the second one can free the memory of the original arrays.
    """
    reference = put(value)
    return reference, get(reference)


def capacity_bytes() -> int:
    """How many bytes the object stores of all nodes hold in memory; more than that spills to disk."""
    return int(ray.cluster_resources().get("object_store_memory", 0))


def least_capacity_bytes() -> int:
    """How many bytes the smallest object store of a node holds: what is larger is not in the memory of every node."""
    sizes = [node["Resources"].get("object_store_memory", 0) for node in alive_nodes()]
    return int(min(sizes, default=0))


def get(reference: Ref) -> Any:  # the caller knows what it put
    """Get the value of a reference; its arrays are shared memory and read-only."""
    return ray.get(reference)


def get_if_there(reference: Ref) -> Any:  # as `get`
    """Get the value of a reference as `get` does; None where it was lost with its node."""
    try:
        return ray.get(reference)
    except ObjectLostError:
        return None


def images_of(stored: StoredImages) -> ByteArray:
    """The images, at least one: a view of shared memory, read-only; a copy where they lie in more than one block."""
    views = [get(reference)[start:stop] for reference, start, stop in stored.parts]
    return views[0] if len(views) == 1 else np.concatenate(views)
