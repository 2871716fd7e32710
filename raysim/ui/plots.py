"""Figures of a run as PNG files.  Drawn without pyplot, so nothing stays open and no window system is needed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.core.files import write_atomic
from raysim.core.records import ByteArray, FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
CELLS_WITH_NUMBERS = 260
TICKS = 25


def accuracy_curve(metrics: "pd.DataFrame", path: Path, column: str = "accuracy") -> Path:
    """Draw test accuracy by round, with the best and the final one marked.

    metrics: columns `round` and `column` (a fraction; NaN where a round was not evaluated).  Returns `path`.
    Raises ValueError if a column is missing.
    """
    from matplotlib.ticker import MaxNLocator

    missing = {"round", column} - set(metrics.columns)
    if missing:
        raise ValueError(f"metrics lack {sorted(missing)}; they have {list(metrics.columns)}")
    measured = metrics[["round", column]].dropna()
    rounds = measured["round"].to_numpy()
    accuracy = measured[column].to_numpy() * 100
    figure, axes = blank_figure(7, 4)
    axes.plot(rounds, accuracy, marker="o" if len(rounds) <= 40 else "", markersize=3, color="C0")
    if len(rounds):
        best = int(accuracy.argmax())
        axes.axhline(accuracy[best], color="0.8", linewidth=0.8, zorder=0)
        axes.plot(rounds[best], accuracy[best], "*", markersize=12, color="C1", label=f"best {accuracy[best]:.2f} %")
        axes.plot(rounds[-1], accuracy[-1], "o", color="C0", label=f"final {accuracy[-1]:.2f} %")
        axes.legend(loc="lower right")
    axes.set(title="Accuracy on the test split", xlabel="round", ylabel="accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    return save(figure, path)


def accuracy_curves(curves: "dict[str, dict[str, list[pd.DataFrame]]]", path: Path) -> Path:
    """Draw test accuracy by round: for each label the mean of its runs and, as a band, the lowest and highest of them.

    curves: by panel and label, one frame per run with columns `round` and `accuracy`.  Returns `path`.
    """
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    figure, panels = blank_figures(1, len(curves), 6.5 * len(curves), 4.5)
    for axes, (panel, by_label) in zip(panels, curves.items(), strict=True):
        for label, runs in by_label.items():
            of_round = pd.concat(runs).groupby("round")["accuracy"]
            rounds = of_round.mean().index.to_numpy()
            (line,) = axes.plot(rounds, of_round.mean().to_numpy() * 100, label=label, linewidth=1.5)
            low = of_round.min().to_numpy() * 100
            high = of_round.max().to_numpy() * 100
            axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(title=panel or "Accuracy on the test split", xlabel="round", ylabel="accuracy (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
        axes.sharey(panels[0])
    figure.supxlabel("lines: means of runs; bands: from the lowest to the highest of them", fontsize=9, color="0.4")
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
        _name_ticks(axes, [str(name) for name in class_names], K)
        if K * C <= CELLS_WITH_NUMBERS:
            _write_numbers(axes, counts_KC, norm.vmax)
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


def lorenz(curves: dict[str, tuple[FloatArray, FloatArray, float]], path: Path) -> Path:
    """Draw Lorenz curves of what each client adds to the label imbalance: how few clients cause most of it.

    curves: by name, the curve (`raysim.allocation.imbalance.lorenz_curve`) as fractions of clients and of the total,
    both from 0 to 1, and the fraction that the top 20 % of clients cause, for the legend.  Returns `path`.
    """
    figure, axes = blank_figure(5.5, 5)
    axes.plot([0, 100], [0, 100], color="0.7", linestyle="--", label="every client alike")
    for name, (clients, caused, top) in curves.items():
        axes.plot(clients * 100, caused * 100, label=f"{name}: top 20 % hold {top * 100:.0f} %")
    axes.axvline(80, color="0.85", linewidth=0.8, zorder=0)
    axes.set(title="Concentration of label imbalance", xlabel="clients, least skewed first (%)")
    axes.set(ylabel="share of the imbalance score (%)", xlim=(0, 100), ylim=(0, 100))
    axes.legend(loc="upper left", fontsize=9)
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
    axes.plot(images_x, removed, marker="o", markersize=4)
    step = max(1, -(-len(betas) // 12))  # a dozen labels at most
    for i in range(0, len(betas), step):
        axes.annotate(f"{betas[i]:g}", (images_x[i], removed[i]), (0, 6), textcoords="offset points", ha="right")
    axes.set(title="What a larger budget of FedEAS buys (numbers: beta)", xlabel="synthetic images")
    axes.set(ylabel="imbalance score removed (%)", ylim=(min(0.0, float(removed.min(initial=0.0))), 105))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    return save(figure, path)


def blank_figures(rows: int, columns: int, width: float, height: float) -> "tuple[Figure, Sequence[Axes]]":
    """Make a figure of `width` x `height` inches; returns it and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def blank_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Make a figure of `width` x `height` inches with one pair of axes; returns both."""
    figure, axes = blank_figures(1, 1, width, height)
    return figure, axes[0]


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG, complete or not at all, making its folder; returns `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)  # the pixels of `figure.savefig`, which draws everything twice
    write_atomic(path, drawn.getvalue())
    return path


def _name_ticks(axes: "Axes", class_names: list[str], clients: int) -> None:
    """Write at most TICKS names on each axis; long class names are turned by 90 degrees."""
    for axis, names in ((axes.xaxis, class_names), (axes.yaxis, [str(k) for k in range(clients)])):
        step = -(-len(names) // TICKS)
        axis.set_ticks(range(0, len(names), step), names[::step])
    if sum(len(name) for name in class_names[:: -(-len(class_names) // TICKS)]) > 20:
        axes.tick_params(axis="x", labelrotation=90)


def _write_numbers(axes: "Axes", counts_KC: IntArray, most: float | None) -> None:
    for (k, c), count in np.ndenumerate(counts_KC):
        if count:
            colour = "white" if count > 0.3 * (most or 1) else "black"  # on the square-root scale, a bit above half
            axes.text(c, k, str(count), ha="center", va="center", fontsize=7, color=colour)
