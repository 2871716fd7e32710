"""The one local training loop, over a model whose parameters live in one flat tensor.

Runs wherever torch does; knows nothing of Ray.
"""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from raysim import buffers, rng
from raysim.flat_model import FlatModel, ImageScale
from raysim.records import ByteArray, FloatArray, IntArray


@dataclass(frozen=True)
class ClientData:
    """One client's training samples in fresh memory: real ones first, then synthetic ones."""

    images: ByteArray
    labels_N: IntArray
    n_real: int


def client_data(
    images: ByteArray,
    rows_N: IntArray,
    labels_N: IntArray,
    synthetic: ByteArray | None = None,
    quota_C: IntArray | None = None,
    noise_std: float = 0.0,
    noise_rng: np.random.Generator | None = None,
) -> ClientData:
    """Gather a client's real and synthetic samples; synthetic ones are sorted by class, quota_C of each.

    noise_std: Gaussian noise on the real images in units of the [0, 1] pixel range, rounded back to uint8.
    """
    own = images[rows_N]
    if noise_std > 0 and noise_rng is not None:
        noisy = own + noise_rng.normal(0, 255 * noise_std, size=own.shape)
        own = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    if synthetic is None or quota_C is None or not quota_C.sum():
        return ClientData(own, labels_N.copy(), len(rows_N))
    made = np.repeat(np.arange(len(quota_C)), quota_C)
    return ClientData(np.concatenate([own, synthetic]), np.concatenate([labels_N, made]), len(rows_N))


@dataclass
class Job:
    """One client's local training while it runs: what the hooks of a local algorithm see and may change.

    start_P: the global parameters, in memory of their own, fixed during the local phase.  lr: that of this round.
    extra: what the server broadcasts beside the model.  state: the client's state from its last participation.
    kept: whatever a hook wants to keep until `finish`.
    """

    model: FlatModel
    start_P: Tensor
    lr: float
    round: int
    client: int
    n: int
    extra: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] | None = None
    steps: int = 0
    kept: dict[str, Any] = field(default_factory=dict)


class LocalAlgorithm(Protocol):
    """The hooks around the one loop; `raysim.local.sgd` gives each its default."""

    epochs: int
    steps: int | None
    batch_size: int
    summed: ClassVar[tuple[str, ...]]
    broadcast: ClassVar[tuple[str, ...]]
    server_only: ClassVar[tuple[str, ...]]

    def check(self, module: nn.Module, rule: Any, server: Any) -> None: ...
    def learning_rate(self, round_: int) -> float: ...
    def start(self, job: Job) -> None: ...
    def loss(self, job: Job, x: Tensor, y_B: Tensor) -> Tensor: ...
    def after_backward(self, job: Job) -> None: ...
    def step(self, job: Job) -> None: ...
    def finish(self, job: Job) -> dict[str, Tensor] | None: ...
    def effective_steps(self, job: Job) -> float: ...
    def server_update(
        self, extra: dict[str, FloatArray], sums: dict[str, FloatArray], update_P: FloatArray
    ) -> tuple[dict[str, FloatArray], FloatArray]: ...


def batches(
    n: int, batch_size: int, epochs: int, steps: int | None, generator: np.random.Generator, norm: bool
) -> Iterator[tuple[IntArray, bool]]:
    """(rows of one batch, whether it ends the epoch), a new order each epoch; `steps`, if given, replaces `epochs`.

    Batch statistics of one sample do not exist, so for models with batch normalisation (`norm`) a last batch of one
    joins the batch before it, and a client with a single sample sees it twice in its batch.
    Raises ValueError for n = 0.
    """
    if n < 1:
        raise ValueError("a client without samples cannot train")
    taken, epoch = 0, 0
    while epoch < epochs if steps is None else taken < steps:
        order = generator.permutation(n)
        parts = [order[i : i + batch_size] for i in range(0, n, batch_size)]
        if norm and len(parts[-1]) == 1:
            tail = parts.pop()
            parts = [*parts[:-1], np.concatenate([parts[-1], tail])] if parts else [np.repeat(tail, 2)]
        for i, part in enumerate(parts):
            taken += 1
            yield part, i == len(parts) - 1 or taken == steps
            if taken == steps:
                return
        epoch += 1


@dataclass(frozen=True)
class LocalResult:
    """loss: mean training loss per sample over the last (possibly unfinished) epoch, each batch before its own step."""

    loss: float
    steps: int
    seconds: float
    state: dict[str, Tensor] | None


def train_client(
    job: Job,
    algorithm: LocalAlgorithm,
    data: ClientData,
    scale: ImageScale,
    seed: int,
    bf16: bool = False,
    fixed_statistics: bool = False,
) -> LocalResult:
    """Train `job.model` in place, from where it stands, on one client's samples.

    All randomness is keyed by (seed, round, client). The model is left in training mode with the client's parameters.
    fixed_statistics: normalise with the running statistics as they are (`buffers: global`).
    """
    began = time.perf_counter()
    model, keys, device = job.model, (job.round, job.client), job.model.device
    model.module.train()
    if fixed_statistics:
        buffers.fix(model.module)
    images = torch.from_numpy(data.images).to(device)
    labels_N = torch.from_numpy(data.labels_N).to(device)
    augment_rng = rng.stream(seed, rng.AUGMENT, *keys) if scale.crop or scale.flip else None
    norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.module.modules())
    order = rng.stream(seed, rng.BATCHES, *keys)
    loss_sum, seen, mean_loss = torch.zeros((), device=device), 0, 0.0
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.manual_seed(rng.integer(seed, rng.DROPOUT, *keys))
        algorithm.start(job)
        plan = batches(job.n, algorithm.batch_size, algorithm.epochs, algorithm.steps, order, norm)
        for rows, last in plan:
            index = torch.from_numpy(rows).to(device)
            x, y_B = images[index], labels_N[index]
            if augment_rng is not None:
                x = scale.augment(x, augment_rng)
            model.grad_P.zero_()
            with torch.autocast(torch.device(device).type, torch.bfloat16) if bf16 else nullcontext():
                loss = algorithm.loss(job, scale(x, model.channels_last), y_B)
            loss.backward()
            algorithm.after_backward(job)
            algorithm.step(job)
            job.steps += 1
            loss_sum += loss.detach() * len(rows)
            seen += len(rows)
            if last:
                mean_loss, seen = float(loss_sum) / seen, 0
                loss_sum.zero_()
        state = algorithm.finish(job)
    return LocalResult(mean_loss, job.steps, time.perf_counter() - began, state)
