"""Starts Ray on this machine or joins a cluster, and removes everything afterwards."""

import contextlib
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import ray

from raysim.config.schema import Resources
from raysim.core.errors import ClientError, RunError, UserError
from raysim.core.host import physical_bytes
from raysim.core.locks import NAME as LOCK
from raysim.core.locks import FolderLock, Held
from raysim.core.plain import PlainMapping
from raysim.core.signals import Interrupted
from raysim.engine.cluster import place_on_cluster, room, survey
from raysim.engine.join import RayContext, join
from raysim.engine.liveness import lost_part
from raysim.engine.placement import Placement, local_node, place, place_here
from raysim.engine.pool import Pool
from raysim.engine.ray_private import command_without_secrets, lean_environment, lean_ray, own_token
from raysim.engine.starting import load_here

START_ATTEMPTS = 2
PROCESS_ADDRESS_BYTES = 5_000_000_000  # of a process of Ray beside the object store; few of them are ever touched
STORE_SHARE = 0.3  # of the memory, which Ray gives to the object store by default
_PARENT = Path("/tmp")  # short, because the paths of sockets have a limit
_PREFIX = "raysim-"
_RAY = "ray"  # what such a folder holds, beside its lock
_LOOPBACK = ("127.", "[::1]")
_QUIET: PlainMapping = {"logging_level": logging.ERROR, "log_to_driver": False}


def clean_up() -> None:
    """Remove this user's folders of drivers that were killed, and end the processes of Ray that they left.

    A folder is left where its lock says that its driver lives, if only in a container with other process ids, and where
    it holds anything but Ray's files: a user may have given a folder such a name.
    """
    for folder in _PARENT.glob(f"{_PREFIX}[0-9]*-*"):
        with contextlib.suppress(OSError, UserError):  # in use, or just removed by another
            is_ours = folder.lstat().st_uid == os.getuid()
            if is_ours and {path.name for path in folder.iterdir()} <= {_RAY, LOCK}:
                with FolderLock(folder) as lock:
                    if lock.is_exclusive:
                        _end_processes(str(folder))
                        _remove(str(folder))


def _own_folder(stack: contextlib.ExitStack) -> Path:
    """Make a folder that only this user can enter, lock it, and let `stack` remove it; UserError where /tmp refuses."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_PARENT))
        except OSError as error:
            raise UserError(
                f"Ray keeps its sockets, logs and spilled objects in {_PARENT}, where no folder can be made "
                f"({error.strerror}); free space there, or make it writable"
            ) from error
        try:
            stack.enter_context(FolderLock(folder))
        except UserError as error:
            if not isinstance(error, Held) and folder.exists():
                raise
            continue  # another process that cleans up has taken it before it was locked
        stack.callback(_remove, str(folder))
        return folder


def _end_processes(folder: str) -> None:
    """End the remaining processes of the Ray that writes to `folder`: its start was interrupted, or some have died."""
    if sys.platform != "linux":
        return
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # Ray's agents and workers overwrite their command line, but all keep their logs open.
            opened = [os.path.realpath(link) for link in (process / "fd").iterdir()]
            if any(file.startswith(f"{folder}/") for file in opened) and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile, or is not ours
            continue


def _remove(folder: str) -> None:
    """Remove Ray's folder, into which a process that is just ending may still write."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            return
        time.sleep(0.1)


def starts_here(resources: Resources) -> bool:
    """Whether a session would start a Ray of its own, on this machine."""
    return not (ray.is_initialized() or resources.address or os.environ.get("RAY_ADDRESS"))


def placement_before_start(resources: Resources) -> Placement | None:
    """Where the workers will run, if that is known before Ray starts: here, or on the cluster this process has joined.

    None where the cluster, or some of its nodes, are not known yet.  Raises UserError for workers that do not fit.
    """
    if ray.is_initialized():
        cluster = survey()
        if cluster.unknown:
            return None
        everything = [*cluster.nodes, *cluster.to_come]
        return place(
            everything, resources.workers, resources.gpus_per_worker, threads=resources.threads_per_worker
        )
    if not starts_here(resources):
        return None
    _check_limits(resources)
    return place_here(resources)


def store_bytes(resources: Resources) -> int:
    """How many bytes the object store of a Ray holds that is started here."""
    return resources.object_store_bytes or int(STORE_SHARE * physical_bytes())


def _check_limits(resources: Resources) -> None:
    """Raise UserError where `ulimit -v` or `-f` leaves Ray's processes too little, of which they die silently."""
    store = store_bytes(resources)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = store + PROCESS_ADDRESS_BYTES
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(
            f"`ulimit -v` allows a process {limit / 1e9:.1f} GB of addresses, and those of Ray need {needed / 1e9:.1f} "
            f"GB, {store / 1e9:.1f} GB of them for the object store: use `ulimit -v unlimited`, or a smaller "
            "resources.object_store_bytes"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < store:
        raise UserError(
            f"`ulimit -f` allows files of up to {limit / 1e9:.1f} GB, and Ray's object store is one of "
            f"{store / 1e9:.1f} GB in shared memory: use `ulimit -f unlimited`, or a smaller "
            "resources.object_store_bytes"
        )


class Session:
    """A connection to Ray for one run or for many: starts Ray here or joins a cluster, keeps the workers between runs.

    A context manager. A Ray started here gets a folder and a token of its own and no dashboard, and is ended and
    removed afterwards; a process that was connected to Ray before stays connected. Raises UserError on entering if a
    cluster does not answer.  where: which Ray it is, for people.
    """

    def __init__(self, resources: Resources, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Prepare a session; entering it starts or joins Ray.

        unwanted: called if Ray did not start; returns whether to give up instead of trying again.
        """
        self.where = ""
        self._unwanted = unwanted
        self._joined = True
        self._resources = resources
        self._stack = contextlib.ExitStack()
        self._pool: Pool | None = None

    def __enter__(self) -> "Session":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics to the makers of Ray
        try:
            self.where = self._connect()
        except SystemExit as stop:  # how Ray answers SIGTERM while it starts
            self._stack.close()
            raise Interrupted("by SIGTERM") from stop
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self.discard_pool)
        return self

    def _connect(self) -> str:
        address = self._resources.address or os.environ.get("RAY_ADDRESS")
        if ray.is_initialized():
            return f"Ray cluster {ray.get_runtime_context().gcs_address}, already connected"
        if address:
            return self._join(address)
        address = self._start()
        self._joined = False
        if address.startswith(_LOOPBACK):
            return "Ray started on this machine"
        return f"Ray started on this machine, where it listens at {address} and asks for a token"

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> str:
        """Start Ray here; where that fails, once more without the use of its private parts (`engine.ray_private`).

        Returns the address at which it listens.

        The second attempt also helps where the machine was too busy to start Ray within Ray's limit of half a minute.
        """
        attempt = 1
        while True:
            with contextlib.ExitStack() as attempt_stack:
                try:
                    address = self._start_once(attempt_stack, lean=attempt == 1)
                except UserError:
                    raise
                except Exception as error:
                    if attempt < START_ATTEMPTS and not self._unwanted():
                        attempt += 1
                        continue
                    raise RunError(
                        f"Ray did not start on this machine, tried {attempt} times{load_here()}: "
                        f"{(str(error).splitlines() or [type(error).__name__])[0]}"
                    ) from error
                self._stack.push(attempt_stack.pop_all())
                return address

    def _start_once(self, stack: contextlib.ExitStack, lean: bool) -> str:
        clean_up()
        folder = _own_folder(stack)
        stack.callback(_end_processes, str(folder))
        stack.enter_context(own_token())
        stack.callback(_shut_down)
        here = local_node()
        workers = self._resources.workers
        cores = here.cpus if workers == "auto" else max(here.cpus, workers * self._resources.threads_per_worker)
        with command_without_secrets(), contextlib.ExitStack() as while_starting:
            if lean:
                while_starting.enter_context(lean_environment())
                while_starting.enter_context(lean_ray())
            context = cast(RayContext, ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=cores,
                object_store_memory=self._resources.object_store_bytes,
                _temp_dir=str(folder / _RAY),  # which Ray makes writable for everybody
                **_QUIET,
            ))
        return str(context.address_info["gcs_address"])

    def _join(self, address: str) -> str:
        source = "resources.address" if self._resources.address else "the environment variable RAY_ADDRESS"
        self._stack.callback(_shut_down)
        with lean_environment(), command_without_secrets():
            context = join(address, source, _QUIET)
        where = f"Ray cluster {context.address_info['gcs_address']} (from {source})"
        return f"{where}, its dashboard through ssh: ray dashboard CLUSTER_FILE" if context.dashboard_url else where

    def pool(self, resources: Resources, say: Callable[[str], None] = lambda _: None) -> Pool:
        """Return the workers for a run: those of the run before, if they have the same resources, else new ones.

        say: told of nodes that are waited for, and of workers that start or are lost where the cluster may change.
        """
        placement = place_on_cluster(resources, say)
        kind = (placement, resources.threads_per_worker)
        if self._pool is None or (self._pool.placement, self._pool.resources.threads_per_worker) != kind:
            self.discard_pool()
            self._pool = Pool(placement, resources)
        changes = room(resources, placement.gpus_per_worker) if self._joined else None
        self._pool.begin_run(resources, changes, say)
        return self._pool

    def after_failure(self, error: BaseException) -> None:
        """End the workers of a run that failed, unless all of them wait for work and none has caused the failure."""
        if self._pool is not None and (isinstance(error, ClientError) or not self._pool.is_idle()):
            self.discard_pool()

    def discard_pool(self) -> None:
        """End the workers."""
        if self._pool is not None and not lost_part():
            self._pool.close()
        self._pool = None


def _shut_down() -> None:
    """Disconnect from Ray, unless it has died: then disconnecting would wait for minutes."""
    if not lost_part():
        ray.shutdown()
