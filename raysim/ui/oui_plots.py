"""Figures of a run whose weights depend on OUI: the OUIs with the fit, OUI by client and round, weight against OUI."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.core.records import BoolArray, FloatArray
from raysim.ui.figure import COLOURS, blank_figure, blank_figures, save, spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CLIENTS_NAMED = 30
_NOISY, _RARE, _OTHER, _FIT = COLOURS[1], COLOURS[3], COLOURS[0], COLOURS[2]
_MARKERS = {_NOISY: "s", _RARE: "^", _OTHER: "o"}


def oui_figures(clients: "pd.DataFrame", metrics: "pd.DataFrame", folder: Path) -> list[Path]:
    """Draw the three figures, as PNG and PDF, in `folder`; none for a run that measured no OUI.  Returns the PNG files.

    clients: one row per participant and round.  metrics: one row per round.  Both as a run writes them.
    """
    if "oui" not in clients.columns or not clients["oui"].notna().any():
        return []
    return [
        oui_fit(clients, metrics, folder / "oui_fit.png"),
        oui_by_client(clients, folder / "oui_by_client.png"),
        oui_weight(clients, folder / "oui_weight.png"),
    ]


def oui_fit(clients: "pd.DataFrame", metrics: "pd.DataFrame", path: Path) -> Path:
    """Draw the OUIs of the last round as a histogram with the fitted Beta density, and the score of each.

    Without a Beta fit in that round (ranks, a single client) the density is left out.  Returns `path`.
    """
    last = int(clients["round"].max())
    rows = clients[clients["round"] == last].sort_values("oui")
    o_K = rows["oui"].to_numpy(dtype=np.float64)
    figure, (above, below) = blank_figures(2, 1, 7, 6)
    margin = max(0.02, 0.6 * float(np.ptp(o_K)))
    low, high = max(0.0, float(o_K.min()) - margin), min(1.0, float(o_K.max()) + margin)
    bins = np.linspace(low, high, 1 + min(24, max(6, len(o_K)))).tolist()
    above.hist(o_K, bins, density=True, color="0.8", label=f"{len(o_K)} clients")
    above.set(title=f"OUI in round {last}", ylabel="density", xlim=(low, high))
    ab = _fitted(metrics, last)
    if ab is not None:
        from scipy.stats import beta

        x = np.linspace(low, high, 400)[1:-1]
        above.plot(x, beta.pdf(x, *ab), color=_FIT, label=f"Beta({ab[0]:.4g}, {ab[1]:.4g})")
        cdf = beta.cdf(x, *ab)
        below.plot(x, 2 * np.minimum(cdf, 1 - cdf), color=_FIT, linewidth=1, zorder=1)
    above.legend()
    if "score" in rows:
        for colour, label, chosen in _groups(rows):
            group = rows[chosen]
            below.plot(group["oui"], group["score"], _MARKERS[colour], color=colour, label=label)
        below.legend()
        if len(rows) <= CLIENTS_NAMED:
            places = spread(o_K, 0.032 * (high - low), low, high)
            for client, o, s, place in zip(rows["client"], o_K, rows["score"], places, strict=True):
                below.annotate(
                    str(client), (o, s), (place, 1.13), fontsize=8, ha="center", va="bottom", annotation_clip=False,
                    arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
                )
    below.set(xlabel="OUI" + _numbers(len(rows), "above: client ids"), ylabel="score")
    below.set(xlim=(low, high), ylim=(-0.03, 1.08))
    return save(figure, path)


def oui_by_client(clients: "pd.DataFrame", path: Path) -> Path:
    """Draw OUI over rounds, one line per client; noisy and rare clients have colours of their own.  Returns `path`.

    Up to CLIENTS_NAMED clients have their ids at the right edge.
    """
    figure, axes = blank_figure(8, 4.5)
    named: set[str] = set()
    ends: list[tuple[str, float, float, str]] = []
    look = {client: (c, name) for c, name, chosen in _groups(clients) for client in clients["client"][chosen]}
    for client, rows in clients.groupby("client"):
        colour, label = look[client]
        ordered = rows.sort_values("round")
        axes.plot(
            ordered["round"], ordered["oui"], marker=_MARKERS[colour], markersize=3, linewidth=0.9, color=colour,
            alpha=0.45 if colour == _OTHER else 0.95, zorder=1 if colour == _OTHER else 2,
            label=label if label not in named else None,
        )
        named.add(label)
        ends.append((str(client), float(ordered["round"].iloc[-1]), float(ordered["oui"].iloc[-1]), colour))
    if len(ends) <= CLIENTS_NAMED:
        low, high = axes.get_ylim()
        edge = axes.get_xlim()[1]
        places = spread([y for _, _, y, _ in ends], 0.036 * (high - low), low, high)
        for (client, x, y, colour), place in zip(ends, places, strict=True):
            axes.annotate(
                client, (x, y), (edge, place), fontsize=8, color=colour, va="center", annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
            )
    title = "OUI of each client" + _numbers(len(ends), "right: client ids")
    axes.set(title=title, xlabel="round", ylabel="OUI")
    _whole_rounds(axes)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return save(figure, path)


def oui_weight(clients: "pd.DataFrame", path: Path) -> Path:
    """Draw the weight against the OUI of every participant in every round; a dot's area: its number of real samples.

    Returns `path`.
    """
    figure, axes = blank_figure(7, 4.5)
    largest = max(1.0, float(clients["n_real"].max()))
    for colour, label, chosen in _groups(clients):
        rows = clients[chosen]
        area = 8 + 90 * rows["n_real"].to_numpy(dtype=np.float64) / largest
        axes.scatter(
            rows["oui"], rows["weight"], s=area, color=colour, marker=_MARKERS[colour], alpha=0.6, linewidths=0,
            label=label,
        )
    axes.set(title="Weight against OUI, all rounds (area: real samples)", xlabel="OUI", ylabel="weight")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    handles = figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    for handle in handles.legend_handles:
        handle.set_sizes([40.0])  # type: ignore[union-attr]
    return save(figure, path)


def _numbers(clients: int, where: str) -> str:
    """Where the ids of the clients stand; empty where there are too many to be named."""
    return f" ({where})" if clients <= CLIENTS_NAMED else ""


def _fitted(metrics: "pd.DataFrame", round_: int) -> tuple[float, float] | None:
    """Parameters of the Beta fit of a round, where there was one."""
    if not {"fit_a", "fit_b"} <= set(metrics.columns):
        return None
    row = metrics[metrics["round"] == round_][["fit_a", "fit_b"]].to_numpy(dtype=np.float64)
    return (float(row[0, 0]), float(row[0, 1])) if len(row) and np.isfinite(row).all() else None


def _groups(rows: "pd.DataFrame") -> list[tuple[str, str, BoolArray]]:
    """(colour, name, which rows) of noisy, rare and other clients, without groups that have no row."""
    noisy = _flag(rows, "noisy") | (_column(rows, "input_noise") > 0)
    rare = _flag(rows, "rare") & ~noisy
    groups = [(_OTHER, "other clients", ~noisy & ~rare), (_RARE, "rare", rare), (_NOISY, "noisy", noisy)]
    if len(groups[0][2]) and not (noisy | rare).any():
        return [(_OTHER, "clients", groups[0][2])]
    return [group for group in groups if group[2].any()]


def _flag(rows: "pd.DataFrame", name: str) -> BoolArray:
    return _column(rows, name) > 0


def _column(rows: "pd.DataFrame", name: str) -> FloatArray:
    return rows[name].to_numpy(dtype=np.float64) if name in rows.columns else np.zeros(len(rows))


def _whole_rounds(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
