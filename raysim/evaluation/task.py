"""What a network is trained for: the loss of a batch, how images become its input, and what is measured of a model.

The engine trains, sums and evaluates networks without knowing what they are for. `Task` is all that it asks; a run
classifies (`Classification`), and `raysim pretrain` with a `federation` trains a network that takes noise off images
(`raysim.generation.denoising`).
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from raysim.core.errors import UserError
from raysim.core.records import ByteArray, Dataset, IntArray

if TYPE_CHECKING:
    from raysim.evaluation.accuracy import ChunkResult
    from raysim.local.contract import Loss
    from raysim.models.flat_model import FlatModel, ImageScale


class Task(Protocol):
    """What a network is trained for.  Without state of its own, so that every worker has the same one.

    Keys of a task are those of its network, and so in the configuration of the run.
    """

    shown: ClassVar[tuple[str, ...]]
    """Names of the metrics of a round that a person sees while it goes."""

    @abstractmethod
    def scale(self, dataset: Dataset, augment: Sequence[str]) -> "ImageScale":
        """How uint8 images become the network's input, and how training batches are changed at random.

        augment: crop, flip, both or none.
        """
        ...

    @abstractmethod
    def check(self, model: "FlatModel", dataset: Dataset, name: str) -> None:
        """Raise UserError for a network that cannot do this on such images.  name: of the network, for messages."""

    @property
    @abstractmethod
    def loss(self) -> "Loss":
        """The function that computes the mean loss of a batch.

        What it draws at random comes from torch's global generator, which is seeded for each client and round.
        """
        ...

    @abstractmethod
    def evaluate(
        self, model: "FlatModel", images: ByteArray, labels_N: IntArray, classes: int, scale: "ImageScale",
        which: Iterable[int],
    ) -> list[Any]:
        """What is found on chunks of `accuracy.CHUNK` images each, one record a chunk, which can be sent to the driver.

        images, labels_N: a whole split.  which: numbers of chunks.  The model is left as it was.
        """
        ...

    @abstractmethod
    def metrics(self, results: Sequence[Any], split: str, counts_KC: IntArray) -> dict[str, float]:
        """The metrics of a round from the records of all chunks of a split, in any order.

        split: test or validation, of which the names of the latter begin with `validation_`.  counts_KC: real samples
        per client and class, by their true labels.
        """
        ...


@dataclass(frozen=True)
class Classification(Task):
    """Tell the class of an image: cross-entropy, accuracy, accuracy over clients."""

    shown = ("accuracy", "validation_accuracy", "loss", "train_loss")

    def scale(self, dataset: Dataset, augment: Sequence[str]) -> "ImageScale":
        """Zero mean and unit variance per channel, over the training images."""
        from raysim.models.flat_model import ImageScale

        return ImageScale(dataset.mean, dataset.std, "crop" in augment, "flip" in augment)

    def check(self, model: "FlatModel", dataset: Dataset, name: str) -> None:
        """Refuse a network that does not give a number for each class."""
        import torch

        from raysim.models.flat_model import evaluating

        with evaluating(model.module):
            logits = model.module(torch.zeros(2, dataset.channels, *dataset.image_size))
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        if shape != (2, dataset.classes):
            raise UserError(
                f"model.name = {name}: for 2 images it returns {shape}, not (2, {dataset.classes}), "
                "a number for each class; "
                "it is built with the channels, the (height, width) and the number of classes of the data"
            )

    @property
    def loss(self) -> "Loss":
        """Cross-entropy, for which the engine has faster ways."""
        from raysim.local.contract import cross_entropy

        return cross_entropy

    def evaluate(
        self, model: "FlatModel", images: ByteArray, labels_N: IntArray, classes: int, scale: "ImageScale",
        which: Iterable[int],
    ) -> "list[ChunkResult]":
        """Right answers and images per class, and the summed loss, of each chunk."""
        from raysim.evaluation.accuracy import evaluate_chunks

        return evaluate_chunks(model, images, labels_N, classes, scale, which)

    def metrics(self, results: "Sequence[ChunkResult]", split: str, counts_KC: IntArray) -> dict[str, float]:
        """Accuracy and loss; on the test split also by class, and over clients, each on its own classes."""
        from raysim.evaluation import per_client
        from raysim.evaluation.accuracy import by_class, overall, summarise

        if split == "validation":
            return overall(results, "validation_")
        a_K = per_client.by_client(counts_KC, by_class(results))
        return summarise(results) | per_client.spread("client_accuracy", a_K, counts_KC.sum(axis=1))


CLASSIFICATION = Classification()
