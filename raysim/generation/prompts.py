"""Prompts of a text-to-image pipeline: from a template, a list or a mapping to the prompts of each class."""

import re
from collections.abc import Mapping, Sequence

from raysim.core.errors import UserError
from raysim.core.validation import nearest

Given = str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]]
"""A template for all classes, or for each class (in their order, or by name) a prompt or several."""

PLACEHOLDER = "{class}"
KEY = "generator.prompts"
_FIELD = re.compile(r"\{[^{}]*\}")


def prompts_per_class(given: Given, class_names: Sequence[str]) -> list[list[str]]:
    """The prompts of each class, at least one, with the class's name in place of `{class}`.

    given: one template with `{class}` in it, a list with an entry for each class in their order, or a mapping from
    class names; an entry is a prompt, or a list of prompts of which each image takes one.
    Raises UserError for a class without a prompt, for names that are no class, for other placeholders, and where two
    classes have the same prompts, since their images would be of one kind.
    """
    if isinstance(given, str):
        if PLACEHOLDER not in given:
            raise UserError(
                f"{KEY} = {given!r}: without {PLACEHOLDER} the images of all classes would be of one kind; write it "
                "where the name of the class belongs, or give a prompt for each class"
            )
        entries: list[str | Sequence[str]] = [given] * len(class_names)
    elif isinstance(given, Mapping):
        entries = _by_name(given, class_names)
    else:
        entries = list(given)
        if len(entries) != len(class_names):
            raise UserError(
                f"{KEY}: there are {len(entries)} entries for {len(class_names)} classes ({_listed(class_names)}); "
                "give one for each, in this order, or a mapping from their names"
            )
    return _apart([_filled(entry, name) for entry, name in zip(entries, class_names, strict=True)], class_names)


def _by_name(given: Mapping[str, str | Sequence[str]], class_names: Sequence[str]) -> list[str | Sequence[str]]:
    unknown = [name for name in given if name not in class_names]
    if unknown:
        raise UserError(
            f"{KEY}: {unknown[0]!r} is no class of the data set{nearest(str(unknown[0]), class_names) or ';'} its "
            f"classes: {_listed(class_names)}"
        )
    missing = [name for name in class_names if name not in given]
    if missing:
        raise UserError(f"{KEY}: {_listed(missing)} {'has' if len(missing) == 1 else 'have'} no prompt; give one")
    return [given[name] for name in class_names]


def _filled(entry: str | Sequence[str], name: str) -> list[str]:
    prompts = [entry] if isinstance(entry, str) else list(entry)
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise UserError(f"{KEY}: the class {name!r} has an empty prompt; give it a text")
    for prompt in prompts:
        other = [field for field in _FIELD.findall(prompt) if field != PLACEHOLDER]
        if other:
            raise UserError(f"{KEY}: {other[0]} in {prompt!r} stands for nothing; only {PLACEHOLDER} is replaced")
    return [prompt.replace(PLACEHOLDER, name) for prompt in prompts]


def _apart(prompts: list[list[str]], class_names: Sequence[str]) -> list[list[str]]:
    first: dict[frozenset[str], str] = {}
    for own, name in zip(prompts, class_names, strict=True):
        other = first.setdefault(frozenset(own), name)
        if other != name:
            raise UserError(f"{KEY}: the classes {other!r} and {name!r} have the same prompts; tell them apart")
    return prompts


def described(prompts: Sequence[Sequence[str]], class_names: Sequence[str]) -> str:
    """A line that shows the prompts of the first classes."""
    shown = [
        f"{name} {own[0]!r}" + (f" and {len(own) - 1} more" if len(own) > 1 else "")
        for name, own in zip(class_names, prompts, strict=True)
    ]
    return _listed(shown, most=5)


def _listed(items: Sequence[str], most: int = 10) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
