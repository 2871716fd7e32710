"""From YAML, overrides and mappings to a checked configuration, or to one message with everything that is wrong."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from raysim.config.markers import beyond_limits, chosen, dotted, without_effect
from raysim.config.registry import KINDS, available, check_name, check_parameters, parameters, resolve
from raysim.config.schema import MODIFIERS, PLUGIN_SECTIONS, SECTIONS, Config, Section, keys
from raysim.config.yaml_io import find_beside, find_file, parse_overrides, plain_copy, read_yaml
from raysim.core.errors import ConfigError
from raysim.core.plain import Plain, PlainDict, PlainMapping
from raysim.core.secrets import is_masked
from raysim.core.validation import closest, problems_of, show

MOST_NAME = 250  # characters of an experiment's name
SORTS = {
    "data": "a data set", "partition": "a partition", "allocation": "an allocation policy", "generator": "a generator",
    "model": "a network", "local": "a local algorithm", "aggregation": "an aggregation rule",
    "server": "a server optimiser",
}


_OF_PRETRAINING = {
    "unet", "prediction", "train_steps", "label_dropout", "sampling", "steps", "minutes", "federation",
}


def command_for(plain: PlainMapping) -> str | None:
    """Which command a file with these keys is for, where that can be told: `raysim run`, sweep, pretrain, `ray up`."""
    if "grid" in plain or "base" in plain:
        return "raysim sweep"
    if "cluster_name" in plain:
        return "ray up"
    if "rounds" not in plain and _OF_PRETRAINING & set(plain):
        return "raysim pretrain"
    return "raysim run" if set(plain) & set(Config.model_fields) else None


def check_command(plain: PlainMapping, command: str, source: str | Path | None) -> None:
    """Raise ConfigError that names the right command if the file is for another one; source: None for a mapping."""
    right = command_for(plain)
    if right not in (None, command):
        kinds = {"raysim sweep": "a sweep", "raysim pretrain": "the training of a generator", "ray up": "a cluster"}
        what = kinds.get(str(right), "a single run")
        file = "FILE" if source is None else str(source)
        raise ConfigError([f"this is the configuration of {what}; use `{right} {file}`"], str(source or "the mapping"))


def key_called(word: str) -> str | None:
    """The dotted key that a person means by a single word, such as `local.lr` by lr; without importing torch."""
    names = light_keys()
    wanted = word.replace("-", "_")
    exact = [name for name in names if name == wanted or name.rpartition(".")[2] == wanted]
    return min(exact, key=lambda name: name.count(".")) if exact else closest(wanted, names)


_LIGHT = ("partition", "allocation", "local", "aggregation", "server")  # sections whose plug-ins need no torch


def light_keys() -> list[str]:
    """The dotted keys of a configuration with the default plug-ins; without importing torch."""
    example = build({"data": {"name": "digits"}, "rounds": 1}, sections=_LIGHT)
    return [key.name for key in keys(example.resolved(), _LIGHT)]


def read_config(path: str | Path) -> tuple[PlainDict, list[str]]:
    """(the content of a configuration file with what it includes, notes on keys that lost their meaning by that).

    path: as `find_file` takes it.  `include:` names one file or a list, as `find_beside` takes them: they are read
    in order, each over those before it, and the file's own keys over all, as overrides on the command line would
    change them.  The name of a plug-in in place of its section (`data: digits`) is written out.
    Raises ConfigError for files that cannot be read, and for files that include themselves.
    """
    path = find_file(path)
    return with_included(read_yaml(path), Path(path))


def with_included(own: PlainMapping, file: Path, above: tuple[Path, ...] = ()) -> tuple[PlainDict, list[str]]:
    """As `read_config`, for the content of `file`; above: the files that include this one."""
    own, file = with_sections(own), file.expanduser().resolve()
    if "include" not in own:
        return own, []
    if file in above:
        raise ConfigError([f"include: {file.name} includes itself, by way of {above[-1].name}; remove one"], str(file))
    given = own.pop("include")
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError([f"include = {show(given)}: must be the path of a file, or a list of them"], str(file))
    plain: PlainDict = {}
    notes: list[str] = []
    for path in (find_beside(file.parent, name) for name in names):
        inner, more = with_included(read_yaml(path), path, (*above, file))
        notes += [*more, *apply_overrides(plain, [], inner)]
    return plain, [*notes, *apply_overrides(plain, [], own)]


def with_sections(plain: PlainMapping) -> PlainDict:
    """The mapping with `data: digits` written out as `data: {name: digits}`, and so for each section of a plug-in."""
    return {
        key: {"name": value} if key in PLUGIN_SECTIONS and isinstance(value, str) else value
        for key, value in plain.items()
    }


def apply_overrides(plain: PlainDict, overrides: Iterable[str], changes: PlainMapping | None = None) -> list[str]:
    """Set dotted keys (`allocation.beta=8`) in place; returns notes on keys that a changed name made meaningless.

    A mapping for a section (`local={epochs: 3}`) sets the keys that it names, and the section's others stay; a text
    (`local=fedprox`) names its plug-in.
    changes: values of top-level keys, of which the same is true.  Raises ConfigError for a key that is set twice, to
    different values.
    """
    given = [([key], value) for key, value in plain_copy(changes or {}).items()]
    assignments = _single_keys(
        (_names_plugin(steps, value) or steps, value) for steps, value in [*given, *parse_overrides(overrides)]
    )
    # A changed name comes first: the file's keys for the old plug-in go, the command line's own keys stay. A whole
    # value comes before what is set inside it.
    assignments.sort(key=lambda a: (a[0][-1] != "name", len(a[0])))
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


_Assignment = tuple[list[str], Plain]


def _names_plugin(steps: list[str], value: Plain) -> list[str] | None:
    """The key `local.name` for `local=fedprox`; None for any other assignment."""
    return [*steps, "name"] if len(steps) == 1 and steps[0] in PLUGIN_SECTIONS and isinstance(value, str) else None


def _single_keys(assignments: Iterable[_Assignment]) -> list[_Assignment]:
    """The assignments with each mapping for a section taken apart into its keys.

    Raises ConfigError for keys that are set twice to different values, also once whole and once in part.
    """
    found: list[_Assignment] = []
    problems: list[str] = []
    for steps, value in assignments:
        if len(steps) > 1 or not isinstance(value, dict):
            found.append((steps, value))
            continue
        found += [([*steps, key], inner) for key, inner in value.items()]
        if not value:
            problems.append(
                f"{steps[0]} = {{}}: names no key, so nothing would change; name the keys of `{steps[0]}` to change"
            )
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            problems += _contradiction(*sorted((one, other), key=lambda assignment: len(assignment[0])))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "the changes to the configuration")
    return found


def _contradiction(outer: _Assignment, inner: _Assignment) -> list[str]:
    """What is wrong where both assignments set one key, the first perhaps whole and the second in part; at most one."""
    (steps, whole), (more, part) = outer, inner
    if more[: len(steps)] != steps:
        return []
    value = whole
    for step in more[len(steps) :]:
        if isinstance(value, dict) and step not in value:
            return []
        value = value[step] if isinstance(value, dict) else None
    if repr(value) == repr(part) and (isinstance(whole, dict) or steps == more):
        return []
    here, there = ".".join(steps), ".".join(more)
    return [f"{here} = {show(whole)} and {there} = {show(part)} contradict each other; remove one"]


def _drop_foreign_keys(section: str, node: PlainDict, name: Plain) -> list[str]:
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


def validate(model: type[_Model], plain: PlainDict, source: str) -> _Model:
    """A pydantic model from plain data; every problem in one ConfigError."""
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, plain), source) from error


def build(
    plain: PlainDict, source: str = "the configuration", sections: Sequence[str] = PLUGIN_SECTIONS
) -> Config:
    """A checked configuration; ConfigError lists every problem.

    sections: the plug-ins whose parameters are checked (and which are therefore imported); of the others only the name.
    """
    set_by_user = frozenset(dotted(plain))
    plain = with_sections(plain)
    plain = {**plain, **{section: _named(section, plain[section]) for section in PLUGIN_SECTIONS if section in plain}}
    problems = beyond_limits(keys(plain, sections))
    if isinstance(plain.get("name"), str):
        problems.append(_name_of_what(plain.pop("name")))
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
    for section in PLUGIN_SECTIONS:
        # The name of the default plug-in, in a section that is written out in full, is no choice either.
        default = Config.model_fields[section].default
        full = all(f"{section}.{key}" in set_by_user for key in getattr(config, section).model_dump())
        if isinstance(default, Section) and full and getattr(config, section).name == default.name:
            on_purpose.pop(f"{section}.name", None)
    config.remember([], list(without_effect(on_purpose.values()).values()), frozenset(on_purpose))
    return config


def _named(section: str, given: Plain) -> Plain:
    """A section without a name means the default plug-in."""
    default = Config.model_fields[section].default
    return {"name": default.name, **given} if isinstance(given, dict) and isinstance(default, Section) else given


def _no_such_name(section: str, name: str, problem: str) -> str:
    """What is wrong with the name of a plug-in; one of another kind is told where it belongs."""
    others = [kind for kind in KINDS if kind != section and name in available(kind)]
    if not others:
        return f"{section}.name = {name}: {problem}"
    kind = others[0]
    what, where = (
        ("a modifier of the partition", f"partition.{name}={{...}}") if kind == "modifier"
        else (SORTS.get(kind, kind), f"{kind}.name={name}")
    )
    known = ", ".join(sorted(available(section)))
    told = f"{section}.name = {name}: {name} is {what}; write {where}"
    return f"{told} (known here: {known}, or package.module:attribute)"


def _name_of_what(name: str) -> str:
    """What is wrong with a `name` outside any section."""
    homes = [f"{kind}.name" for kind in KINDS if kind != "modifier" and name in available(kind)]
    meant = f"write {' or '.join(homes)}" if homes else "write it with its section, such as local.name"
    return f"name = {name}: this is the name of what? {meant}"


def _clashes(section: str, name: str, theirs: Iterable[str]) -> list[str]:
    """A plug-in of the user's own must leave the keys to the section that every plug-in of its kind has."""
    own = SECTIONS[section].model_fields
    return [
        f"{section}.name = {name}: its key {key!r} is one that `{section}` has for every plug-in "
        f"({own[key].description}); give the parameter another name"
        for key in theirs
        if key in own
    ]


def _check_section(section: str, given: PlainDict, deep: bool) -> tuple[PlainDict, list[str]]:
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
            return {**extras, **common}, [*problems, *([_no_such_name(section, name, problem)] if problem else [])]
        plugin = resolve(section, name)
        clashes = _clashes(section, name, parameters(plugin).model_fields)
        params, found = (extras, clashes) if clashes else check_parameters(plugin, extras, section, also=own)
    except LookupError as error:
        return given, [*problems, _no_such_name(section, name, str(error))]
    return {**common, **params}, problems + found


def _cross_checks(config: Config) -> list[str]:
    found = [*config.update.problems(), *config.generator.keep.problems(), *_masked_values(config.resolved())]
    for key, folder in (("dir", config.output.dir), ("cache", config.output.cache)):
        if folder is not None and "://" in folder:
            found.append(
                f"output.{key} = {show(folder)}: must be a folder of this machine, not the address of another place"
            )
    for key, folder in (("cache", config.output.cache), ("mirror", config.output.mirror)):
        if folder is not None and folder.strip().lower() in ("", "none", "no", "off", "false"):
            found.append(
                f"output.{key} = {show(folder)}: a text names a folder; write null for no {key}, or a path such as "
                "./none for a folder of this name"
            )
    found += _dates(config)
    name = config.tracking.experiment
    if not name.strip() or len(name) > MOST_NAME or not name.isprintable():
        found.append(
            f"tracking.experiment = {show(name)}: give a name of 1 to {MOST_NAME} characters (this has {len(name)}), "
            "none of them a control character"
        )
    clients, per_round = config.partition.params.get("clients"), config.clients_per_round
    if isinstance(clients, int) and isinstance(per_round, int) and per_round > clients:
        there = f"there are only {clients} clients (partition.clients); use at most {clients}"
        return [*found, f"clients_per_round = {per_round}: {there}, or a fraction such as 1.0"]
    return found


def _dates(config: Config) -> list[str]:
    """What is wrong with the rounds after which the allocation policy is asked, one line at most."""
    at = config.allocation.at
    if at != sorted(set(at)):
        return [f"allocation.at = {show(at)}: each round must be later than the one before; write {sorted(set(at))}"]
    if at[-1] >= config.rounds and at != [0]:
        return [
            f"allocation.at = {show(at)}: the run has {config.rounds} rounds, so nothing is trained after round "
            f"{at[-1]}; use rounds below {config.rounds}, or more rounds"
        ]
    return []


def _masked_values(plain: PlainMapping, prefix: str = "") -> list[str]:
    """One line for each value whose secret is masked, as in the files of a run; that of a store may be looked up."""
    found = []
    for key, value in plain.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += _masked_values(value, f"{name}.")
        elif is_masked(value) and name != "tracking.uri":
            found.append(
                f"{name} = {show(value)}: the secret is masked, as in every file of a run; set {name} to the whole "
                "value, or leave the secret out and give it in the environment, where what reads it looks there"
            )
    return found


def foreign_code(plain: PlainMapping, overrides: Iterable[str] = ()) -> list[str]:
    """The plug-ins `module:attribute` that a configuration file names, as `key = name`; nothing is imported.

    plain: the content of the file, unchecked.  overrides: what they set themselves is left out.
    """
    typed = {text.partition("=")[0].strip() for text in overrides}
    found = []
    for section in PLUGIN_SECTIONS:
        given = plain.get(section)
        name = given.get("name") if isinstance(given, Mapping) else given  # a name may stand for its section
        if isinstance(name, str) and ":" in name and f"{section}.name" not in typed:
            found.append(f"{section}.name = {name}")
    allocation = plain.get("allocation")
    return [*found, *foreign_totals(allocation, "allocation")] if "allocation.total" not in typed else found


def foreign_totals(given: Plain, prefix: str) -> list[str]:
    """The policies `module:attribute` whose total another one is to reach, however deep, as `key = name`.

    given: the keys below `prefix`.
    """
    found = []
    while isinstance(given, Mapping) and isinstance(given := given.get("total"), Mapping):
        prefix = f"{prefix}.total"
        name = given.get("of")
        if isinstance(name, str) and ":" in name:
            found.append(f"{prefix}.of = {name}")
    return found


def foreign_note(source: str | Path, code: Iterable[str]) -> str:
    """What is said before the code that a file names is imported.  code: what `foreign_code` has found in it."""
    return f"note: {source} names code of its own, which runs with your rights: {', '.join(dict.fromkeys(code))}"


def load_config(
    source: str | Path | PlainMapping, overrides: Iterable[str] = (), sections: Sequence[str] = PLUGIN_SECTIONS,
    changes: PlainMapping | None = None, say: Callable[[str], object] = lambda _: None,
) -> Config:
    """A checked configuration from a YAML file or a mapping, with dotted overrides such as `allocation.beta=8`.

    changes: values of top-level keys; a mapping sets the keys of its section that it names, and the others stay.
    say: told of code that the file names, before it runs.
    Raises ConfigError that lists every problem, each with its key, its value, what is accepted and the nearest name.
    """
    plain, notes = (with_sections(plain_copy(source)), []) if isinstance(source, Mapping) else read_config(source)
    check_command(plain, "raysim run", None if isinstance(source, Mapping) else source)
    overrides = list(overrides) if not isinstance(overrides, str) else overrides
    if not isinstance(source, Mapping) and (code := foreign_code(plain, overrides)):
        say(foreign_note(source, code))
    notes += apply_overrides(plain, overrides, changes)
    where = "the configuration" if isinstance(source, Mapping) else str(source)
    config = build(plain, f"{where} with the overrides given" if overrides or changes else where, sections)
    config.changes.extend(notes)
    if not isinstance(source, Mapping):
        config.remember_source(str(source), overrides)
    return config


def with_resources(config: Config, resources: PlainMapping) -> Config:
    """The configuration with these values of its section `resources`, but for the keys that the user has set."""
    missing = {key: value for key, value in resources.items() if f"resources.{key}" not in config.chosen}
    return config.model_copy(update={"resources": config.resources.model_copy(update=missing)})
