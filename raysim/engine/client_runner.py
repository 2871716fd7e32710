"""What a worker does with its clients: each starts from the global model, trains, and reports what it sends."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import walk_tb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raysim.aggregation.oui_probe import Probe
from raysim.config.plugin_guard import blamed
from raysim.core import rng
from raysim.core.errors import described
from raysim.core.records import ByteArray, ClientReport, ClientTask, Dataset, FloatArray, ModelState, Partition
from raysim.engine.messages import BatchTrainer, Classifier, ClientState, Failure, WorkerSetup
from raysim.engine.object_store import get, images_of
from raysim.engine.reduce import Diverged, checked_norm
from raysim.engine.schedule import calls_of
from raysim.evaluation.accuracy import log_probabilities
from raysim.local import batchnorm
from raysim.local.batched.on_cpu import CpuBatchTrainer
from raysim.local.batched.on_gpu import VmapTrainer
from raysim.local.batched.schedule import BatchedClient
from raysim.local.batched.timing import step_s, steps_of
from raysim.local.compression import RESIDUAL, send
from raysim.local.contract import ClientData, Job, LocalResult, cross_entropy
from raysim.local.loop import client_data, train_client
from raysim.models.flat_model import FlatModel, ImageScale, build_model

Vectors = dict[str, Tensor]
Trained = tuple[ClientReport, Vectors, ClientState | None]
"""A client's report, its update, and its new state where the algorithm keeps one."""
Begun = tuple[BatchedClient, Vectors, Tensor | None]
"""A client that can start, its state, and the part of earlier updates that it has not sent yet."""


class ClientRunner:
    """A worker's model, and the training of one client after another or of several at once."""

    def __init__(self, setup: WorkerSetup, dataset: Dataset, partition: Partition, device: str) -> None:
        self.setup = setup
        self.dataset = dataset
        self.partition = partition
        self.device = device
        seed = setup.seed if setup.model_seed is None else setup.model_seed
        module = build_model(setup.model.build, dataset.channels, dataset.image_size, dataset.classes, seed)
        self.model = FlatModel(module, device)
        self.algorithm = setup.local.build()
        self.probe = Probe(setup.measure["oui"], setup.seed) if "oui" in setup.measure else None
        self.scale = setup.task.scale(dataset, setup.augment)
        self.fixed_statistics = setup.buffers == "global"
        self.vmap: VmapTrainer | None = None
        self.batch = self._batch(setup.batch_trainer)

    def _batch(self, kind: BatchTrainer | None) -> CpuBatchTrainer | VmapTrainer | None:
        """The trainer of several clients at once, if there is one for this device, model, algorithm and loss."""
        if kind is None or self.setup.task.loss is not cross_entropy:
            return None
        bf16 = self.setup.bf16
        if kind == "dense":
            return None if bf16 else CpuBatchTrainer.of(self.model, self.algorithm, self.scale)
        self.vmap = VmapTrainer.of(self.model, self.algorithm, self.scale, bf16, self._image_shape)
        return self.vmap

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        return (self.dataset.channels, *self.dataset.image_size)

    def why_alone(self, kind: BatchTrainer) -> str:
        """Why clients cannot be trained several at once by this trainer here, for people; empty where they can."""
        if self._batch(kind) is not None:
            return ""
        if self.setup.task.loss is not cross_entropy:
            return "the network is not trained to classify"
        if kind == "dense":
            return (
                "on a CPU only small networks of linear layers are trained several at once, under plain sgd, in "
                "float32 and with one thread a worker"
            )
        return VmapTrainer.obstacle(self.model, self.algorithm, self.scale) or (
            "a trial failed: the network draws random numbers, or cannot be computed for several clients at once"
        )

    def expected_s(self, sizes_K: Sequence[int], seconds: float, at_once: bool) -> float:
        """Seconds of training clients with so many samples, one after another or at once by `vmap`, as timed here.

        sizes_K: each at least 1.  seconds: how long to time.  Infinite where this worker cannot train clients at once,
        or these do not fit into memory.
        """
        trainer = self.vmap or self._batch("vmap")
        if not isinstance(trainer, VmapTrainer):
            return math.inf
        n = sorted(sizes_K)[len(sizes_K) // 2]
        try:
            each_s = step_s(trainer, n, self._image_shape, seconds, at_once=at_once)
        except torch.OutOfMemoryError:
            if not at_once:
                raise
            return math.inf
        steps_K = [steps_of(trainer.algorithm, n) for n in sizes_K]
        if not at_once:
            return each_s * sum(steps_K)
        pace = each_s * sum(steps_K) / trainer.width / sum(sizes_K)
        steps = 0
        for call in calls_of(sizes_K, pace):
            groups = trainer.groups([sizes_K[i] for i in call], self.dataset.image_bytes)
            steps += sum(max(steps_K[call[place]] for place in group) for group in groups)
        return each_s * steps

    def start_from(self, round_: int, state: ModelState) -> None:
        """Bring the global model to the device once, for all clients of a call."""
        self.round = round_
        self.model.load(state)
        self.start = self.model.snapshot()
        self.broadcast_vectors = tensors(state.broadcast_vectors, self.device)

    def train(
        self, tasks: Sequence[ClientTask], begin: Callable[[Sequence[int]], Sequence[bool]]
    ) -> Iterator[tuple[int, Trained | Failure]]:
        """Train clients; yields (position in `tasks`, the result or Failure) of each, in any order.

        begin: called with the ids of the clients that come next; returns which of them are still to be trained.
        """
        for grouped in self._groups(tasks):
            wanted = begin([tasks[i].client for i in grouped])
            places = [i for i, is_wanted in zip(grouped, wanted, strict=True) if is_wanted]
            group = [tasks[i] for i in places]
            for i, task, trained in zip(places, group, self._together(group), strict=True):
                yield i, self._attempt(task, trained)

    def _attempt(
        self, task: ClientTask, trained: tuple[Begun, LocalResult, Tensor] | None
    ) -> Trained | Failure:
        """Train a client, unless it is trained; what a plug-in raises is a Failure, as is its `sys.exit`."""
        try:
            return self._answer(task, *(trained or self._alone(task)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            *_, (innermost, _) = walk_tb(error.__traceback__)
            if isinstance(error, SystemExit) and str(innermost.f_globals.get("__name__")).startswith("ray."):
                raise  # Ray ends this worker, in the middle of whatever it does
            return self._failure(task.client, error)

    def become(self, round_: int, state: ModelState, task: ClientTask | None) -> None:
        """Set the model to the one that a client would send in a round, trained alone; None: to the global model."""
        self.start_from(round_, state)
        if task is not None:
            self._alone(task)

    def predict_by(self, classifier: Classifier, state: ModelState, images: ByteArray) -> FloatArray:
        """What another model says of images: logarithms of probabilities, N x C.  state: its parameters."""
        build, dataset = classifier.model.build, self.dataset
        module = build_model(build, dataset.channels, dataset.image_size, dataset.classes, classifier.seed)
        model = FlatModel(module, self.device)
        model.load(state)
        return log_probabilities(model, images, ImageScale(classifier.mean, classifier.std))

    def _groups(self, tasks: Sequence[ClientTask]) -> list[list[int]]:
        if self.batch is None:
            return [[i] for i in range(len(tasks))]
        return self.batch.groups([task.n_real + task.n_synthetic for task in tasks], self.dataset.image_bytes)

    def _together(self, tasks: Sequence[ClientTask]) -> Iterable[tuple[Begun, LocalResult, Tensor] | None]:
        """What `_answer` needs of each client, trained as a group; None for those that are to train alone.

        Where a group fails, its clients train one by one, with the same bits, so that the error is that of one client.
        """
        if self.batch is not None and len(tasks) >= self.batch.least:
            try:
                begun = [self._begin(task) for task in tasks]
                trained = self.batch.train([client for client, *_ in begun], self.setup.seed)
            except Exception:  # noqa: BLE001 - any error comes again in the client that causes it
                return [None] if len(tasks) == 1 else [found for task in tasks for found in self._together([task])]
            return [(b, result, params_P) for b, (result, params_P) in zip(begun, trained, strict=True)]
        return [None] * len(tasks)

    def _begin(self, task: ClientTask) -> Begun:
        data, state = self.load(task)
        residual_P = state.pop(RESIDUAL, None)
        job = Job(
            self.model, self.start["params"], self.algorithm.learning_rate(self.round), self.round, task.client,
            len(data.labels_N), broadcast_vectors=dict(self.broadcast_vectors), state=state or None,
            loss=self.setup.task.loss,
        )
        return BatchedClient(job, data), state, residual_P

    def _alone(self, task: ClientTask) -> tuple[Begun, LocalResult, Tensor]:
        begun = self._begin(task)
        client = begun[0]
        result = train_client(
            client.job, self.algorithm, client.data, self.scale, self.setup.seed, self.setup.bf16,
            self.fixed_statistics,
        )
        return begun, result, self.model.params_P

    def _answer(self, task: ClientTask, begun: Begun, result: LocalResult, params_P: Tensor) -> Trained:
        """The report, the update and the new state of a client that has trained to these parameters."""
        client, state, residual_P = begun
        k = task.client
        job = client.job
        self.model.params_P.copy_(params_P)  # does nothing where they are the model's own
        delta_P, residual_P, seen = self._send(self.model.params_P.detach() - job.start_P, residual_P, k)
        update = {"delta": delta_P, "buffers": self.model.buffers_F.clone(), "counters": self.model.counters.clone()}
        update.update({name: job.scratch[name] for name in self.algorithm.summed})
        norm = checked_norm(result.loss, update)
        measured = self.probe.measure(self.model, self.scale, k, client.data, self.dataset) if self.probe else {}
        report = ClientReport(
            k, task.n_real, task.n_synthetic, result.steps, self.algorithm.effective_steps(job), result.loss, norm,
            result.seconds, {**measured, **seen, **{name: job.scratch[name] for name in self.algorithm.logged}},
        )
        further = {} if residual_P is None else {RESIDUAL: residual_P}
        if self.setup.buffers == "local":
            further |= batchnorm.save_to(self.model)
        if result.state is None and not further:
            return report, update, None
        after = {**(state if result.state is None else result.state), **further}
        return report, update, {name: t.cpu().numpy() for name, t in after.items()}

    def load(self, task: ClientTask) -> tuple[ClientData, Vectors]:
        """Gather a client's samples and state, and set the model to the parameters at which the client starts."""
        k = task.client
        rows_N, labels_N = self.partition.client(k)
        synthetic = None if task.synthetic is None else images_of(task.synthetic)
        noise_std = float(self.partition.input_noise_K[k])
        seed = self.setup.seed if self.setup.partition_seed is None else self.setup.partition_seed
        noise_rng = rng.stream(seed, rng.MODIFIER, k) if noise_std else None
        data = client_data(self.dataset.train_images, rows_N, labels_N, synthetic, task.quota_C, noise_std, noise_rng)
        self.model.restore(self.start)
        state = {} if task.state is None else tensors(get(task.state), self.device)
        batchnorm.restore_from(self.model, state)
        return data, state

    def _send(
        self, delta_P: Tensor, residual_P: Tensor | None, client: int
    ) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """(the update as the client sends it, the part that it did not send, metrics about it)."""
        options = self.setup.update
        if not options.changes_updates:
            return delta_P, None, {}
        checked_norm(0.0, {"delta": delta_P})  # before the largest values of something that is not finite are chosen
        return send(delta_P, residual_P, options, self.setup.seed, self.round, client)

    def _failure(self, client: int, error: BaseException) -> Failure:
        diverged = isinstance(error, Diverged)
        plugins = {"local.name": self.setup.local.name, "model.name": self.setup.model.name}
        cause = blamed(error, plugins) or (str(error) if diverged else described(error))
        return Failure(client, cause, diverged)


def tensors(arrays: Mapping[str, NDArray[np.generic]], device: str) -> Vectors:
    """Copies of the arrays as tensors on a device, by the same names; never views of shared memory."""
    return {name: torch.from_numpy(np.array(a)).to(device) for name, a in arrays.items()}
