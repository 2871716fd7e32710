"""The configuration: every key, with its type, range, default and meaning."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())


class Section(BaseModel):
    """A plug-in: its name, and beside it the plug-in's own keys."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True, protected_namespaces=())
    name: str
    """Name of the plug-in (`python -m raysim list` shows them), or `package.module:attribute`."""

    @property
    def params(self) -> dict[str, Any]:
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
    augment: list[Literal["crop", "flip"]] = []
    """Augmentation of training batches, drawn per client and round: random crop after 4-pixel padding, mirror."""


class PartitionSection(Section):
    """Who owns which training sample, and what is changed afterwards (in the order below)."""

    stream: Literal["raysim", "numpy"] = "raysim"
    """Random numbers that deal out the samples: raysim's own, or numpy.random.RandomState(seed) of earlier code."""
    rare: dict[str, Any] | None = None
    """Cut a fraction of clients to few samples: {fraction: 0.2, max_samples: 120}."""
    label_noise: dict[str, Any] | None = None
    """Replace labels of a fraction of clients: {fraction: 0.2, rate: 0.4, kind: symmetric}."""
    input_noise: dict[str, Any] | None = None
    """Add Gaussian noise to the images of a fraction of clients: {fraction: 0.2, std: 0.1}."""


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
    clients: Annotated[int, Field(ge=1)] | None = None
    """How many clients are tuned, the same ones each time; null: all."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the client's samples, with plain SGD."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Samples a step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Learning rate."""
    test_images: Annotated[int, Field(ge=1)] | None = 100
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
    noise_at: Literal["server", "client"] = "server"
    """Who adds the noise: the server once to the weighted sum, or every client to its own update."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
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
