"""What the run's task measures of the global model on held-out images, and accuracy after fine-tuning on a client."""

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
from raysim.evaluation.accuracy import chunks
from raysim.evaluation.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class Evaluator:
    """Evaluates on the workers; changes nothing of the run.

    test_images, validation_images: how many there are.  class_counts_KC: real samples per client and class, by their
    true labels.  task: what is measured.
    """

    config: Config
    pool: Pool
    test_images: int
    validation_images: int
    class_counts_KC: IntArray
    task: Task = CLASSIFICATION

    @classmethod
    def of(
        cls, config: Config, pool: Pool, partition: Partition, dataset: Dataset, task: Task = CLASSIFICATION
    ) -> "Evaluator":
        """For the data, the clients and the task of a run."""
        counts_KC = per_client.class_counts(partition, dataset)
        validation = 0 if dataset.validation_labels_N is None else len(dataset.validation_labels_N)
        return cls(config, pool, len(dataset.test_labels_N), validation, counts_KC, task)

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
        """What the task measures on the test and the validation split."""
        row: dict[str, float] = {}
        for split, images in (("test", self.test_images), ("validation", self.validation_images)):
            if images:
                row |= self.task.metrics(self._on(model_ref, split, images), split, self.class_counts_KC)
        return row

    def _on(self, model_ref: Any, split: str, images: int) -> list[Any]:
        """What the task finds on all chunks of a split of so many images."""
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
