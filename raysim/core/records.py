"""The typed records that cross a process boundary, and the legend of shape letters.

Shape suffixes: K clients, C classes, N samples, B batch, P trainable parameters, F floating-point buffer elements.
Images are written `B x channels x height x width`, uint8 in 0..255. Units stand in names: `_s`, `_bytes`, `_frac`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
Ref: TypeAlias = Any
"""A reference into Ray's object store; only the engine, which imports Ray, knows its type."""
ClientTable = dict[str, NDArray[Any]]  # columns of one round, each with one number per participant; dtypes differ


def sha256(*arrays: NDArray[Any], images: "tuple[tuple[int, ...], Iterable[ByteArray]] | None" = None) -> str:
    """Hex digest of arrays: dtype, shape and bytes of each, in order.

    images: (shape, parts) of a last array that is never in memory as a whole.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        for start in range(0, len(array), 65536):  # in blocks: a broadcast array is never copied whole
            digest.update(np.ascontiguousarray(array[start : start + 65536]).data)
    if images is not None:
        shape, parts = images
        digest.update(f"{np.dtype(np.uint8).str}{shape}".encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """A data set in memory: uint8 images, int64 labels, the official test split kept apart.

    mean, std: per channel, of the training images scaled to [0, 1].
    flips: whether a mirrored image keeps its label (natural images: yes; digits and letters: no).
    public_images, public_labels_N: real training images that no client owns (`data.public_frac`); None without.
    validation_images, validation_labels_N: training images that the model is chosen on and no client owns
    (`data.validation_fraction`); None without.
    unread: the data set's own keys that have no effect on these data, such as test_fraction beside a test split.
    """

    name: str
    train_images: ByteArray
    train_labels_N: IntArray
    test_images: ByteArray
    test_labels_N: IntArray
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flips: bool = True
    public_images: ByteArray | None = None
    public_labels_N: IntArray | None = None
    validation_images: ByteArray | None = None
    validation_labels_N: IntArray | None = None
    unread: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """How many classes the labels may have."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for colour."""
        return int(self.train_images.shape[1])

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return int(self.train_images.shape[2]), int(self.train_images.shape[3])

    @property
    def image_bytes(self) -> int:
        """Bytes of one image: one per channel and pixel."""
        height, width = self.image_size
        return self.channels * height * width

    @property
    def nbytes(self) -> int:
        """Bytes of all its images."""
        parts = (self.train_images, self.test_images, self.public_images, self.validation_images)
        return sum(images.nbytes for images in parts if images is not None)


class ClientDraw(Protocol):
    """The samples of each client, as a pure function of its id."""

    def __call__(self, client: int) -> tuple[IntArray, IntArray]:
        """Return a client's (rows of the training split, labels), both of length N_k."""

    def sha256(self) -> str:
        """Hex digest that identifies the function."""


@dataclass(frozen=True)
class Partition:
    """Which training samples each client owns: one flat index array and offsets, never a list per client.

    indices: rows of the training split; client k owns indices[offsets_K1[k]:offsets_K1[k + 1]].
    labels: aligned with `indices`; differ from the data set's own labels only where label noise is configured.
    rare_K, noisy_K: which clients a modifier changed.  input_noise_K: standard deviation of Gaussian pixel noise, in
    units of the [0, 1] pixel range.
    drawn: computes a client's rows when it trains, for very many clients; `indices` and `labels` are then empty.
    """

    indices: IntArray
    offsets_K1: IntArray
    labels: IntArray
    classes: int
    rare_K: BoolArray
    noisy_K: BoolArray
    input_noise_K: FloatArray
    drawn: ClientDraw | None = None

    @property
    def clients(self) -> int:
        """How many clients there are: K."""
        return len(self.offsets_K1) - 1

    @property
    def sizes_K(self) -> IntArray:
        """Samples per client, shape K."""
        return np.diff(self.offsets_K1)

    @property
    def counts_KC(self) -> IntArray:
        """Samples per client and class, K x C; takes minutes for a drawn partition of a million clients."""
        if self.drawn is not None:
            return np.array([np.bincount(self.client(k)[1], minlength=self.classes) for k in range(self.clients)])
        owner = np.repeat(np.arange(self.clients), self.sizes_K)
        flat = np.bincount(owner * self.classes + self.labels, minlength=self.clients * self.classes)
        return flat.reshape(self.clients, self.classes).astype(np.int64)

    def client(self, k: int) -> tuple[IntArray, IntArray]:
        """Client k's (rows of the training split, labels), both of length N_k."""
        if self.drawn is not None:
            return self.drawn(k)
        owned = slice(int(self.offsets_K1[k]), int(self.offsets_K1[k + 1]))
        return self.indices[owned], self.labels[owned]

    def sha256(self) -> str:
        """Hex digest of the partition: all its arrays, and the function of a drawn one."""
        arrays = sha256(self.indices, self.offsets_K1, self.labels, self.rare_K, self.noisy_K, self.input_noise_K)
        return arrays if self.drawn is None else hashlib.sha256((arrays + self.drawn.sha256()).encode()).hexdigest()


@dataclass(frozen=True)
class Allocation:
    """What an allocation policy decides.

    quota_KC: synthetic images of each class that each client trains on, K x C.  keep_KC: how many real samples of each
    class each client trains on, K x C; None: all of them.  shared: the images come from one pool, which is made once:
    image i of a class is the same for all clients, and a client gets the first quota_kc of class c.
    candidates_KC: how many images are made for those that are kept (`generator.keep`), K x C; None: all are kept.
    """

    quota_KC: IntArray
    keep_KC: IntArray | None = None
    shared: bool = False
    candidates_KC: IntArray | None = None

    @property
    def to_make_KC(self) -> IntArray:
        """The images that are made: K x C, or 1 x C for a pool, which is as large as any client needs."""
        if self.candidates_KC is not None:
            return self.candidates_KC
        return self.quota_KC.max(axis=0, keepdims=True) if self.shared else self.quota_KC

    @property
    def images(self) -> int:
        """How many images are made: what a budget counts."""
        return int(self.to_make_KC.sum())


@dataclass(frozen=True)
class ClientTask:
    """One client's local training in one round.

    n_real, n_synthetic: how many samples it has.  quota_C: synthetic images per class.  synthetic: these, sorted by
    class.  state: reference to the client's state, for algorithms that keep one.
    """

    client: int
    n_real: int
    n_synthetic: int = 0
    quota_C: IntArray | None = None
    synthetic: "StoredImages | None" = None
    state: Ref = None


@dataclass(frozen=True)
class ClientReport:
    """What a worker answers for one client: scalars only.

    loss: mean training loss per sample over the last local epoch.  delta_norm: Euclidean norm of the update.
    effective_steps: ||a||_1 of FedNova, the number of local steps, each weighted by its total effect through momentum.
    metrics: further values that the configuration asks for, such as `oui`.  seconds: wall time of the local training.
    """

    client: int
    n_real: int
    n_synthetic: int
    steps: int
    effective_steps: float
    loss: float
    delta_norm: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundTable:
    """The scalars of a round's clients from which a rule computes weights: one row per participant, by client id.

    n_K: samples that weigh a client (real ones, unless `weight_by: total`).  columns: `effective_steps` and
    every statistic that clients report, those that the rule declared in `needs` among them, each of shape K.
    """

    round: int
    client_K: IntArray
    n_K: IntArray
    columns: dict[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """A rule's answer: what each client weighs; scores_K and info are logged, such as the mode of a fit.

    w_K sums to 1, but for rules with `normalises = False`, such as fednova and fixed_denominator.
    """

    w_K: FloatArray
    scores_K: FloatArray | None = None
    info: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelState:
    """A model as three flat arrays: trainable parameters (P), floating-point buffers (F), integer buffers.

    broadcast_vectors: further vectors that a local algorithm broadcasts, such as SCAFFOLD's control variate.
    """

    params_P: Float32Array
    buffers_F: Float32Array
    counters: IntArray
    broadcast_vectors: dict[str, Float32Array] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredImages:
    """Images in the object store, of one client for example: stretches of blocks, one after another.

    parts: (reference to a block, its first row that counts, the row after the last) of each stretch.
    """

    parts: tuple[tuple[Ref, int, int], ...]


@dataclass(frozen=True)
class ImageBlocks:
    """Many images in the object store, in an order of their own: equally large blocks, the last may be smaller.

    refs: reference to each block, uint8 B x channels x height x width.  size: images in a block.
    """

    refs: tuple[Ref, ...] = ()
    size: int = 1

    def rows(self, *ranges: tuple[int, int]) -> StoredImages:
        """The images of some ranges [start, stop) of this order; where one goes on, the next is added to it."""
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif start < stop:
                joined.append((start, stop))
        return StoredImages(tuple(
            (self.refs[i], max(start - i * self.size, 0), min(stop - i * self.size, self.size))
            for start, stop in joined
            for i in range(start // self.size, -(-stop // self.size))
        ))


@dataclass(frozen=True)
class Synthetic:
    """The synthetic images of all clients.

    quota_KC: images of each class that each client has.  blocks: the images, sorted by client, class and index.
    made: how many were generated in this run; the others came from the cache.  examples: a few images and their labels.
    pool_C: images of each class in the pool that clients share, sorted by class and index; None where each has its own.
    chosen: which images these are, where they were chosen among candidates; else None, and image i of a cell is the
    i-th that was made for it.
    """

    quota_KC: IntArray
    blocks: ImageBlocks = ImageBlocks()
    sha256: str = ""
    made: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    examples: tuple[ByteArray, IntArray] | None = None
    pool_C: IntArray | None = None
    chosen: "Chosen | None" = None

    @property
    def images(self) -> int:
        """How many images were made for these, or had been made before: what a budget counts."""
        return int((self.owned_KC if self.chosen is None else self.chosen.candidates_KC).sum())

    @property
    def owned_KC(self) -> IntArray:
        """How many different images there are of each owner and class: of each client, or of the pool, 1 x C."""
        return self.quota_KC if self.pool_C is None else self.pool_C[None]

    @cached_property
    def _ends_K(self) -> IntArray:
        return np.cumsum(self.quota_KC.sum(axis=1))

    def of(self, client: int) -> StoredImages | None:
        """The images of a client, sorted by class, then by index; None where it has none.

        Of a pool that is the first quota_kc images of each class.
        """
        quota_C = self.quota_KC[client]
        n = int(quota_C.sum())
        if not n:
            return None
        if self.pool_C is None:
            end = int(self._ends_K[client])
            return self.blocks.rows((end - n, end))
        starts_C = np.cumsum(self.pool_C) - self.pool_C
        return self.blocks.rows(*zip(starts_C.tolist(), (starts_C + quota_C).tolist(), strict=True))


@dataclass(frozen=True)
class Chosen:
    """Which images were chosen among candidates.

    keys_M3: client, class and index of each, sorted.  candidates_KC: how many were made for each client and class.
    """

    keys_M3: IntArray
    candidates_KC: IntArray


@dataclass(frozen=True)
class Candidates:
    """Images of one client among which some are to be chosen.

    labels_N: their classes.  task: the client's training, where its own model judges them, too; None where another does
    alone.
    """

    client: int
    images: StoredImages
    labels_N: IntArray
    task: ClientTask | None = None


@dataclass(frozen=True)
class BatchingChoice:
    """Whether a run's clients are trained several at once on devices where that changes bits, and why.

    alone_s, at_once_s: seconds that a worker's part of the local training of a round is expected to take one after
    another and at once; None where that was not timed.
    """

    at_once: bool
    why: str
    alone_s: float | None = None
    at_once_s: float | None = None

    def __str__(self) -> str:
        return f"{'several at once' if self.at_once else 'one after another'}: {self.why}"
