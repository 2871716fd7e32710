"""Figures that compare methods over several runs, each as PNG and PDF.

A method is one curve, dot or panel; a setting (values of the other axes of a sweep) is a panel.  A line is the mean
over all runs of a method; one that lacks a run has none, and the legend says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.core.records import FloatArray, IntArray
from raysim.ui.figure import COLOURS, MARKERS, blank_figures, look, save, spread
from raysim.ui.plots import TICKS, X_LABELS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curves:
    """The runs of one method in one setting.  expected: how many there are to be.

    runs: of each that is there, `round`, `accuracy` (a fraction) and `local_steps` (those of all clients so far) of the
    evaluated rounds.
    """

    runs: "list[pd.DataFrame]"
    expected: int

    @property
    def is_complete(self) -> bool:
        """Whether no run is missing."""
        return len(self.runs) == self.expected


@dataclass(frozen=True)
class Gain:
    """What one method gave each class, over that of another method, one number per class and run.

    images_RC: synthetic images of the class, R x C.  gain_RC: difference of the accuracies (fractions), R x C; NaN
    for a class without test images.
    """

    images_RC: IntArray
    gain_RC: FloatArray


def accuracy_curves(panels: Mapping[str, Mapping[str, Curves]], path: Path, by: str = "round") -> Path:
    """Draw test accuracy by round or by local steps: for each method the mean and, as a band, lowest and highest run.

    panels: by setting and method.  by: `round`, or `local_steps`; runs are averaged at equal rounds in either case.
    Only rounds that every run of the method has evaluated are drawn.  Returns `path`.
    """
    import pandas as pd

    methods = _methods(panels)
    figure, all_axes = _panels(len(panels), 6.5, 4.5)
    for axes, (setting, by_method) in zip(all_axes, panels.items(), strict=False):
        for method, curves in by_method.items():
            i = methods.index(method)
            if not curves.is_complete or not curves.runs:
                _say_missing(axes, method, i, len(methods), len(curves.runs), curves.expected)
                continue
            of_round = pd.concat(curves.runs).groupby("round")
            everywhere = of_round["accuracy"].count() == len(curves.runs)
            accuracy = of_round["accuracy"].agg(["mean", "min", "max"])[everywhere] * 100
            x = (of_round[by].mean() if by != "round" else of_round["round"].first())[everywhere].to_numpy()
            style = look(i, len(methods), len(x))
            axes.plot(x, accuracy["mean"].to_numpy(), label=_counted(method, len(curves.runs)), **style)
            if len(curves.runs) > 1:
                low, high = accuracy["min"].to_numpy(), accuracy["max"].to_numpy()
                axes.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)
        axes.set(title=setting or "Accuracy on the test split", xlabel=X_LABELS[by], ylabel="accuracy (%)")
        _finish(axes, all_axes[0])
    note = "line: mean of the runs; band: from the lowest to the highest of them"
    figure.supxlabel(note + ("" if by == "round" else "; averaged at equal rounds"), fontsize=9, color="0.4")
    return save(figure, path)


def accuracy_by_images(panels: Mapping[str, "Mapping[str, tuple[pd.DataFrame, int]]"], path: Path) -> Path:
    """Draw final accuracy against synthetic images: for each method its runs, pale, and their mean with bars of one sd.

    panels: by setting and method, (columns `images` and `final_accuracy`, a row per run; how many there are to be).
    Returns `path`.
    """
    methods = _methods(panels)
    figure, all_axes = _panels(len(panels), 6.5, 4.5)
    for axes, (setting, by_method) in zip(all_axes, panels.items(), strict=False):
        for method, (runs, expected) in by_method.items():
            i = methods.index(method)
            if len(runs) < expected or runs.empty:
                _say_missing(axes, method, i, len(methods), len(runs), expected)
                continue
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            size = 13 - 6 * i / max(1, len(methods) - 1)  # a later mean is smaller: of two that coincide both are seen
            images, accuracy = runs["images"].to_numpy(dtype=float), runs["final_accuracy"].to_numpy(dtype=float) * 100
            axes.plot(images, accuracy, linestyle="", markersize=5, alpha=0.35, markeredgewidth=0, **style)
            bars: dict[str, Any] = {"xerr": images.std(ddof=1), "yerr": accuracy.std(ddof=1)} if len(runs) > 1 else {}
            axes.errorbar(
                images.mean(), accuracy.mean(), **bars, **style, markersize=size, markeredgecolor="white", capsize=3,
                linestyle="", label=_counted(method, len(runs)),
            )
        axes.set(title=setting or "Final accuracy and images made", xlabel="synthetic images")
        axes.set(ylabel="final accuracy (%)")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _finish(axes, all_axes[0], curves=False)
    figure.supxlabel("pale: runs; solid: their mean, with bars of one standard deviation", fontsize=9, color="0.4")
    return save(figure, path)


def class_gains(
    gains: Mapping[str, Gain],
    reference: str,
    class_names: Sequence[str],
    path: Path,
    methods: Sequence[str],
    title: str = "",
) -> Path:
    """Draw, in a panel for each method, what each class gained over `reference` against the images made of it.

    gains: by method.  Pale: single runs; a solid dot with the name of the class: their mean.  methods: all that are
    compared, which gives each the look that it has in other figures.  Returns `path`.
    """
    figure, all_axes = _panels(len(gains), 5.2, 4.4)
    for axes, (method, gain) in zip(all_axes, gains.items(), strict=False):
        i = methods.index(method)
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": "", "markeredgecolor": "white"}
        y_RC = gain.gain_RC * 100
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        axes.plot(gain.images_RC.ravel(), y_RC.ravel(), marker=".", alpha=0.3, markersize=6, **style)
        x_C, y_C = gain.images_RC.mean(axis=0), y_RC.mean(axis=0)
        axes.plot(x_C, y_C, marker=MARKERS[i % len(MARKERS)], markersize=7, **style)
        axes.set(title=method, xlabel="synthetic images of the class")
        axes.set(ylabel=f"accuracy gained on {reference} (points)")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        axes.margins(x=0.08, y=0.12)
        axes.sharey(all_axes[0])
        _name_dots(axes, x_C, y_C, [str(name) for name in class_names])
    figure.suptitle(title)
    note = "pale: single runs; solid: the mean of a class, named at the right edge"
    figure.supxlabel(note if len(class_names) <= TICKS else note.partition(", named")[0], fontsize=9, color="0.4")
    return save(figure, path)


def allocation_maps(
    quotas: Mapping[str, IntArray], class_names: Sequence[str], path: Path, title: str
) -> Path:
    """Draw the synthetic images of each client and class, a panel for each method, on one colour scale.

    quotas: K x C by method; empty cells stay white; the scale is the square root.  Returns `path`.
    """
    from matplotlib.colors import PowerNorm

    from raysim.ui.plots import name_ticks, write_numbers

    clients, classes = next(iter(quotas.values())).shape
    figure, all_axes = _panels(len(quotas), min(9.0, 2.5 + 0.32 * classes), min(10.0, 1.6 + 0.28 * clients))
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, max(int(quota_KC.max(initial=1)) for quota_KC in quotas.values())))
    for axes, (method, quota_KC) in zip(all_axes, quotas.items(), strict=False):
        image = axes.imshow(np.ma.masked_equal(quota_KC, 0), aspect="auto", cmap="viridis_r", norm=norm)
        axes.set(title=f"{method}: {int(quota_KC.sum()):,} images", xlabel="class", ylabel="client")
        name_ticks(axes, [str(name) for name in class_names], clients)
        write_numbers(axes, quota_KC, norm.vmax)
    drawn = list(all_axes[: len(quotas)])
    figure.colorbar(image, ax=drawn, label="images (square-root scale)", fraction=0.04, pad=0.02)
    figure.suptitle(title)
    return save(figure, path)


def _methods(panels: Mapping[str, Mapping[str, object]]) -> list[str]:
    """All methods, in the order of the panels, so that each has one look in all of them."""
    return list(dict.fromkeys(method for by_method in panels.values() for method in by_method))


def _panels(count: int, width: float, height: float) -> "tuple[Figure, Sequence[Axes]]":
    """A figure of `count` panels of this size in inches, at most three in a row; what is left over stays blank."""
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure, all_axes = blank_figures(rows, columns, width * columns, height * rows + 0.3)
    for axes in all_axes[count:]:
        axes.set_axis_off()
    return figure, all_axes


def _finish(axes: "Axes", first: "Axes", curves: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    if curves:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right" if curves else "best", fontsize=9, handlelength=3.5)
    axes.sharey(first)


def _counted(method: str, runs: int) -> str:
    return f"{method} ({runs} runs)" if runs > 1 else f"{method} (1 run)"


def _say_missing(axes: "Axes", method: str, i: int, of: int, there: int, expected: int) -> None:
    """An entry of the legend, without anything drawn, for a method that lacks a run."""
    axes.plot([], [], label=f"{method}: not drawn, {there} of {expected} runs are there", **look(i, of))


def _name_dots(axes: "Axes", x_C: FloatArray, y_C: FloatArray, names: list[str]) -> None:
    """Write the names of dots at the right edge, as high as the dot is where there is room, with a line to each."""
    seen = np.flatnonzero(np.isfinite(y_C))
    if len(names) > TICKS or not len(seen):
        return
    low, high = axes.get_ylim()
    places = spread(y_C[seen], 0.052 * (high - low), low, high)
    edge = axes.get_xlim()[1]
    for c, place in zip(seen, places, strict=True):
        axes.annotate(
            f" {names[c]}", (x_C[c], y_C[c]), (edge, place), fontsize=8, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
