"""The one evaluation loop. Needs torch alone; knows nothing of Ray."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from raysim.core.records import ByteArray, FloatArray, IntArray
from raysim.models.flat_model import FlatModel, ImageScale, evaluating

CHUNK = 50  # images at a time: few enough for a core's cache; fixed, so that the number of workers changes no bit
CLASSES_SHOWN = 100  # with more classes, a metric for each would hide the others


@dataclass(frozen=True)
class ChunkResult:
    """A model's results on one chunk of test images.

    chunk: its number.  correct_C, total_C: right answers and images per class.  loss_sum: the loss summed over images.
    """

    chunk: int
    correct_C: IntArray
    total_C: IntArray
    loss_sum: float


def chunks(n: int) -> int:
    """How many chunks of CHUNK images n images make."""
    return -(-n // CHUNK)


def evaluate_chunks(
    model: FlatModel, images: ByteArray, labels_N: IntArray, classes: int, scale: ImageScale, which: Iterable[int]
) -> list[ChunkResult]:
    """Evaluate chunks of `CHUNK` images each; the model's mode, statistics and random state are not changed.

    images, labels_N: all test images, uint8 N x channels x height x width, and their labels.  which: numbers of chunks.
    """
    module = model.module
    results = []
    with evaluating(module):
        for chunk in which:
            rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            x = torch.from_numpy(images[rows].copy()).to(model.device)
            y_B = torch.from_numpy(labels_N[rows].copy()).to(model.device)
            logits = module(scale(x, model.channels_last)).float()
            loss = torch.nn.functional.cross_entropy(logits, y_B, reduction="sum")
            right = y_B[logits.argmax(1) == y_B]
            results.append(
                ChunkResult(
                    chunk,
                    torch.bincount(right, minlength=classes).cpu().numpy(),
                    torch.bincount(y_B, minlength=classes).cpu().numpy(),
                    float(loss),
                )
            )
    return results


def accuracy_and_loss(
    model: FlatModel, images: ByteArray, labels_N: IntArray, classes: int, scale: ImageScale
) -> tuple[FloatArray, FloatArray]:
    """(accuracy, mean cross-entropy) of a model on the images of each class, nan for a class without one: C each.

    images: uint8 N x channels x height x width.  A prediction that is not finite is wrong.
    """
    log_p_NC = log_probabilities(model, images, scale)
    right_N = (log_p_NC.argmax(axis=1) == labels_N) & np.isfinite(log_p_NC).all(axis=1)
    loss_N = -log_p_NC[np.arange(len(labels_N)), labels_N]
    n_C = np.bincount(labels_N, minlength=classes)
    with np.errstate(invalid="ignore"):
        accuracy_C: FloatArray = np.bincount(labels_N, right_N, minlength=classes) / n_C
        loss_C: FloatArray = np.bincount(labels_N, loss_N, minlength=classes) / n_C
    return accuracy_C, loss_C


def log_probabilities(model: FlatModel, images: ByteArray, scale: ImageScale) -> FloatArray:
    """The logarithm of the probability of each class for each image: N x C; computed in chunks of CHUNK images.

    images: uint8 N x channels x height x width.  The model's mode, statistics and random state are not changed.
    """
    parts = []
    with evaluating(model.module):
        for start in range(0, len(images), CHUNK):
            x = torch.from_numpy(images[start : start + CHUNK].copy()).to(model.device)
            logits = model.module(scale(x, model.channels_last)).to(torch.float64)
            parts.append(torch.log_softmax(logits, dim=1).cpu().numpy())
    return np.concatenate(parts)


def by_class(results: Iterable[ChunkResult]) -> FloatArray:
    """The accuracy of each class over all chunks, nan for a class without test images: C."""
    found = list(results)
    correct_C = np.sum([r.correct_C for r in found], axis=0)
    total_C = np.sum([r.total_C for r in found], axis=0)
    return np.where(total_C > 0, correct_C / np.maximum(1, total_C), np.nan)


def summarise(results: Iterable[ChunkResult]) -> dict[str, float]:
    """Accuracy and mean loss on all images, accuracy of the worst class and of each; chunks may come in any order.

    The metrics have `accuracy_class_C` for each class C with a test image, unless there are more than CLASSES_SHOWN.
    """
    ordered = sorted(results, key=lambda r: r.chunk)
    total_C = np.sum([r.total_C for r in ordered], axis=0)
    accuracy_C = by_class(ordered)
    shown = np.flatnonzero((total_C > 0) & (len(total_C) <= CLASSES_SHOWN))
    return {
        **overall(ordered),
        "worst_class_accuracy": float(np.nanmin(accuracy_C)),
        "evaluated_classes": int((total_C > 0).sum()),
        **{f"accuracy_class_{c}": float(accuracy_C[c]) for c in shown},
    }


def overall(results: Iterable[ChunkResult], prefix: str = "") -> dict[str, float]:
    """Accuracy and mean loss on all images; chunks may come in any order.  prefix: begins the names of both."""
    found = list(results)
    n = int(np.sum([r.total_C for r in found]))
    correct = int(np.sum([r.correct_C for r in found]))
    return {f"{prefix}accuracy": correct / n, f"{prefix}loss": math.fsum(r.loss_sum for r in found) / n}
