"""Messages for people about what went wrong on a worker."""

import re

from ray.exceptions import RayActorError, RayError, RayTaskError

from raysim.core.errors import RunError, UserError
from raysim.engine.schedule import Item


def plain(error: RayTaskError, items: list[Item]) -> Exception:
    """The exception that a call raised, without Ray's wrapping: a UserError stays one, others name the failed work."""
    reason = error.cause
    if isinstance(reason, UserError):
        return UserError(str(reason))
    what = items[0].name if items else "a call to a worker"
    if isinstance(reason, RunError):
        return RunError(f"{what} failed: {reason}")
    return RunError(f"{what} failed: {type(reason).__name__}: {reason}")


def death(error: RayActorError) -> str:
    """Why a worker died; RunError where it cannot start at all, as on a node that lacks a package."""
    text = str(error).strip()
    if "creation task" in text:
        where = re.search(r"\bip=([\w.:]+)", text)
        last = text.splitlines()[-1].strip()
        raise RunError(f"a worker cannot start{f' on {where[1].rstrip(chr(44))}' if where else ''}: {last}") from None
    return f"its worker died ({first_line(error)})"


def first_line(error: RayError) -> str:
    """The first line of Ray's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
