"""Accuracy and loss of the global model: on the test split, for each client, and after fine-tuning on a client."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.config.schema import Config
from raysim.core.records import ClientTask, Dataset, IntArray, Partition
from raysim.core.rng import FINE_TUNED, stream
from raysim.engine.pool import Pool
from raysim.engine.schedule import Item
from raysim.evaluation import per_client
from raysim.evaluation.accuracy import ChunkResult, by_class, chunks, overall, summarise


@dataclass(frozen=True)
class Evaluator:
    """Evaluates on the workers; changes nothing of the run.

    test_images, validation_images: how many there are.  class_counts_KC: real samples per client and class, by their
    true labels.
    """

    config: Config
    pool: Pool
    test_images: int
    validation_images: int
    class_counts_KC: IntArray

    @classmethod
    def of(cls, config: Config, pool: Pool, partition: Partition, dataset: Dataset) -> "Evaluator":
        """For the data and the clients of a run."""
        counts_KC = per_client.class_counts(partition, dataset)
        validation = 0 if dataset.validation_labels_N is None else len(dataset.validation_labels_N)
        return cls(config, pool, len(dataset.test_labels_N), validation, counts_KC)

    def due(self, number: int, model: Callable[[], Any], task: Callable[[int], ClientTask]) -> dict[str, float]:
        """The metrics that are due after round `number`.

        model: gives a reference to the global model.  task: a client's samples and what it remembers.
        """
        row: dict[str, float] = {}
        if self._is_due(number, self.config.evaluate_every):
            row |= self.evaluate(model())
        if self._is_due(number, self.config.fine_tuning.every):
            row |= self.evaluate_fine_tuned(number, model(), task)
        return row

    def _is_due(self, number: int, every: int | None) -> bool:
        return every is not None and (number % every == 0 or number == self.config.rounds)

    def evaluate(self, model_ref: Any) -> dict[str, float]:
        """Accuracy and loss on the test and the validation split; accuracy over clients, each on its own classes."""
        results = self._on(model_ref, "test", self.test_images)
        a_K = per_client.by_client(self.class_counts_KC, by_class(results))
        row = summarise(results) | per_client.spread("client_accuracy", a_K, self.class_counts_KC.sum(axis=1))
        if self.validation_images:
            row |= overall(self._on(model_ref, "validation", self.validation_images), "validation_")
        return row

    def _on(self, model_ref: Any, split: str, images: int) -> list[ChunkResult]:
        """The results on all chunks of a split of so many images."""
        items = [Item(chunk, 1.0, f"evaluation of chunk {chunk} ({split})") for chunk in range(chunks(images))]
        answers = self.pool.map(
            items, lambda actor, which: actor.evaluate.remote(model_ref, which, split), kind="evaluate"
        )
        return [result for _, _, found in answers for result in found]

    def evaluate_fine_tuned(self, number: int, model_ref: Any, task: Callable[[int], ClientTask]) -> dict[str, float]:
        """Accuracy over clients of what each makes of the model by training it on its own samples (`fine_tuning`)."""
        options, counts_KC = self.config.fine_tuning, self.class_counts_KC
        size = min(options.clients or len(counts_KC), len(counts_KC))
        drawn = stream(self.config.seed, FINE_TUNED).choice(len(counts_KC), size, replace=False, shuffle=False)
        tasks = [task(k) for k in sorted(drawn.tolist())]
        items = [Item(t, t.n_real + t.n_synthetic, f"fine-tuning of client {t.client}") for t in tasks]

        def submit(actor: Any, tasks: list[ClientTask]) -> Any:
            return actor.fine_tune.remote(number, model_ref, tasks, counts_KC[[t.client for t in tasks]], options)

        found = {
            item.payload.client: per_client.by_client(counts_KC[[item.payload.client]], accuracy_C)[0]
            for _, done, answer in self.pool.map(items, submit, kind="fine_tune")
            for item, accuracy_C in zip(done, answer, strict=True)
        }
        clients = sorted(found)
        a_K = np.array([found[k] for k in clients])
        return per_client.spread("tuned_client_accuracy", a_K, counts_KC[clients].sum(axis=1))
