"""Reading YAML and key=value texts as people write them, with messages that say where and what."""

import difflib
import json
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from raysim.core.errors import ConfigError
from raysim.core.plain import Plain, PlainDict, PlainMapping
from raysim.core.validation import show

MOST_BYTES = 10_000_000
MOST_DEPTH = 50
MOST_EXPANDED = 100_000

_AMBIGUOUS = {  # how YAML 1.1 reads what looks like a plain number: pattern -> in words
    re.compile(r"^[-+]?0[0-9_]*[0-9]$"): "in base 8",
    re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$"): "in base 60",
    re.compile(r"^[-+]?(0[bx])?[0-9a-fA-F.]*_[0-9a-fA-F_.]*([eE][-+]?[0-9]+)?$"): "without its underscores",
}
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}


class _Loader(yaml.SafeLoader):
    """YAML as people write it, and no more of it than a configuration needs.

    `1e-3` is a number; a number that YAML reads as another one than is written, a key that stands twice in a mapping, a
    date, and what would grow without bound, are errors that name the line.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    # Any: PyYAML says of neither what it is.
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ConfigError([f"line {self.line + 1}: brackets or lists are nested more than {MOST_DEPTH} deep"])
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
        if node is not None and node.tag not in _PLAIN_TAGS:
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            is_date = kind == "timestamp"
            what = f"{node.value} is a date to YAML" if is_date else f"YAML's type {kind!r} is not used here"
            raise ConfigError([f"{_line(node)}: {what}; put the value in quotes"])
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, before `<<` merges mappings, every key is still seen as it was written.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                written = f"{key.value!r} " if isinstance(key, yaml.ScalarNode) else ""
                raise ConfigError([f"{_line(key)}: the key {written}is not text to YAML; put it in quotes"])
            if key.value in seen:
                raise ConfigError([f"{_line(key)}: the key {key.value!r} stands twice in one mapping; remove one"])
            seen.add(key.value)
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _check_scalar(node: yaml.ScalarNode) -> None:
    """Refuse a number that means another one to YAML than to a person."""
    if node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return
    for pattern, how in _AMBIGUOUS.items():
        if pattern.match(node.value):
            read = yaml.safe_load(node.value)
            is_other = node.value.lstrip("+-").isdecimal() and int(node.value) != read
            raise ConfigError([
                f"{_line(node)}: {node.value} is {read} to YAML, which reads it {how}; write {read}"
                f"{f', or {int(node.value)}' if is_other else ''}, or '{node.value}' in quotes if it is text"
            ])


def _check_size(root: yaml.Node) -> None:
    """Refuse anchors that refer to themselves, or that grow far wider or deeper than what is written."""
    sizes: dict[int, tuple[int, int]] = {}

    def size(node: yaml.Node) -> tuple[int, int]:
        """(how many values, how deep); (0, 0) while it is measured."""
        if id(node) in sizes:
            if not sizes[id(node)][0]:
                raise ConfigError([f"{_line(node)}: this anchor contains itself; write the value out"])
            return sizes[id(node)]
        sizes[id(node)] = 0, 0
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        measured = [size(part) for part in inner]
        sizes[id(node)] = 1 + sum(n for n, _ in measured), 1 + max((depth for _, depth in measured), default=0)
        return sizes[id(node)]

    expanded, depth = size(root)
    if expanded > len(sizes) + MOST_EXPANDED or depth > MOST_DEPTH:
        raise ConfigError([
            f"its anchors (`&name`, `*name`) stand for {expanded:,} values, up to {depth} deep; write out what is meant"
        ])


def parse_yaml(text: str, source: str) -> Plain:
    """Plain data from YAML text; ConfigError with the line for text that is not YAML, or is more than plain data."""
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
        # What looks like a number to YAML, but is none that it can hold, such as one of 5,000 digits.
        raise ConfigError([f"not valid YAML: {error}; put the value in quotes"], source) from error
    except ConfigError as error:
        raise ConfigError(error.problems, source) from error


def read_yaml(path: str | Path) -> PlainDict:
    """The mapping in a YAML file; ConfigError for a file that is missing, empty, not text or not a mapping."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError([f"{path!r} is no configuration; give the path of a YAML file, or a mapping"])
    file = Path(path).expanduser()
    try:
        is_there = file.exists()
    except OSError as error:  # a name of 300 characters
        problem = f"{show(str(path))} cannot be read: {error.strerror}"
        raise ConfigError([problem], "the path of the configuration") from error
    if not is_there or file.is_dir():
        what = "is a folder" if file.is_dir() else "does not exist"
        close = _meant(file)
        remedy = f"did you mean {close!r}?" if close else "give the path of a YAML file"
        if "=" in file.name:
            remedy = "the path of the configuration comes first, then KEY=VALUE"
        problem = f"{file.absolute()} {what} on {socket.gethostname()}; {remedy}"
        raise ConfigError([problem], "the path of the configuration")
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError([f"it is larger than {MOST_BYTES:,} bytes; give the path of a YAML file"], str(path))
        plain = parse_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError([f"not a text file ({error.reason}); give the path of a YAML file"], str(path)) from error
    except OSError as error:
        raise ConfigError([f"{file.absolute()} cannot be read: {error.strerror}"], str(path)) from error
    if plain is None:
        raise ConfigError(["the file is empty; `raysim init` copies complete examples to start from"], str(path))
    if not isinstance(plain, dict):
        what = "a list" if isinstance(plain, list) else f"just {show(plain)}"
        raise ConfigError([f"the file holds {what}; it must hold `key: value` pairs, such as rounds: 30"], str(path))
    return plain


def experiments() -> Path:
    """The folder of the examples that come with raysim: in the package where it is installed, beside it in a clone."""
    package = Path(__file__).parents[1]
    return next((p for p in (package / "experiments", package.parent / "experiments") if p.is_dir()), package)


def find_file(path: str | Path) -> str | Path:
    """The file that a path names: as it stands, or else the example of this name in ./experiments or with raysim.

    `quickstart`, `quickstart.yaml` and `experiments/quickstart.yaml` name the same example; a copy in ./experiments,
    which may have been changed, goes before the one that comes with raysim.  A path that names none of them is returned
    as it is, for `read_yaml` to refuse.
    """
    try:
        given = Path(path)
        if given.expanduser().exists() or given.is_absolute() or ".." in given.parts:
            return path
        inside = Path(*given.parts[1:]) if given.parts[:1] == ("experiments",) else given
        name = str(inside) if inside.suffix == ".yaml" else f"{inside}.yaml"
        found = [folder / name for folder in (Path("experiments"), experiments()) if (folder / name).is_file()]
        return found[0] if inside.parts and found else path
    except (OSError, TypeError, ValueError):  # a name of 300 characters, or none at all
        return path


def find_beside(folder: Path, name: str) -> Path:
    """The file that a file in `folder` names: the one beside it, or else the example of this name."""
    beside = folder / Path(name).expanduser()
    example = Path(find_file(name))
    return example if not beside.exists() and example.is_file() else beside


def _meant(file: Path) -> str | None:
    """The YAML file that a person who wrote this path most likely meant, as they would write it.

    A file of this name wins over one with a similar name, and a folder nearby over the experiments that come with
    raysim.
    """
    nearby = [(file if file.is_dir() else file.parent).glob("*.yaml"), Path("experiments").glob("**/*.yaml")]
    found = [sorted(paths) for paths in (*nearby, experiments().glob("**/*.yaml"))]
    name = file.name if file.suffix in (".yaml", ".yml") else f"{file.name}.yaml"
    same = [path for paths in found for path in paths if path.stem == Path(name).stem]
    if not same:
        by_name = {path.name: path for paths in reversed(found) for path in paths}
        close = difflib.get_close_matches(name, by_name, n=1)
        same = [by_name[close[0]]] if close else []
    if not same:
        return None
    folder = file if file.is_dir() else file.parent
    if same[0].is_relative_to(experiments()):
        return str(same[0].relative_to(experiments()).with_suffix(""))
    return same[0].name if same[0].parent == folder else str(same[0])


def plain_copy(source: PlainMapping) -> PlainDict:
    """A copy of a mapping as YAML would hold it; ConfigError for keys and values that YAML could not hold."""
    try:
        copy: PlainDict = json.loads(json.dumps(dict(source), default=_as_plain))
    except (RecursionError, ValueError, TypeError) as error:
        problem = f"the mapping cannot be kept as YAML: {error}; use text for keys, and plain values"
        raise ConfigError([problem]) from error
    if _depth(copy) > MOST_DEPTH:
        raise ConfigError([f"mappings or lists are nested more than {MOST_DEPTH} deep"])
    return copy


def _depth(value: Plain) -> int:
    """How deep mappings and lists are nested; counting stops beyond what is allowed."""
    depth, level = 0, [value]
    while level and depth <= MOST_DEPTH + 1:
        lists = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        depth, level = depth + 1, [inner for entries in lists for inner in entries]
    return depth


def _as_plain(value: Any) -> Plain:  # Any: whatever a caller put there
    """Paths and numpy numbers, which callers from Python use."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise ConfigError([f"a value of type {type(value).__name__} ({value!r}) cannot be kept; use text, numbers, lists"])


def joined(overrides: Iterable[str]) -> list[str]:
    """Put together overrides that a shell has split at the spaces inside their brackets, as that of `ray submit` does.

    What stays open to the end is left as it is, to be reported.
    """
    left, found = list(overrides), []
    while left:
        parts = next((n for n in range(1, len(left) + 1) if not _is_open(" ".join(left[:n]))), 1)
        found.append(" ".join(left[:parts]))
        del left[:parts]
    return found


def _is_open(text: str) -> bool:
    """Whether the value of an override begins with a bracket and is not YAML so far."""
    value = text.partition("=")[2].lstrip()
    try:
        return value.startswith(("{", "[")) and parse_yaml(value, "") is None
    except ConfigError:
        return True


def parse_overrides(overrides: Iterable[str]) -> list[tuple[list[str], Plain]]:
    """(steps of the key, value) of each override; ConfigError lists all that are malformed or stand twice."""
    if isinstance(overrides, str):
        raise ConfigError([f"overrides = {overrides!r}: must be a list of texts, such as [{overrides!r}]"])
    problems: list[str] = []
    assignments: dict[str, tuple[list[str], Plain]] = {}
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
                what = re.sub(r"^line 1(, column \d+)?: ", "", error.problems[0])
                problems.append(f"override {text!r}: {what}")
    if problems:
        raise ConfigError(problems, "the command line")
    return list(assignments.values())
