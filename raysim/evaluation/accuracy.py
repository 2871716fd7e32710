"""The one evaluation loop. Runs wherever torch does; knows nothing of Ray."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from raysim.core.records import ByteArray, FloatArray, IntArray
from raysim.models.flat_model import FlatModel, ImageScale

CHUNK = 50  # images at a time: small enough to stay in a core's cache; fixed, so that sharding cannot change a bit

CLASSES_SHOWN = 100  # of more, one metric each would drown the others


@dataclass(frozen=True)
class ChunkResult:
    """What a model makes of one chunk of test images: right answers and images per class, and the summed loss."""

    chunk: int
    correct_C: IntArray
    total_C: IntArray
    loss_sum: float


def chunks(n: int) -> int:
    """How many chunks n images make."""
    return -(-n // CHUNK)


def evaluate_chunks(
    model: FlatModel, images: ByteArray, labels_N: IntArray, classes: int, scale: ImageScale, which: Iterable[int]
) -> list[ChunkResult]:
    """Evaluate chunks of `CHUNK` images each; the model's mode, statistics and random state are left as they were."""
    module, was_training = model.module, model.module.training
    module.eval()
    results = []
    try:
        with torch.inference_mode():
            for chunk in which:
                part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                x = torch.from_numpy(images[part].copy()).to(model.device)
                y_B = torch.from_numpy(labels_N[part].copy()).to(model.device)
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
    finally:
        module.train(was_training)
    return results


def by_class(results: Iterable[ChunkResult]) -> FloatArray:
    """Accuracy of each class, nan for one without test images: C."""
    parts = list(results)
    correct_C, total_C = np.sum([r.correct_C for r in parts], axis=0), np.sum([r.total_C for r in parts], axis=0)
    return np.where(total_C > 0, correct_C / np.maximum(1, total_C), np.nan)


def summarise(results: Iterable[ChunkResult]) -> dict[str, float]:
    """Accuracy and mean loss on all images, accuracy of the worst class and of each; chunks may come in any order.

    `accuracy_class_C` for each class C that has a test image, unless there are more than CLASSES_SHOWN classes.
    """
    parts = sorted(results, key=lambda r: r.chunk)
    correct_C = np.sum([r.correct_C for r in parts], axis=0)
    total_C = np.sum([r.total_C for r in parts], axis=0)
    accuracy_C, n = by_class(parts), int(total_C.sum())
    shown = np.flatnonzero((total_C > 0) & (len(total_C) <= CLASSES_SHOWN))
    return {
        "accuracy": float(correct_C.sum() / n),
        "loss": math.fsum(r.loss_sum for r in parts) / n,
        "worst_class_accuracy": float(np.nanmin(accuracy_C)),
        "evaluated_classes": int((total_C > 0).sum()),
        **{f"accuracy_class_{c}": float(accuracy_C[c]) for c in shown},
    }
