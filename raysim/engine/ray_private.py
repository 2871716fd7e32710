"""Every use of a private part of Ray, which another version may lack: what it is used for, and what happens without it.

Where a version of Ray lacks a name, raysim works without it. Where Ray does not start with the replacements and
settings below, `engine.session` starts it once more without them. Seconds are medians of three by
benchmarks/private_parts.py on two busy cores, where starting, two workers and the end take 10 s together, and where
savings below about 1.5 s were lost in the noise.

Replaced while Ray starts (`REPLACED`):
- processes: Node.start_monitor, start_log_monitor and start_api_server start nothing: no autoscaler, no collector of
  log lines, no dashboard. Saves 2.3 s.
- agent: utils.get_dashboard_dependency_error says that there is no dashboard, so that the agent of the node, for which
  Ray waits, is a small one. What that saves was lost in the noise.
- signals: ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER leaves SIGTERM to the driver. Without it Ray's handler
  prints a stack and ends the process after 3 s, even if the run has not saved everything yet.
- loopback: ray_constants.ENABLE_RAY_CLUSTER is off, as on Windows, so that Ray's servers listen at 127.0.0.1 alone.
  Without it they listen at all addresses of the machine, where the token guards them.
Set in the environment while Ray starts (`ENVIRONMENT`):
- RAY_preload_python_modules: the processes of workers load torch before they get their first call. What that
  saves was lost in the noise.
- RAY_task_events_report_interval_ms and RAY_enable_metrics_collection: no record of every call ever made and no
  statistics of Ray's own. They save memory that would grow with the run, no seconds.
- RAY_worker_register_timeout_seconds: how long the process of a worker may take until Ray knows it, 60 s by default.
  On a machine so busy that it takes longer, each would be ended and started anew for ever.
Replaced while a driver starts or joins Ray (`command_without_secrets`):
- utils.get_entrypoint_name: the command line, which Ray keeps for as long as it runs and shows on its dashboard, loses
  its passwords. Without it they stay there for who has the token.
Asked:
- worker._global_node: which process of Ray has died. Without it Ray ends the driver without any message.
- services.canonicalize_bootstrap_address_or_die, the call NodeInfoGcsService/CheckAlive, authentication_token_setup:
  whether a cluster does not answer, or wants a token, is known within 10 s; Ray itself tries for minutes.
- state.actors: whether a worker that has not started has a machine and a process. Without it, one that waits for a
  machine counts as one that does not start.
- commands.debug_status: what `ray status` shows. Without it, a run that waits for a machine cannot say why.
- AuthenticationTokenLoader, Config: forget the token of an earlier Ray of this process, which a later one would refuse.
Used in other modules, where only a message or a wait gets worse without it: the resource node:__internal_head__ and the
file ray_bootstrap_config.yaml (engine.cluster), the text of the error of an actor that cannot start (engine.failures),
the folder of `ray job submit` (core.persistent), the argument _temp_dir of ray.init (engine.session).
"""

import contextlib
import importlib
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import ray

from raysim.core.secrets import without_secrets

ENVIRONMENT = {
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_preload_python_modules": "torch",
    "RAY_worker_register_timeout_seconds": "240",
}
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_MODE = "RAY_AUTH_MODE"
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # asked without a token, which tells whether one is needed
ANSWER_S = 10.0  # that a cluster may take to answer
_NO_PROXY = [("grpc.enable_http_proxy", 0)]


def _nothing(*_: object, **__: object) -> None:
    """Replaces a function of Ray that starts a process."""


def _no_dashboard() -> ImportError:
    """The answer that Ray gets where it was installed without its dashboard; it then starts a smaller agent."""
    return ImportError("the dashboard is not used")


@dataclass(frozen=True)
class Replaced:
    """A private name of Ray that gets another value while Ray starts.

    group: what it belongs to, as in the head of this module.  owner: a class in the module; "": the module itself.
    """

    group: str
    module: str
    owner: str
    name: str
    value: Any


REPLACED = (
    Replaced("processes", "ray._private.node", "Node", "start_monitor", _nothing),
    Replaced("processes", "ray._private.node", "Node", "start_log_monitor", _nothing),
    Replaced("processes", "ray._private.node", "Node", "start_api_server", _nothing),
    Replaced("agent", "ray._private.utils", "", "get_dashboard_dependency_error", _no_dashboard),
    Replaced("signals", "ray._private.ray_constants", "", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True),
    Replaced("loopback", "ray._private.ray_constants", "", "ENABLE_RAY_CLUSTER", False),
)


@contextlib.contextmanager
def lean_ray() -> Iterator[None]:
    """A context in which `ray.init` starts only the processes that objects, actors and calls need."""
    with contextlib.ExitStack() as stack:
        for part in REPLACED:
            owner = _found(part.module, part.owner)
            if hasattr(owner, part.name):
                stack.callback(setattr, owner, part.name, getattr(owner, part.name))
                setattr(owner, part.name, part.value)
        yield


@contextlib.contextmanager
def command_without_secrets() -> Iterator[None]:
    """A context in which Ray, which keeps the command of each driver and shows it, gets it with its secrets masked."""
    owner, name = _found("ray._private.utils"), "get_entrypoint_name"
    whole = getattr(owner, name, None)
    if whole is None:
        yield
        return
    setattr(owner, name, lambda: without_secrets(whole()))
    try:
        yield
    finally:
        setattr(owner, name, whole)


def _found(module: str, name: str = "") -> Any:
    """A private module of Ray, or the attribute `name` of it; None where this version of Ray has no such thing."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


@contextlib.contextmanager
def lean_environment() -> Iterator[None]:
    """A context in which the processes that Ray starts get the variables of ENVIRONMENT that the user has not set."""
    added = {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


@contextlib.contextmanager
def own_token() -> Iterator[None]:
    """A context in which this process and those that it starts have a new token, unless RAY_AUTH_TOKEN is set.

    Ray tries that variable first. So it neither reads a token from a file nor writes one, which everybody could read.
    Afterwards this process may join a cluster that asks for another token, or for none.
    """
    mode = os.environ.get(TOKEN_MODE)
    is_new = not os.environ.get(TOKEN)
    if is_new:
        os.environ[TOKEN] = secrets.token_hex(32)
        _forget_token()
    try:
        yield
    finally:
        if is_new:
            os.environ.pop(TOKEN, None)
        if mode is None:
            os.environ.pop(TOKEN_MODE, None)  # set by Ray as it starts
        _forget_token()


def _forget_token() -> None:
    """Let Ray find out again whether it needs a token, and look for it."""
    settings = _found("ray._raylet", "Config")
    if hasattr(settings, "initialize"):
        settings.initialize("")
    loader = _found("ray._raylet", "AuthenticationTokenLoader")
    if hasattr(loader, "instance"):
        loader.instance().reset_cache()


def dead_process() -> str:
    """The kind of a process that has died, such as "raylet", of a Ray that was started here; "" if none is known."""
    node = getattr(_found("ray._private.worker"), "_global_node", None)
    try:
        dead = [str(kind) for kind, _ in node.dead_processes()] if node is not None else []
    except AttributeError:
        return ""
    return next((kind for kind in dead if kind in ("raylet", "gcs_server")), "")


def has_process(actor: str) -> bool:
    """Whether an actor that is starting has got a process on some node; True where that is not known.

    actor: its id in hexadecimal digits.
    """
    state = _found("ray._private.state", "actors")
    try:
        found = state(actor) if state is not None else {}
        return bool(found["Address"]["IPAddress"])
    except (KeyError, TypeError):
        return True


def autoscaler_status() -> str:
    """The text of `ray status`; "" where it cannot be had."""
    keys = _found("ray._private.ray_constants")
    status = _found("ray.autoscaler._private.commands", "debug_status")
    get = _found("ray.experimental.internal_kv", "_internal_kv_get")
    try:
        report, error = (get(getattr(keys, f"DEBUG_AUTOSCALING_{name}")) for name in ("STATUS", "ERROR"))
        return str(status(report, error, address=ray.get_runtime_context().gcs_address))
    except Exception:  # noqa: BLE001 - whatever another version raises, only a message gets worse
        return ""


def raylet_socket() -> str:
    """The path of the socket of this machine's raylet; "" where it is not known."""
    node = getattr(_found("ray._private.worker"), "_global_node", None)
    return str(getattr(node, "raylet_socket_name", "") or "")


def address_of_auto() -> str | None:
    """HOST:PORT of the Ray that was started on this machine; None where only Ray itself can tell.

    Raises ConnectionError where none was started.
    """
    find = _found("ray._private.services", "canonicalize_bootstrap_address_or_die")
    return None if find is None else str(find("auto"))


def asks_for_token(address: str) -> bool:
    """Whether the cluster requires a token; ConnectionError if no Ray answers within ANSWER_S."""
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return False  # Ray reads its own keys and certificates
    with grpc.insecure_channel(address, options=_NO_PROXY) as channel:
        try:
            channel.unary_unary(_ALIVE, request_serializer=bytes, response_deserializer=bytes)(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False  # a Ray without this call; `ray.init` finds out the rest
            raise ConnectionError(error.details()) from None
    return False


def show_token() -> bool:
    """Make this process send its token, which Ray by itself does only to a cluster that it starts.

    Returns whether there is a token, or True where only `ray.init` can find out.
    """
    setup = "ray._private.authentication.authentication_token_setup"
    enable = _found(setup, "maybe_enable_token_auth_if_token_available")
    if enable is None:
        return True  # `ray.init` finds out
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    return bool(enable(warn_if_disabled=False))
