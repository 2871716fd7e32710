"""A sweep's YAML file: a base configuration, a grid of values, and the checked configuration of every combination."""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from raysim.config.load import (
    apply_overrides,
    check_command,
    foreign_code,
    foreign_note,
    load_config,
    read_config,
    with_included,
    with_resources,
)
from raysim.config.schema import PLUGIN_SECTIONS, SECTIONS, Config
from raysim.config.yaml_io import find_beside, find_file, parse_overrides, plain_copy
from raysim.core.errors import ConfigError
from raysim.core.plain import Plain, PlainDict, PlainMapping
from raysim.core.secrets import plain_without_secrets, without_secrets
from raysim.core.validation import nearest, show

METHOD = "method"
_Axes = dict[str, list[tuple[str, list[str]]]]  # (label, overrides) of each value, by axis
_KEYS = ("base", "grid", "target_accuracy", "compare")
COMPARE = ("equal_images", "equal_epochs", "equal_steps")


@dataclass(frozen=True)
class Cell:
    """One combination of a grid, and its configuration.

    labels: the text of its value on each axis.  group: the labels of all axes but `seed`, joined, so that runs of a
    group differ in their seed alone.
    """

    labels: dict[str, str]
    group: str
    config: Config

    @property
    def name(self) -> str:
        """All labels, joined: the name of the cell in messages and tables."""
        return ", ".join(self.labels.values()) or "base"

    @functools.cached_property
    def config_hash(self) -> str:
        """The hash of the configuration, which takes a millisecond to compute."""
        return self.config.hash()

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^A-Za-z0-9.=_]+", "-", self.name).strip("-.")[:100] or "cell"


@dataclass(frozen=True)
class Grid:
    """A whole sweep.

    notes: messages about what was changed when the configurations were read.  compare: what is to be equal in all
    cells on the same clients, of COMPARE.
    """

    name: str
    cells: list[Cell]
    target_accuracy: float | None
    notes: list[str]
    compare: tuple[str, ...] = ()


def short_groups(cells: Iterable[Cell]) -> dict[str, str]:
    """The groups of a sweep by names that can be read in a list: without the keys in braces, where that is enough."""
    groups = list(dict.fromkeys(cell.group for cell in cells))
    plain = {group: re.sub(r" \{.*?\}+(?=, |$)", "", group) for group in groups}
    shared = [name for name, times in Counter(plain.values()).items() if times > 1]
    return {group: group if name in shared else name for group, name in plain.items()}


def running_order(cells: Iterable[Cell]) -> list[int]:
    """The places of cells in the order in which they run: the first of each group, then the second of each.

    So there are soon results of every method, on one seed, and not every seed of one method.
    """
    seen: Counter[str] = Counter()
    turns = []
    for cell in cells:
        turns.append(seen[cell.group])
        seen[cell.group] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)


def read_sweep(
    path: str | Path, overrides: Iterable[str] = (), say: Callable[[str], object] = lambda _: None,
    resources: PlainMapping = MappingProxyType({}),
) -> Grid:
    """Read every combination of a sweep file, and check each configuration.

    say: told of code that the file names, before it runs.
    overrides: dotted keys that change the base (`rounds=2`), one axis (`grid.seed=[0]`), `target_accuracy`, `compare`.
    resources: values of that section for keys that nothing sets.
    Raises ConfigError that lists every problem of all cells, each with the cells that have it.
    """
    path = find_file(path)
    plain, _ = read_config(path)
    texts = _apply_own(plain, list(overrides))
    if "base" not in plain and "grid" not in plain:
        check_command(plain, "raysim sweep", path)
    problems = _problems(plain)
    if problems:
        raise ConfigError(problems, str(path))
    clash = [text for text in texts if text.partition("=")[0].strip() in plain["grid"]]
    if clash:
        problems = [f"override {t!r}: the grid sets this key; change grid.{t.partition('=')[0]}" for t in clash]
        raise ConfigError(problems, "the command line")
    axes = {axis: _choices(axis, values) for axis, values in plain["grid"].items()}
    base, notes = _base(plain["base"], Path(path), texts, axes, say)
    cells, found = _cells(base, axes, str(path), resources)
    # The sweep names an experiment even where no MLflow run is asked for; only a name that the user wrote is reported.
    own = f"tracking.experiment = {show(Path(path).stem)} has no effect"
    found = [note for note in found if not note.startswith(own)]
    notes = list(dict.fromkeys([*notes, *found]))
    return Grid(Path(path).stem, cells, plain.get("target_accuracy"), notes, tuple(_as_list(plain.get("compare"))))


def _as_list(value: Plain) -> list[Plain]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _apply_own(plain: PlainDict, texts: list[str]) -> list[str]:
    """Apply the overrides for the sweep itself to `plain`; returns the others, which are for the base."""
    left = []
    for text, (steps, value) in zip(texts, parse_overrides(texts), strict=True):
        if steps in (["target_accuracy"], ["compare"]):
            plain[steps[0]] = value
        elif steps[0] == "grid" and len(steps) > 1 and isinstance(plain.get("grid"), dict):
            plain["grid"][".".join(steps[1:])] = value
        else:
            left.append(text)
    return left


def _problems(plain: PlainMapping) -> list[str]:
    """What is wrong with the sweep file itself."""
    problems = [
        f"{key} = {show(plain[key])}: no such key{nearest(key, _KEYS)} (valid keys here: {', '.join(_KEYS)})"
        for key in plain
        if key not in _KEYS
    ]
    base, grid, target = plain.get("base"), plain.get("grid"), plain.get("target_accuracy")
    if not isinstance(base, str | dict):
        problems.append(f"base = {show(base)}: must be the path of a configuration, or a configuration itself")
    if not isinstance(grid, dict) or not grid:
        problems.append(f"grid = {show(grid)}: must be keys with lists of values, such as seed: [0, 1, 2]")
    else:
        problems += [problem for axis, values in grid.items() for problem in _axis_problems(axis, values)]
    if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1):
        problems.append(f"target_accuracy = {show(target)}: must be a number greater than 0 and at most 1")
    problems += [
        f"compare = {show(kind)}: no such comparison{nearest(str(kind), COMPARE)} ({', '.join(COMPARE)}, or a list)"
        for kind in _as_list(plain.get("compare"))
        if kind not in COMPARE
    ]
    return problems


def _axis_problems(axis: str, values: Plain) -> list[str]:
    if not isinstance(values, list) or not values:
        return [f"grid.{axis} = {show(values)}: must be a list with at least one value"]
    labels = [label for label, _ in _choices(axis, values)]
    return [
        f"grid.{axis}: two values are called {label!r}; give each a `label` of its own"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]


def _choices(axis: str, values: list[Plain]) -> list[tuple[str, list[str]]]:
    """(label, overrides) of each value of an axis.

    A mapping for a section changes its keys as overrides on the command line would; a text names its plug-in.
    The axis `method` is for changes that go together: each value a mapping of dotted keys (and a `label`).
    """
    choices = []
    for value in values:
        keys, label = value, None
        if isinstance(value, dict):
            keys = {key: inner for key, inner in value.items() if key != "label"}
            label = str(value["label"]) if "label" in value else None
        if axis in (*SECTIONS, METHOD) and isinstance(keys, dict):
            prefix = "" if axis == METHOD else f"{axis}."
            overrides = [f"{prefix}{key}={json.dumps(inner)}" for key, inner in keys.items()]
            label = label or _short(plain_without_secrets(keys))
        elif axis in PLUGIN_SECTIONS and isinstance(keys, str):
            overrides, label = [f"{axis}.name={json.dumps(keys)}"], keys
        else:
            overrides = [f"{axis}={json.dumps(keys)}"]
            label = label or f"{axis.rpartition('.')[2]} {show(plain_without_secrets(keys))}"
        choices.append((without_secrets(label), overrides))
    return choices


def _short(keys: PlainMapping) -> str:
    """`fedeas` for {name: fedeas}, `fedeas {beta: 8}` with more keys."""
    others = {key: value for key, value in keys.items() if key != "name"}
    return " ".join([*([str(keys["name"])] if "name" in keys else []), *([show(others)] if others else [])])


def _base(
    base: str | PlainDict, file: Path, overrides: list[str], axes: _Axes, say: Callable[[str], object]
) -> tuple[PlainDict, list[str]]:
    """The base with the overrides of the command line; its MLflow experiment is that of the sweep."""
    path = find_beside(file.expanduser().parent, base) if isinstance(base, str) else None
    plain, notes = read_config(path) if path is not None else with_included(plain_copy(base), file)  # type: ignore[arg-type]
    code = foreign_code(plain, overrides)
    for text in (text for choices in axes.values() for _, texts in choices for text in texts):
        ((steps, value),) = parse_overrides([text])
        code += foreign_code(functools.reduce(lambda inner, step: {step: inner}, reversed(steps), value))
    if code:
        say(foreign_note(file, code))
    tracking = plain.setdefault("tracking", {})
    if isinstance(tracking, dict) and (path is not None or "experiment" not in tracking):
        tracking["experiment"] = file.stem
    return plain, [*notes, *apply_overrides(plain, overrides)]


def _cells(
    base: PlainDict, axes: _Axes, source: str, resources: PlainMapping
) -> tuple[list[Cell], list[str]]:
    """(every combination in the order of the file, notes); ConfigError with the problems of all of them."""
    cells: list[Cell] = []
    notes: list[str] = []
    unread: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    for choice in itertools.product(*axes.values()):
        labels = {axis: label for axis, (label, _) in zip(axes, choice, strict=True) if len(axes[axis]) > 1}
        group = ", ".join(label for axis, label in labels.items() if axis != "seed") or "base"
        try:
            config = load_config(base, [text for _, texts in choice for text in texts])
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(", ".join(labels.values()) or "base")
            continue
        notes += config.changes
        for note in config.unread:
            unread[note] = unread.get(note, 0) + 1
        cells.append(Cell(labels, group, with_resources(config, resources)))
    if found:
        raise ConfigError([f"{problem} [{named(names)}]" for problem, names in found.items()], source)
    # A key that some cell reads, such as the generator's beside a policy that makes no image, is there for that cell.
    return cells, [*notes, *(note for note, times in unread.items() if times == len(cells))]


def named(cells: list[str]) -> str:
    """`cell "a"`, or `cell "a" and 5 more`."""
    return f'cell "{cells[0]}"' + (f" and {len(cells) - 1} more" if len(cells) > 1 else "")
