"""Starts Ray on this machine or joins a cluster, and leaves nothing behind."""

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from raysim.config import Resources
from raysim.engine.placement import Node, Placement, local_node, place
from raysim.errors import UserError


_PREFIX = "raysim-ray-"


def _sweep() -> None:
    """Remove the folders of drivers that were killed."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and sys.platform == "linux":
            shutil.rmtree(folder, ignore_errors=True)


def address_of(resources: Resources) -> str | None:
    """The cluster to join: one this process is connected to, the configured one, RAY_ADDRESS, or None (start Ray)."""
    if ray.is_initialized():
        return "the one this process is connected to"
    return resources.address or os.environ.get("RAY_ADDRESS") or None


def local_placement(resources: Resources) -> Placement | None:
    """What would run on this machine, before Ray starts; None where a cluster is to be joined."""
    if address_of(resources):
        return None
    return place([local_node()], resources.workers, resources.gpus_per_worker, more_than_cores=True)


@contextlib.contextmanager
def session(resources: Resources) -> Iterator[tuple[Placement, str]]:
    """Ray for the time of a run: yields the placement of its workers and a line that says which Ray it is.

    A Ray started here gets a folder of its own, no dashboard, and is gone afterwards. A process that is already
    connected to Ray stays so. Raises UserError if the cluster does not answer.
    """
    if ray.is_initialized():
        yield _place_on_cluster(resources), f"Ray cluster {ray.get_runtime_context().gcs_address}, already connected"
        return
    address = address_of(resources)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        placement = place([local_node()], resources.workers, resources.gpus_per_worker, more_than_cores=True)
        _sweep()
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp")  # short: socket paths have a limit
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(local_node().cpus, placement.workers),
                object_store_memory=resources.object_store_bytes,
                _temp_dir=folder,
                **quiet,
            )
            yield placement, "Ray started on this machine"
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
        return
    source = "resources.address" if resources.address else "the environment variable RAY_ADDRESS"
    try:
        context: Any = ray.init(address=address, **quiet)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} (from {source}): {str(error).splitlines()[0]}; start one with "
            "`ray start --head`, correct the address, or leave it out to run on this machine"
        ) from error
    try:
        yield _place_on_cluster(resources), f"Ray cluster {context.address_info['gcs_address']} (from {source})"
    finally:
        ray.shutdown()


def _place_on_cluster(resources: Resources) -> Placement:
    nodes = [
        Node(n["NodeManagerAddress"], int(n["Resources"].get("CPU", 0)), int(n["Resources"].get("GPU", 0)))
        for n in ray.nodes()
        if n["Alive"]
    ]
    return place(nodes, resources.workers, resources.gpus_per_worker)
