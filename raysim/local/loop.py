"""The one local training loop, over a model whose parameters live in one flat tensor.

Needs torch alone; knows nothing of Ray.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from raysim.config.protocols import LocalAlgorithm
from raysim.core import rng
from raysim.core.records import ByteArray, IntArray
from raysim.local import batchnorm
from raysim.local.contract import ClientData, Job, LocalResult, cross_entropy
from raysim.local.dense_gradient import DenseGradient
from raysim.local.sgd import sgd
from raysim.models.architectures import Classifier
from raysim.models.flat_model import FlatModel, ImageScale

BLOCK_BYTES = 1 << 20  # bytes of float32 images that are prepared at a time: few enough for a core's cache


def client_data(
    images: ByteArray,
    rows_N: IntArray,
    labels_N: IntArray,
    synthetic: ByteArray | None = None,
    quota_C: IntArray | None = None,
    noise_std: float = 0.0,
    noise_rng: np.random.Generator | None = None,
) -> ClientData:
    """Gather a client's real and synthetic samples.

    images: all training images.  rows_N, labels_N: the client's rows of them, and its labels.  synthetic: its synthetic
    images sorted by class, quota_C of each class.  noise_std: standard deviation of Gaussian noise on the real images
    in units of the [0, 1] pixel range; the result is rounded to uint8.
    """
    own = images[rows_N]
    if noise_std > 0 and noise_rng is not None:
        noisy = own + noise_rng.normal(0, 255 * noise_std, size=own.shape)
        own = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    if synthetic is None or quota_C is None or not quota_C.sum():
        return ClientData(own, labels_N.copy(), len(rows_N))
    made = np.repeat(np.arange(len(quota_C)), quota_C)
    return ClientData(np.concatenate([own, synthetic]), np.concatenate([labels_N, made]), len(rows_N))


def batches(
    n: int, batch_size: int, epochs: int, steps: int | None, generator: np.random.Generator, norm: bool
) -> Iterator[tuple[IntArray, bool]]:
    """Yield (rows of one batch, whether it ends the epoch), in a new order each epoch.

    steps: if given, the number of batches, whatever `epochs` is.  Batch statistics of one sample do not exist, so for
    models with batch normalisation (`norm`) a last batch of one sample is added to the batch before it, and a client
    with a single sample has it twice in its batch.
    Raises ValueError for n = 0.
    """
    if n < 1:
        raise ValueError("a client without samples cannot train")
    taken = 0
    epoch = 0
    while epoch < epochs if steps is None else taken < steps:
        order = generator.permutation(n)
        rows = [order[i : i + batch_size] for i in range(0, n, batch_size)]
        if norm and len(rows[-1]) == 1:
            last = rows.pop()
            rows = [*rows[:-1], np.concatenate([rows[-1], last])] if rows else [np.repeat(last, 2)]
        for i, rows_B in enumerate(rows):
            taken += 1
            yield rows_B, i == len(rows) - 1 or taken == steps
            if taken == steps:
                return
        epoch += 1


def train_client(
    job: Job,
    algorithm: LocalAlgorithm,
    data: ClientData,
    scale: ImageScale,
    seed: int,
    bf16: bool = False,
    fixed_statistics: bool = False,
) -> LocalResult:
    """Train `job.model` in place, from its present parameters, on one client's samples.

    All randomness is keyed by (seed, round, client). The model is left in training mode with the client's parameters.
    bf16: compute in bfloat16 where autocast allows it.  fixed_statistics: normalise with the running statistics and do
    not change them (`buffers: global`).
    """
    began = time.perf_counter()
    model = job.model
    keys = (job.round, job.client)
    device = model.device
    model.module.train()
    if fixed_statistics:
        batchnorm.fix(model.module)
    order = rng.stream(seed, rng.BATCHES, *keys)
    plan = batches(job.n, algorithm.batch_size, algorithm.epochs, algorithm.steps, order, model.batch_norm)
    augment_rng = rng.stream(seed, rng.AUGMENT, *keys) if scale.crop or scale.flip else None
    losses: list[Tensor] = []
    seen = 0
    mean_loss = 0.0
    with _seeded(device, rng.integer(seed, rng.DROPOUT, *keys)):
        algorithm.start(job)
        dense = None if bf16 else _dense_gradient(job, algorithm)
        for x, y_B, is_last in _feed(data, plan, scale, model, augment_rng):
            loss = dense(x, y_B) if dense else _gradient(job, algorithm, x, y_B, bf16)
            algorithm.after_backward(job)
            algorithm.step(job)
            job.steps += 1
            losses.append(loss * len(y_B))
            seen += len(y_B)
            if is_last:  # read once an epoch: on a GPU, reading waits for everything before it
                mean_loss = float(torch.stack(losses).sum(dtype=torch.float64)) / seen
                losses = []
                seen = 0
        state = algorithm.finish(job)
    return LocalResult(mean_loss, job.steps, time.perf_counter() - began, state)


def _gradient(job: Job, algorithm: LocalAlgorithm, x: Tensor, y_B: Tensor, bf16: bool) -> Tensor:
    """Compute the loss of a batch, and put its gradient into the model's."""
    job.model.grad_P.zero_()
    with torch.autocast(torch.device(job.model.device).type, torch.bfloat16) if bf16 else nullcontext():
        loss = algorithm.loss(job, x, y_B)
    loss.backward()
    return loss.detach()


def _dense_gradient(job: Job, algorithm: LocalAlgorithm) -> DenseGradient | None:
    """A faster way to compute loss and gradient of fully connected networks, where the loss is plain cross-entropy.

    Tested once for each model and batch size; None where it differs from autograd.
    """
    model = job.model
    if type(model.module) is not Classifier or type(algorithm).loss is not sgd.loss or job.loss is not cross_entropy:
        return None
    dense = DenseGradient.of(model.module.chain())
    key = ("dense gradient", algorithm.batch_size)
    if dense is not None and key not in model.tried:
        model.tried[key] = dense.agrees(algorithm.batch_size)
    return dense if model.tried.get(key) else None


def _feed(
    data: ClientData,
    plan: Iterator[tuple[IntArray, bool]],
    scale: ImageScale,
    model: FlatModel,
    augment_rng: np.random.Generator | None,
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield (images as the model takes them, labels, whether the epoch ends) of each batch.

    Consecutive batches are gathered, augmented and normalised together, as many as fit into BLOCK_BYTES.
    """
    images = torch.from_numpy(data.images).to(model.device)
    labels_N = torch.from_numpy(data.labels_N).to(model.device)
    most = max(1, BLOCK_BYTES // (4 * images[0].numel()))
    while block := _block(plan, most):
        index = torch.from_numpy(np.concatenate([rows for rows, _ in block])).to(model.device)
        chosen = images[index]
        if augment_rng is not None:
            chosen = scale.augment(chosen, augment_rng)
        sizes = [len(rows) for rows, _ in block]
        xs = scale(chosen, model.channels_last).split(sizes)
        ys = labels_N[index].split(sizes)
        yield from zip(xs, ys, (last for _, last in block), strict=True)


def _block(plan: Iterator[tuple[IntArray, bool]], most: int) -> list[tuple[IntArray, bool]]:
    """The next batches, until they have `most` samples or more together; an empty list at the end."""
    block = []
    taken = 0
    for rows, last in plan:
        block.append((rows, last))
        taken += len(rows)
        if taken >= most:
            break
    return block


@contextmanager
def _seeded(device: str, seed: int) -> Iterator[None]:
    """A context in which torch's global generators start at this seed; afterwards they are as before."""
    if device == "cpu":  # 50 times as fast as the general way, which asks every kind of device
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)
        return
    with torch.random.fork_rng(devices=[device]):
        torch.manual_seed(seed)
        yield
