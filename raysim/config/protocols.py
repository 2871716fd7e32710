"""What each kind of plug-in takes and gives: one protocol a kind, for those who write plug-ins.

Functions (data set, partition, modifier, allocation policy, model) are called with what raysim supplies, in this order,
and with the keys of their section of the configuration, which are their keyword-only parameters.  Classes (generator,
local algorithm, aggregation rule, server optimiser) take their keys when they are built; for a dataclass these are its
fields.  A class may derive from its protocol, and need not: a member with a default here may be left out either way.

Letters in names give shapes: K clients, C classes, N samples, B images of a batch, P trainable parameters, p some of
these.  For input that cannot work, a plug-in raises `UserError`, which ends the command with its text and exit code 2.

Some types below belong to packages that import this one; they are for annotations alone and never imported here.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from raysim.core.plain import PlainDict

if TYPE_CHECKING:
    from numpy.random import Generator, RandomState
    from torch import Tensor, nn

    from raysim.core.records import Allocation, ByteArray, Dataset, FloatArray, IntArray, Partition, RoundTable, Weights
    from raysim.local.contract import Job

__all__ = [
    "MEASURED_INPUTS",
    "POLICY_INPUTS",
    "PROTOCOLS",
    "AggregationRule",
    "AllocationPolicy",
    "DataSource",
    "FunctionRule",
    "ImageGenerator",
    "LocalAlgorithm",
    "ModelFactory",
    "Modifier",
    "Partitioner",
    "ServerOptimiser",
    "Updates",
]

# `*args: Any, **keys: Any` stands for "and any keyword-only parameters": the keys are each plug-in's own.


class DataSource(Protocol):
    """A data set: a function of its keys alone.

    One with an optional positional parameter `reader` is given a `raysim.plugins_api.Reader`: a cache of decoded
    images, and a list of notes for the user.
    """

    def __call__(self, *args: Any, **keys: Any) -> "Dataset":
        """Images N x channels x height x width, uint8 in 0..255; labels N, int64 in 0..C-1; test images kept apart.

        Raises UserError for files that are missing or cannot be read.
        """
        ...


class Partitioner(Protocol):
    """A partition: which client owns which training sample.

    A function whose attribute `replacement` is True may give one sample to several clients, or twice to one.
    """

    def __call__(
        self, labels_N: "IntArray", classes: int, rng: "Generator | RandomState", /, *args: Any, **keys: Any
    ) -> "Partition":
        """The clients' rows of the training split, from its labels: N, int64 in 0..C-1.

        All randomness comes from `rng`, which depends on the seed alone.  Raises UserError for keys that cannot be met.
        """
        ...


class Modifier(Protocol):
    """What is changed in a partition afterwards, such as labels that are made wrong."""

    def __call__(self, partition: "Partition", rng: "Generator", /, *args: Any, **keys: Any) -> "Partition":
        """A changed copy with the same clients.  Raises UserError for keys that the partition cannot meet."""
        ...


MEASURED_INPUTS = {
    "global_accuracy_KC": "K x C in [0, 1]: of the global model on validation images of a class, alike for all clients",
    "global_loss_KC": "K x C: its mean cross-entropy there",
    "local_accuracy_KC": "K x C: of client k's model, the global one after the client's training of the next round",
    "local_loss_KC": "K x C: its mean cross-entropy there",
}
"""What training has shown; nan for a class without a validation image.  Known once a round has been trained."""

POLICY_INPUTS = {
    "seed": "int: the seed of the run, for policies that draw",
    "round": "int: rounds trained so far",
    "images_KC": "K x C whole numbers: synthetic images that clients have so far",
    "spent": "int: synthetic images made so far",
    **MEASURED_INPUTS,
}
"""What an allocation policy may have as a positional parameter after counts_KC, by name: it is then given it."""


class AllocationPolicy(Protocol):
    """How many synthetic images each client gets of each class.

    What else it needs it asks for by the names of its positional parameters after the first: see POLICY_INPUTS.
    """

    def __call__(self, counts_KC: "IntArray", /, *args: Any, **keys: Any) -> "IntArray | Allocation":
        """Images to make now, K x C whole numbers >= 0, from the real samples per client and class, K x C, read-only.

        An `Allocation` in place of the array also says which real samples are left out, or that clients share images.
        A pure function: no files, no randomness but from `seed`.  Raises UserError for a budget that cannot be placed.
        """
        ...


class ModelFactory(Protocol):
    """A network for classification."""

    def __call__(
        self, channels: int, image_size: tuple[int, int], classes: int, /, *args: Any, **keys: Any
    ) -> "nn.Module":
        """A module from images, B x channels x height x width in float32, to logits: B x C.

        image_size: (height, width) in pixels.  Initial parameters come from torch's global generator, which is seeded
        before the call.  Raises UserError for images that the network cannot take.
        """
        ...


class ImageGenerator(Protocol):
    """What makes synthetic images.  An image depends on its label and its seed alone, not on others in its batch."""

    def __init__(self, dataset: "Dataset", device: str, *args: Any, **keys: Any) -> None:
        """dataset: what the images are to look like.  device: of torch, such as cpu or cuda:0.

        Raises UserError for keys, or weights, that do not suit the data set.
        """

    @abstractmethod
    def sample(self, labels_B: "IntArray", seeds_B: "IntArray") -> "ByteArray":
        """One image per label and seed: uint8 B x channels x height x width of the data set, for any B."""
        ...

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes with everything that changes a pixel, such as weights and keys; the cache's key."""
        ...

    def memory_bytes(self) -> int:
        """The memory that each worker needs to load the generator, in bytes; 0, the default, for little."""
        return 0

    @staticmethod
    def images_per_call(*args: Any, **keys: Any) -> int:  # noqa: ARG004
        """How many images a worker is asked for at once, from the keys; by default `batch_size`, or else 64."""
        return int(keys.get("batch_size") or 64)

    @staticmethod
    def image_seed(seed: int, client: int, class_: int, index: int) -> int:
        """The seed of image `index` of a class on a client, 0 <= seed < 2^63; by default, one that no other has.

        seed: of the run.  To be overridden where a seed must say more than that it differs.
        """
        from raysim.core import rng

        return rng.integer(seed, rng.SYNTHETIC, client, class_, index)

    @staticmethod
    def settled(dataset: "Dataset", **keys: Any) -> dict[str, Any]:  # noqa: ARG004
        """The keys as all workers are to use them, with what only the driver can look up settled; by default as given.

        Raises UserError where it is not there.
        """
        return keys

    @staticmethod
    def notes(dataset: "Dataset", quota_KC: "IntArray", *args: Any, **keys: Any) -> list[str]:  # noqa: ARG004
        """What the user should know about this quota, such as that images repeat; by default nothing."""
        return []


class LocalAlgorithm(Protocol):
    """Training on a client: hooks around one loop over batches.  `raysim.local.sgd` gives each hook a default.

    The loop of one client in one round, on the resident model, whose parameters and gradient are flat vectors of
    length P (`job.model.params_P`, `job.model.grad_P`):

        start(job);  for each batch: loss(job, x, y_B), backward, after_backward(job), step(job);  finish(job)

    and at the server, once the updates are combined: server_update.
    """

    epochs: int
    """Passes over the client's samples."""
    steps: int | None
    """Steps in place of epochs; None: by epochs."""
    batch_size: int
    """Samples of a step."""
    summed: ClassVar[tuple[str, ...]] = ()
    """Names of vectors (P) in `job.scratch`; the server gets their sum divided by the number of all clients."""
    broadcast: ClassVar[tuple[str, ...]] = ()
    """Names of the server-side vectors (P) that every client receives; they start at zero."""
    server_only: ClassVar[tuple[str, ...]] = ()
    """Those of `broadcast` and `summed` that a real federation would not send: the server can compute them itself."""
    logged: ClassVar[tuple[str, ...]] = ()
    """Names of numbers in `job.scratch` that are recorded for each client; a real federation sends none of them."""
    equal_clients: ClassVar[bool] = False
    """Whether the method minimises the mean over clients with equal weights, whatever the weights of their updates."""

    def check(self, module: "nn.Module", rule: "AggregationRule", server: "ServerOptimiser") -> None:
        """Raise UserError for a model, aggregation rule or server optimiser that the algorithm cannot work with."""

    @abstractmethod
    def learning_rate(self, round_: int) -> float:
        """The learning rate of a round (counted from 1), the same for every client."""
        ...

    def start(self, job: "Job") -> None:
        """Before the first step."""

    @abstractmethod
    def loss(self, job: "Job", x: "Tensor", y_B: "Tensor") -> "Tensor":
        """The mean loss, a scalar, of images x (B x channels x height x width, float32) with labels y_B (int64)."""
        ...

    def after_backward(self, job: "Job") -> None:
        """Change the gradient in place, after `backward` and before the step."""

    @abstractmethod
    def step(self, job: "Job") -> None:
        """One step on the flat parameters, in place."""
        ...

    def finish(self, job: "Job") -> "dict[str, Tensor] | None":  # noqa: ARG002
        """After the last step: the client's new state, kept until its next round; None for algorithms without one."""
        return None

    def effective_steps(self, job: "Job") -> float:
        """||a||_1 of FedNova: how far unit gradients would have moved the client, in units of the learning rate."""
        return job.steps

    def server_update(
        self, broadcast_vectors: "dict[str, FloatArray]", sums: "dict[str, FloatArray]", update_P: "FloatArray"
    ) -> "tuple[dict[str, FloatArray], FloatArray]":
        """(next round's `broadcast` vectors, the update for the server optimiser), from this round's sums (P each).

        broadcast_vectors, sums: by the names in `broadcast` and `summed`.  update_P: what the aggregation rule gives.
        """
        del sums
        return broadcast_vectors, update_P


class Updates(Protocol):
    """A handle on the K updates of a round, which stay where they were computed; rows in the order of the table."""

    def norms(self) -> "FloatArray":
        """Euclidean norm of each update: K."""
        ...

    def dot(self, v_P: "FloatArray") -> "FloatArray":
        """Inner product of each update with v_P: K."""
        ...

    def weighted_sum(self, w_K: "FloatArray") -> "FloatArray":
        """sum_k w_k Delta_k: P."""
        ...

    def gram(self) -> "FloatArray":
        """Inner products of the updates with each other: K x K."""
        ...

    def by_coordinate(self, fn: "Callable[[FloatArray], FloatArray]") -> "FloatArray":
        """`fn` maps any slice of coordinates, K x p, to p numbers; the slices' answers, joined: P."""
        ...


class AggregationRule(Protocol):
    """How much each client's update counts.  No rule sees a client's update: `Updates` answers with scalars and sums.

    A function (table) -> w_K is a rule, too: its numbers, one a client, >= 0, are divided by their sum.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Columns of the round table that `weights` reads beyond n_K: effective_steps; oui, which clients then measure."""
    streams: ClassVar[bool] = False
    """Whether n_K alone decides: `weights` is then asked before training, and updates are summed meanwhile."""
    robust: ClassVar[bool] = False
    """Whether the rule bounds what a few arbitrary clients can do; every rule with an `aggregate` counts as one."""

    normalises: ClassVar[bool] = True
    """Whether the weights of every round add up to 1."""

    def needs_samples(self) -> bool:
        """Whether a round has no weights where every client of its cohort has n_k = 0."""
        return False

    def check(self, participants: int) -> None:
        """Before the run: raises UserError for a number of participants a round that the rule cannot work with."""

    def register(self, n_K: "IntArray", participants: int) -> None:
        """Before the run: n_k of all registered clients, and how many of them take part in a round.

        Raises UserError for sizes that the rule cannot work with.
        """

    def constant_weights(self, n_K: "IntArray", participants: int) -> "FloatArray | None":  # noqa: ARG002
        """The weight of each registered client in every cohort of this many, if it is the same in all of them: K.

        None where it depends on the rest of the cohort, on updates, or on anything else that is not known beforehand.
        The noise of differential privacy at the server is only accepted with constant weights.
        """
        return None

    @abstractmethod
    def weights(self, table: "RoundTable", updates: "Updates | None") -> "Weights":
        """The weight of each client of the table: K.  Called once a round, in order of rounds.

        Raises RunError where no weights exist, which ends the run.
        """
        ...

    def aggregate(self, table: "RoundTable", updates: "Updates") -> "FloatArray | None":  # noqa: ARG002
        """The combined update (P) of a rule that is no weighted sum of updates; None: sum_k w_k Delta_k."""
        return None

    @property
    def is_weighted_sum(self) -> bool:
        """Whether the combined update is sum_k w_k Delta_k: true unless `aggregate` is overridden."""
        return type(self).aggregate is AggregationRule.aggregate

    def state(self) -> PlainDict:
        """What the rule remembers of earlier rounds, as JSON values, for a checkpoint; by default nothing."""
        return {}

    def load_state(self, state: PlainDict) -> None:
        """Take up where `state` left off; called before each round that has one before it."""


class ServerOptimiser(Protocol):
    """From the combined update to the step of the global model; a pure function of its state and the update."""

    @abstractmethod
    def init(self, parameters: int) -> "dict[str, FloatArray]":
        """The state before round 1, for this many parameters, P: named float64 vectors."""
        ...

    @abstractmethod
    def step(
        self, state: "dict[str, FloatArray]", update_P: "FloatArray"
    ) -> "tuple[dict[str, FloatArray], FloatArray]":
        """(the next state, the step to add to the global parameters: P); the arguments are not changed.

        The update points from the global model towards the clients.
        """
        ...


class FunctionRule(AggregationRule):
    """An aggregation rule from a plain function (table, *, its keys) -> one number >= 0 a client: K.

    The numbers are divided by their sum.  Raises RunError for an answer that is anything else.
    """

    function: ClassVar["Callable[..., FloatArray]"]

    def __init__(self, **keys: Any) -> None:
        self.keys = keys

    def weights(self, table: "RoundTable", updates: "Updates | None") -> "Weights":  # noqa: ARG002
        """What the function says of this table, over its sum."""
        import numpy as np

        from raysim.core.errors import RunError
        from raysim.core.records import Weights

        answer = type(self).function(table, **self.keys)
        raw_K = np.asarray(answer)
        total = math.nan
        if raw_K.shape == table.n_K.shape and raw_K.dtype.kind in "iufb" and (raw_K >= 0).all():
            total = math.fsum(raw_K)
        if not 0 < total < math.inf:
            raise RunError(
                f"round {table.round}: the aggregation rule {type(self).__module__}:{type(self).__name__} returned "
                f"{raw_K.tolist()!r:.200}; it must return one finite number >= 0 for each of the {len(table.n_K)} "
                "clients of the table, at least one of them above 0"
            )
        return Weights(raw_K.astype(np.float64) / total)


PROTOCOLS: dict[str, type] = {
    "data": DataSource,
    "partition": Partitioner,
    "modifier": Modifier,
    "allocation": AllocationPolicy,
    "generator": ImageGenerator,
    "model": ModelFactory,
    "local": LocalAlgorithm,
    "aggregation": AggregationRule,
    "server": ServerOptimiser,
}
"""The protocol of each kind of plug-in, by the name of the kind."""
