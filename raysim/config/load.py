"""From YAML, overrides and mappings to a checked configuration, or to one message with everything that is wrong."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raysim.config.markers import beyond_limits, chosen, dotted, without_effect
from raysim.config.registry import check_name, check_parameters, parameters, resolve
from raysim.config.schema import MODIFIERS, PLUGIN_SECTIONS, SECTIONS, Config, Section, keys
from raysim.config.yaml_io import parse_overrides, plain_copy, read_yaml
from raysim.core.errors import ConfigError
from raysim.core.validation import problems_of


def apply_overrides(plain: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Set dotted keys (`allocation.beta=8`) in place; returns notes on keys that a changed name made meaningless."""
    # A changed name comes first: the file's keys for the old plug-in go, the command line's own keys stay.
    assignments = sorted(parse_overrides(overrides), key=lambda a: a[0][-1] != "name")
    notes: list[str] = []
    for steps, value in assignments:
        node = plain
        for step in steps[:-1]:
            if not isinstance(node.get(step), dict):
                node[step] = {}
            node = node[step]
        if steps[-1] == "name" and len(steps) == 2 and steps[0] in PLUGIN_SECTIONS and node.get("name") != value:
            notes += _drop_foreign_keys(steps[0], node, value)
        node[steps[-1]] = value
    return notes


def _drop_foreign_keys(section: str, node: dict[str, Any], name: Any) -> list[str]:
    """Forget the keys of a section that the newly named plug-in does not take."""
    if not isinstance(name, str):
        return []
    try:
        known = {*parameters(resolve(section, name)).model_fields, *SECTIONS[section].model_fields}
    except LookupError:
        return []  # the name itself is reported later
    dropped = [key for key in node if key not in known]
    for key in dropped:
        del node[key]
    keys = ", ".join(f"{section}.{key}" for key in dropped)
    return [f"{section}.name={name} leaves out {keys}, which {name!r} does not take"] if dropped else []


_Model = TypeVar("_Model", bound=BaseModel)


def validate(model: type[_Model], plain: dict[str, Any], source: str) -> _Model:
    """A pydantic model from plain data; every problem in one ConfigError."""
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, plain), source) from error


def build(
    plain: dict[str, Any], source: str = "the configuration", sections: Sequence[str] = PLUGIN_SECTIONS
) -> Config:
    """A checked configuration; ConfigError lists every problem.

    sections: the plug-ins whose parameters are checked (and which are therefore imported); of the others only the name.
    """
    set_by_user = frozenset(dotted(plain))
    plain = {**plain, **{section: _named(section, plain[section]) for section in PLUGIN_SECTIONS if section in plain}}
    problems = beyond_limits(keys(plain, sections))
    config, failure = None, None
    try:
        config = Config.model_validate(plain)
    except ValidationError as error:
        failure = error
    deeper: list[str] = []
    for section in PLUGIN_SECTIONS:
        given = plain.get(section, Config.model_fields[section].default)
        given = given.model_dump() if isinstance(given, Section) else given
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            checked, found = _check_section(section, given, section in sections)
            problems += found
            deeper += [f"{section}.{key}" for key in checked]
            if config is not None and not found:
                setattr(config, section, SECTIONS[section].model_validate(checked))
    others = {name: model for name, model in SECTIONS.items() if name not in PLUGIN_SECTIONS}
    deeper += [f"{section}.{key}" for section, model in others.items() for key in model.model_fields]
    problems += problems_of(failure, Config, plain, elsewhere=deeper) if failure else []
    problems += _cross_checks(config) if config is not None else []
    if problems or config is None:
        raise ConfigError(problems, source)
    on_purpose = chosen(keys(config.resolved(), sections), set_by_user)
    config.remember([], list(without_effect(on_purpose.values()).values()), frozenset(on_purpose))
    return config


def _named(section: str, given: Any) -> Any:
    """A section without a name means the default plug-in."""
    default = Config.model_fields[section].default
    return {"name": default.name, **given} if isinstance(given, dict) and isinstance(default, Section) else given


def _check_section(section: str, given: dict[str, Any], deep: bool) -> tuple[dict[str, Any], list[str]]:
    """(the section with defaults filled in, problems): the keys of its plug-in, and of the modifiers of a partition."""
    name, own = given["name"], SECTIONS[section].model_fields
    common = {key: value for key, value in given.items() if key in own}
    problems: list[str] = []
    for key in MODIFIERS if section == "partition" else ():
        if isinstance(common.get(key), dict):
            common[key], found = check_parameters(resolve("modifier", key), common[key], f"partition.{key}")
            problems += found
    extras = {key: value for key, value in given.items() if key not in own}
    try:
        if not deep:
            problem = check_name(section, name)
            return {**extras, **common}, [*problems, *([f"{section}.name = {name}: {problem}"] if problem else [])]
        params, found = check_parameters(resolve(section, name), extras, section, also=own)
    except LookupError as error:
        return given, [*problems, f"{section}.name = {name}: {error}"]
    return {**common, **params}, problems + found


def _cross_checks(config: Config) -> list[str]:
    clients, per_round = config.partition.params.get("clients"), config.clients_per_round
    if isinstance(clients, int) and isinstance(per_round, int) and per_round > clients:
        there = f"there are only {clients} clients (partition.clients); use at most {clients}"
        return [*config.update.problems(), f"clients_per_round = {per_round}: {there}, or a fraction such as 1.0"]
    return config.update.problems()


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), sections: Sequence[str] = PLUGIN_SECTIONS
) -> Config:
    """A checked configuration from a YAML file or a mapping, with dotted overrides such as `allocation.beta=8`.

    Raises ConfigError that lists every problem, each with its key, its value, what is accepted and the nearest name.
    """
    plain = plain_copy(source) if isinstance(source, Mapping) else read_yaml(source)
    notes = apply_overrides(plain, overrides)
    where = "the configuration" if isinstance(source, Mapping) else str(source)
    config = build(plain, f"{where} with the overrides given" if overrides else where, sections)
    config.changes.extend(notes)
    return config
