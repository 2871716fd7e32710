"""Calls to workers: what is asked, what comes back, and how a piece of work is handed out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from raysim.engine.schedule import Item

Submit = Callable[[Any, list[Any]], Any]
"""(actor, payloads) -> reference of the answer; or [that, reference of a value that stays where it was made]."""


@dataclass
class Call:
    """One call to a worker.  refs: what `Submit` gave."""

    refs: Any
    items: list[Item]

    @property
    def ref(self) -> Any:
        """The reference to wait for."""
        return self.refs[0] if isinstance(self.refs, list) else self.refs

    def outcome(self) -> Any:
        """The answer, or (answer, reference of the value that stays)."""
        answer = ray.get(self.ref)
        return (answer, self.refs[1]) if isinstance(self.refs, list) else answer


@dataclass(frozen=True)
class Lost:
    """The call will not be answered: its worker is no more."""

    cause: str


@dataclass(frozen=True)
class Deal:
    """How the items of one `map` are handed out.  share: a worker's part of the cost of all of them."""

    submit: Submit
    last: Submit
    kind: str
    largest: int | None
    share: float
