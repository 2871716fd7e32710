"""Messages for people about what went wrong on a worker."""

import re

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from raysim.core.errors import RunError, UserError, described
from raysim.engine.schedule import Item


def plain(error: RayTaskError, items: list[Item]) -> Exception:
    """The exception that a call raised, without Ray's wrapping: a UserError stays one, others name the failed work."""
    reason = error.cause
    if isinstance(reason, UserError):
        return UserError(str(reason))
    what = items[0].name if items else "a call to a worker"
    if isinstance(reason, RunError):
        return RunError(f"{what} failed: {reason}")
    return RunError(f"{what} failed: {with_remedy(described(reason))}")


def death(error: RayActorError | OutOfMemoryError) -> str:
    """Why a worker died; RunError where it cannot start at all, as on a node that lacks a package."""
    text = str(error).strip()
    if "creation task" in text:
        where = re.search(r"\bip=([\w.:]+)", text)
        last = text.splitlines()[-1].strip()
        raise RunError(f"a worker cannot start{f' on {where[1].rstrip(chr(44))}' if where else ''}: {last}") from None
    return with_remedy(f"its worker died ({first_line(error)})", text)


_REMEDIES = {
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED": (
        "the GPU's memory is full: lower local.batch_size (generator.batch_size for images), give each worker a GPU "
        "(resources.gpus_per_worker=1), or set resources.client_batching=off"
    ),
    r"ObjectStoreFull|OutOfDisk": (
        "the object store is full, and so is the disk that it spills to: free space in /tmp, ask for fewer images "
        "(allocation) or participants (clients_per_round), or raise resources.object_store_bytes"
    ),
    r"OutOfMemory|MemoryError|[Cc]annot allocate memory|can't allocate memory|low on memory|\bOOM\b": (
        "memory is full: use fewer workers (resources.workers), or lower local.batch_size"
    ),
}
"""What an error's text tells of memory that ran out -> what to do."""


def with_remedy(text: str, details: str = "") -> str:
    """A message on an error, with what to do where memory ran out.  details: more of the error's text, not shown."""
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, f"{text} {details}"):
            return f"{text}; {remedy}"
    return text


def first_line(error: RayError) -> str:
    """The first line of Ray's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
