"""Finds plug-ins by name and checks their parameters against their own signatures.

A plug-in is a plain function or a small class whose name is its name in YAML, listed in its module's `__all__`; a
dotted `package.module:attribute` finds one anywhere. Positional parameters come from the engine; keyword-only
parameters (all fields, for a dataclass) are the keys a user may write.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, overload

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from raysim.config.protocols import (
    POLICY_INPUTS,
    PROTOCOLS,
    AggregationRule,
    AllocationPolicy,
    DataSource,
    FunctionRule,
    ImageGenerator,
    LocalAlgorithm,
    ModelFactory,
    Modifier,
    Partitioner,
    ServerOptimiser,
)
from raysim.core.errors import UserError, described
from raysim.core.plain import PlainDict
from raysim.core.validation import nearest, problems_of

KINDS: dict[str, str] = {
    "data": "raysim.data",
    "partition": "raysim.data",
    "modifier": "raysim.data",
    "allocation": "raysim.allocation",
    "generator": "raysim.generation",
    "model": "raysim.models.architectures",
    "local": "raysim.local",
    "aggregation": "raysim.aggregation",
    "server": "raysim.aggregation.server_optimisers",
}
_MODULES = {
    "data": ("datasets", "files"), "partition": ("partitions",), "modifier": ("modifiers",),
    "allocation": ("policies", "rivals", "trained"), "aggregation": ("mean", "fedoui", "robust"),
}


@cache
def available(kind: str) -> dict[str, tuple[str, str]]:
    """Every built-in plug-in of a kind: name -> (module, first line of its docstring), read without importing it."""
    found: dict[str, tuple[str, str]] = {}
    for module, path in _sources(kind):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public: list[str] = []
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                public = ast.literal_eval(node.value)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public:
                doc = (ast.get_docstring(node) or "").strip().split("\n")[0]
                found[node.name] = (module, doc)
    return found


def _sources(kind: str) -> list[tuple[str, Path]]:
    package = KINDS[kind]
    root = Path(__file__).parents[1].joinpath(*package.split(".")[1:])
    if root.is_dir():
        names = _MODULES.get(kind) or sorted(p.stem for p in root.glob("*.py") if p.stem != "__init__")
        return [(f"{package}.{n}", root / f"{n}.py") for n in names if (root / f"{n}.py").exists()]
    return [(package, root.with_suffix(".py"))]


def check_name(kind: str, name: str) -> str | None:
    """A problem with this plug-in name, or None; imports nothing of ours."""
    if ":" in name:
        module = name.partition(":")[0]
        try:
            known = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            known = False
        except (KeyboardInterrupt, UserError):
            raise
        except BaseException as error:  # finding a module imports the packages that it is in
            raise _not_imported(module, error) from error
        where = "is it installed, in this folder or on PYTHONPATH?"
        return None if known else f"module {module!r} cannot be found; {where}"
    names = available(kind)
    if name in names:
        return None
    return f"no such name{nearest(name, names) or ';'} known: {', '.join(sorted(names))}, or package.module:attribute"


@overload
def resolve(kind: Literal["data"], name: str) -> DataSource: ...
@overload
def resolve(kind: Literal["partition"], name: str) -> Partitioner: ...
@overload
def resolve(kind: Literal["modifier"], name: str) -> Modifier: ...
@overload
def resolve(kind: Literal["allocation"], name: str) -> AllocationPolicy: ...
@overload
def resolve(kind: Literal["generator"], name: str) -> type[ImageGenerator]: ...
@overload
def resolve(kind: Literal["model"], name: str) -> ModelFactory: ...
@overload
def resolve(kind: Literal["local"], name: str) -> type[LocalAlgorithm]: ...
@overload
def resolve(kind: Literal["aggregation"], name: str) -> type[AggregationRule]: ...
@overload
def resolve(kind: Literal["server"], name: str) -> type[ServerOptimiser]: ...
@overload
def resolve(kind: str, name: str) -> Callable[..., object]: ...


def resolve(kind: str, name: str) -> Callable[..., object]:
    """The plug-in called `name`, with every optional member of its kind; raises LookupError with the remedy."""
    problem = check_name(kind, name)
    if problem:
        raise LookupError(problem)
    module, _, attribute = name.partition(":") if ":" in name else (available(kind)[name][0], ":", name)
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:
        raise _not_imported(module, error) from error
    if not callable(found):
        what = f"{attribute!r} is not a function or class" if found is not None else f"no attribute {attribute!r}"
        raise LookupError(f"module {module!r}: {what}; write package.module:attribute")
    if ":" in name and (lack := _lack(kind, found)):
        raise LookupError(f"{attribute!r} in module {module!r} is no {kind} plug-in: {lack}")
    return complete(kind, found) if kind in _CLASSES else typing.cast(Callable[..., object], found)


def _not_imported(module: str, error: BaseException) -> LookupError:
    """The error for a module that raised `error` as it was imported, with file and line.

    A module may raise anything, and `sys.exit` in it would end raysim as if all were well.
    """
    if isinstance(error, ImportError | SyntaxError):
        return LookupError(f"module {module!r} cannot be imported: {error}")
    frames = [*walk_tb(error.__traceback__)]
    frame, line = next((at for at in reversed(frames) if not at[0].f_code.co_filename.startswith("<")), frames[-1])
    where = f"{frame.f_code.co_filename}:{line}"
    return LookupError(f"module {module!r} cannot be imported: {described(error)} ({where})")


def _members(protocol: type) -> set[str]:
    """The names that a protocol asks for, those with a default too."""
    return {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}


def _needed(protocol: type) -> list[str]:
    """The members of a protocol without a default, sorted."""
    abstract: frozenset[str] = getattr(protocol, "__abstractmethods__")  # noqa: B009 - mypy knows it of no `type`
    return sorted(abstract.union(name for name in protocol.__annotations__ if name not in vars(protocol)))


def _has(plugin: object, member: str) -> bool:
    return hasattr(plugin, member) or member in getattr(plugin, "__dataclass_fields__", ())


_CLASSES = tuple(kind for kind, protocol in PROTOCOLS.items() if "__call__" not in vars(protocol))
"""The kinds whose plug-ins are classes; those of the others are functions."""


@cache
def complete(kind: str, plugin: Callable[..., object]) -> type:
    """A plug-in of one of `_CLASSES`, with the protocol's default for every member that it leaves out.

    A function that weighs clients becomes an aggregation rule.
    """
    protocol = PROTOCOLS[kind]
    if not isinstance(plugin, type):
        members = {"function": staticmethod(plugin), "__doc__": plugin.__doc__, "__module__": plugin.__module__}
        return types.new_class(plugin.__name__, (FunctionRule,), exec_body=lambda body: body.update(members))
    if all(_has(plugin, member) for member in _members(protocol)):
        return plugin
    own = {"__doc__": plugin.__doc__, "__module__": plugin.__module__, "__qualname__": plugin.__qualname__}
    return types.new_class(plugin.__name__, (plugin, protocol), exec_body=lambda body: body.update(own))


def _lack(kind: str, plugin: Callable[..., object]) -> str:
    """What a plug-in from elsewhere lacks to be one of its kind; empty if nothing."""
    protocol = PROTOCOLS[kind]
    if kind == "aggregation" and inspect.isfunction(plugin):
        return _unlike(plugin, ["table"])
    if kind == "allocation":
        return _unlike(plugin, ["counts_KC", *asked_for(plugin)]) or _not_given(plugin)
    if kind not in _CLASSES:
        return _unlike(plugin, _positional(protocol))
    missing = [member for member in _needed(protocol) if not _has(plugin, member)]
    if missing:
        base = "raysim.plugins_api.sgd" if kind == "local" else f"raysim.plugins_api.{protocol.__name__}"
        return f"it has no {', '.join(missing)}; derive from {base}, or see there what a plug-in of this kind is"
    return _unheard(plugin) if isinstance(plugin, type) else "it is no class"


def _unheard(plugin: type) -> str:
    """What a class declares as its keys in vain, and why; empty if nothing."""
    fields = getattr(plugin, "__dataclass_fields__", {})
    for cls in plugin.__mro__:
        own, hints = vars(cls), inspect.get_annotations(cls)
        shadows = [name for name, value in own.items() if name in fields and not hasattr(value, "__get__")]
        bare = [name for name in shadows if name not in hints]
        if bare:
            return f"{bare[0]} of class {cls.__name__!r} has no annotation, so it changes no key; give it one"
        if "__init__" in own and "__dataclass_params__" not in own:
            return ""  # it takes its keys there
        keys = [name for name, hint in hints.items() if not name.startswith("_") and not _is_of_class(hint)]
        if keys and "__dataclass_params__" not in own:
            return (
                f"class {cls.__name__!r} is no dataclass, so what it annotates ({', '.join(keys)}) are no keys; write "
                "@dataclass above it, and annotate what is no key with ClassVar"
            )
    return ""


def _is_of_class(hint: object) -> bool:
    text = hint if isinstance(hint, str) else str(hint)
    return text.removeprefix("typing.").startswith("ClassVar")


def _positional(protocol: type) -> list[str]:
    """The positional parameters of a kind whose plug-ins are functions."""
    given = inspect.signature(vars(protocol)["__call__"]).parameters.values()
    return [p.name for p in given if p.kind is p.POSITIONAL_ONLY or p.kind is p.POSITIONAL_OR_KEYWORD][1:]


def asked_for(policy: Callable[..., object]) -> dict[str, bool]:
    """The names of an allocation policy's positional parameters after the first: whether it must be given each."""
    try:
        given = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default is p.empty for p in [*given][1:] if p.kind is p.POSITIONAL_OR_KEYWORD}


def _not_given(policy: Callable[..., object]) -> str:
    """What an allocation policy asks for that there is not; empty if nothing."""
    unknown = [name for name in asked_for(policy) if name not in POLICY_INPUTS]
    if not unknown:
        return ""
    return (
        f"it asks for {unknown[0]}{nearest(unknown[0], POLICY_INPUTS) or ';'} a policy may ask for "
        f"{', '.join(POLICY_INPUTS)}; its keys are keyword-only parameters, after a `*`"
    )


def _unlike(plugin: Callable[..., object], positional: list[str]) -> str:
    """What is wrong with a function that cannot be called with these positional parameters; empty if nothing."""
    try:
        inspect.signature(plugin).bind(*positional, **_required(plugin))
    except (TypeError, ValueError):
        taken = ", ".join(positional) or "no positional parameter"
        return f"it must take ({taken}), and its keys as keyword-only parameters"
    return ""


def _required(plugin: Callable[..., object]) -> dict[str, None]:
    given = inspect.signature(plugin).parameters.values()
    return {p.name: None for p in given if p.kind is p.KEYWORD_ONLY and p.default is p.empty}


def parameters(plugin: Callable[..., object]) -> type[BaseModel]:
    """A strict pydantic model of the keys that a plug-in takes; LookupError where its signature cannot be read."""
    try:
        return _model_of_signature(plugin)
    except Exception as error:  # the annotations and defaults are the user's, so anything may come
        reason = str(error).split(". ")[0] if isinstance(error, NameError | PydanticUserError) else described(error)
        raise LookupError(
            f"the annotations of {plugin.__qualname__!r} cannot be used for keys ({reason}); annotate with numbers, "
            "str, bool, Literal, lists and dicts, imported at the top of the module"
        ) from error


@cache
def _model_of_signature(plugin: Callable[..., object]) -> type[BaseModel]:
    fields: PlainDict = {}  # a name -> its annotation, any form of it, and its default
    if isinstance(plugin, type) and issubclass(plugin, FunctionRule):
        plugin = plugin.function
    if dataclasses.is_dataclass(plugin):
        hints = typing.get_type_hints(plugin, include_extras=True)
        for f in dataclasses.fields(plugin):
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            fields[f.name] = (hints[f.name], ... if default is dataclasses.MISSING else default)
    else:
        target = plugin.__init__ if isinstance(plugin, type) else plugin  # type: ignore[misc]
        hints = typing.get_type_hints(target, include_extras=True)
        for p in inspect.signature(target).parameters.values():
            if p.kind is inspect.Parameter.KEYWORD_ONLY:
                fields[p.name] = (hints.get(p.name, Any), ... if p.default is inspect.Parameter.empty else p.default)
    config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    model: type[BaseModel] = create_model(plugin.__name__, __config__=config, **fields)
    model.model_json_schema()  # what has no schema could not be described to the user, either
    return model


def check_parameters(
    plugin: Callable[..., object], given: PlainDict, prefix: str, also: Iterable[str] = ()
) -> tuple[PlainDict, list[str]]:
    """(all parameters with defaults filled in, problems).  also: keys of the section that are not the plug-in's."""
    model = parameters(plugin)
    try:
        checked = model.model_validate(given)
    except ValidationError as error:
        return given, problems_of(error, model, given, prefix, also)
    return {name: getattr(checked, name) for name in model.model_fields}, []
