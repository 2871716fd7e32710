"""Cheap measures of how good synthetic images are: what a classifier learns from them, and whether they are copies.

Accuracy of a classifier trained on synthetic images alone and tested on real ones is the classification accuracy score
of arXiv 1905.10887. Distances are root-mean-square pixel differences, in units of the [0, 1] pixel range. Nothing is
downloaded: the features in which sets of images are compared are those of a classifier trained here.
"""

import numpy as np
import torch

from raysim.core import rng
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import ByteArray, Dataset, FloatArray, IntArray
from raysim.data.splits import choose
from raysim.evaluation.accuracy import chunks, evaluate_chunks
from raysim.generation.feature_distances import NEIGHBOURS, frechet, neighbourhoods
from raysim.models.architectures import cnn, linear
from raysim.models.flat_model import FlatModel, ImageScale, build_model

# Each classifier is trained with AdamW for this many steps, with this batch size and learning rate.
STEPS = 600
BATCH = 64
LR = 2e-3
MOST_QUERIES = 1000  # images of each kind whose nearest neighbour is searched, or whose features are compared
BINS = 40  # of the histograms of distances
CLOSEST = 10  # pairs of a synthetic and a training image that are kept
_QUALITY = "quality"  # purpose of the random streams


def measure(
    dataset: Dataset, images: ByteArray, labels_M: IntArray, seed: int = 0, device: str = "cpu"
) -> PlainDict:
    """Compare synthetic images with as many real ones of the same classes; returns plain data for JSON.

    images: uint8 M x channels x height x width.  labels_M: their classes.  Two small CNNs are trained in the same way,
    one on the synthetic images and one on real training images; both are tested on the test split.
    accuracy: that of both, in all and per class (None for a class without test image).  recognised: fraction of the
    synthetic images to which the CNN trained on real images gives their own class; for real images that fraction is its
    accuracy.  distance: median from a synthetic image to the nearest training image, the same from test images, and
    the fraction of synthetic images that are nearer than all but 1 % of the test images: far above 0.01 means copies;
    the histograms of both, and the closest pairs: row of `images`, row of the training split, distance.
    features: how far synthetic and test images are apart in features of the CNN, see `_feature_distances`.
    Raises ValueError without images or without test images.
    """
    if not len(images) or not len(dataset.test_labels_N):
        there = f"{len(images)} synthetic and {len(dataset.test_labels_N)} test images"
        raise ValueError(f"{there}; some of both are needed")
    counts_C = np.bincount(labels_M, minlength=dataset.classes)
    real_C = np.minimum(counts_C, np.bincount(dataset.train_labels_N, minlength=dataset.classes))
    rows = choose(dataset.train_labels_N, real_C, rng.stream(seed, _QUALITY, 0))
    scale = ImageScale(dataset.mean, dataset.std, flip=dataset.flips)
    from_synthetic = _fit(dataset, images, labels_M, scale, seed, device)
    from_real = _fit(dataset, dataset.train_images[rows], dataset.train_labels_N[rows], scale, seed, device)
    synthetic_C, real_accuracy_C = (
        _accuracy(m, dataset, scale, dataset.test_images, dataset.test_labels_N) for m in (from_synthetic, from_real)
    )
    recognised_C = _accuracy(from_real, dataset, scale, images, labels_M)
    return {
        "images": len(images),
        "real_images": len(rows),
        "accuracy": {"from_synthetic": _overall(synthetic_C), "from_real": _overall(real_accuracy_C)},
        "per_class": {
            "from_synthetic": _rates(synthetic_C), "from_real": _rates(real_accuracy_C),
            "recognised": _rates(recognised_C),
        },
        "recognised": _overall(recognised_C),
        "distance": _distances(dataset, images, seed),
        "features": _feature_distances(from_real, dataset, scale, images, labels_M, seed),
        "class_names": list(dataset.class_names),
    }


def _fit(
    dataset: Dataset, images: ByteArray, labels_M: IntArray, scale: ImageScale, seed: int, device: str
) -> FlatModel:
    """Train a small CNN (a linear model for images with a side below 4 pixels) for STEPS steps on these images."""
    architecture = cnn if min(dataset.image_size) >= 4 else linear
    model = FlatModel(build_model(architecture, dataset.channels, dataset.image_size, dataset.classes, seed), device)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draw = rng.stream(seed, _QUALITY, 1)
    model.module.train()
    for _ in range(STEPS):
        rows = draw.integers(0, len(images), BATCH)
        x = scale.augment(torch.from_numpy(images[rows]).to(device), draw)
        y_B = torch.from_numpy(labels_M[rows]).to(device)
        model.grad_P.zero_()
        torch.nn.functional.cross_entropy(model.module(scale(x, model.channels_last)), y_B).backward()
        optimizer.step()
        schedule.step()
    return model


def _accuracy(model: FlatModel, dataset: Dataset, scale: ImageScale, images: ByteArray, labels_N: IntArray) -> IntArray:
    """Right answers and images per class: 2 x C."""
    results = evaluate_chunks(model, images, labels_N, dataset.classes, scale, range(chunks(len(images))))
    return np.stack([np.sum([r.correct_C for r in results], axis=0), np.sum([r.total_C for r in results], axis=0)])


def _overall(counts_2C: IntArray) -> float:
    return round(float(counts_2C[0].sum() / counts_2C[1].sum()), 4)


def _rates(counts_2C: IntArray) -> list[float | None]:
    return [round(right / total, 4) if total else None for right, total in counts_2C.T.tolist()]


def _feature_distances(
    model: FlatModel, dataset: Dataset, scale: ImageScale, images: ByteArray, labels_M: IntArray, seed: int
) -> PlainDict | None:
    """How far synthetic images are from test images, and other test images from these, in features of `model`.

    The features are the inputs of its last layer.  All sets have as many images of each class, `images` in all, at most
    half of the test split.  synthetic, real: each with frechet, precision, recall, density and coverage; what is
    reached with real images is the bound.  None where there are too few images for that.
    """
    test_labels_N = dataset.test_labels_N
    least_C = np.minimum(
        np.bincount(labels_M, minlength=dataset.classes), np.bincount(test_labels_N, minlength=dataset.classes) // 2
    )
    take_C = np.minimum(least_C, least_C * MOST_QUERIES // max(1, least_C.sum()))
    if take_C.sum() <= NEIGHBOURS:
        return None
    draw = rng.stream(seed, _QUALITY, 3)
    chosen = draw.permutation(choose(test_labels_N, 2 * take_C, draw))
    first = np.concatenate([np.flatnonzero(test_labels_N[chosen] == c)[:n] for c, n in enumerate(take_C)])
    second = np.setdiff1d(np.arange(len(chosen)), first)
    reference_ND, real_ND, made_ND = (
        _features(model, scale, part)
        for part in (
            dataset.test_images[chosen[first]], dataset.test_images[chosen[second]],
            images[choose(labels_M, take_C, draw)],
        )
    )
    found: PlainDict = {"images": int(take_C.sum())}
    for kind, own_ND in (("synthetic", made_ND), ("real", real_ND)):
        values = {"frechet": frechet(reference_ND, own_ND), **neighbourhoods(reference_ND, own_ND)}
        found[kind] = {name: round(value, 4) for name, value in values.items()}
    return found


def _features(model: FlatModel, scale: ImageScale, images: ByteArray) -> FloatArray:
    """The inputs of the last linear layer for each image: N x D."""
    layers = [module for module in model.module.modules() if isinstance(module, torch.nn.Linear)]
    caught: list[torch.Tensor] = []
    hook = layers[-1].register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].double().cpu()))
    device = next(model.module.parameters()).device
    model.module.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(images), 256):
                block = torch.from_numpy(np.ascontiguousarray(images[start : start + 256])).to(device)
                model.module(scale(block, model.channels_last))
    finally:
        hook.remove()
    features: FloatArray = torch.cat(caught).numpy()
    return features


def _distances(dataset: Dataset, images: ByteArray, seed: int) -> PlainDict:
    draw = rng.stream(seed, _QUALITY, 2)
    near: dict[str, FloatArray] = {}
    closest: list[list[int | float]] = []
    for kind, queries in (("synthetic", images), ("real", dataset.test_images)):
        rows = draw.choice(len(queries), min(len(queries), MOST_QUERIES), replace=False)
        near[kind], of = nearest(queries[rows], dataset.train_images)
        if kind == "synthetic":
            first = np.argsort(near[kind], kind="stable")[:CLOSEST]
            closest = [[int(rows[i]), int(of[i]), round(float(near[kind][i]), 4)] for i in first]
    edges = np.linspace(0.0, max(float(values.max()) for values in near.values()) or 1.0, BINS + 1)
    counts = {kind: np.histogram(values, edges)[0] / len(values) for kind, values in near.items()}
    return {
        "synthetic_to_train": round(float(np.median(near["synthetic"])), 4),
        "test_to_train": round(float(np.median(near["real"])), 4),
        "nearer_than_99_of_test": round(float((near["synthetic"] < np.quantile(near["real"], 0.01)).mean()), 4),
        "closest": closest,
        "histogram": {
            "edges": edges.round(5).tolist(),
            "synthetic": counts["synthetic"].round(4).tolist(),
            "test": counts["real"].round(4).tolist(),
        },
    }


def nearest(queries: ByteArray, references: ByteArray) -> tuple[FloatArray, IntArray]:
    """Root-mean-square pixel difference from each query image to the nearest of the references, in [0, 1]; its row."""
    flat = torch.from_numpy(queries.reshape(len(queries), -1)).float() / 255
    best, rows = torch.full((len(flat),), torch.inf), torch.zeros(len(flat), dtype=torch.int64)
    for start in range(0, len(references), 4096):
        block = references[start : start + 4096]
        others = torch.from_numpy(block.reshape(len(block), -1).astype(np.float32)) / 255
        found, at = torch.cdist(flat, others).min(1)
        rows = torch.where(found < best, at + start, rows)
        best = torch.minimum(best, found)
    distances: FloatArray = (best / flat.shape[1] ** 0.5).double().numpy()
    return distances, rows.numpy()


_FEATURE_NAMES = {
    "frechet": "Fréchet distance (0: equal)", "precision": "precision", "recall": "recall",
    "density": "density (1: as real ones)", "coverage": "coverage",
}


def table(quality: PlainMapping) -> list[str]:
    """Format the result of `measure` as the lines of a Markdown table, aligned for a terminal."""
    accuracy = quality["accuracy"]
    per_class = quality["per_class"]
    distance = quality["distance"]
    rows = [
        ("accuracy of a classifier trained on synthetic images", f"{accuracy['from_synthetic']:.4f}"),
        (f"accuracy of one trained on {quality['real_images']:,} real images", f"{accuracy['from_real']:.4f}"),
        ("synthetic images that the real-trained one recognises", f"{quality['recognised']:.4f}"),
        ("median distance, synthetic to nearest training image", f"{distance['synthetic_to_train']:.4f}"),
        ("median distance, test to nearest training image", f"{distance['test_to_train']:.4f}"),
        ("synthetic images nearer than 99 % of test images", f"{distance['nearer_than_99_of_test']:.4f}"),
    ]
    features = quality.get("features")
    title = f"quality of {quality['images']:,} synthetic images"
    lines = [f"| {title:<54} | {'':>7} |", f"|{'-' * 56}|{'-' * 8}:|"]
    lines += [f"| {name:<54} | {value:>7} |" for name, value in rows]
    if features:
        against = f"against {features['images']:,} test images"
        lines += ["", f"| {against:<32} | {'synthetic':>10} | {'real':>10} |",
                  f"|{'-' * 34}|{'-' * 11}:|{'-' * 11}:|"]
        made, real = features["synthetic"], features["real"]
        lines += [f"| {_FEATURE_NAMES[name]:<32} | {made[name]:>10.3f} | {real[name]:>10.3f} |" for name in made]
    lines += ["", f"| {'class':<16} | {'from synthetic':>14} | {'from real':>9} | {'recognised':>10} |",
              f"|{'-' * 18}|{'-' * 15}:|{'-' * 10}:|{'-' * 11}:|"]
    columns = [per_class[key] for key in ("from_synthetic", "from_real", "recognised")]
    for name, *values in zip(quality["class_names"], *columns, strict=True):
        shown = ["-" if value is None else f"{value:.3f}" for value in values]
        lines.append(f"| {name:<16} | {shown[0]:>14} | {shown[1]:>9} | {shown[2]:>10} |")
    return lines
