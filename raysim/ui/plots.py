"""Figures of a run and of a plan, each as PNG and PDF: accuracy, counts, images, concentration, time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.core.records import ByteArray, FloatArray, IntArray
from raysim.ui.display import PHASES
from raysim.ui.figure import COLOURS, blank_figure, blank_figures, look, save

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CELLS_WITH_NUMBERS = 260
TICKS = 25
_FILLS = (*COLOURS[:-1], "0.55")  # a bar in black hides its frame
X_LABELS = {"round": "round", "local_steps": "local steps of all clients so far"}


def accuracy_curve(metrics: "pd.DataFrame", path: Path, column: str = "accuracy", by: str = "round") -> Path:
    """Draw test accuracy by round, with the best and the final one marked.

    metrics: columns `by` and `column` (a fraction; NaN where a round was not evaluated).  by: `round`, or
    `local_steps`, those of all participants so far.  Returns `path`.  Raises ValueError if a column is missing.
    """
    from matplotlib.ticker import MaxNLocator

    missing = {by, column} - set(metrics.columns)
    if missing:
        raise ValueError(f"metrics lack {sorted(missing)}; they have {list(metrics.columns)}")
    measured = metrics[[by, column]].dropna()
    x = measured[by].to_numpy()
    accuracy = measured[column].to_numpy() * 100
    figure, axes = blank_figure(7, 4)
    axes.plot(x, accuracy, marker="o" if len(x) <= 40 else "", markersize=3, color=COLOURS[0])
    if len(x):
        best = int(accuracy.argmax())
        axes.axhline(accuracy[best], color="0.8", linewidth=0.8, zorder=0)
        axes.plot(x[best], accuracy[best], "*", markersize=12, color=COLOURS[1], label=f"best {accuracy[best]:.2f} %")
        axes.plot(x[-1], accuracy[-1], "o", color=COLOURS[0], label=f"final {accuracy[-1]:.2f} %")
        axes.legend(loc="lower right")
    axes.set(title="Accuracy on the test split", xlabel=X_LABELS[by], ylabel="accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    return save(figure, path)


def client_counts(
    real_KC: IntArray, synthetic_KC: IntArray, class_names: Sequence[str], path: Path, policy: str = ""
) -> Path:
    """Draw samples per client and class as two heat maps on one colour scale: real ones, and real plus synthetic ones.

    real_KC, synthetic_KC: K x C.  Empty cells stay white; the scale is the square root, so that small counts are
    visible.  policy: the name of the policy that placed the images, for the title.  Returns `path`.
    """
    from matplotlib.colors import PowerNorm

    K, C = real_KC.shape
    figure, (left, right) = blank_figures(1, 2, min(20.0, 4 + 0.5 * C), min(16.0, 2.2 + 0.32 * K))
    both_KC = real_KC + synthetic_KC
    by = f" of {policy}" if policy else ""
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, int(both_KC.max(initial=1))))
    for axes, counts_KC, title in (
        (left, real_KC, f"Real samples: {int(real_KC.sum()):,}"),
        (right, both_KC, f"With {int(synthetic_KC.sum()):,} synthetic images{by}: {int(both_KC.sum()):,} samples"),
    ):
        image = axes.imshow(np.ma.masked_equal(counts_KC, 0), aspect="auto", cmap="viridis_r", norm=norm)
        axes.set(title=title, xlabel="class", ylabel="client")
        name_ticks(axes, [str(name) for name in class_names], K)
        write_numbers(axes, counts_KC, norm.vmax)
    figure.colorbar(image, ax=[left, right], label="samples (square-root scale)", fraction=0.04, pad=0.02)
    return save(figure, path)


def image_grid(
    images: ByteArray, labels: IntArray, class_names: Sequence[str], path: Path, per_class: int = 10
) -> Path:
    """Draw the first `per_class` images of each class, one row per class; more than 25 classes are put in blocks.

    images: uint8 B x channels x height x width, 1 or 3 channels.  labels: B.  Returns `path`.
    Raises ValueError for another number of channels.
    """
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images have {images.shape[1]} channels; 1 (grey) or 3 (RGB) can be shown")
    blocks = [range(c, min(c + TICKS, len(class_names))) for c in range(0, len(class_names), TICKS)]
    rows = len(blocks[0])
    figure, all_axes = blank_figures(1, len(blocks), len(blocks) * (1.6 + 0.45 * per_class), 0.9 + 0.45 * rows)
    step = images.shape[2] + _gap(images)
    for axes, block in zip(all_axes, blocks, strict=True):
        axes.imshow(_mosaic(images, labels, block, rows, per_class), interpolation="nearest")
        axes.set_yticks([(i + 0.5) * step for i in range(len(block))], [str(class_names[c]) for c in block])
        axes.tick_params(axis="y", length=0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    all_axes[0].set_ylabel("class")
    figure.suptitle(f"{len(images):,} images, up to {per_class} of each class shown")
    return save(figure, path)


def comparison_grid(
    real: tuple[ByteArray, IntArray], synthetic: tuple[ByteArray, IntArray], class_names: Sequence[str], path: Path,
    per_class: int = 8,
) -> Path:
    """Draw real images on the left and synthetic ones on the right, one row per class; the first 25 classes.

    Returns `path`.

    real, synthetic: images (uint8 B x channels x height x width, 1 or 3 channels) and their labels B.
    """
    block = range(min(len(class_names), TICKS))
    figure, all_axes = blank_figures(1, 2, 2 * (1.2 + 0.45 * per_class), 0.9 + 0.45 * len(block))
    for axes, (images, labels), title in zip(all_axes, (real, synthetic), ("real", "synthetic"), strict=True):
        step = images.shape[2] + _gap(images)
        axes.imshow(_mosaic(images, labels, block, len(block), per_class), interpolation="nearest")
        names = [str(class_names[c]) for c in block] if axes is all_axes[0] else []
        axes.set_yticks([(i + 0.5) * step for i in range(len(names))], names)
        axes.set(title=title, xticks=[])
        axes.tick_params(axis="y", length=0)
        axes.spines[:].set_visible(False)
    return save(figure, path)


def _gap(images: ByteArray) -> int:
    """White pixels between images."""
    return max(1, int(images.shape[2]) // 16)


def _mosaic(images: ByteArray, labels: IntArray, block: range, rows: int, per_class: int) -> ByteArray:
    """Rows of images, one row per class, on white: uint8 height x width x 3."""
    gap = _gap(images)
    height, width = images.shape[2:]
    mosaic = np.full((rows * (height + gap) + gap, per_class * (width + gap) + gap, 3), 255, dtype=np.uint8)
    for row, c in enumerate(block):
        for i, image in enumerate(images[labels == c][:per_class]):
            top = gap + row * (height + gap)
            left = gap + i * (width + gap)
            mosaic[top : top + height, left : left + width] = image.transpose(1, 2, 0)  # grey spreads over RGB
    return mosaic


def lorenz(curves: Mapping[str, tuple[FloatArray, FloatArray, float]], path: Path, of: str = "") -> Path:
    """Draw Lorenz curves of what each client adds to the label imbalance: how few clients cause most of it.

    curves: by name, the curve (`raysim.allocation.imbalance.lorenz_curve`) as fractions of clients and of the total,
    both from 0 to 1, and the fraction that the top 20 % of clients cause, for the legend.  of: added to the title.
    Returns `path`.
    """
    figure, axes = blank_figure(5.5, 5 + 0.22 * (len(curves) + 1))
    axes.plot([0, 100], [0, 100], color="0.7", linestyle="--", label="every client alike")
    for i, (name, (clients, caused, top)) in enumerate(curves.items()):
        style = look(i, len(curves), len(clients))
        axes.plot(clients * 100, caused * 100, label=f"{name}: top 20 % hold {top * 100:.0f} %", **style)
    axes.axvline(80, color="0.85", linewidth=0.8, zorder=0)
    axes.set(title="Concentration of label imbalance" + (f", {of}" if of else ""))
    axes.set(xlabel="clients, least skewed first (%)")
    axes.set(ylabel="share of the imbalance score (%)", xlim=(0, 100), ylim=(0, 100))
    figure.legend(loc="outside lower center", fontsize=9, handlelength=3.5)  # the curves end in the corner above
    return save(figure, path)


def budget_curve(images_x: FloatArray, removed_y: FloatArray, betas: FloatArray, path: Path) -> Path:
    """Draw the imbalance removed against the images made, one point for each beta.

    images_x: synthetic images; removed_y: fraction of the imbalance score removed; both ordered like `betas`.
    Returns `path`.
    """
    figure, axes = blank_figure(7, 4.5)
    removed = np.asarray(removed_y) * 100
    axes.axhline(50, color="0.8", linewidth=0.8, zorder=0)
    axes.text(0.995, 50, "half of it ", transform=axes.get_yaxis_transform(), ha="right", va="bottom", color="0.4")
    axes.plot(images_x, removed, marker="o", markersize=4, color=COLOURS[0])
    step = max(1, -(-len(betas) // 12))  # a dozen labels at most
    for i in range(0, len(betas), step):
        axes.annotate(f"{betas[i]:g}", (images_x[i], removed[i]), (0, 6), textcoords="offset points", ha="right")
    axes.set(title="What a larger budget of FedEAS buys (numbers: beta)", xlabel="synthetic images")
    axes.set(ylabel="imbalance score removed (%)", ylim=(min(0.0, float(removed.min(initial=0.0))), 105))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    return save(figure, path)


def time_by_phase(seconds: Mapping[str, Mapping[str, float]], path: Path, note: str = "") -> Path:
    """Draw how long each phase took: a bar for each label.

    seconds: by label and phase; phases that took nothing anywhere are left out, and the others are in the order of
    `PHASES`.  note: below the axis.  Returns `path`.
    """
    named = dict.fromkeys(phase for parts in seconds.values() for phase, s in parts.items() if s > 0)
    phases = sorted(named, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))
    figure, axes = blank_figure(8, 1.8 + 0.45 * len(seconds))
    left = np.zeros(len(seconds))
    labels = list(seconds)
    for i, phase in enumerate(phases):
        widths = np.array([seconds[label].get(phase, 0.0) for label in labels])
        colour, hatch = _FILLS[i % len(_FILLS)], "//" if i >= len(_FILLS) else None
        axes.barh(
            labels, widths, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, height=0.6,
            label=phase,
        )
        left += widths
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:,.1f} s", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set(title="Time by phase", xlabel="seconds" + (f"; {note}" if note else ""))
    axes.set_xlim(0, 1.12 * float(left.max(initial=0.0)) or 1.0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(5, max(1, len(phases))), fontsize=9)
    return save(figure, path)


def name_ticks(axes: "Axes", class_names: list[str], clients: int) -> None:
    """Write at most TICKS names on each axis; long class names are turned by 90 degrees."""
    for axis, names in ((axes.xaxis, class_names), (axes.yaxis, [str(k) for k in range(clients)])):
        step = -(-len(names) // TICKS)
        axis.set_ticks(range(0, len(names), step), names[::step])
    if sum(len(name) for name in class_names[:: -(-len(class_names) // TICKS)]) > 20:
        axes.tick_params(axis="x", labelrotation=90)


def write_numbers(axes: "Axes", counts_KC: IntArray, most: float | None) -> None:
    """Write the counts into the cells of a heat map that has room for them.  most: the upper end of its scale."""
    if counts_KC.size > CELLS_WITH_NUMBERS:
        return
    for (k, c), count in np.ndenumerate(counts_KC):
        if count:
            colour = "white" if count > 0.3 * (most or 1) else "black"  # on the square-root scale, a bit above half
            axes.text(c, k, str(count), ha="center", va="center", fontsize=7, color=colour)
