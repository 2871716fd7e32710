"""The configuration: its keys, their defaults and ranges, and how it is read from YAML and dotted overrides."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from raysim.config.registry import check_name, check_parameters, parameters, problems_of, resolve
from raysim.config.sections import AggregationSection, DataSection, FineTuning, PartitionSection, Section
from raysim.config.update_options import Update
from raysim.config.yaml_io import parse_overrides, plain_copy, read_yaml
from raysim.core.errors import ConfigError

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())


class Resources(_Base):
    """Where the work runs."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Ray actors; auto: one per CPU core, or as many as fit on the GPUs."""
    gpus_per_worker: Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = "auto"
    """Fraction of a GPU that each worker owns; 0: CPU only; auto: 1 where there is a GPU, else 0."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of local training: float32, or bf16 autocast."""
    threads_per_worker: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each worker; the results of a run are the same for any number of workers, not of threads."""
    client_batching: Annotated[Literal["auto", "off"], BeforeValidator(lambda v: "off" if v is False else v)] = "auto"
    """Train clients of small networks several at once; on a CPU, to the same bits; YAML reads off as false, too."""
    task_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """A call to a worker that takes longer than this is given up, its worker replaced and its clients trained again."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """How often a client's work is tried again after its worker died, before the run is given up."""
    on_client_failure: Literal["raise", "drop"] = "raise"
    """What to do with a client that fails for good or diverges: stop the run, or leave the client out of the round."""
    start_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """How long to wait for workers to start."""
    address: str | None = None
    """Address of a running Ray cluster (`auto`, `host:port`, `ray://...`); null: start Ray on this machine."""
    object_store_bytes: Annotated[int, Field(ge=80_000_000)] | None = None
    """Size of the object store of a Ray started here; null: Ray's default. More than that spills to disk."""


class Tracking(_Base):
    """Where MLflow keeps the run."""

    uri: str = "auto"
    """auto: sqlite file mlflow.db in the working directory; any MLflow tracking URI; none: no tracking."""
    experiment: str = "raysim"
    """MLflow experiment."""


class Output(_Base):
    """What a run leaves on disk."""

    dir: str = "runs"
    """Folder that gets one sub-folder a run."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    """Rounds between checkpoints; one is also written at the end and when the run is interrupted."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints are kept."""
    quality: bool = False
    """Measure the synthetic images (takes a minute): what a classifier learns from them, whether any is a copy."""
    cache: str | None = "~/.cache/raysim/images"
    """Folder of the cache of synthetic and of decoded images, shared by all runs; null: no cache."""


class Config(_Base):
    """A whole run. Every key has a default but `data` and `rounds`."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Everything random is a function of this number."""
    rounds: Annotated[int, Field(ge=1)]
    """Federated rounds."""
    clients_per_round: Annotated[int, Field(ge=1)] | Fraction = 1.0
    """Participants of a round: a number, or a fraction in (0, 1], rounded to a whole number of at least one."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on the test split; the last round is always evaluated."""
    data: DataSection
    """Images and labels."""
    partition: PartitionSection = PartitionSection(name="dirichlet")
    """How the training split is spread over clients."""
    allocation: Section = Section(name="none")
    """How many synthetic images each client gets of each class."""
    generator: Section = Section(name="ddpm")
    """What makes the synthetic images."""
    model: Section = Section(name="cnn")
    """The network."""
    local: Section = Section(name="sgd")
    """Local training."""
    aggregation: AggregationSection = AggregationSection(name="fedavg")
    """Weights of the clients' updates."""
    server: Section = Section(name="sgd")
    """The step from the aggregated update to the next global model."""
    update: Update = Update()
    fine_tuning: FineTuning = FineTuning()
    resources: Resources = Resources()
    tracking: Tracking = Tracking()
    output: Output = Output()
    _notes: list[str] = PrivateAttr(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What reading the configuration changed, for the user to see."""
        return self._notes

    def resolved(self) -> dict[str, Any]:
        """The whole configuration as plain data, defaults filled in."""
        return self.model_dump(mode="json")

    def hash(self) -> str:
        """Identifies what is computed: everything but the number of rounds and where and how the run is kept."""
        plain = self.resolved()
        for key in ("rounds", "tracking", "output", "resources"):
            del plain[key]
        plain["arithmetic"] = [self.resources.precision, self.resources.threads_per_worker]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


PLUGIN_SECTIONS = ("data", "partition", "allocation", "generator", "model", "local", "aggregation", "server")
MODIFIERS = ("rare", "label_noise", "input_noise")
_PLAIN: dict[str, type[BaseModel]] = {
    "update": Update, "fine_tuning": FineTuning, "resources": Resources, "tracking": Tracking, "output": Output,
}


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
        known = {*parameters(resolve(section, name)).model_fields, *_section_class(section).model_fields}
    except LookupError:
        return []  # the name itself is reported later
    dropped = [key for key in node if key not in known]
    for key in dropped:
        del node[key]
    keys = ", ".join(f"{section}.{key}" for key in dropped)
    return [f"{section}.name={name} leaves out {keys}, which {name!r} does not take"] if dropped else []


def _section_class(section: str) -> type[BaseModel]:
    return cast(type[BaseModel], Config.model_fields[section].annotation)


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
    plain = {**plain, **{section: _named(section, plain[section]) for section in PLUGIN_SECTIONS if section in plain}}
    problems: list[str] = []
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
                setattr(config, section, _section_class(section).model_validate(checked))
    deeper += [f"{section}.{key}" for section, model in _PLAIN.items() for key in model.model_fields]
    problems += problems_of(failure, Config, plain, elsewhere=deeper) if failure else []
    problems += _cross_checks(config) if config is not None else []
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def _named(section: str, given: Any) -> Any:
    """A section without a name means the default plug-in."""
    default = Config.model_fields[section].default
    return {"name": default.name, **given} if isinstance(given, dict) and isinstance(default, Section) else given


def _check_section(section: str, given: dict[str, Any], deep: bool) -> tuple[dict[str, Any], list[str]]:
    """(the section with defaults filled in, problems): the keys of its plug-in, and of the modifiers of a partition."""
    name, own = given["name"], _section_class(section).model_fields
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
    config.notes.extend(notes)
    return config
