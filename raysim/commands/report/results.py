"""The results that a report is about, read from the folders of runs and sweeps: a row per run, and notes on them."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.report.statistics import TARGET_COSTS, cost_of_target
from raysim.core.errors import UserError
from raysim.core.plain import Plain, PlainDict, PlainMapping
from raysim.core.validation import nearest, show
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable

if TYPE_CHECKING:
    import pandas as pd

AXIS = "axis."
RUNS = "runs.csv"
MISSING = "MISSING"
SINGLE = "runs"
REQUIRED = ("final_accuracy", "best_accuracy", "accuracy_auc")
VALIDATION = ("final_validation_accuracy", "best_validation_accuracy")
_NAMED = 5


@dataclass(frozen=True)
class Results:
    """Runs to be compared.

    runs: one row each: `source` (the sweep), `group`, `method`, `setting`, `seed`, `status`, an `axis.` column each,
    the metrics, and `folder`, None where the run is not there any more.  Runs that are still to come are MISSING.
    axis: the column whose labels are the methods; None: groups are methods.  notes: what is to be said of the runs.
    """

    name: str
    runs: "pd.DataFrame"
    axis: str | None
    target: float | None
    notes: list[str]

    @property
    def finished(self) -> "pd.DataFrame":
        """The rows of finished runs."""
        return self.runs[self.runs["status"] == "FINISHED"]


def measured(run: RunDirectory, target: float | None) -> PlainDict:
    """The values of a finished run that tables need, by its summary.json.

    target: the accuracy whose first round is wanted.  Raises KeyError, OSError or ValueError where that is damaged.
    """
    summary = run.read_json(SUMMARY)
    values = {
        "best_chosen_on": summary.get("best_chosen_on", "test"),
        **{key: summary[key] for key in VALIDATION if key in summary},
        **{key: summary[key] for key in ("final_accuracy", "best_accuracy", "best_round", "accuracy_auc", "rounds")},
        "images": summary["n_synthetic"],
        "images_made": summary["n_synthetic_made"],
        "seconds": summary["seconds"]["total"],
        "seconds_generate": summary["seconds"].get("generate"),
        "seconds_train": summary["seconds"].get("train"),
    }
    if target is not None:
        values |= cost_of_target(run.metrics(), target, values["images"], values["seconds_generate"] or 0.0)
    keys = ("config_hash", "partition_sha256", "model_sha256", "mlflow_run_id")
    return {**values, **{key: summary.get(key) for key in keys}, "run_directory": str(run.path)}


def read_results(folders: Sequence[Path], against: str | None = None, target: float | None = None) -> Results:
    """Read sweeps, or finished runs, or both, to be shown in one table.

    against: the label of the method that the others are compared with.  target: an accuracy; by default that of the
    sweeps.  Raises UserError for a folder that is neither, is damaged, or has nothing finished, and for such a label.
    """
    import pandas as pd

    notes: list[str] = []
    sweeps = [path for path in folders if (path / RUNS).is_file()]
    single = [path for path in folders if path not in sweeps]
    parts = [_sweep(path, notes) for path in sweeps]
    parts += [_runs(single, notes)] if single else []
    if target is None:
        targets = {_asked(path).get("target_accuracy") for path in sweeps}
        target = next(iter(targets)) if len(targets) == 1 else None
        if len(targets) > 1:
            notes.append("the sweeps name different target accuracies; choose one with --target")
    runs = pd.concat(parts, ignore_index=True)
    again = runs["folder"].notna() & runs["folder"].map(str).duplicated()
    runs = runs[~again].reset_index(drop=True)
    if len(parts) > 1:
        _tell_apart(runs, notes)
    if (runs["status"] != "FINISHED").all():
        where = f", by its {RUNS}" if sweeps else ""
        raise UserError(f"{folders[0]}: no run of it has finished{where}; `raysim sweep` goes on with a sweep")
    _say_unfinished(runs, notes)
    axis = _axis(runs, against, notes)
    runs = _with_methods(runs, axis)
    _say_seeds(runs, notes)
    results = Results("+".join(path.name for path in folders), runs, axis, target, notes)
    _say_versions(results.finished, notes)
    _say_batching(results.finished, notes)
    return replace(results, runs=_with_costs(results.runs, target, notes))


def axes_of(runs: "pd.DataFrame") -> list[str]:
    """The columns of all axes but the seed, in the order of the sweep file."""
    return [name for name in runs.columns if name.startswith(AXIS) and name != f"{AXIS}seed"]


def default_reference(results: Results) -> str | None:
    """The label of the first method, which the others are compared with by default; None if there is only one."""
    methods = results.runs["method"].unique()
    return str(methods[0]) if len(methods) > 1 else None


def why_unfinished(folder: Path) -> str:
    """The text, for a message, of how a run ended; empty if that is not known."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        status = RunDirectory(folder).read_json("status.json")
        return f" ({status['status']}{': ' if status['message'] else ''}{status['message']})"
    return ""


def _sweep(folder: Path, notes: list[str]) -> "pd.DataFrame":
    """The rows of a sweep, in the order of its grid, with those that are still to come."""
    import pandas as pd

    with readable(folder / RUNS):
        runs = pd.read_csv(folder / RUNS, dtype={"group": str})
        runs[list(REQUIRED)] = runs[list(REQUIRED)].astype(float)
        runs[["group", "seed", "status", "images", "seconds", "run_directory"]]
        runs["group"] = runs["group"].fillna("base")
    asked = _asked(folder)
    if asked.get("cells"):
        with readable(folder / "sweep.json"):
            cells = pd.DataFrame(asked["cells"])
            names = list(zip(cells["group"], cells["seed"], strict=True))
            there = list(zip(runs["group"], runs["seed"], strict=True))
            missing = cells[[name not in there for name in names]].assign(status=MISSING)
        runs = pd.concat([runs, missing], ignore_index=True)
        order = {name: i for i, name in enumerate(names)}
        place = [order.get(name, len(order)) for name in zip(runs["group"], runs["seed"], strict=True)]
        runs = runs.iloc[sorted(range(len(runs)), key=place.__getitem__)].reset_index(drop=True)
    elif (left := asked.get("runs", 0) - len(runs)) > 0:
        notes.append(f"{left} runs of {folder.name} are still to come; `raysim sweep` goes on with them")
    folders = [_found(folder.parent, entry) for entry in runs["run_directory"]]
    return runs.assign(source=folder.name, folder=folders)


def _asked(folder: Path) -> PlainDict:
    """What sweep.json says of a sweep; nothing for one without that file."""
    path = folder / "sweep.json"
    if not path.is_file():
        return {}
    with readable(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        target = content.get("target_accuracy")
        return {**content, "runs": int(content["runs"]), "target_accuracy": None if target is None else float(target)}


def _found(root: Path, written: object) -> Path | None:
    """The folder of a run, beside that of its sweep or where it was written; None where it is not there any more."""
    if not isinstance(written, str):
        return None
    candidates = [root / Path(written).name, Path(written)]
    return next((path for path in candidates if path.is_dir()), None)


def _runs(folders: Sequence[Path], notes: list[str]) -> "pd.DataFrame":
    """The rows of single runs, which are named by the keys of their configurations that differ."""
    import pandas as pd

    rows = []
    for folder in folders:
        if not (folder / "run.json").is_file():
            raise UserError(f"{folder}: not the folder of a run or a sweep; they lie in output.dir, `runs` by default")
        run = RunDirectory(folder)
        identity = run.identity()
        row = {"seed": identity.get("result_keys", {}).get("seed", 0), "name": identity.get("name", folder.name)}
        row |= {"keys": identity.get("result_keys", {}), "status": MISSING}
        if run.summary() is None:
            notes.append(f"{folder.name} has not finished{why_unfinished(folder)}")
        else:
            with readable(folder / SUMMARY):
                row |= {**measured(run, None), "status": "FINISHED", "folder": folder}
        rows.append(row)
    runs = pd.DataFrame(rows).reindex(columns=list(dict.fromkeys([*pd.DataFrame(rows).columns, "folder", *REQUIRED])))
    differing = _differing([row["keys"] for row in rows])
    for key in differing:
        name = key if key.endswith(".seed") else key.rpartition(".")[2]
        runs[f"{AXIS}{key}"] = [f"{name} {_short(row['keys'].get(key))}" for row in rows]
    if not differing and runs["name"].nunique() > 1:
        runs[f"{AXIS}name"] = runs["name"]
    named_by = [*axes_of(runs), "name"]
    runs["group"] = [", ".join(labels) or name for *labels, name in runs[named_by].itertuples(index=False)]
    if differing:
        notes.append(f"the configurations of these runs differ in {', '.join(differing)}, which name the rows")
    doubled = runs.duplicated(["group", "seed"], keep="last")
    if doubled.any():
        notes.append(f"{int(doubled.sum())} runs are repeated by later ones of the same configuration, which are shown")
    return runs[~doubled].drop(columns=["keys", "name"]).assign(source=SINGLE)


def _differing(keys: Sequence[PlainMapping]) -> list[str]:
    """The names of the keys, but the seed, that do not have one value in all configurations."""
    names = dict.fromkeys(name for of_run in keys for name in of_run if name != "seed")
    return [name for name in names if len({json.dumps(of_run.get(name)) for of_run in keys}) > 1]


def _short(value: Plain) -> str:
    return "null" if value is None else value if isinstance(value, str) else show(value)


def result_keys(folder: Path | None) -> PlainDict:
    """The keys on which the results of a run depend, as its run.json has them; empty where that cannot be read."""
    if folder is None:
        return {}
    with contextlib.suppress(UserError):
        keys = RunDirectory(folder).identity().get("result_keys", {})
        return dict(keys)
    return {}


def _tell_apart(runs: "pd.DataFrame", notes: list[str]) -> None:
    """Say in which keys the sources differ; each is then a setting of its own, as where two groups have one name."""
    of_source = {}
    for source, members in runs.groupby("source", sort=False):
        known = [keys for keys in map(result_keys, members["folder"]) if keys]
        varied = set(_differing(known))
        of_source[str(source)] = {k: v for k, v in (known[0] if known else {}).items() if k not in varied | {"seed"}}
    shared = set.intersection(*(set(keys) for keys in of_source.values()))
    set_by_axes = tuple(axis.removeprefix(AXIS) for axis in axes_of(runs))
    differing = [
        key for key in _differing(list(of_source.values()))
        if key in shared and not any(key == axis or key.startswith(f"{axis}.") for axis in set_by_axes)
    ]  # fmt: skip
    for key in differing[:_NAMED]:
        told = ", ".join(f"{_short(keys[key])} in {source}" for source, keys in of_source.items())
        notes.append(f"configurations differ: {key} is {told}")
    if len(differing) > _NAMED:
        notes.append(f"configurations differ in {len(differing) - _NAMED} more keys: {', '.join(differing[_NAMED:])}")
    alike = {tuple(axis for axis in axes_of(runs) if of[axis].notna().all()) for _, of in runs.groupby("source")}
    if len(alike) > 1:
        notes.append("the sweeps have different axes: rows of one are named by fewer labels than those of the other")
    if differing or len(alike) > 1 or runs.duplicated(["group", "seed"]).any():
        runs[f"{AXIS}sweep"] = runs["source"]
        runs["group"] = runs["group"] + ", " + runs["source"]


def _say_seeds(runs: "pd.DataFrame", notes: list[str]) -> None:
    """Say where the rows of a setting are means over different seeds, so that they differ by these, too."""
    for setting, there in runs.groupby("setting", sort=False):
        seeds = {str(method): sorted(set(of["seed"])) for method, of in there.groupby("method", sort=False)}
        if len({*map(tuple, seeds.values())}) > 1:
            told = "; ".join(f"{method}: {named([str(int(s)) for s in of])}" for method, of in seeds.items())
            where = f"{setting}: " if setting else ""
            notes.append(f"{where}the rows are not of the same seeds, and so differ by these, too ({told})")


def _say_unfinished(runs: "pd.DataFrame", notes: list[str]) -> None:
    for status, said in (("FAILED", "failed"), (MISSING, "not finished")):
        rows = runs[(runs["status"] == status) & (runs["source"] != SINGLE)]
        names = [f"{group} seed {seed}" for group, seed in zip(rows["group"], rows["seed"], strict=True)]
        if names:
            notes.append(f"{len(names)} of {len(runs)} runs {said}: {named(names)}; `raysim sweep` goes on with them")
    lost = runs[(runs["status"] == "FINISHED") & runs["folder"].isna()]
    if len(lost):
        names = [Path(str(path)).name for path in lost["run_directory"]]
        notes.append(f"{len(lost)} runs are not in their folder any more, and are in no figure: {named(names)}")


def named(names: Sequence[str]) -> str:
    """The first few names, and how many there are beside them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _say_versions(finished: "pd.DataFrame", notes: list[str]) -> None:
    """Name versions of packages, and code of raysim, that are not the same for all runs."""
    seen: dict[str, dict[str, int]] = {}
    for run in _readable_runs(finished):
        with contextlib.suppress(UserError):
            identity = run.identity()
            code = {"the code of raysim": str(identity.get("code", {}).get("raysim", ""))[:8]}
            for name, version in {**identity.get("versions", {}), **code}.items():
                counts = seen.setdefault(name, {})
                counts[str(version)] = counts.get(str(version), 0) + 1
    for name, counts in seen.items():
        if len(counts) > 1:
            told = ", ".join(f"{version} in {count} runs" for version, count in counts.items())
            notes.append(f"made with different versions: {name} {told}")


def _say_batching(finished: "pd.DataFrame", notes: list[str]) -> None:
    """Say where some runs have trained several clients at once, and others not, on devices where that changes bits."""
    counts = {True: 0, False: 0}
    for run in _readable_runs(finished):
        with contextlib.suppress(UserError):
            choice = run.identity().get("client_batching")
            if choice is not None:
                counts[bool(choice["at_once"])] += 1
    if all(counts.values()):
        notes.append(
            f"{counts[True]} runs have trained several clients at once and {counts[False]} one after another, which "
            "differs by rounding; resources.client_batching = on or off is one way for all"
        )


def _readable_runs(runs: "pd.DataFrame") -> Iterator[RunDirectory]:
    return (RunDirectory(folder) for folder in runs["folder"] if isinstance(folder, Path))


def _axis(runs: "pd.DataFrame", against: str | None, notes: list[str]) -> str | None:
    """The axis whose labels are compared: that of `against`, or the first that every run has."""
    axes = axes_of(runs)
    common = [axis for axis in axes if runs[axis].notna().all()]
    if against is None:
        if axes and not common:
            notes.append("the sweeps have no axis in common, so that whole rows are compared")
        return common[0] if common else None
    labels = {axis: list(runs[axis].astype(str).unique()) for axis in common}
    for axis, values in labels.items():
        if against in values:
            return axis
    groups = list(runs["group"].unique())
    if against in groups:
        return None
    known = list(dict.fromkeys([value for values in labels.values() for value in values] or groups))
    raise UserError(f"--against = {against}: no run is called so{nearest(against, known)} (labels: {', '.join(known)})")


def _with_methods(runs: "pd.DataFrame", axis: str | None) -> "pd.DataFrame":
    """The runs with `method`, what is compared, and `setting`, the labels of all other axes."""
    if axis is None:
        return runs.assign(method=runs["group"], setting="")
    others = [other for other in axes_of(runs) if other != axis]
    settings = [
        ", ".join(str(label) for label in labels if isinstance(label, str))
        for labels in runs[others].itertuples(index=False)
    ]
    return runs.assign(method=runs[axis].astype(str), setting=settings)


def _with_costs(runs: "pd.DataFrame", target: float | None, notes: list[str]) -> "pd.DataFrame":
    """The runs with what each took to reach the target; NaN where it did not, and where its metrics cannot be read."""
    import pandas as pd

    if target is None:
        return runs.drop(columns=[name for name in TARGET_COSTS if name in runs])
    costs = []
    for row in runs.to_dict("records"):
        cost: PlainDict = dict.fromkeys(TARGET_COSTS)
        cost["target_known"] = False
        if row["status"] == "FINISHED" and isinstance(row["folder"], Path):
            try:
                metrics = RunDirectory(row["folder"]).metrics()
                generate = row.get("seconds_generate")
                seconds = float(generate) if isinstance(generate, float) and generate == generate else 0.0
                cost = {**cost_of_target(metrics, target, row["images"], seconds), "target_known": True}
            except UserError as error:
                notes.append(str(error))
        costs.append(cost)
    return runs.drop(columns=[name for name in TARGET_COSTS if name in runs]).join(
        pd.DataFrame(costs, index=runs.index).astype(dict.fromkeys(TARGET_COSTS, float))
    )
