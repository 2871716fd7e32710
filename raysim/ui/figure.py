"""A figure: blank, the looks of its curves, labels that do not overprint, and its files.

Drawn without pyplot, so nothing stays open and no window system is needed.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.core.files import write_atomic
from raysim.core.records import FloatArray
from raysim.ui.pdf_fonts import lean_fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The palette of Okabe and Ito, told apart with any colour blindness; without its yellow, which is too pale."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 1.5, 1.5, 1.5)), (0, (3, 4)))


def look(i: int, of: int = 1, points: int = 1) -> dict[str, Any]:
    """Keywords for `Axes.plot` of curve i of `of`: curves that coincide are both seen.

    Colour, marker and dashes differ from curve to curve, and their cycles have no common length.  A later curve is
    thinner, so that an earlier one is seen on both sides of it and in its gaps; markers, at most about eight of
    `points`, stand at other points from curve to curve.
    """
    step = max(of, points // 8)
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i % len(DASHES)],
        "linewidth": 3.2 - 1.8 * i / max(1, of - 1) if of > 1 else 1.8,
        "markevery": (i * step // of, step),
        "markersize": 6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def spread(places: Sequence[float] | FloatArray, gap: float, low: float, high: float) -> FloatArray:
    """Places for labels, as near as can be to those given (least squares), at least `gap` apart and in [low, high].

    In the order of `places`.  Where there is no room for all, the gap is smaller.
    """
    from scipy.optimize import isotonic_regression

    wanted = np.asarray(places, dtype=np.float64)
    if not len(wanted):
        return wanted
    order = np.argsort(wanted, kind="stable")
    steps = min(gap, (high - low) / max(1, len(wanted) - 1)) * np.arange(len(wanted))
    # p_i+1 - p_i >= gap is the same as p_i - i gap not falling, whose nearest solution is an isotonic regression.
    placed = np.clip(isotonic_regression(wanted[order] - steps).x, low, high - steps[-1]) + steps
    result = np.empty(len(wanted))
    result[order] = placed
    return result


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
    """Write a figure as PNG to `path`, and as PDF beside it, each complete or not at all; returns `path`.

    Text in the PDF is text, in TrueType fonts, as conferences ask.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    path = Path(path)
    png, pdf = io.BytesIO(), io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)  # the pixels of `figure.savefig`, which draws everything twice
    figure.set_layout_engine("none")  # the layout is found, and takes as long as the drawing
    with matplotlib.rc_context({"pdf.fonttype": 42}), lean_fonts():
        FigureCanvasPdf(figure).print_pdf(pdf, metadata={"CreationDate": None})  # the same figure, the same file
    write_atomic(path, png.getvalue())
    write_atomic(path.with_suffix(".pdf"), pdf.getvalue())
    return path
