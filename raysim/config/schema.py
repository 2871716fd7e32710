"""The configuration: every key, with its type, range, default and meaning."""

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic.fields import FieldInfo

from raysim.config.markers import (
    IS_DEVICE,
    IS_MODIFIER,
    MAY_CHANGE,
    SAME_BITS_ON_CPU,
    AtMost,
    Key,
    NotWith,
    OnlyWith,
    inner_model,
    markers_of,
    walk,
)
from raysim.config.registry import parameters, resolve
from raysim.core.host import has_gpu
from raysim.core.plain import Plain, PlainDict, PlainMapping
from raysim.core.secrets import plain_without_secrets

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0), AtMost(2**63 - 1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), AtMost(10_000_000)]


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())


class Section(BaseModel):
    """A plug-in: its name, and beside it the plug-in's own keys."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True, protected_namespaces=())
    name: str
    """Name of the plug-in (`python -m raysim list` shows them), or `package.module:attribute`."""

    @property
    def params(self) -> PlainDict:
        """The plug-in's own keys, defaults filled in."""
        return self.__pydantic_extra__ or {}


class DataSection(Section):
    """Which images: a data set, and how much of it."""

    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many training images, class-balanced; null for all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many test images, class-balanced; null for all."""
    public_frac: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Class-balanced fraction of the training images that no client owns: for the oracle, or to pretrain on."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Class-balanced fraction of the training images that no client owns, on which the best round is chosen."""
    augment: list[Literal["crop", "flip"]] = []
    """Augmentation of training batches, drawn per client and round: random crop after 4-pixel padding, mirror."""


_WITH_MODIFIERS = (OnlyWith("rare"), OnlyWith("label_noise"), OnlyWith("input_noise"))


class PartitionSection(Section):
    """Who owns which training sample, and what is changed afterwards (in the order below)."""

    stream: Annotated[Literal["raysim", "numpy"], NotWith("name", "file")] = "raysim"
    """Random numbers that deal out the samples: raysim's own, or numpy.random.RandomState(seed) of earlier code."""
    seed: Annotated[Seed | None, NotWith("name", "file"), *_WITH_MODIFIERS] = None
    """Deals out the samples, and chooses and changes what the modifiers change; null: the seed of the run."""
    rare: Annotated[PlainDict | None, IS_MODIFIER] = None
    """Cut a fraction of clients to few samples: {fraction: 0.2, max_samples: 120}."""
    label_noise: Annotated[PlainDict | None, IS_MODIFIER] = None
    """Replace labels of a fraction of clients: {fraction: 0.2, rate: 0.4, kind: symmetric}."""
    input_noise: Annotated[PlainDict | None, IS_MODIFIER] = None
    """Add Gaussian noise to the images of a fraction of clients: {fraction: 0.2, std: 0.1}."""


_FILTERS = ("confidence", "discrepancy")


class AllocationSection(Section):
    """How many synthetic images each client gets of each class."""

    at: Annotated[list[Annotated[int, Field(ge=0), AtMost(10_000_000)]], Field(min_length=1)] = [0]
    """Rounds after which the policy is asked, ascending; 0: before the first.  `total` is spent over them."""


class Keep(_Base):
    """Which of the images that the generator makes are kept, the best by a classifier; all unless configured."""

    rule: Literal["none", "confidence", "discrepancy"] = "none"
    """confidence: the surest to be of their class; discrepancy: where the client's and the global model differ most."""
    ratio: Annotated[float, Field(ge=1, allow_inf_nan=False), AtMost(1000), OnlyWith("rule", *_FILTERS)] = 1.0
    """Candidates made for each image that is kept; all of them count in `allocation.total`."""
    classifier: Annotated[str | None, OnlyWith("rule", "confidence")] = None
    """Folder of a finished run whose model judges the candidates; null: the global model, once a round is trained."""

    @property
    def candidates(self) -> float:
        """Candidates made for each image that is kept."""
        return 1.0 if self.rule == "none" else self.ratio

    def problems(self) -> list[str]:
        """What does not go together, one line at most."""
        if self.rule == "none" or self.ratio > 1:
            return []
        return [
            f"generator.keep.ratio = {self.ratio:g}: the rule {self.rule} has nothing to choose from; make more "
            "candidates than are kept, such as generator.keep.ratio=2, or use generator.keep.rule=none"
        ]


class GeneratorSection(Section):
    """What makes the synthetic images."""

    keep: Keep = Keep()


class ModelSection(Section):
    """The network."""

    seed: Seed | None = None
    """Draws the initial parameters; null: the seed of the run."""


class AggregationSection(Section):
    """How much each client's update counts."""

    weight_by: Literal["real", "total"] = "real"
    """What n_k counts: real samples, or real plus synthetic ones."""
    buffers: Literal["average", "local", "global"] = "average"
    """Running statistics (BatchNorm): averaged by size, each client's own, or fixed at the initial ones."""


class FineTuning(_Base):
    """How well the global model serves a client that trains it on its own samples first; changes no bit of the run."""

    every: Annotated[int, Field(ge=1)] | None = None
    """Rounds between such evaluations, of which the last round is always one; null: none at all."""
    clients: Annotated[Annotated[int, Field(ge=1)] | None, OnlyWith("every")] = None
    """How many clients are tuned, the same ones each time; null: all."""
    epochs: Annotated[int, Field(ge=1), AtMost(1_000_000), OnlyWith("every")] = 1
    """Passes over the client's samples, with plain SGD."""
    batch_size: Annotated[int, Field(ge=1), OnlyWith("every")] = 32
    """Samples a step."""
    lr: Annotated[Positive, OnlyWith("every")] = 0.01
    """Learning rate."""
    test_images: Annotated[Annotated[int, Field(ge=1)] | None, OnlyWith("every")] = 100
    """Test images of each class that a tuned model is evaluated on; null: all."""


class Update(_Base):
    """What a client does to its update before sending it, and the noise that hides it; everything is off by default."""

    top_k: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Fraction of the coordinates that is sent, the largest; the rest is remembered and added to the next update."""
    quantise: Annotated[int, Field(ge=2, le=16)] | None = None
    """Bits of each coordinate sent, rounded at random to a level above or below, right on average; null: float32."""
    clip: Positive | None = None
    """Largest Euclidean norm of a client's update; longer ones are scaled down to it."""
    noise_multiplier: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Standard deviation of Gaussian noise in units of what one client can change (`clip`); 0: none."""
    noise_at: Annotated[Literal["server", "client"], OnlyWith("noise_multiplier")] = "server"
    """Who adds the noise: the server once to the weighted sum, or every client to its own update."""
    delta: Annotated[float, Field(gt=0, lt=1), OnlyWith("noise_multiplier")] = 1e-5
    """The delta of (epsilon, delta)-differential privacy for which epsilon is worked out."""

    @property
    def private(self) -> bool:
        """Whether noise is added, and so an epsilon exists."""
        return self.noise_multiplier > 0

    @property
    def changes_updates(self) -> bool:
        """Whether clients send anything but the plain update."""
        return any((self.top_k, self.quantise, self.clip, self.private and self.noise_at == "client"))

    def problems(self) -> list[str]:
        """What does not go together, one line a problem."""
        found = []
        if self.private and self.clip is None:
            found.append(
                f"update.noise_multiplier = {self.noise_multiplier:g}: noise hides a client only if its update is "
                "bounded; set update.clip"
            )
        if self.private and self.noise_at == "client" and (self.top_k or self.quantise):
            found.append(
                "update.noise_at = client: noise on every coordinate undoes update.top_k and update.quantise; use "
                "update.noise_at=server, or leave them out"
            )
        return found

    def bytes_up(self, parameters: int) -> int:
        """Bytes of one client's update of this many parameters as it is sent.

        Dense: float32, or `quantise` bits each and one float32 scale.  Sparse: a 4-byte index with each value.
        """
        sent = kept(self.top_k, parameters)
        bits = self.quantise or 32
        scale = 4 if self.quantise else 0
        return -(-sent * bits // 8) + scale + (4 * sent if self.top_k else 0)


def kept(top_k: float | None, parameters: int) -> int:
    """How many coordinates are sent: round(top_k P), at least one."""
    return parameters if top_k is None else max(1, round(top_k * parameters))


class Resources(_Base):
    """Where the work runs."""

    workers: Annotated[Literal["auto"] | Annotated[int, Field(ge=1), AtMost(1_000_000)], MAY_CHANGE] = "auto"
    """Ray actors; auto: one per threads_per_worker CPU cores, or as many of these as fit on the GPUs."""
    gpus_per_worker: Annotated[Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False)], IS_DEVICE] = "auto"
    """Fraction of a GPU that each worker owns; 0: CPU only; auto: 0 where there is no GPU, 1 where there is, or the
    largest 1 / m that has room for the number of workers."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of local training: float32, or bf16 autocast."""
    threads_per_worker: Annotated[int, Field(ge=1), AtMost(10_000)] = 1
    """CPU threads of each worker; the results of a run are the same for any number of workers, not of threads."""
    client_batching: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(lambda v: {False: "off", True: "on"}.get(v, v) if isinstance(v, bool) else v),
        SAME_BITS_ON_CPU,
    ] = "auto"
    """Train clients of small networks several at once: on a CPU to the same bits, on a GPU but for rounding.  auto: on
    a GPU the faster way, as timed before round 1 and kept by a resume; on a CPU the same as on."""
    task_timeout_s: Annotated[Seconds, MAY_CHANGE] = 600.0
    """Seconds for one client, batch of images or chunk of test images; a worker that takes longer (for several in one
    call: as many times that) is given up and replaced, and its work is done again."""
    max_retries: Annotated[int, Field(ge=0), MAY_CHANGE] = 3
    """How often a client's work is tried again after its worker died, before the run is given up."""
    on_client_failure: Literal["raise", "drop"] = "raise"
    """What to do with a client that fails for good or diverges: stop the run, or leave the client out of the round."""
    start_timeout_s: Annotated[Seconds, MAY_CHANGE] = 120.0
    """Seconds that a worker may take to start; a machine that is too busy for that gets up to 8 times as many."""
    cluster_timeout_s: Annotated[Seconds, MAY_CHANGE] = 1800.0
    """How long a run waits on a cluster while no machine has room for any worker, for example until one is started."""
    address: Annotated[str | None, MAY_CHANGE] = None
    """Address of a running Ray cluster (`auto`, `host:port`, `ray://...`); null: start Ray on this machine."""
    object_store_bytes: Annotated[
        Annotated[int, Field(ge=80_000_000), AtMost(2**60)] | None, OnlyWith("address", None), MAY_CHANGE
    ] = None
    """Size of the object store of a Ray started here; null: Ray's default. More than that spills to disk."""


class Tracking(_Base):
    """Where MLflow keeps the run."""

    uri: str = "auto"
    """auto: sqlite file mlflow.db in the working directory; any MLflow tracking URI; none: no tracking."""
    experiment: Annotated[str, NotWith("uri", "none")] = "raysim"
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
    """Measure the synthetic images (takes a minute): what is learned from them, their spread, whether any is a copy."""
    mirror: str | None = None
    """Where each run's folder is copied, such as s3://BUCKET/PREFIX or a folder that outlives this machine: what has
    changed, at every checkpoint; --resume fetches a run from there that is not in `dir`.  null: nowhere."""
    cache: str | None = "~/.cache/raysim/images"
    """Folder of the cache of synthetic and of decoded images, shared by all runs; null: no cache."""


class Config(_Base):
    """A whole run. Every key has a default but `data` and `rounds`."""

    seed: Seed = 0
    """Everything random is a function of this number, but for what has a seed of its own."""
    rounds: Annotated[int, Field(ge=1), AtMost(10_000_000), MAY_CHANGE]
    """Federated rounds."""
    clients_per_round: Annotated[int, Field(ge=1)] | Fraction = 1.0
    """Participants of a round: a number, or a fraction in (0, 1], rounded to a whole number of at least one."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations on the test split; the last round is always evaluated."""
    data: DataSection
    """Images and labels."""
    partition: PartitionSection = PartitionSection(name="dirichlet")
    """How the training split is spread over clients."""
    allocation: AllocationSection = AllocationSection(name="none")
    """How many synthetic images each client gets of each class."""
    generator: GeneratorSection = GeneratorSection(name="ddpm")
    """What makes the synthetic images."""
    model: ModelSection = ModelSection(name="cnn")
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
    tracking: Annotated[Tracking, MAY_CHANGE] = Tracking()
    output: Annotated[Output, MAY_CHANGE] = Output()
    _changes: list[str] = PrivateAttr(default_factory=list)
    _unread: list[str] = PrivateAttr(default_factory=list)
    _chosen: frozenset[str] = PrivateAttr(default_factory=frozenset)
    _source: tuple[str, ...] = PrivateAttr(default=())

    @property
    def changes(self) -> list[str]:
        """What reading the configuration changed, one line each, for the user to see."""
        return self._changes

    @property
    def unread(self) -> list[str]:
        """The keys that the user has set and that nothing reads, one line each."""
        return self._unread

    @property
    def notes(self) -> list[str]:
        """What there is to say about how the configuration was read: `changes` and `unread`."""
        return [*self._changes, *self._unread]

    @property
    def chosen(self) -> frozenset[str]:
        """The dotted names of the keys that the user has set, in a file, a mapping or an override."""
        return self._chosen

    @property
    def source(self) -> tuple[str, ...]:
        """The file that the configuration was read from and the overrides; nothing for one that was in no file."""
        return self._source

    def remember_source(self, file: str, overrides: Sequence[str]) -> None:
        """Keep what the configuration was read from."""
        self._source = (file, *overrides)

    def remember(self, changes: Sequence[str], unread: Sequence[str], chosen: frozenset[str]) -> None:
        """Keep what was found when this configuration was read."""
        self._changes, self._unread, self._chosen = list(changes), list(unread), chosen

    @property
    def partition_seed(self) -> int:
        """What deals out the samples: `partition.seed`, or the seed of the run."""
        return self.seed if self.partition.seed is None else self.partition.seed

    @property
    def model_seed(self) -> int:
        """What draws the initial parameters: `model.seed`, or the seed of the run."""
        return self.seed if self.model.seed is None else self.model.seed

    def resolved(self) -> PlainDict:
        """The whole configuration as plain data, defaults filled in."""
        return self.model_dump(mode="json")

    def without_secrets(self) -> PlainDict:
        """`resolved()` with passwords and tokens masked: what is kept with a run, and shown."""
        masked: PlainDict = plain_without_secrets(self.resolved())
        return masked

    def result_keys(self) -> PlainDict:
        """Every key on which a number of the results depends, dotted, with what the run makes of its value.

        A seed of its own that is null is that of the run; of `gpus_per_worker` only the device counts; on a CPU,
        `client_batching` does not.  Keys marked MAY_CHANGE are not among them, nor is any key of such a section.
        Passwords and tokens are masked: a new one makes no other run.
        """
        device, plain = device_of(self.resources), self.without_secrets()
        found: PlainDict = {}
        for key in keys(plain):
            if MAY_CHANGE in key.markers or (device == "cpu" and SAME_BITS_ON_CPU in key.markers):
                continue
            found[key.name] = device if IS_DEVICE in key.markers else key.value
        for modifier in MODIFIERS:  # each as a whole, which is null where it is off
            found = {name: value for name, value in found.items() if not name.startswith(f"partition.{modifier}.")}
            found[f"partition.{modifier}"] = plain["partition"][modifier]
        return {**found, "partition.seed": self.partition_seed, "model.seed": self.model_seed}

    def hash(self) -> str:
        """Identifies what is computed: equal for two configurations whose `result_keys` are equal."""
        return hashlib.sha256(json.dumps(self.result_keys(), sort_keys=True).encode()).hexdigest()[:16]


def device_of(resources: Resources) -> Literal["cpu", "gpu", "auto"]:
    """Where training runs; auto where that is up to a cluster that is yet to be joined."""
    if resources.gpus_per_worker != "auto":
        return "gpu" if resources.gpus_per_worker > 0 else "cpu"
    if resources.address or os.environ.get("RAY_ADDRESS"):
        return "auto"
    return "gpu" if has_gpu() else "cpu"


def _models() -> dict[str, type[BaseModel]]:
    """The keys of a configuration that hold further keys."""
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: t for name, t in found.items() if inspect.isclass(t) and issubclass(t, BaseModel)}


SECTIONS = _models()
PLUGIN_SECTIONS = tuple(name for name, model in SECTIONS.items() if issubclass(model, Section))
MODIFIERS = tuple(name for name, field in PartitionSection.model_fields.items() if IS_MODIFIER in markers_of(field))


def keys(plain: PlainMapping, sections: Sequence[str] = PLUGIN_SECTIONS) -> Iterator[Key]:
    """Every key of a configuration as plain data, those of its plug-ins and modifiers included.

    sections: those whose plug-ins are looked at, and which are therefore imported.
    """

    def inner(name: str, field: FieldInfo, value: PlainMapping) -> Mapping[str, FieldInfo] | None:
        if IS_MODIFIER in markers_of(field):
            return _keys_of("modifier", name.rpartition(".")[2])
        known = inner_model(name, field, value)
        return {**known, **_keys_of(name, value.get("name"))} if known is not None and name in sections else known

    return walk(Config.model_fields, plain, inner)


def _keys_of(kind: str, name: Plain) -> Mapping[str, FieldInfo]:
    """The keys of a plug-in; none of one that cannot be found."""
    try:
        return parameters(resolve(kind, name)).model_fields if isinstance(name, str) else {}
    except LookupError:
        return {}


def may_change_on_resume() -> list[str]:
    """The dotted keys of the schema that a resumed run may change; of a whole section that may, its name alone."""
    return [
        *(name for name, field in Config.model_fields.items() if MAY_CHANGE in markers_of(field)),
        *(
            f"{section}.{name}"
            for section, model in SECTIONS.items()
            for name, field in model.model_fields.items()
            if MAY_CHANGE in markers_of(field)
        ),
    ]
