"""Joins a running Ray cluster; finds out first whether that can work, because Ray itself would try for minutes."""

from typing import Protocol, cast

import ray
from ray.exceptions import AuthenticationError

from raysim.core.errors import UserError
from raysim.core.plain import PlainDict, PlainMapping
from raysim.engine.ray_private import address_of_auto, asks_for_token, show_token


class RayContext(Protocol):
    """The part that is used here of what `ray.init` returns."""

    address_info: PlainDict
    dashboard_url: str | None


def join(address: str, source: str, options: PlainMapping) -> RayContext:
    """Join a cluster, at `auto` (one that was started on this machine) or HOST:PORT; returns what `ray.init` returns.

    source: where the address comes from, for people.  options: further arguments of `ray.init`.
    Raises UserError if no cluster answers, if its Ray has another version, or if it asks for a token that this process
    does not have.
    """
    if "://" in address:
        raise UserError(
            f"{address} (from {source}) would put the driver far from the cluster's memory; give `auto` or HOST:6379 "
            "on a machine of the cluster, or send the run there with `ray submit`, or with "
            "`ray job submit --working-dir . -- python -m raysim run ...`"
        )
    try:
        place = address_of_auto() if address == "auto" else address
        if place is not None and asks_for_token(place) and not show_token():
            raise _no_token(place, source)
        return cast(RayContext, ray.init(address=place or address, **options))
    except AuthenticationError as error:  # a token that cannot be read, or a wrong one
        raise UserError(f"{_no_token(place or address, source)}: {_sentence(error)}") from error
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, source, error) from error


def _no_token(address: str, source: str) -> UserError:
    return UserError(
        f"Ray cluster {address} (from {source}) asks for a token, which this process does not show; "
        "~/.ray/auth_token must be a copy of that on the head, or RAY_AUTH_TOKEN hold it, and RAY_AUTH_MODE, if it is "
        "set, be `token`"
    )


def _sentence(error: Exception) -> str:
    """The first sentence of what Ray says."""
    return " ".join(str(error).split()).partition(". ")[0][:300]


def _no_cluster(address: str, source: str, error: Exception) -> UserError:
    cause = " ".join(str(error).split())
    if "ersion mismatch" in cause:
        return UserError(f"Ray cluster {address} (from {source}): {cause}; install the same versions on every node")
    return UserError(
        f"no Ray cluster answers at {address} (from {source}): {cause[:300]}; start one with `ray start --head`, "
        "correct the address, or leave it out to run on this machine"
    )
