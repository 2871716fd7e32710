"""What is known of a key besides its type: markers that stand in its annotation, as its range does.

    nesterov: Annotated[bool, OnlyWith("momentum")] = False
    clients: Annotated[int, Field(ge=1), AtMost(10_000_000)] = 10

They work on the keys of the schema, and on those of any plug-in, built-in or the user's own. A key has an effect unless
a marker says when it has none, and it changes results unless it is marked MAY_CHANGE.
"""

import functools
import inspect
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raysim.core.plain import Plain, PlainMapping
from raysim.core.validation import show


@dataclass(frozen=True)
class MayChange:
    """On a key, or a whole section, on which no number of the rounds done depends: a resumed run may change it."""


@dataclass(frozen=True)
class SameBitsOnCpu:
    """On a key that changes the bits of the results on a GPU, and none on a CPU."""


@dataclass(frozen=True)
class IsDevice:
    """On the key that decides whether training runs on a CPU or on GPUs; which of the two it is changes the bits."""


@dataclass(frozen=True)
class IsModifier:
    """On a key of `partition` that holds the keys of the modifier of its own name, or null."""


MAY_CHANGE = MayChange()
SAME_BITS_ON_CPU = SameBitsOnCpu()
IS_DEVICE = IsDevice()
IS_MODIFIER = IsModifier()


@dataclass(frozen=True)
class AtMost:
    """The largest value that makes sense; far more would end in the middle of a run, for want of memory or time."""

    most: int


@dataclass(frozen=True, init=False)
class OnlyWith:
    """On a key that is read only if another one beside it is switched on, or has one of `values`.

    Switched on means: not null, false, 0 or empty.  Of several conditions on one key, one is enough.
    """

    key: str
    values: tuple[Plain, ...]

    def __init__(self, key: str, *values: Plain) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)

    def holds(self, beside: PlainMapping) -> bool:
        """Whether the key is read, given the values of the keys beside it."""
        value = beside.get(self.key)
        return value in self.values if self.values else bool(value)

    def demand(self, prefix: str) -> str:
        """What must be so, such as `local.momentum is set`."""
        return f"{prefix}{self.key} is {' or '.join(map(show, self.values)) if self.values else 'set'}"


@dataclass(frozen=True, init=False)
class NotWith:
    """On a key that is not read if another one beside it has one of `values`."""

    key: str
    values: tuple[Plain, ...]

    def __init__(self, key: str, *values: Plain) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)

    def holds(self, beside: PlainMapping) -> bool:
        """Whether the key is read, given the values of the keys beside it."""
        return beside.get(self.key) not in self.values

    def demand(self, prefix: str) -> str:
        """What must be so, such as `tracking.uri is not none`."""
        return f"{prefix}{self.key} is not {' or '.join(map(show, self.values))}"


@dataclass(frozen=True)
class ReplacedBy:
    """On a key that another one beside it takes the place of, where that is given."""

    key: str

    def holds(self, beside: PlainMapping) -> bool:
        """Whether the key is read, given the values of the keys beside it."""
        return beside.get(self.key) is None


@dataclass(frozen=True)
class Key:
    """One key of a configuration, with what the schema says of it.

    name: dotted.  value: as plain data.  markers: its own and those of the sections that it is in.  beside: all values
    of the mapping that it is in.  prefix: what stands before the names of these, such as `local.`.
    """

    name: str
    value: Plain
    field: FieldInfo
    markers: tuple[object, ...]
    beside: PlainMapping
    prefix: str


@functools.cache
def markers_of(field: FieldInfo) -> tuple[object, ...]:
    """The markers of a field, also those inside a union such as `Annotated[int, AtMost(9)] | None`."""
    return (*field.metadata, *_nested(field.annotation))


def _nested(annotation: object) -> Iterator[object]:
    yield from getattr(annotation, "__metadata__", ())
    for part in typing.get_args(annotation):
        if not isinstance(part, str):
            yield from _nested(part)


Inner = Callable[[str, FieldInfo, PlainMapping], Mapping[str, FieldInfo] | None]
"""(dotted name, field, value) -> the keys inside a mapping, or None for one that is a value as a whole."""


def inner_model(_: str, field: FieldInfo, value: PlainMapping) -> Mapping[str, FieldInfo] | None:  # noqa: ARG001
    """The keys of a field that holds a model."""
    annotation = field.annotation
    is_model = inspect.isclass(annotation) and issubclass(annotation, BaseModel)
    return annotation.model_fields if is_model else None  # type: ignore[union-attr]


def walk(
    fields: Mapping[str, FieldInfo], plain: PlainMapping, inner: Inner = inner_model, prefix: str = "",
    inherited: tuple[object, ...] = (),
) -> Iterator[Key]:
    """Every key of `plain` that `fields` knows, those inside mappings instead of the mappings."""
    for name, field in fields.items():
        if name not in plain:
            continue
        value, markers = plain[name], (*inherited, *markers_of(field))
        inside = inner(prefix + name, field, value) if isinstance(value, Mapping) else None
        if inside is None:
            yield Key(prefix + name, value, field, markers, plain, prefix)
        else:
            yield from walk(inside, value, inner, f"{prefix}{name}.", markers)


def dotted(plain: PlainMapping, prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys of nested mappings."""
    for name, value in plain.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")


def chosen(keys: Iterable[Key], given: Collection[str]) -> dict[str, Key]:
    """The keys that a user has set on purpose, by name.

    A mapping that is written out in full, as raysim writes it or as it was copied from the documentation, is no choice
    of every key in it: there, a key that has its default does not count.
    """
    found = list(keys)
    partial = {key.prefix for key in found if key.name not in given}
    return {
        key.name: key
        for key in found
        if key.name in given and (key.prefix in partial or key.value != plain_default(key.field))
    }


def plain_default(field: FieldInfo) -> Plain:
    """The default of a field as plain data."""
    default = field.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def without_effect(keys: Iterable[Key]) -> dict[str, str]:
    """The keys that nothing reads, because of the values beside them: name -> one line that says so."""
    found = {}
    for key in keys:
        conditions = [m for m in key.markers if isinstance(m, OnlyWith | NotWith | ReplacedBy)]
        if not conditions or any(condition.holds(key.beside) for condition in conditions):
            continue
        if isinstance(conditions[0], ReplacedBy):
            other = f"{key.prefix}{conditions[0].key} = {show(key.beside[conditions[0].key])}"
            found[key.name] = f"{other} takes the place of {key.name} = {show(key.value)}, which is not used"
            continue
        demands = " or ".join(c.demand(key.prefix) for c in conditions if not isinstance(c, ReplacedBy))
        here = ", ".join(
            f"{key.prefix}{name} = {show(key.beside.get(name))}" for name in dict.fromkeys(c.key for c in conditions)
        )
        found[key.name] = f"{key.name} = {show(key.value)} has no effect: it is read only where {demands} (here {here})"
    return found


def beyond_limits(keys: Iterable[Key]) -> list[str]:
    """One line for every value that is far beyond what makes sense."""
    return [
        f"{key.name} = {show(key.value)}: more than {marker.most:,}, the most that makes sense here"
        for key in keys
        for marker in key.markers
        if isinstance(marker, AtMost) and isinstance(key.value, int | float) and marker.most < key.value < math.inf
    ]
