"""The worker: one model and the whole data set in read-only shared memory; trains, sums, evaluates and generates."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import ObjectLostError

from raysim.config.plugin_guard import ask_generator, blaming
from raysim.core.errors import RunError, UserError
from raysim.core.records import (
    ByteArray,
    Candidates,
    ClientReport,
    ClientTask,
    Dataset,
    FloatArray,
    IntArray,
    ModelState,
    Partition,
)
from raysim.data.mapped import MappedDataset
from raysim.engine import slices
from raysim.engine.calls import Ref
from raysim.engine.claims import Claims
from raysim.engine.messages import (
    BatchTrainer,
    Classifier,
    ClientState,
    Failure,
    PartialSum,
    Plugin,
    SumWeights,
    WorkerSetup,
)
from raysim.engine.versions import check_versions

if TYPE_CHECKING:
    import torch

    from raysim.config.protocols import ImageGenerator
    from raysim.config.schema import FineTuning
    from raysim.engine.reduce import UpdateSums

Answer = tuple[ClientReport | Failure, ClientState | None]
"""A client's report or failure, and its new state where the algorithm keeps one."""
Update = dict[str, "torch.Tensor"]
"""What a client sends: its delta, buffers, counters and summed vectors, by name."""


class Worker:
    """The Ray actor that does the work: its calls run one after another, and another worker can repeat all its work."""

    def __init__(self, device: str, threads: int, search_path: Sequence[str] = ()) -> None:
        """Set up torch for this process.

        device: cpu or cuda.  threads: how many torch may use.  search_path: where the driver finds modules, so that the
        user's own plug-ins are found here too.
        """
        sys.path.extend(p for p in search_path if p not in sys.path)
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray shows every GPU to an actor that owns none
        import torch

        torch.set_num_threads(threads)
        if device != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.device = device
        self.threads = threads
        self.claims = Claims()
        self.generator: tuple[Plugin[ImageGenerator], ImageGenerator] | None = None  # (what it is built from, itself)

    def where(self) -> tuple[str, str]:
        """The address of this worker's node, and Ray's name of the node."""
        address: str = ray.util.get_node_ip_address()
        return address, ray.get_runtime_context().get_node_id()

    def configure(
        self, setup: WorkerSetup, dataset: Dataset | MappedDataset, partition: Partition,
        search_path: Sequence[str] = (),
    ) -> tuple[str, str]:
        """Build the model and keep references to the shared data; returns what `where` returns.

        search_path: as at the start, with what the driver has added since.
        Raises UserError, naming this node, where its versions differ from the driver's, or images are in a file that
        is not here.
        """
        import torch

        from raysim.engine.client_runner import ClientRunner

        sys.path.extend(p for p in search_path if p not in sys.path)
        torch.set_num_threads(self.threads)  # Ray calls methods in another thread than the constructor
        where = self.where()
        check_versions(setup.versions, where[0])
        if isinstance(dataset, MappedDataset):
            try:
                dataset = dataset.open()
            except (OSError, ValueError) as error:
                raise UserError(
                    f"output.cache: the images of the data set cannot be mapped on {where[0]} ({error}); name a folder "
                    "that all nodes share, or none (output.cache=null): then they go through the object store"
                ) from error
        self.setup = setup
        self.dataset = dataset
        self.claims = Claims()
        self.local = ClientRunner(setup, dataset, partition, self.device)
        if setup.batch_trainer == "vmap" and self.local.batch is None:
            raise RunError(
                f"{where[0]} cannot train several clients at once, as the workers that began this run do: "
                f"{self.local.why_alone('vmap')}; start a new run with resources.client_batching=off"
            )
        self._forget(-1)
        return where

    def why_alone(self, trainer: BatchTrainer) -> str:
        """What `ClientRunner.why_alone` says."""
        return self.local.why_alone(trainer)

    def expected_s(self, sizes_K: Sequence[int], seconds: float, at_once: bool) -> float:
        """What `ClientRunner.expected_s` says."""
        return self.local.expected_s(sizes_K, seconds, at_once)

    def _forget(self, round_: int) -> None:
        """Drop the updates of an earlier round."""
        self.round = round_
        self.updates: dict[int, Update | Ref] = {}
        self.update_bytes = 0
        self.running: UpdateSums | None = None

    # Training

    def train(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask], sum_weights: Sequence[SumWeights] | None
    ) -> list[Answer | None]:
        """Train clients; keep their updates, or add them to a running sum if `sum_weights` are known.

        Returns one answer for each task, in their order; None for a client that was given back meanwhile.
        """
        from raysim.engine.reduce import UpdateSums

        if round_ != self.round:
            self._forget(round_)
        self.local.start_from(round_, state)
        answers: dict[int, Answer] = {}
        for i, trained in self.local.train(tasks, partial(self.claims.begin, round_)):
            if isinstance(trained, Failure):
                answers[i] = trained, None
                continue
            report, update, client_state = trained
            if sum_weights is None:
                self._keep(report.client, update)
            else:
                self.running = self.running or UpdateSums(update)
                self.running.add(update, sum_weights[i])
            answers[i] = report, client_state
        return [answers.get(i) for i in range(len(tasks))]

    @ray.method(concurrency_group="control")
    def give_back(self, round_: int, clients: Sequence[int]) -> list[bool]:
        """Give back clients that were sent here; returns for each whether it had not begun: others may train those.

        Runs in a thread of its own while another call trains.
        """
        return self.claims.give_back(round_, clients)

    @ray.method(num_returns=2)
    def train_and_sum(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask], sum_weights: Sequence[SumWeights]
    ) -> tuple[list[Answer | None], PartialSum | None]:
        """Train clients as `train` does; returns (its answers, the running sum as an object of its own), resets it."""
        return self.train(round_, state, tasks, sum_weights), self._give_running_sum()

    def _keep(self, client: int, update: Update) -> None:
        size = sum(t.numel() * t.element_size() for t in update.values())
        if self.update_bytes + size > self.setup.update_bytes_limit:
            self.updates[client] = ray.put({name: t.cpu().numpy() for name, t in update.items()})
        else:
            self.updates[client] = update
            self.update_bytes += size

    def _update_of(self, client: int) -> Update:
        from raysim.engine.client_runner import tensors

        update = self.updates[client]
        return tensors(ray.get(update), self.device) if isinstance(update, ray.ObjectRef) else update

    # What rules ask of the kept updates

    def dot(self, clients: Sequence[int], vector_P: FloatArray) -> list[float]:
        """The inner product of each client's update with a vector."""
        import torch

        v_P = torch.from_numpy(vector_P.copy()).to(self.device)
        return [float(self._update_of(k)["delta"].to(torch.float64) @ v_P) for k in clients]

    def put_slices(self, clients: Sequence[int], wanted: Sequence[slices.Slice]) -> list[Ref]:
        """Put slices of these clients' updates into the object store; returns one reference for each slice."""
        return slices.put_slices((self._update_of(k)["delta"].cpu().numpy() for k in clients), wanted)

    def answer(
        self, fn: slices.SliceFunction, gathered: Sequence[Sequence[slices.StoredRows]]
    ) -> list[FloatArray | None]:
        """Apply `fn` to each of these slices of all clients' updates; None for a slice of which some rows are lost."""
        return [slices.answer(fn, stored) for stored in gathered]

    @ray.method(num_returns=2)
    def partial_sum(self, clients: Sequence[int], sum_weights: Sequence[SumWeights]) -> tuple[None, PartialSum]:
        """Return (None, this worker's sums over the given clients, all of which it trained in this round).

        The sums are an object of their own, as in `train_and_sum`, so that they stay on this node until they are
        fetched.
        """
        from raysim.engine.reduce import UpdateSums

        running = self._give_running_sum()
        if running is not None:
            return None, running
        sums = UpdateSums(self._update_of(clients[0]))
        for k, weights in zip(clients, sum_weights, strict=True):
            sums.add(self._update_of(k), weights)
        return None, sums.result()

    def add(self, refs: Sequence[Ref]) -> PartialSum | None:
        """Add partial sums of this node's workers; None if one of them is lost."""
        from raysim.engine.reduce import add_sums

        try:
            return add_sums(ray.get(list(refs)))
        except ObjectLostError:
            return None

    def _give_running_sum(self) -> PartialSum | None:
        sums = self.running
        self.running = None
        return None if sums is None else sums.result()

    # Evaluation and generation

    def evaluate(
        self, state: "ModelState", which: Sequence[int], split: Literal["test", "validation"]
    ) -> list[Any]:
        """What the task finds on chunks of a split, a record each.  which: their numbers."""
        model = self.local.model
        dataset = self.dataset
        model.load(state)
        images, labels_N = dataset.test_images, dataset.test_labels_N
        if split == "validation" and dataset.validation_images is not None and dataset.validation_labels_N is not None:
            images, labels_N = dataset.validation_images, dataset.validation_labels_N
        return self.setup.task.evaluate(model, images, labels_N, dataset.classes, self.local.scale, which)

    def fine_tune(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask], counts_KC: IntArray, options: "FineTuning"
    ) -> list[FloatArray]:
        """Fine-tune the global model on the samples of each of these clients; returns their accuracies by class: C."""
        from raysim.evaluation.fine_tuning import fine_tune, fine_tuned_accuracy

        local = self.local
        answers: list[FloatArray] = []
        local.start_from(round_, state)
        for task, counts_C in zip(tasks, counts_KC, strict=True):
            data, _ = local.load(task)
            key = self.setup.seed, round_, task.client
            fine_tune(local.model, data, local.scale, options, *key, fixed_statistics=local.fixed_statistics)
            answers.append(fine_tuned_accuracy(local.model, self.dataset, local.scale, counts_C, options))
        return answers

    def measure(
        self, round_: int, state: "ModelState", tasks: Sequence[ClientTask | None]
    ) -> list[tuple[FloatArray, FloatArray]]:
        """(accuracy, loss) by class on the validation split, C each: of a client's model, or the global (None).

        A client's model is the global one after its local training in round `round_`; nothing of it is kept.
        """
        from raysim.evaluation.accuracy import accuracy_and_loss

        local, dataset = self.local, self.dataset
        assert dataset.validation_images is not None and dataset.validation_labels_N is not None
        answers = []
        for task in tasks:
            local.become(round_, state, task)
            answers.append(accuracy_and_loss(
                local.model, dataset.validation_images, dataset.validation_labels_N, dataset.classes, local.scale
            ))
        return answers

    def score(
        self, round_: int, state: "ModelState", several: Sequence[Candidates], classifier: Classifier | None
    ) -> list[FloatArray]:
        """How good each of these images is, by what a model says of it, for each client (see `evaluation.candidates`).

        state: of the classifier, where there is one, else of the global model.  round_: as in `measure`.
        """
        from raysim.engine.object_store import images_of
        from raysim.evaluation.accuracy import log_probabilities
        from raysim.evaluation.candidates import confidence, discrepancy

        local = self.local
        answers = []
        for candidates in several:
            images = images_of(candidates.images)
            if classifier is None:
                local.become(round_, state, None)
                log_p_NC = log_probabilities(local.model, images, local.scale)
            else:
                log_p_NC = local.predict_by(classifier, state, images)
            if candidates.task is None:
                answers.append(confidence(log_p_NC, candidates.labels_N))
            else:
                local.become(round_, state, candidates.task)
                answers.append(discrepancy(log_p_NC, log_probabilities(local.model, images, local.scale)))
        return answers

    @ray.method(num_returns=2)
    def generate(
        self, plugin: "Plugin[ImageGenerator]", labels_B: IntArray, seeds_B: IntArray
    ) -> tuple[None, ByteArray]:
        """Make one image per label and seed; returns (None, the images as an object of their own).

        The generator is built when it is first used and stays in memory; `release_generator` frees it.
        """
        with blaming({"generator.name": plugin.name}, RunError):
            generator = self._generator(plugin)
        return None, ask_generator(plugin.name, generator, labels_B, seeds_B, self.dataset)

    def fingerprint(self, plugin: "Plugin[ImageGenerator]") -> str:
        """The text that identifies the generator's images; also checks that the generator fits the data set."""
        with blaming({"generator.name": plugin.name}, RunError):
            return self._generator(plugin).fingerprint()

    def _generator(self, plugin: "Plugin[ImageGenerator]") -> "ImageGenerator":
        if self.generator is None or self.generator[0] != plugin:
            self.generator = (plugin, plugin.build(self.dataset, self.device))
        return self.generator[1]

    def release_generator(self) -> None:
        """Free the memory of the generator."""
        self.generator = None

