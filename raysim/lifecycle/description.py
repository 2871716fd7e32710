"""What a run's page in MLflow says of it: a description in Markdown, tags, the data set."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.allocation.imbalance import normalised_entropy_K
from raysim.allocation.policies import full_balance
from raysim.config.schema import Config
from raysim.core.plain import PlainMapping
from raysim.core.records import Dataset
from raysim.lifecycle.prepare import Prepared
from raysim.tracking.about import About, DatasetAbout

_DEFAULTS = {"allocation": "none", "local": "sgd", "aggregation": "fedavg", "server": "sgd"}
_SUMMED_UP = ("best_accuracy", "best_round", "accuracy_auc", "accuracy_last5", "best_validation_accuracy")


@dataclass(frozen=True)
class Origin:
    """What was run.  source: the name of a file, or of a function.

    Of a run of a sweep, also the sweep's name and the run of it in MLflow, `parent`, and name and method of this run.
    """

    source: str = ""
    sweep: str = ""
    parent: str = ""
    name: str = ""
    method: str = ""


def method_name(config: Config) -> str:
    """What sets a run apart from plain FedAvg, by the names of its plug-ins, such as `fedeas + fedprox`."""
    named = {section: getattr(config, section).name.rpartition(":")[2] for section in _DEFAULTS}
    return " + ".join(name for section, name in named.items() if name != _DEFAULTS[section]) or "fedavg"


def about(
    config: Config, prepared: Prepared, digests: Mapping[str, str], directory: Path, origin: Origin
) -> About:
    """What is known of a run when it begins.  digests: of the arrays of the data set."""
    return About(
        description(config, prepared, directory),
        origin.source,
        _tags(config, prepared, origin),
        dataset_about(config, prepared.dataset, digests),
        origin.parent,
    )


def _tags(config: Config, prepared: Prepared, origin: Origin) -> dict[str, str]:
    """Tags to search, group and compare by; what does not apply has none."""
    alpha = config.partition.params.get("alpha")
    found = {
        "method": origin.method or method_name(config),
        "dataset": prepared.dataset.name,
        "clients": str(prepared.partition.clients),
        "alpha": "" if alpha is None else f"{alpha:g}",
        "allocation": config.allocation.name,
        "generator": config.generator.name if prepared.makes_images else "",
        "seed": str(config.seed),
        "sweep": origin.sweep,
    }
    return {name: value for name, value in found.items() if value}


def dataset_about(config: Config, dataset: Dataset, digests: Mapping[str, str]) -> DatasetAbout:
    """The data set of a run for MLflow."""
    digest = hashlib.sha256(json.dumps(dict(digests), sort_keys=True).encode()).hexdigest()[:16]
    counts = {"training": len(dataset.train_labels_N), "test": len(dataset.test_labels_N)}
    made_by = {"mlflow.source.name": config.data.name, "mlflow.source.type": "LOCAL"}
    image = (dataset.channels, *dataset.image_size)
    return DatasetAbout(dataset.name, digest, image, counts, tuple(map(str, dataset.class_names)), made_by)


def result_tags(summary: PlainMapping) -> dict[str, str]:
    """The values of a whole run, as tags: as metrics each would be a chart with one dot."""
    found = {name: _number(summary[name]) for name in _SUMMED_UP if name in summary}
    return found | {"images": str(summary["n_synthetic"]), "seconds": f"{summary['seconds']['total']:.1f}"}


def description(config: Config, prepared: Prepared, directory: Path, summary: PlainMapping | None = None) -> str:
    """The description of a run in Markdown.  summary: the content of summary.json; None while it goes on."""
    results = {} if summary is None else _results(summary)  # first: MLflow shows but the first lines of it
    rows = {
        **results,
        "Data": _data(prepared.dataset),
        "Clients": _clients(config, prepared),
        "Images": _images(config, prepared),
        "Training": _training(config),
        **({} if summary is None else _ending(summary)),
    }
    table = "\n".join(f"| **{name}** | {value} |" for name, value in rows.items())
    again = f"Again, to the same bits: `python -m raysim run {directory}/config.yaml`"
    return f"**{method_name(config)}** on {prepared.dataset.name}\n\n| | |\n|---|---|\n{table}\n\n{again}\n"


def _data(dataset: Dataset) -> str:
    height, width = dataset.image_size
    shape = f"{height} x {width} pixels" + ("" if dataset.channels == 1 else f" x {dataset.channels}")
    n, test = len(dataset.train_labels_N), len(dataset.test_labels_N)
    return f"{dataset.name}: {n:,} training and {test:,} test images of {shape}, {dataset.classes} classes"


def _clients(config: Config, prepared: Prepared) -> str:
    sizes_K = prepared.dealt.sizes_K
    alpha = config.partition.params.get("alpha")
    dealt = config.partition.name + ("" if alpha is None else f" with alpha {alpha:g}")
    text = f"{prepared.partition.clients:,}, {dealt}, with {sizes_K.min():,} to {sizes_K.max():,} images each"
    if prepared.dealt.drawn is not None:
        return text
    least, middle, most = np.quantile(normalised_entropy_K(prepared.dealt.counts_KC), [0, 0.5, 1])
    return f"{text}; label entropy {least:.2f} to {most:.2f}, median {middle:.2f} (0: one class, 1: all alike)"


def _images(config: Config, prepared: Prepared) -> str:
    images = prepared.images
    if not prepared.makes_images:
        return "no synthetic image"
    drawn = prepared.dealt.drawn is not None  # whose counts take minutes
    balance = 0 if drawn else full_balance(prepared.dealt.counts_KC)
    share = f", {images / balance:.1%} of the {balance:,} of full balance" if balance else ""
    shared = ", shared by all clients" if prepared.allocation.shared else ""
    left_out = f"; {prepared.left_out:,} real samples are left out" if prepared.left_out else ""
    made = f"{images:,} synthetic by {config.generator.name}, dealt out by {config.allocation.name}"
    asked = "" if prepared.schedule is None else f", asked after rounds {', '.join(map(str, prepared.schedule.at))}"
    return f"{made}{share}{shared}{asked}{left_out}"


def _training(config: Config) -> str:
    shown = ("epochs", "steps", "batch_size", "lr")
    keys = ", ".join(f"{key} {value}" for key in shown if (value := config.local.params.get(key)))
    who = config.clients_per_round
    cohort = f"{who:.0%} of the clients" if isinstance(who, float) else f"{who} clients"
    return (
        f"{config.rounds} rounds with {cohort}; {config.model.name} by {config.local.name} ({keys}); "
        f"{config.aggregation.name} weights, {config.server.name} at the server"
    )


def _results(summary: PlainMapping) -> dict[str, str]:
    final, best = _number(summary["final_accuracy"]), _number(summary["best_accuracy"])
    return {
        "Accuracy": f"**{final}** after round {summary['rounds']}; best {best} in round {summary['best_round']}, "
        f"{_number(summary['accuracy_auc'])} on average over the rounds (AUC)",
    }


def _ending(summary: PlainMapping) -> dict[str, str]:
    seconds = {name: value for name, value in summary["seconds"].items() if name != "total" and value >= 0.05}
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:5]
    time = f"{summary['seconds']['total']:.1f} s: " + ", ".join(f"{name} {value:.1f} s" for name, value in longest)
    rows = {"Time": time, "Model": f"sha256 {summary['model_sha256']}"}
    if summary.get("notes"):
        rows["Notes"] = "<br>".join(str(note).replace("|", "\\|") for note in summary["notes"])
    return rows


def _number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
