"""`Result`: what a run found, in memory."""

import functools
import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.core.errors import UserError
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable
from raysim.ui.display import duration, near
from raysim.ui.picture import Picture

if TYPE_CHECKING:
    import pandas as pd

CLIENTS = "clients.parquet"


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run.  metrics: one row per round.  summary: the content of summary.json.  directory: its folder.

    Printed, it is five lines; a notebook shows these and the accuracy over the rounds.
    """

    metrics: "pd.DataFrame"
    summary: dict[str, Any]
    directory: Path

    @functools.cached_property
    def clients(self) -> "pd.DataFrame":
        """One row per participant and round: samples, steps, loss, weight and more.  UserError where it is damaged."""
        import pandas as pd

        with readable(self.directory / CLIENTS):
            return pd.read_parquet(self.directory / CLIENTS)

    def plot(self) -> Picture:
        """Draw accuracy over the rounds; the picture is shown by a notebook, and `.save(PATH)` writes it."""
        from raysim.ui import plots

        return Picture.drawn(lambda path: plots.accuracy_curve(self.metrics, path))

    def lines(self) -> list[str]:
        """The five lines that are printed: what it was, accuracy, clients, images, files."""
        s = self.summary
        images, balance = s["n_synthetic"], s.get("n_synthetic_full_balance")
        share = f", {images / balance:.1%} of full balance" if images and balance else ""
        took = duration(s["seconds"]["total"])
        return [
            f"{s['dataset']}, {s['policy']} images, {s['rule']} weights: {s['rounds']} rounds in {took}",
            f"accuracy {s['final_accuracy']:.4f} after round {s['rounds']}, best {s['best_accuracy']:.4f} in round "
            f"{s['best_round']}, {s['accuracy_auc']:.4f} on average",
            f"clients  {s['clients']:,} with {s['n_real']:,} real images",
            f"images   {images:,} synthetic{share}",
            f"files    {near(self.directory)}",
        ]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        text = html.escape("\n".join(self.lines()))
        return f"<pre>{text}</pre>{self.plot().as_html()}"


def load_run(folder: Path) -> Result:
    """Read the result of a finished run from its folder; UserError where there is none, or a file is damaged."""
    directory = RunDirectory(folder)
    summary = directory.summary()
    if summary is None:
        raise UserError(f"{folder}: this is no folder of a finished run (it has no {SUMMARY} of one)")
    return Result(directory.metrics(), summary, folder)
