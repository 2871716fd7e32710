"""Joining a Ray cluster that is there: what cannot work is found out before Ray itself would try, for minutes."""

import logging
import os
from typing import Any

import grpc
import ray
from ray._private.services import canonicalize_bootstrap_address_or_die

from raysim.core.errors import UserError

_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # asked without a token, which tells whether one is needed
_NO_PROXY = [("grpc.enable_http_proxy", 0)]


def join(address: str, source: str, options: dict[str, Any]) -> Any:
    """What `ray.init` returns for a cluster: `auto`, one that was started on this machine, or HOST:PORT.

    source: where the address comes from, for people.  options: of `ray.init`.
    Raises UserError where no cluster answers, it is another Ray, or it asks for a token that this process has not.
    """
    if "://" in address:
        raise UserError(
            f"{address} (from {source}) would put the driver far from the cluster's memory; give `auto` or HOST:6379 "
            "on a machine of the cluster, or send the run there with `ray submit`, or with "
            "`ray job submit --working-dir . -- python -m raysim run ...`"
        )
    try:
        place = canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
        if _asks_for_token(place):
            _show_token(place, source)
        return ray.init(address=place, **options)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, source, error) from error


def _asks_for_token(address: str) -> bool:
    """Whether the cluster wants to see a token; ConnectionError if no Ray answers within 10 s."""
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return False  # Ray reads its own keys and certificates
    with grpc.insecure_channel(address, options=_NO_PROXY) as channel:
        try:
            channel.unary_unary(_ALIVE, request_serializer=bytes, response_deserializer=bytes)(b"", timeout=10)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ConnectionError(error.details()) from None
    return False


def _show_token(address: str, source: str) -> None:
    """Let this process show its token; Ray itself does so only to a cluster that it starts."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
        raise UserError(
            f"Ray cluster {address} (from {source}) asks for a token, which this process does not show; "
            "~/.ray/auth_token must be a copy of that on the head, and RAY_AUTH_MODE, if it is set, `token`"
        )


def _no_cluster(address: str, source: str, error: Exception) -> UserError:
    cause = " ".join(str(error).split())
    if "ersion mismatch" in cause:
        return UserError(f"Ray cluster {address} (from {source}): {cause}; install the same versions on every node")
    return UserError(
        f"no Ray cluster answers at {address} (from {source}): {cause[:300]}; start one with `ray start --head`, "
        "correct the address, or leave it out to run on this machine"
    )
