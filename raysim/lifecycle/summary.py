"""The results of a run: the content of summary.json, and the table of its clients."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.allocation.imbalance import normalised_entropy_K
from raysim.allocation.policies import full_balance
from raysim.config.schema import Config
from raysim.core.records import Synthetic
from raysim.evaluation import per_client
from raysim.lifecycle.clock import PhaseClock
from raysim.lifecycle.prepare import Prepared

if TYPE_CHECKING:
    import pandas as pd


EVALUATED = (
    "accuracy", "loss", "validation_", "worst_class_accuracy", "evaluated_classes", "accuracy_class_",
    "client_accuracy_",
)
FINE_TUNED = ("tuned_client_accuracy_",)


def as_uninterrupted(metrics: "pd.DataFrame", config: Config) -> "pd.DataFrame":
    """The metrics without evaluations that the run, had it never been shorter, would not have made.

    The last round of a run is always evaluated.  Where a run was resumed for more rounds, that round is no longer the
    last, and its evaluation is not due: it is nan, as in a run of all the rounds at once.
    """
    metrics = metrics.copy()
    for prefixes, every in ((EVALUATED, config.evaluate_every), (FINE_TUNED, config.fine_tuning.every)):
        rounds = metrics["round"]
        not_due = (rounds > 0) & (rounds < config.rounds) & (rounds % (every or config.rounds) != 0)
        columns = [name for name in metrics if name.startswith(prefixes)]
        if not_due.any() and columns:
            metrics.loc[not_due, columns] = np.nan
    return metrics


def left_out(metrics: "pd.DataFrame") -> list[str]:
    """A note on clients that failed and were left out of rounds (`resources.on_client_failure: drop`); usually none."""
    dropped = metrics["dropped"].fillna(0)
    if not dropped.any():
        return []
    rounds = int((dropped > 0).sum())
    return [f"clients that failed or diverged were left out {int(dropped.sum())} times, in {rounds} rounds"]


def not_finite(metrics: "pd.DataFrame") -> list[str]:
    """Notes on each loss that is not finite in a round that measured it; usually none.

    metrics: one row per round; in rounds that were not evaluated, `loss` and `accuracy` are nan.
    """
    notes = []
    evaluated = metrics["accuracy"].notna()
    for name, measured in (("loss", evaluated), ("validation_loss", evaluated), ("train_loss", metrics["round"] > 0)):
        values = metrics.loc[measured, ["round", name]] if name in metrics else metrics.iloc[:0]
        wrong = values.loc[~np.isfinite(values[name]), "round"].astype(int).tolist() if len(values) else []
        if wrong:
            rounds = ", ".join(map(str, wrong[:10])) + (", ..." if len(wrong) > 10 else "")
            notes.append(
                f"{name} is not finite in round {rounds}: the model has diverged, and accuracies from there on mean "
                "nothing; lower local.lr or server.lr, or set update.clip"
            )
    return notes


def accuracy_auc(rounds: Iterable[float], accuracies: Iterable[float]) -> float:
    """Area under the accuracy curve (trapezoid rule) over the rounds that it spans; of a single value, that value."""
    x = np.asarray(list(rounds), dtype=float)
    y = np.asarray(list(accuracies), dtype=float)
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def accuracy_summary(metrics: "pd.DataFrame") -> dict[str, float | str]:
    """Final, best (with its round), mean of the last five and area under the curve of the test accuracy.

    The best round is the one with the highest validation accuracy, and `best_accuracy` is the test accuracy there; only
    without a validation split is it chosen on the test split itself, which `best_chosen_on` tells.
    """
    measured = metrics[metrics["round"] > 0].dropna(subset=["accuracy"])
    accuracy = measured["accuracy"].to_numpy()
    rounds = measured["round"].to_numpy()
    validation = measured["validation_accuracy"].to_numpy() if "validation_accuracy" in measured else None
    best = int(np.argmax(accuracy if validation is None else validation))
    return {
        "final_accuracy": float(accuracy[-1]),
        "best_accuracy": float(accuracy[best]),
        "best_round": int(rounds[best]),
        "best_chosen_on": "test" if validation is None else "validation",
        "accuracy_last5": float(accuracy[-5:].mean()),
        "accuracy_auc": accuracy_auc(rounds, accuracy),
        **({} if validation is None else {
            "final_validation_accuracy": float(validation[-1]), "best_validation_accuracy": float(validation[best]),
        }),
    }


def accuracy_by_class(metrics: "pd.DataFrame", classes: int) -> list[float | None] | None:
    """Final accuracy of each class, None for a class without test images; None where it was not measured at all."""
    final = metrics.dropna(subset=["accuracy"]).iloc[-1]
    measured = [final.get(f"accuracy_class_{c}", np.nan) for c in range(classes)]
    return [None if np.isnan(a) else float(a) for a in measured] if not np.isnan(measured).all() else None


SPREAD = ("clients", "mean", "weighted_mean", "worst", "sd")


def accuracy_over_clients(metrics: "pd.DataFrame") -> dict[str, float]:
    """Accuracy of the worst class and over clients (`evaluation.per_client`), each where it was last measured."""
    names = [f"{prefix}_{what}" for prefix in ("client_accuracy", "tuned_client_accuracy") for what in SPREAD]
    measured = [name for name in ("worst_class_accuracy", "evaluated_classes", *names) if name in metrics]
    return {name: float(metrics[name].dropna().iloc[-1]) for name in measured}


def accuracy_by_client(metrics: "pd.DataFrame", prepared: Prepared) -> list[float | None] | None:
    """Final accuracy of each client by its id, on its own mix of classes; None where it was not measured at all."""
    by_class = accuracy_by_class(metrics, prepared.dataset.classes)
    if by_class is None:
        return None
    accuracy_C = np.array([np.nan if a is None else a for a in by_class])
    a_K = per_client.by_client(per_client.class_counts(prepared.dealt, prepared.dataset), accuracy_C)
    return [None if np.isnan(a) else float(a) for a in a_K]


def per_client_table(clients: "pd.DataFrame", metrics: "pd.DataFrame", prepared: Prepared) -> "pd.DataFrame":
    """One row per client that took part in a round, for people: its data, how it trained, what its updates counted.

    weight, oui, score and others are means over its rounds, loss and update_norm those of its last one; accuracy is
    that of the final model on its own mix of classes.
    """
    taken = clients.groupby("client")
    last, mean = taken.last(), taken.mean(numeric_only=True)
    table = last[["n_real", "n_synthetic"]].copy()
    table["rounds"] = taken.size()
    accuracy_K = accuracy_by_client(metrics, prepared) if prepared.partition.drawn is None else None
    if accuracy_K is not None:
        table["accuracy"] = [accuracy_K[client] for client in table.index]
    table["last_loss"] = last["loss"]
    table["last_update_norm"] = last["update_norm"]
    varying = [name for name in ("rare", "noisy", "input_noise") if last[name].any()]
    table[varying] = last[varying]
    known = {"round", "n_real", "n_synthetic", "loss", "update_norm", "rare", "noisy", "input_noise"}
    others = [name for name in mean.columns if name not in known]
    table[[f"mean_{name}" for name in others]] = mean[others]
    return table.reset_index()


def summarise(
    config: Config, prepared: Prepared, metrics: "pd.DataFrame", synthetic: Synthetic, clock: PhaseClock
) -> dict[str, Any]:
    """The content of summary.json, without the entries that `lifecycle.runner` adds, such as the status.

    Lists with one entry per client are empty for a partition that is drawn client by client.  `entropy_K` and
    `n_synthetic_full_balance` are of all samples that clients own, those that the policy leaves out among them.
    """
    partition = prepared.partition
    C = prepared.dataset.classes
    counts_KC = prepared.dealt.counts_KC if partition.drawn is None else np.empty((0, C), dtype=np.int64)
    return {
        **accuracy_summary(metrics),
        **accuracy_over_clients(metrics),
        "accuracy_by_class": accuracy_by_class(metrics, prepared.dataset.classes),
        "client_accuracy_K": accuracy_by_client(metrics, prepared),
        "rounds": int(metrics["round"].max()),
        "clients": partition.clients,
        "n_real": int(partition.offsets_K1[-1]),
        "n_real_left_out": prepared.left_out,
        "n_synthetic": synthetic.images,
        "n_synthetic_held": int(synthetic.quota_KC.sum()),
        "n_synthetic_made": synthetic.made,
        "n_synthetic_full_balance": full_balance(counts_KC),
        "images_per_s": synthetic.made / synthetic.seconds if synthetic.seconds else None,
        "sizes_K": partition.sizes_K.tolist() if partition.drawn is None else [],
        "entropy_K": normalised_entropy_K(counts_KC).tolist(),
        "seconds": clock.rounded(),
        "workers": clock.workers,
        "synthetic_sha256": synthetic.sha256,
        "partition_sha256": partition.sha256(),
        "config_hash": config.hash(),
        "dataset": prepared.dataset.name,
        "image": [prepared.dataset.channels, *prepared.dataset.image_size],
        "image_mean": list(prepared.dataset.mean),
        "image_std": list(prepared.dataset.std),
        "class_names": [str(name) for name in prepared.dataset.class_names],
        "policy": config.allocation.name,
        "rule": config.aggregation.name,
        "seed": config.seed,
    }
