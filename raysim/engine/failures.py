"""What went wrong on a worker, in words for people."""

import re

from ray.exceptions import RayActorError, RayError, RayTaskError

from raysim.core.errors import RunError, UserError
from raysim.engine.schedule import Item


def plain(error: RayTaskError, items: list[Item]) -> Exception:
    """What a call raised, without Ray's wrapping: the user's mistakes as such, anything else with the work it hit."""
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
    """The first line of what Ray says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
