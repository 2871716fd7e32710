"""Calls to workers: what is asked, what comes back, and the types of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import ray

from raysim.engine.schedule import Chunk

if TYPE_CHECKING:
    Ref = ray.ObjectRef[Any]
    """A reference to a value in the object store, or to the answer of a call."""
else:
    Ref = Any


class RemoteMethod(Protocol):
    """A method of a worker that answers with one value."""

    def remote(self, *arguments: object) -> Ref:
        """Call it; returns at once."""


class RemoteMethodWithValue(Protocol):
    """A method of a worker that answers, and beside the answer leaves a value where it was made."""

    def remote(self, *arguments: object) -> list[Ref]:
        """Call it; returns [reference to the answer, reference to the value] at once."""


class WorkerActor(Protocol):
    """A `raysim.engine.worker.Worker` in a process of its own, as the driver sees it."""

    where: RemoteMethod
    configure: RemoteMethod
    train: RemoteMethod
    train_and_sum: RemoteMethodWithValue
    give_back: RemoteMethod
    dot: RemoteMethod
    put_slices: RemoteMethod
    answer: RemoteMethod
    partial_sum: RemoteMethodWithValue
    add: RemoteMethod
    evaluate: RemoteMethod
    fine_tune: RemoteMethod
    generate: RemoteMethod
    fingerprint: RemoteMethod
    release_generator: RemoteMethod


Submit = Callable[[WorkerActor, list[Any]], Ref | list[Ref]]
"""(worker, payloads of its items) -> what `remote` returned."""
Question = Callable[[WorkerActor], Ref | list[Ref]]
"""A call to one worker that is no piece of a larger work."""
TakeBack = Callable[[WorkerActor, list[Any]], Ref]
"""(worker, payloads of items) -> reference to a list of bool: which of them it had not begun, and will not do."""


@dataclass
class Call(Chunk):
    """One call to a worker.  refs: what `remote` returned."""

    refs: Ref | list[Ref] = field(default_factory=list)

    @property
    def ref(self) -> Ref:
        """The reference to wait for."""
        return self.refs[0] if isinstance(self.refs, list) else self.refs

    def outcome(self) -> Any:
        """The answer, or (answer, reference to the value that stays where it was made)."""
        answer = ray.get(self.ref)
        return (answer, self.refs[1]) if isinstance(self.refs, list) else answer


@dataclass(frozen=True)
class Lost:
    """The call will not be answered: its worker is no more."""

    cause: str


@dataclass(frozen=True)
class MapCalls:
    """The calls that one `Pool.map` makes.

    submit: for a chunk of items.  last: the same, for a worker that is not expected to get another chunk.
    take_back: asks a worker for items that it has not begun; None: work of this kind is not taken back.
    """

    submit: Submit
    last: Submit
    take_back: TakeBack | None


def not_done(answer: Any, items: Sequence[Any]) -> list[Any]:
    """The items of a call that its worker gave back: those with None in their place in the list of answers."""
    answers = answer[0] if isinstance(answer, tuple) else answer
    return [item for item, one in zip(items, answers, strict=True) if one is None]
