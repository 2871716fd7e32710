"""Figures of the quality of synthetic images: what `raysim.generation.quality.measure` found, beside real ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.core.plain import PlainMapping
from raysim.core.records import ByteArray
from raysim.ui.figure import COLOURS, blank_figures, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CLASSES = 25
_SHARES = ("precision", "recall", "density", "coverage")
_RATES = {
    "from_real": "trained on real images", "from_synthetic": "trained on synthetic images",
    "recognised": "synthetic images that the first recognises",
}


def quality_figure(quality: PlainMapping, path: Path) -> Path:
    """Draw accuracies per class, distances to the nearest training image, and how the images lie among real ones.

    quality: the result of `measure`.  At most 25 classes are drawn.  The third part is left out where there were too
    few images for it.  Returns `path`.
    """
    features = quality.get("features")
    figure, axes = blank_figures(1, 3 if features else 2, 13.5 if features else 9, 3.8)
    _classes(axes[0], quality)
    _distances(axes[1], quality["distance"])
    if features:
        _among_real(axes[2], features)
    return save(figure, path)


def nearest_pairs(
    images: ByteArray, train_images: ByteArray, closest: Sequence[Sequence[float]], path: Path
) -> Path:
    """Draw the synthetic images that are nearest to training images, each above that training image.

    images, train_images: uint8 B x channels x height x width, 1 or 3 channels.  closest: pairs of `measure`, a row of
    each and their distance.  Returns `path`.
    """
    figure, axes = blank_figures(2, len(closest), 0.6 + 1.1 * len(closest), 3)
    for i, (made, real, distance) in enumerate(closest):
        for place, image, title in (
            (i, images[int(made)], f"{distance:.3f}"), (len(closest) + i, train_images[int(real)], "")
        ):
            pixels = np.broadcast_to(image, (3, *image.shape[1:])).transpose(1, 2, 0)
            axes[place].imshow(pixels, interpolation="nearest")
            axes[place].set(title=title, xticks=[], yticks=[])
    axes[0].set_ylabel("synthetic")
    axes[len(closest)].set_ylabel("training")
    figure.suptitle("The nearest pairs, and how far they are apart (black to white: 1)")
    return save(figure, path)


def _classes(axes: "Axes", quality: PlainMapping) -> None:
    names = [str(name) for name in quality["class_names"][:MOST_CLASSES]]
    places = np.arange(len(names))
    for i, (key, label) in enumerate(_RATES.items()):
        rates = [np.nan if rate is None else 100 * rate for rate in quality["per_class"][key][:MOST_CLASSES]]
        axes.bar(places + (i - 1) * 0.27, rates, 0.25, color=COLOURS[i], label=label)
    axes.set_xticks(places, names, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set(title="Accuracy of small classifiers on the test split", ylabel="%", ylim=(0, 130))
    axes.set_yticks(range(0, 101, 20))
    axes.legend(fontsize="small", loc="upper center")


def _distances(axes: "Axes", distance: PlainMapping) -> None:
    histogram = distance["histogram"]
    for i, (key, label) in enumerate((("test", "test images"), ("synthetic", "synthetic images"))):
        values = 100 * np.asarray(histogram[key])
        axes.stairs(values, histogram["edges"], color=COLOURS[i], label=label, fill=True, alpha=0.35)
        axes.stairs(values, histogram["edges"], color=COLOURS[i])
    nearer = f"nearer than 99 % of the test images: {100 * distance['nearer_than_99_of_test']:.1f} %"
    axes.set(
        title=f"Distance to the nearest training image\n{nearer}",
        xlabel="root-mean-square difference of pixels (black to white: 1)", ylabel="% of images",
    )
    axes.legend()


def _among_real(axes: "Axes", features: Any) -> None:
    places = np.arange(len(_SHARES))
    for i, (kind, label) in enumerate((("real", "other test images"), ("synthetic", "synthetic images"))):
        shares = [features[kind][name] for name in _SHARES]
        axes.bar(places + (i - 0.5) * 0.4, shares, 0.38, color=COLOURS[i], label=label)
    axes.set_xticks(places, _SHARES)
    frechet = ", ".join(f"{kind} {features[kind]['frechet']:,.1f}" for kind in ("real", "synthetic"))
    axes.set(title=f"Among {features['images']:,} test images, in features\nFréchet distance: {frechet}")
    axes.legend()
