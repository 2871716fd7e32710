"""Ray without the processes that a run on one machine has no use for, and without its hand on the driver's signals.

No dashboard, no autoscaler, no process that collects log lines, and an agent that serves none of them: a node of Ray
waits until its agent listens, and a full one takes seconds to load. Ray has no public switch for these, so parts of it
are replaced while it starts; a version of Ray that has them elsewhere starts in full, only slower.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray._private.node
import ray._private.ray_constants
import ray._private.utils

_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")


@contextlib.contextmanager
def lean_ray() -> Iterator[None]:
    """While this is entered, `ray.init` starts nothing but what objects, actors and calls need."""
    instead: list[tuple[Any, str, Any]] = [(ray._private.node.Node, name, _nothing) for name in _UNUSED]
    instead.append((ray._private.utils, "get_dashboard_dependency_error", _no_dashboard))
    instead.append((ray._private.ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True))
    instead = [part for part in instead if hasattr(*part[:2])]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in instead]
    for owner, name, replacement in instead:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _nothing(*_: object, **__: object) -> None:
    """In place of what starts a process."""


def _no_dashboard() -> ImportError:
    """What Ray finds where it was installed without its dashboard: its agent is a small one then."""
    return ImportError("the dashboard is not used")
