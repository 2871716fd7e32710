"""The figures of a report: what is drawn of which runs, and what the page says below each."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.commands.report.results import MISSING, Results
from raysim.commands.report.tables import MAIN
from raysim.core.errors import UserError
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import IntArray
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable
from raysim.lifecycle.figures import RunFigures, further_figures, lorenz_curves, with_local_steps

if TYPE_CHECKING:
    import pandas as pd

    from raysim.ui.comparison_plots import Curves, Gain

CAPTIONS = {
    "accuracy": "Accuracy on the test split by round.",
    "accuracy_steps": "Accuracy against the local steps of all clients so far: what training costs them.",
    "accuracy_images": "Final accuracy against the synthetic images made: what images cost.",
    "client_counts": "Samples of each client and class, without and with synthetic images.",
    "allocation": "Where each policy puts its images.",
    "lorenz": "How few clients cause most of the label imbalance; the nearer to the diagonal, the more alike they are.",
    "class_gains": "What each class gains, against the images made of it.",
    "time": "Where the time went.",
    "synthetic": "Synthetic images.",
    "real_and_synthetic": "Real and synthetic images.",
    "nearest_pairs": "The synthetic images nearest to training images, each above its own.",
    "quality": "Quality of the synthetic images: what is learned from them, whether they are copies, how they spread.",
    "oui_fit": "OUIs of the last round, the distribution fitted to them, and the score of each client.",
    "oui_by_client": "OUI of each client by round.",
    "oui_weight": "How much an update counted, against its OUI.",
}
MOST_FIGURES = 6  # of those that are drawn once for each setting
_CACHED = "images from the cache cost none"


def caption(path: Path) -> str:
    """What the page says below a figure."""
    stem = re.sub(r"-\d+$", "", path.stem)
    return CAPTIONS.get(stem, stem.replace("_", " "))


def of_run(run: RunDirectory, summary: PlainMapping, folder: Path) -> list[Path]:
    """Draw the figures of a finished run from its files; returns PNG files, also of others that the run has left.

    Raises UserError for a damaged file, and OSError where the disk refuses a figure.
    """
    import pandas as pd

    from raysim.ui import plots

    metrics = run.metrics()
    with readable(run.path / "clients.parquet"):
        clients = pd.read_parquet(run.path / "clients.parquet")
        clients[["round", "client", "n_real", "weight"]]
    with readable(run.path / SUMMARY):
        phases = _phases(summary)
    counts = _counts(run)
    names = _class_names(summary, 0 if counts is None else counts[0].shape[1])
    RunFigures(metrics, clients, counts, names).draw(folder)
    further_figures(folder, metrics, counts, str(summary.get("policy", "")))
    plots.time_by_phase({"": phases}, folder / "time.png", _CACHED)
    found = {path.stem: path for place in (run.figures, folder) for path in sorted(place.glob("*.png"))}
    return [found.pop(stem) for stem in CAPTIONS if stem in found] + sorted(found.values())


def of_results(results: Results, reference: str | None, folder: Path, notes: list[str]) -> list[Path]:
    """Draw the figures that compare methods; returns the PNG files.

    reference: the method over which classes gain.  notes: is told of files that cannot be read, whose runs are then
    missing.  Raises OSError where the disk refuses a figure.
    """
    from raysim.ui import comparison_plots, plots

    panels = _curves(results, notes)
    drawn = [
        comparison_plots.accuracy_curves(panels, folder / "accuracy.png"),
        comparison_plots.accuracy_curves(panels, folder / "accuracy_steps.png", "local_steps"),
        comparison_plots.accuracy_by_images(_points(results), folder / "accuracy_images.png"),
    ]
    files = _Files(notes)
    drawn += _allocations(results, files, folder)
    if reference is not None:
        drawn += _class_gains(results, reference, files, folder)
    seconds = _seconds(results, files)
    if seconds:
        note = f"mean over the runs of a row; {_CACHED}"
        drawn.append(plots.time_by_phase(seconds, folder / "time.png", note))
    return drawn


class _Files:
    """The summaries and counts of runs, each read once.  notes: is told of what cannot be read."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._summaries: dict[Path, PlainDict | None] = {}

    def summary(self, folder: object) -> PlainDict | None:
        """The summary of a run; None where it is not there or damaged."""
        if not isinstance(folder, Path):
            return None
        if folder not in self._summaries:
            try:
                summary = RunDirectory(folder).summary()
                with readable(folder / SUMMARY):
                    _phases(summary or {"seconds": {}})
                    np.array((summary or {}).get("accuracy_by_class") or [], dtype=float)
                self._summaries[folder] = summary
            except UserError as error:
                self._notes.append(str(error))
                self._summaries[folder] = None
        return self._summaries[folder]

    def say(self, note: str) -> None:
        """Note what a figure does not show."""
        self._notes.append(note)

    def say_left_out(self, what: str, settings: int) -> None:
        """Note that not every setting has its figure."""
        if settings > MOST_FIGURES:
            self._notes.append(f"{what} are drawn for the first {MOST_FIGURES} of {settings} settings")

    def counts(self, folder: object) -> tuple[IntArray, IntArray] | None:
        """Real and synthetic samples, K x C each; None where they are not there."""
        if not isinstance(folder, Path):
            return None
        try:
            return _counts(RunDirectory(folder))
        except UserError as error:
            self._notes.append(str(error))
            return None


def _counts(run: RunDirectory) -> tuple[IntArray, IntArray] | None:
    path = run.path / "partition.npz"
    if not path.is_file():
        return None
    with readable(path), np.load(path, allow_pickle=False) as arrays:
        return arrays["counts"], arrays["quota"]


def _class_names(summary: PlainMapping, classes: int) -> list[str]:
    return [str(name) for name in summary.get("class_names") or range(classes)]


def _phases(summary: PlainMapping) -> dict[str, float]:
    """Seconds by phase, and what is left of the total as `other`."""
    phases = {name: float(s) for name, s in summary["seconds"].items() if name != "total"}
    other = float(summary["seconds"].get("total", 0.0)) - sum(phases.values())
    return {**phases, **({"other": other} if other > 0 else {})}


def _curves(results: Results, notes: list[str]) -> "dict[str, dict[str, Curves]]":
    from raysim.ui.comparison_plots import Curves

    panels: dict[str, dict[str, Curves]] = {}
    for (setting, method), members in results.runs.groupby(["setting", "method"], sort=False):
        curves = []
        for row in members.to_dict("records"):
            if row["status"] != "FINISHED" or not isinstance(row["folder"], Path):
                continue
            try:
                metrics = with_local_steps(RunDirectory(row["folder"]).metrics())
                curves.append(metrics[["round", "accuracy", "local_steps"]].dropna(subset=["accuracy"]))
            except UserError as error:
                notes.append(str(error))
        panels.setdefault(str(setting), {})[str(method)] = Curves(curves, len(members))
    return panels


def _points(results: Results) -> "dict[str, dict[str, tuple[pd.DataFrame, int]]]":
    panels: dict[str, dict[str, tuple[pd.DataFrame, int]]] = {}
    for (setting, method), members in results.runs.groupby(["setting", "method"], sort=False):
        done = members[members["status"] == "FINISHED"][["images", MAIN]]
        panels.setdefault(str(setting), {})[str(method)] = (done, len(members))
    return panels


def _allocations(results: Results, files: _Files, folder: Path) -> list[Path]:
    """Heat maps and Lorenz curves of one seed, for each setting in which other samples or images are dealt out."""
    from raysim.ui import comparison_plots, plots

    found: dict[tuple[object, ...], _Allocation] = {}
    for setting, there in results.finished.groupby("setting", sort=False):
        seed = int(there["seed"].min())
        chosen = there[there["seed"] == seed].drop_duplicates("method")
        counts = {str(m): files.counts(f) for m, f in zip(chosen["method"], chosen["folder"], strict=True)}
        known = {method: pair for method, pair in counts.items() if pair is not None}
        shapes = {pair[0].shape for pair in known.values()}
        if len(shapes) != 1 or not any(quota_KC.any() for _, quota_KC in known.values()):
            continue
        summary = next((s for s in map(files.summary, chosen["folder"]) if s is not None), {})
        drawn_alike = (seed, *((method, *(a.tobytes() for a in pair)) for method, pair in known.items()))
        names = _class_names(summary, next(iter(shapes))[1])
        found.setdefault(drawn_alike, _Allocation(seed, known, names, [])).settings.append(str(setting))
    files.say_left_out("allocations and Lorenz curves", len(found))
    maps, lorenz = [], []
    for place, one in enumerate(list(found.values())[:MOST_FIGURES]):
        where = f"seed {one.seed}" + (f", {'; '.join(one.settings)}" if len(found) > 1 else "")
        quotas = {method: quota_KC for method, (_, quota_KC) in one.counts.items() if quota_KC.any()}
        path = _numbered(folder / "allocation.png", place)
        title = f"Synthetic images by client and class, {where}"
        maps.append(comparison_plots.allocation_maps(quotas, one.names, path, title))
        real_KC = next(iter(one.counts.values()))[0]
        after = {f"with {method}": real_KC + quota_KC for method, quota_KC in quotas.items()}
        curves = lorenz_curves({"real samples": real_KC, **after})
        if curves:
            lorenz.append(plots.lorenz(curves, _numbered(folder / "lorenz.png", place), where))
    return maps + lorenz


@dataclass(frozen=True)
class _Allocation:
    """Who has what in some settings.  counts: by method, real and synthetic samples, K x C each."""

    seed: int
    counts: dict[str, tuple[IntArray, IntArray]]
    names: list[str]
    settings: list[str]


def _class_gains(results: Results, reference: str, files: _Files, folder: Path) -> list[Path]:
    """What each class gains over `reference`, for each setting."""
    from raysim.ui import comparison_plots

    methods = [str(method) for method in results.runs["method"].unique()]
    found = {str(s): _gains(there, reference, files) for s, there in results.runs.groupby("setting", sort=False)}
    found = {setting: pair for setting, pair in found.items() if pair[0]}
    files.say_left_out("gains of classes", len(found))
    return [
        comparison_plots.class_gains(
            gains, reference, names, _numbered(folder / "class_gains.png", place), methods,
            "What each class gained" + (f", {setting}" if setting else ""),
        )
        for place, (setting, (gains, names)) in enumerate(list(found.items())[:MOST_FIGURES])
    ]


def _numbered(path: Path, place: int) -> Path:
    """The file of a figure that is drawn once for each setting: a.png, a-2.png, a-3.png."""
    return path.with_stem(f"{path.stem}-{place + 1}") if place else path


def _gains(
    there: "pd.DataFrame", reference: str, files: _Files
) -> "tuple[dict[str, Gain], list[str]]":
    """What the classes gain over `reference`, seed by seed; and the names of the classes.

    there: the runs of one setting.  A method is left out where it shares no seed with the reference.
    """
    from raysim.ui.comparison_plots import Gain

    base = {}
    names: list[str] = []
    finished = there[there["status"] == "FINISHED"]
    for row in finished[finished["method"] == reference].to_dict("records"):
        summary = files.summary(row["folder"])
        if summary is not None and summary.get("accuracy_by_class"):
            base[row["seed"]] = np.array(summary["accuracy_by_class"], dtype=float)
            names = _class_names(summary, len(base[row["seed"]]))
    gains: dict[str, Gain] = {}
    for method, members in finished[finished["method"] != reference].groupby("method", sort=False):
        images, gained = [], []
        for row in members.to_dict("records"):
            summary, counts = files.summary(row["folder"]), files.counts(row["folder"])
            if summary is None or counts is None or row["seed"] not in base or not summary.get("accuracy_by_class"):
                continue
            images.append(counts[1].sum(axis=0))
            gained.append(np.array(summary["accuracy_by_class"], dtype=float) - base[row["seed"]])
        if images and len({len(g) for g in gained}) == 1:
            gains[str(method)] = Gain(np.array(images), np.array(gained))
        runs = (there["method"] == method).sum()
        if 0 < len(images) < runs:
            files.say(
                f"gains of classes: {len(images)} of the {runs} seeds of {method} are drawn, those of {reference} too"
            )
    return gains, names


def _seconds(results: Results, files: _Files) -> dict[str, dict[str, float]]:
    """Mean seconds by phase of each group that has all its runs."""
    import pandas as pd

    seconds = {}
    for group, members in results.runs.groupby("group", sort=False):
        phases = [_phases(s) for s in map(files.summary, members["folder"]) if s is not None and "seconds" in s]
        if len(phases) == len(members) and MISSING not in set(members["status"]):
            seconds[str(group)] = {str(k): float(v) for k, v in pd.DataFrame(phases).fillna(0.0).mean().items()}
    return seconds
