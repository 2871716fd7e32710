"""What is wrong with a configuration, one line for each problem: key, value, what is accepted, nearest valid name."""

import difflib
from collections.abc import Iterable, Mapping
from datetime import date

import yaml
from pydantic import BaseModel, ValidationError

from raysim.core.plain import Plain, PlainMapping

# What other tools call the same thing: similar meaning, dissimilar spelling.
_SYNONYMS = {
    "learning_rate": "lr",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
    "n_rounds": "rounds",
    "local_epochs": "epochs",
    "bs": "batch_size",
    "fraction_fit": "clients_per_round",
    "participation": "clients_per_round",
    "concentration": "alpha",
    "gpus": "gpus_per_worker",
    "num_workers": "workers",
    "optimizer": "local",
    "dataset": "data",
}

Schema = PlainMapping


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was most likely meant to be, or None where nothing is close.

    Of dotted candidates, such as partition.alpha, the last part is compared; the first of equals is taken.
    """
    by_word: dict[str, str] = {}
    for candidate in candidates:
        by_word.setdefault(candidate.rpartition(".")[2], candidate)
    synonym = _SYNONYMS.get(word.lower())
    if synonym in by_word:
        return by_word[synonym]
    close = difflib.get_close_matches(word.lower(), by_word, n=1, cutoff=0.6)
    return by_word[close[0]] if close else None


def nearest(word: str, candidates: Iterable[str]) -> str:
    """A hint such as `; did you mean 'alpha'?`, or an empty text where nothing is close (see `closest`)."""
    found = closest(word, candidates)
    return f"; did you mean {found!r}?" if found is not None else ""


def show(value: object) -> str:
    """A value as YAML would write it, on one line of at most 80 characters."""
    dumped = yaml.dump(value, Dumper=yaml.SafeDumper, default_flow_style=True, width=10**6, sort_keys=False)
    text = dumped.removesuffix("\n...\n").strip().replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:77]}..."


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    given: PlainMapping,
    prefix: str = "",
    also: Iterable[str] = (),
    elsewhere: Iterable[str] = (),
) -> list[str]:
    """Return one line for every key of `given` that `model` refused.

    prefix: the name of the section `given`.  also: keys that the section takes besides those of the model.
    elsewhere: dotted keys of other sections, for hints.
    """
    root = model.model_json_schema()
    lines: dict[str, str] = {}
    for item in error.errors():
        steps, schema, siblings = _locate(root, [str(step) for step in item["loc"]])
        key = ".".join([prefix, *steps] if prefix else steps)
        value = _value(given, steps)
        if item["type"] == "extra_forbidden":
            beside = {*siblings, *(also if len(steps) == 1 else ())}
            lines[key] = f"{key} = {show(value)}: {_no_such_key(steps[-1], sorted(beside), elsewhere)}"
            continue
        must = accepted(schema, root)
        if item["type"] == "missing":
            lines[key] = f"{key} is missing: it must be {must}. {schema.get('description', '')}".rstrip()
            continue
        if item["type"] == "finite_number":
            must = must.replace("a number", "a finite number")
        elif must == "text" and isinstance(value, bool):
            must = "text; to YAML, yes, no, on and off are true and false: put the word in quotes"
        elif must == "text" and isinstance(value, int | float | date):
            must = f"text; put it in quotes (on the command line: '\"{value}\"')"
        elif isinstance(value, str):
            must = must.replace("NAME", value)
        elif isinstance(value, float) and value.is_integer() and "a whole number" in must:
            must = f"{must}; write {int(value)}"
        lines.setdefault(key, f"{key} = {show(value)}: must be {must}")
    return list(lines.values())


def _no_such_key(word: str, names: list[str], elsewhere: Iterable[str]) -> str:
    hint = nearest(word, [*names, *elsewhere])
    valid = f"valid keys here: {', '.join(names)}" if names else "it takes no keys"
    return f"no such key{hint} ({valid})" if hint else f"no such key; {valid}"


def _locate(root: Schema, location: list[str]) -> tuple[list[str], Schema, list[str]]:
    """(the leading steps of a location that are keys, the schema of the last one, the keys valid beside it).

    What follows the keys is a position in a list or the branch of a union, which means nothing to the user.
    """
    current = root
    steps: list[str] = []
    siblings: list[str] = []
    for step in location:
        properties = _follow(current, root).get("properties")
        if properties is None:
            break
        siblings = list(properties)
        steps.append(step)
        current = properties.get(step, {})
    return steps, current, siblings


def _follow(schema: Schema, root: Schema) -> Schema:
    """The object that a schema is or refers to."""
    reference = schema.get("$ref", "").removeprefix("#/$defs/")
    return root["$defs"][reference] if reference else schema


def _value(given: Plain, steps: list[str]) -> Plain:
    for step in steps:
        given = given.get(step) if isinstance(given, Mapping) else None
    return given


def accepted(schema: Schema, root: Schema) -> str:
    """What a JSON schema accepts, in words: `a number greater than 0, or auto`."""
    schema = _follow(schema, root)
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(accepted(branch, root) for branch in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return _either([show(value) for value in schema.get("enum", [schema.get("const")])])
    kind = str(schema.get("type"))
    if kind == "array":
        return f"a list{_limits(schema, _LENGTHS)}, each entry {accepted(schema.get('items', {}), root)}"
    if kind == "object":
        names = list(schema.get("properties") or schema.get("propertyNames", {}).get("enum", []))
        if "name" in names:
            return "a plug-in and its keys, such as {name: NAME, key: value}"
        return f"`key: value` pairs{' with the keys ' + ', '.join(names) if names else ''}"
    return _KINDS.get(kind, "something else") + _limits(schema, _RANGES)


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_RANGES = {
    "exclusiveMinimum": "greater than",
    "minimum": "of at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}
_LENGTHS = {"minItems": "of length at least", "maxItems": "at most"}


def _limits(schema: Schema, words: Mapping[str, str]) -> str:
    found = [f"{text} {schema[key]:,}".removesuffix(".0") for key, text in words.items() if key in schema]
    return f" {' and '.join(found)}" if found else ""


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
