"""Fine-tunes the global model on one client's samples, and measures it: what personalisation would give the client."""

import numpy as np

from raysim.config.schema import FineTuning
from raysim.core.records import Dataset, FloatArray, IntArray
from raysim.evaluation.accuracy import by_class, chunks, evaluate_chunks
from raysim.local.contract import ClientData, Job
from raysim.local.loop import train_client
from raysim.local.sgd import sgd
from raysim.models.flat_model import FlatModel, ImageScale


def fine_tune(
    model: FlatModel, data: ClientData, scale: ImageScale, options: FineTuning, seed: int, round_: int, client: int,
    fixed_statistics: bool,
) -> None:
    """Train the model in place with plain SGD; randomness is keyed by seed, round and client, as in training."""
    algorithm = sgd(epochs=options.epochs, batch_size=options.batch_size, lr=options.lr)
    job = Job(model, model.params_P.detach().clone(), options.lr, round_, client, len(data.labels_N))
    train_client(job, algorithm, data, scale, seed, fixed_statistics=fixed_statistics)


def fine_tuned_accuracy(
    model: FlatModel, dataset: Dataset, scale: ImageScale, counts_C: IntArray, options: FineTuning
) -> FloatArray:
    """The accuracy on test images of each class that the client has (counts_C > 0), nan for other classes: C."""
    rows = test_rows(dataset.test_labels_N, counts_C, options.test_images)
    if not len(rows):
        return np.full(dataset.classes, np.nan)
    images = dataset.test_images[rows]
    labels_N = dataset.test_labels_N[rows]
    return by_class(evaluate_chunks(model, images, labels_N, dataset.classes, scale, range(chunks(len(rows)))))


def test_rows(labels_N: IntArray, counts_C: IntArray, most: int | None) -> IntArray:
    """The rows, ascending, of the first `most` (None: all) test images of every class that the client has."""
    found = [np.flatnonzero(labels_N == c)[:most] for c in np.flatnonzero(counts_C)]
    return np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
