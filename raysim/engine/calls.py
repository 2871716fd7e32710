"""Calls to workers: what is asked, what comes back, and the types of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import ray

from raysim.engine.schedule import Chunk, Item

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
    """A method of a worker that answers, and also puts a value into the object store of the worker's node."""

    def remote(self, *arguments: object) -> list[Ref]:
        """Call it; returns [reference to the answer, reference to the value] at once."""


class WorkerActor(Protocol):
    """A `raysim.engine.worker.Worker` in a process of its own, as the driver sees it."""

    where: RemoteMethod
    configure: RemoteMethod
    why_alone: RemoteMethod
    expected_s: RemoteMethod
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
    generate: RemoteMethodWithValue
    fingerprint: RemoteMethod
    release_generator: RemoteMethod


Submit = Callable[[WorkerActor, list[Any]], Ref | list[Ref]]  # Any: each caller of `Pool.map` knows its own payloads
"""(worker, payloads of its items) -> what `remote` returned."""
Question = Callable[[WorkerActor], Ref | list[Ref]]
"""A call to one worker that is no chunk of a larger work."""
TakeBack = Callable[[WorkerActor, list[Any]], Ref]
"""(worker, payloads of items) -> reference to a list of bool: which of them it had not begun, and will not do."""


@dataclass
class Call(Chunk):
    """One call to a worker.  refs: what `remote` returned for it."""

    refs: Ref | list[Ref] = field(default_factory=list)

    @property
    def ref(self) -> Ref:
        """The reference to wait for."""
        return self.refs[0] if isinstance(self.refs, list) else self.refs

    def outcome(self) -> Any:  # of whatever type the called method of the worker returns
        """Return the answer, or (answer, reference to the value that stays on the worker's node)."""
        answer = ray.get(self.ref)
        return (answer, self.refs[1]) if isinstance(self.refs, list) else answer


@dataclass(frozen=True)
class Lost:
    """Stands for the answer of a call whose worker has died.  cause: why, for people."""

    cause: str


@dataclass(frozen=True)
class MapCalls:
    """The calls that one `Pool.map` makes.

    submit: sends a chunk of items.  last: the same, for a worker that is not expected to get another chunk.
    take_back: asks a worker to return items that it has not begun; None: work of this kind is not taken back.
    """

    submit: Submit
    last: Submit
    take_back: TakeBack | None


def not_done(answer: Sequence[object], items: Sequence[Item]) -> list[Item]:
    """The items of a call that its worker gave back: those for which the list of answers holds None.

    answer: the list of answers, or a tuple that begins with it.
    """
    answers = answer[0] if isinstance(answer, tuple) else answer
    return [item for item, one in zip(items, answers, strict=True) if one is None]
