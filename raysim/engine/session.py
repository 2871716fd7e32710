"""Starts Ray on this machine or joins a cluster, and leaves nothing behind."""

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from raysim.config import Resources
from raysim.engine.placement import Node, Placement, local_node, place
from raysim.engine.pool import Pool
from raysim.errors import UserError

_PREFIX = "raysim-ray-"
# No report to Ray's makers; no record of every call ever made, which would grow with the run.
_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_task_events_report_interval_ms": "0"}
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def _sweep() -> None:
    """Remove the folders of drivers that were killed."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and sys.platform == "linux":
            shutil.rmtree(folder, ignore_errors=True)


def placement_before_start(resources: Resources) -> Placement | None:
    """What would run where, if that is known before Ray starts: here, or on the cluster this process has joined.

    None where a cluster is yet to be joined.  Raises UserError for what does not fit.
    """
    if ray.is_initialized():
        return _place_on_cluster(resources)
    if resources.address or os.environ.get("RAY_ADDRESS"):
        return None
    return place([local_node()], resources.workers, resources.gpus_per_worker, more_than_cores=True)


def _knock(address: str, source: str) -> None:
    """Raise UserError if nothing listens at `host:port`; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at {address} (from {source}): {error}; start one with `ray start --head`, correct "
            "the address, or leave it out to run on this machine"
        ) from error


class Session:
    """Ray, for one run or for many: starts it on this machine or joins a cluster, keeps the workers warm between runs.

    A context manager. A Ray started here gets a folder of its own, no dashboard, and is gone afterwards; a process that
    was connected to Ray before stays so. Raises UserError on entering if a cluster does not answer.  where: which Ray
    it is, for people.
    """

    def __init__(self, resources: Resources) -> None:
        self.where = ""
        self._resources = resources
        self._stack = contextlib.ExitStack()
        self._pool: Pool | None = None

    def __enter__(self) -> "Session":
        for key, value in _RAY_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        address = self._resources.address or os.environ.get("RAY_ADDRESS")
        if ray.is_initialized():
            self.where = f"Ray cluster {ray.get_runtime_context().gcs_address}, already connected"
        elif address:
            self.where = self._join(address)
        else:
            self._start()
            self.where = "Ray started on this machine"
        self._stack.callback(self.discard_pool)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        _sweep()
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp")  # short: socket paths have a limit
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._stack.callback(ray.shutdown)
        here, workers = local_node(), self._resources.workers
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=here.cpus if workers == "auto" else max(here.cpus, workers),
            object_store_memory=self._resources.object_store_bytes,
            _temp_dir=folder,
            **_QUIET,
        )

    def _join(self, address: str) -> str:
        source = "resources.address" if self._resources.address else "the environment variable RAY_ADDRESS"
        _knock(address, source)
        self._stack.callback(ray.shutdown)
        try:
            context: Any = ray.init(address=address, **_QUIET)
        except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
            raise UserError(
                f"no Ray cluster answers at {address} (from {source}): {str(error).splitlines()[0]}; start one with "
                "`ray start --head`, correct the address, or leave it out to run on this machine"
            ) from error
        return f"Ray cluster {context.address_info['gcs_address']} (from {source})"

    def pool(self, resources: Resources) -> Pool:
        """Workers for a run: those of the run before, if they are of the same kind, else new ones."""
        placement = _place_on_cluster(resources)
        kind = (placement, resources.threads_per_worker)
        if self._pool is None or (self._pool.placement, self._pool.resources.threads_per_worker) != kind:
            self.discard_pool()
            self._pool = Pool(placement, resources)
        self._pool.resources, self._pool.lost = resources, 0
        return self._pool

    def discard_pool(self) -> None:
        """End the workers, for example because a run failed and left them in the middle of something."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _place_on_cluster(resources: Resources) -> Placement:
    nodes = [
        Node(n["NodeManagerAddress"], int(n["Resources"].get("CPU", 0)), int(n["Resources"].get("GPU", 0)))
        for n in ray.nodes()
        if n["Alive"]
    ]
    return place(nodes, resources.workers, resources.gpus_per_worker)
