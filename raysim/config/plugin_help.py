"""The keys of one plug-in, for people: what each accepts, its default, what it is for."""

import inspect
import typing
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from raysim.config.registry import KINDS, available, parameters, resolve
from raysim.core.errors import UserError
from raysim.core.plain import Plain
from raysim.core.validation import accepted, nearest, show


def check_kind(kind: str) -> str:
    """The kind itself; UserError with the right ones for any other."""
    if kind not in KINDS:
        raise UserError(f"no such kind of plug-in: {kind!r}{nearest(kind, KINDS)} (the kinds are {', '.join(KINDS)})")
    return kind


def describe(kind: str, name: str) -> list[str]:
    """Docstring and keys of a plug-in, built-in or `module:attribute`, as lines; UserError for an unknown one."""
    try:
        plugin = resolve(check_kind(kind), name)
        keys = [f"  {key}: {told}" for key, told in key_lines(kind, name)]
    except LookupError as error:
        homes = " or ".join(f"`raysim list {other} {name}`" for other in KINDS if name in available(other))
        raise UserError(f"{kind} {name}: {f'it is elsewhere, see {homes}' if homes else error}") from error
    return [f"{kind} {name}: {inspect.cleandoc(plugin.__doc__ or '')}", "", *(keys or ["  it takes no keys"])]


def describe_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A line for each key of a pydantic model, of the models inside it, too: what it accepts, its default, its purpose.

    prefix: stands before the keys, such as `sampling.`.
    """
    schema = model.model_json_schema()
    for key, field in model.model_fields.items():
        if inner_model := _model_in(field.annotation):
            yield from describe_keys(inner_model, f"{prefix}{key}.")
            continue
        default = "required" if field.is_required() else f"default {show(_plain(field.default))}"
        told = accepted(schema["properties"][key], schema)
        yield f"  {prefix}{key}: {told} ({default}). {' '.join((field.description or '').split())}"


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model that a key holds, also where it may be null; None for a value, and for the section of a plug-in."""
    for part in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(part) and issubclass(part, BaseModel) and part.model_config.get("extra") != "allow":
            return part
    return None


def key_lines(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """(dotted key, what it accepts, its default and purpose) of each key of a plug-in; LookupError if unknown."""
    model = parameters(resolve(kind, name))
    prefix = f"partition.{name}" if kind == "modifier" else kind
    schema = model.model_json_schema()
    for key, field in model.model_fields.items():
        entry = schema["properties"][key]
        default = "required" if field.is_required() else f"default {show(_plain(field.default))}"
        about = entry.get("description") or next(
            (branch["description"] for branch in entry.get("anyOf", []) if "description" in branch), ""
        )
        yield f"{prefix}.{key}", f"{accepted(entry, schema)} ({default})" + (f". {about}" if about else "")


def _plain(default: object) -> Plain:
    """A default as YAML would hold it; of what YAML has no form for, its text in Python."""
    return to_jsonable_python(default, fallback=repr)
