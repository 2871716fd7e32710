"""The actor: one resident model and the whole data set, mapped read-only; trains, sums, evaluates and generates."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from raysim import rng
from raysim.engine import parts, slices
from raysim.engine.messages import Failure, PartialSum, Plugin, Share, WorkerSetup
from raysim.engine.versions import check_versions
from raysim.errors import RunError
from raysim.records import ByteArray, ClientReport, ClientTask, FloatArray, IntArray, ModelState, Partition, Split
from raysim.update_options import RESIDUAL
from raysim.user_code import blamed, blaming, checked_images

if TYPE_CHECKING:
    import torch

    from raysim.engine.reduce import UpdateSums
    from raysim.evaluation import ChunkResult
    from raysim.sections import FineTuning
    from raysim.training import ClientData

Answer = tuple[ClientReport | Failure, dict[str, Any] | None]
"""A client's report or failure, and its new state where the algorithm keeps one."""


class Worker:
    """One actor. Calls run one after another; nothing it holds cannot be made again elsewhere."""

    def __init__(self, device: str, threads: int, search_path: Sequence[str] = ()) -> None:
        """search_path: where the driver finds modules, so that plug-ins of the user's own are found here too."""
        sys.path.extend(p for p in search_path if p not in sys.path)
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray shows every GPU to an actor that owns none
        import torch

        torch.set_num_threads(threads)
        if device != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.device = device
        self.generator: Any = None

    def where(self) -> tuple[str, str]:
        """The address of this worker's node, and Ray's name of the node."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def configure(self, setup: WorkerSetup, split: Split, partition: Partition) -> tuple[str, str]:
        """Build the model and take hold of the shared data; answers as `where`.

        Raises UserError, naming this node, where its versions differ from the driver's.
        """
        from raysim.flat_model import FlatModel, ImageScale, build_model
        from raysim.probe import Probe

        where = self.where()
        check_versions(setup.versions, where[0])
        self.setup, self.split, self.partition = setup, split, partition
        module = build_model(setup.model.build, split.channels, split.image_size, split.classes, setup.seed)
        self.model = FlatModel(module, self.device)
        self.algorithm = setup.local.build()
        self.probe = Probe(setup.measure["oui"], setup.seed) if "oui" in setup.measure else None
        self.scale = ImageScale(split.mean, split.std, "crop" in setup.augment, "flip" in setup.augment)
        self.fixed_statistics = setup.buffers == "global"
        self._forget(-1)
        return where

    def _forget(self, round_: int) -> None:
        self.round = round_
        self.kept: dict[int, Any] = {}
        self.kept_bytes = 0
        self.running: UpdateSums | None = None

    # Training

    def train(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask], shares: Sequence[Share] | None
    ) -> list[Answer]:
        """Train clients one after another; keep their updates, or add them to a running sum if `shares` are known."""
        from raysim.engine.reduce import Diverged, UpdateSums

        if round_ != self.round:
            self._forget(round_)
        self._start_from(state)
        answers: list[Answer] = []
        for i, task in enumerate(tasks):
            try:
                report, update, client_state = self._train_one(task)
            except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; the driver names client and round
                diverged = isinstance(error, Diverged)
                plugins = {"local.name": self.setup.local.name, "model.name": self.setup.model.name}
                cause = blamed(error, plugins) or (str(error) if diverged else f"{type(error).__name__}: {error}")
                answers.append((Failure(task.client, cause, diverged), None))
                continue
            if shares is None:
                self._keep(task.client, update)
            else:
                self.running = self.running or UpdateSums(update)
                self.running.add(update, shares[i])
            answers.append((report, client_state))
        return answers

    @ray.method(num_returns=2)
    def train_and_sum(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask], shares: Sequence[Share]
    ) -> tuple[list[Answer], PartialSum | None]:
        """`train`, and give the running sum as an object of its own; it then begins anew."""
        return self.train(round_, state, tasks, shares), self._give_running_sum()

    def _start_from(self, state: "ModelState") -> None:
        """Bring the global model to the device once, for all clients of a call."""
        import torch

        self.model.load(state)
        self.start = self.model.snapshot()
        self.extra = {name: torch.from_numpy(v.copy()).to(self.device) for name, v in state.extra.items()}

    def _train_one(
        self, task: ClientTask
    ) -> tuple[ClientReport, dict[str, "torch.Tensor"], dict[str, Any] | None]:
        from raysim import buffers
        from raysim.engine.reduce import checked_norm
        from raysim.training import Job, train_client

        k, seed = task.client, self.setup.seed
        data, kept = self._load(task)
        residual_P = kept.pop(RESIDUAL, None)
        job = Job(
            self.model, self.start["params"], self.algorithm.learning_rate(self.round), self.round, k,
            len(data.labels_N), extra=dict(self.extra), state=kept or None,
        )
        result = train_client(job, self.algorithm, data, self.scale, seed, self.setup.bf16, self.fixed_statistics)
        delta_P, residual_P, seen = self._send(self.model.params_P.detach() - job.start_P, residual_P, k)
        update = {"delta": delta_P, "buffers": self.model.buffers_F.clone(), "counters": self.model.counters.clone()}
        update.update({name: job.kept[name] for name in self.algorithm.summed})
        norm = checked_norm(result.loss, update)
        measured = self.probe.measure(self.model, self.scale, k, data, self.split) if self.probe else {}
        report = ClientReport(
            k, task.n_real, task.n_synthetic, result.steps, self.algorithm.effective_steps(job), result.loss, norm,
            result.seconds, {**measured, **seen},
        )
        further = {} if residual_P is None else {RESIDUAL: residual_P}
        if self.setup.buffers == "local":
            further |= buffers.put_by(self.model)
        if result.state is None and not further:
            return report, update, None
        after = {**(kept if result.state is None else result.state), **further}
        return report, update, {name: t.cpu().numpy() for name, t in after.items()}

    def _load(self, task: ClientTask) -> tuple["ClientData", dict[str, "torch.Tensor"]]:
        """A client's samples and what it remembers, and the model where the client starts."""
        from raysim import buffers
        from raysim.training import client_data

        k = task.client
        rows_N, labels_N = self.partition.client(k)
        synthetic = None if task.synthetic is None else ray.get(task.synthetic)
        noise_std = float(self.partition.input_noise_K[k])
        noise_rng = rng.stream(self.setup.seed, rng.MODIFIER, k) if noise_std else None
        data = client_data(self.split.train_images, rows_N, labels_N, synthetic, task.quota_C, noise_std, noise_rng)
        self.model.restore(self.start)
        kept = {} if task.state is None else _tensors(ray.get(task.state), self.device)
        buffers.take_up(self.model, kept)
        return data, kept

    def _send(
        self, delta_P: "torch.Tensor", residual_P: "torch.Tensor | None", client: int
    ) -> tuple["torch.Tensor", "torch.Tensor | None", dict[str, float]]:
        """(the update as the client sends it, what it remembers of the rest, what there is to say about it)."""
        from raysim.compression import send
        from raysim.engine.reduce import checked_norm

        options = self.setup.update
        if not options.changes_updates:
            return delta_P, None, {}
        checked_norm(0.0, {"delta": delta_P})  # before the largest values of something that is not finite are chosen
        return send(delta_P, residual_P, options, self.setup.seed, self.round, client)

    def _keep(self, client: int, update: dict[str, "torch.Tensor"]) -> None:
        size = sum(t.numel() * t.element_size() for t in update.values())
        if self.kept_bytes + size > self.setup.kept_bytes_limit:
            self.kept[client] = ray.put({name: t.cpu().numpy() for name, t in update.items()})
        else:
            self.kept[client] = update
            self.kept_bytes += size

    def _kept(self, client: int) -> dict[str, "torch.Tensor"]:
        update = self.kept[client]
        return _tensors(ray.get(update), self.device) if isinstance(update, ray.ObjectRef) else update

    # What rules ask of the kept updates

    def dot(self, clients: Sequence[int], vector_P: FloatArray) -> list[float]:
        """The inner product of each client's update with a vector."""
        import torch

        v_P = torch.from_numpy(vector_P.copy()).to(self.device)
        return [float(self._kept(k)["delta"].to(torch.float64) @ v_P) for k in clients]

    def share(self, clients: Sequence[int], wanted: Sequence[slices.Slice]) -> list[Any]:
        """Put slices of these clients' updates where every worker can read them; one reference a slice."""
        return slices.share((self._kept(k)["delta"].cpu().numpy() for k in clients), wanted)

    def answer(self, fn: slices.Question, gathered: Sequence[Sequence[slices.Part]]) -> list[FloatArray | None]:
        """`fn` of each of these slices of all clients' updates; None for one of which a part is lost."""
        return [slices.answer(fn, parts) for parts in gathered]

    @ray.method(num_returns=2)
    def partial_sum(self, clients: Sequence[int], shares: Sequence[Share]) -> tuple[None, PartialSum]:
        """This worker's part of the sums over the given clients, all of which it trained in this round.

        An object of its own beside the answer, as in `train_and_sum`, so that it stays here until it is fetched.
        """
        from raysim.engine.reduce import UpdateSums

        running = self._give_running_sum()
        if running is not None:
            return None, running
        sums = UpdateSums(self._kept(clients[0]))
        for k, share in zip(clients, shares, strict=True):
            sums.add(self._kept(k), share)
        return None, sums.result()

    def add(self, refs: Sequence[Any]) -> PartialSum | None:
        """The sum of partial sums of this node's workers; None if one is lost."""
        return parts.add(refs)

    def _give_running_sum(self) -> PartialSum | None:
        sums, self.running = self.running, None
        return None if sums is None else sums.result()

    # Evaluation and generation

    def evaluate(self, state: "ModelState", which: Sequence[int]) -> list["ChunkResult"]:
        """Evaluate chunks of the test split."""
        from raysim.evaluation import evaluate_chunks

        self.model.load(state)
        split = self.split
        return evaluate_chunks(
            self.model, split.test_images, split.test_labels_N, split.classes, self.scale, which
        )

    def tune(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask], counts_KC: IntArray, options: "FineTuning"
    ) -> list[FloatArray]:
        """Accuracy of each class after each of these clients has trained the global model on its own samples."""
        from raysim.tuning import tune, tuned_accuracy

        answers = []
        self._start_from(state)
        for task, counts_C in zip(tasks, counts_KC, strict=True):
            data, _ = self._load(task)
            key = self.setup.seed, round_, task.client
            tune(self.model, data, self.scale, options, *key, fixed_statistics=self.fixed_statistics)
            answers.append(tuned_accuracy(self.model, self.split, self.scale, counts_C, options))
        return answers

    def generate(self, plugin: Plugin, labels_B: IntArray, seeds_B: IntArray) -> ByteArray:
        """Make one image per label and seed; the generator is built at its first use and stays until `release`."""
        with blaming({"generator.name": plugin.name}, RunError):
            images = self._generator(plugin).sample(labels_B, seeds_B)
        return checked_images(images, (len(labels_B), self.split.channels, *self.split.image_size), plugin.name)

    def fingerprint(self, plugin: Plugin) -> str:
        """What identifies the generator's images; checks, too, that it fits the data set."""
        with blaming({"generator.name": plugin.name}, RunError):
            fingerprint: str = self._generator(plugin).fingerprint()
        return fingerprint

    def _generator(self, plugin: Plugin) -> Any:
        if self.generator is None or self.generator[0] != plugin:
            self.generator = (plugin, plugin.build(self.split, self.device))
        return self.generator[1]

    def release_generator(self) -> None:
        """Give the generator's memory back."""
        self.generator = None


def _tensors(arrays: dict[str, Any], device: str) -> dict[str, "torch.Tensor"]:
    """Tensors of their own, never views of shared memory."""
    import torch

    return {name: torch.from_numpy(np.array(a)).to(device) for name, a in arrays.items()}
