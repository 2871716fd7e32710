"""The figures of one run, drawn at its end and, from its files, by `raysim report`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.allocation.imbalance import contributions_K, lorenz_curve, top_share
from raysim.core.records import ByteArray, FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd

VISIBLE = 1e-9  # an imbalance that is more than rounding


@dataclass(frozen=True)
class RunFigures:
    """What every run draws at its end, in this process or, sent there, in another (`lifecycle.figure_process`).

    metrics: one row per round.  clients: one per participant and round.  counts: real and synthetic samples, K x C
    each; None for a partition that is drawn client by client.  examples: a few synthetic images and their labels.
    """

    metrics: "pd.DataFrame"
    clients: "pd.DataFrame"
    counts: tuple[IntArray, IntArray] | None
    class_names: Sequence[str]
    examples: tuple[ByteArray, IntArray] | None = None

    def draw(self, folder: Path) -> list[Path]:
        """Draw accuracy, samples of the clients, OUIs and example images, as PNG and PDF; returns the PNG files."""
        from raysim.ui import oui_plots, plots

        drawn = [plots.accuracy_curve(self.metrics, folder / "accuracy.png")]
        if self.counts is not None:
            drawn.append(plots.client_counts(*self.counts, self.class_names, folder / "client_counts.png"))
        drawn += oui_plots.oui_figures(self.clients, self.metrics, folder)
        if self.examples is not None:
            drawn.append(plots.image_grid(*self.examples, self.class_names, folder / "synthetic.png"))
        return drawn


def further_figures(
    folder: Path, metrics: "pd.DataFrame", counts: tuple[IntArray, IntArray] | None, policy: str
) -> list[Path]:
    """Draw accuracy against local steps, and the concentration of the imbalance; arguments are those of `run_figures`.

    policy: the name of what placed the images.
    """
    from raysim.ui import plots

    drawn = [plots.accuracy_curve(with_local_steps(metrics), folder / "accuracy_steps.png", by="local_steps")]
    if counts is not None:
        real_KC, synthetic_KC = counts
        after = {f"with the images of {policy}": real_KC + synthetic_KC} if synthetic_KC.any() else {}
        curves = lorenz_curves({"real samples": real_KC, **after})
        drawn += [plots.lorenz(curves, folder / "lorenz.png")] if curves else []
    return drawn


def with_local_steps(metrics: "pd.DataFrame") -> "pd.DataFrame":
    """The metrics with `local_steps`, those of all clients up to and with each round."""
    steps = metrics["steps"].fillna(0.0).cumsum() if "steps" in metrics else float("nan")
    return metrics.assign(local_steps=steps)


def lorenz_curves(counts: Mapping[str, IntArray]) -> dict[str, tuple[FloatArray, FloatArray, float]]:
    """What `ui.plots.lorenz` draws, for samples K x C by name; without those that have no imbalance left."""
    contributions = {name: contributions_K(counts_KC) for name, counts_KC in counts.items()}
    return {
        name: (*lorenz_curve(values_K), top_share(values_K))
        for name, values_K in contributions.items()
        if float(values_K.sum()) > VISIBLE
    }
