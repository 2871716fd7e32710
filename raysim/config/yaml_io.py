"""Reading YAML and key=value texts as people write them, with messages that say where and what."""

import difflib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from raysim.core.errors import ConfigError
from raysim.core.validation import show


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, and a key that stands twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, before `<<` merges mappings, every key is still seen as it was written.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            line = f"line {key.start_mark.line + 1}"
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                written = f"{key.value!r} " if isinstance(key, yaml.ScalarNode) else ""
                raise ConfigError([f"{line}: the key {written}is not text to YAML; put it in quotes"])
            if key.value in seen:
                raise ConfigError([f"{line}: the key {key.value!r} stands twice in one mapping; remove one"])
            seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Plain data from YAML text; ConfigError with the line for text that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        is_tab = "\\t" in str(error.problem)
        remedy = "indent with spaces, not tabs" if is_tab else "text with special characters needs quotes"
        if "another document" in str(error.problem):
            remedy = "a file holds one configuration; remove the line `---` and what belongs to another"
        raise ConfigError([f"{where}not valid YAML: {error.problem or error.context}; {remedy}"], source) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"not valid YAML: {' '.join(str(error).split())}"], source) from error
    except ValueError as error:
        # What looks like a date or a number to YAML, but is none, such as 2024-13-45.
        raise ConfigError([f"not valid YAML: {error}; put the value in quotes"], source) from error
    except ConfigError as error:
        raise ConfigError(error.problems, source) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigError for a file that is missing, empty, not text or not a mapping."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError([f"{path!r} is no configuration; give the path of a YAML file, or a mapping"])
    file = Path(path).expanduser()
    if not file.exists() or file.is_dir():
        what = "is a folder" if file.is_dir() else "does not exist"
        siblings = [p.name for p in (file if file.is_dir() else file.parent).glob("*.yaml")]
        close = difflib.get_close_matches(file.name, siblings, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "give the path of a YAML file"
        problem = f"{file.absolute()} {what} on {socket.gethostname()}; {remedy}"
        raise ConfigError([problem], "the path of the configuration")
    try:
        plain = parse_yaml(file.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError([f"not a text file ({error.reason}); give the path of a YAML file"], str(path)) from error
    except OSError as error:
        raise ConfigError([f"{file.absolute()} cannot be read: {error.strerror}"], str(path)) from error
    if plain is None:
        raise ConfigError(["the file is empty; experiments/quickstart.yaml is a complete example"], str(path))
    if not isinstance(plain, dict):
        what = "a list" if isinstance(plain, list) else f"just {show(plain)}"
        raise ConfigError([f"the file holds {what}; it must hold `key: value` pairs, such as rounds: 30"], str(path))
    return plain


def plain_copy(source: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a mapping as YAML would hold it; ConfigError for values that YAML could not hold."""
    copy: dict[str, Any] = json.loads(json.dumps(source, default=_as_plain))
    return copy


def _as_plain(value: Any) -> Any:
    """Paths and numpy numbers, which callers from Python use."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise ConfigError([f"a value of type {type(value).__name__} ({value!r}) cannot be kept; use text, numbers, lists"])


def parse_overrides(overrides: Iterable[str]) -> list[tuple[list[str], Any]]:
    """(steps of the key, value) of each override; ConfigError lists all that are malformed or stand twice."""
    if isinstance(overrides, str):
        raise ConfigError([f"overrides = {overrides!r}: must be a list of texts, such as [{overrides!r}]"])
    problems: list[str] = []
    assignments: dict[str, tuple[list[str], Any]] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        steps = key.strip().split(".")
        if not equals or not all(steps):
            problems.append(f"override {text!r} is not of the form key=value, as in allocation.beta=8")
        elif key.strip() in assignments:
            problems.append(f"override {text!r}: {key.strip()} is set twice; remove one")
        else:
            try:
                assignments[key.strip()] = steps, parse_yaml(value, "")
            except ConfigError as error:
                problems.append(f"override {text!r}: {error.problems[0]}")
    if problems:
        raise ConfigError(problems, "the command line")
    return list(assignments.values())
