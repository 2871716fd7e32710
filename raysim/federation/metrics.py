"""The metrics of a round: one documented list of their names, and those that updates, weights and reports give.

The same list describes the columns of metrics.parquet and metrics.csv and the metrics of the MLflow run; COLUMNS
describes those of clients.parquet.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from raysim.config.schema import Config
from raysim.core.records import (
    BoolArray,
    ClientReport,
    ClientTable,
    FloatArray,
    ModelState,
    Partition,
    RoundTable,
    Weights,
)
from raysim.engine.rounds import Round

METRICS: dict[str, str] = {
    "round": "number of the round; 0 is the initial model, of which there is evaluation alone",
    "accuracy": "of the global model on the test split, in [0, 1]; only in rounds that are evaluated",
    "loss": "mean cross-entropy per image of the test split",
    "validation_accuracy": "accuracy on the validation split, on which the best round is chosen "
    "(data.validation_fraction); only with such a split",
    "validation_loss": "mean cross-entropy per image of the validation split",
    "denoising_error": "of a generator that clients train (`raysim pretrain` with a federation): mean squared error "
    "of its prediction on the test split, over all timesteps, under noise that is always the same",
    "validation_denoising_error": "the same on the validation split",
    "accuracy_class_{class}": "accuracy on the test images of one class, by its number",
    "worst_class_accuracy": "the lowest accuracy of a class that has test images",
    "evaluated_classes": "how many classes have test images, over which the worst is taken",
    "client_accuracy_clients": "how many clients the figures client_accuracy_* are over",
    "tuned_client_accuracy_clients": "how many clients the figures tuned_client_accuracy_* are over",
    "client_accuracy_{mean|weighted_mean|worst|sd}": "over all clients with samples, each on its own mix of classes; "
    "weighted_mean: by the number of real samples; sd: population standard deviation",
    "tuned_client_accuracy_{mean|weighted_mean|worst|sd}": "the same after each client of fine_tuning.clients has "
    "trained the global model on its own samples",
    "train_loss": "mean over the participants of their loss in the last local epoch, weighted by their samples",
    "participants": "clients that finished the round",
    "synthetic_images": "synthetic images that were made before this round; where the policy is asked again "
    "(allocation.at)",
    "dropped": "clients of the cohort that failed or diverged and were left out (resources.on_client_failure: drop)",
    "samples": "real and synthetic samples of the participants",
    "steps": "local steps of all participants",
    "weight_max": "the largest weight of a participant",
    "weight_entropy": "entropy of the weights over its maximum: 1 for equal weights, 0 for one client that decides",
    "weight_ratio_noisy": "mean weight of noisy participants over that of the others; only where there are both",
    "update_norm_mean": "mean Euclidean norm of the participants' updates",
    "{vector}_norm": "Euclidean norm of a vector that goes to clients beside the model: SCAFFOLD's c, FedDyn's h",
    "c_k_norm_mean": "mean Euclidean norm of the participants' control variates after the round (SCAFFOLD)",
    "oui_mean": "mean OUI of the participants, in [0, 1]; for rules that measure it",
    "oui.{layer}_mean": "the same for one of several layers",
    "clipped_mean": "fraction of the participants whose update was clipped (update.clip)",
    "{statistic}_mean": "mean over the participants of a further statistic that clients report",
    "fit_mode_{moments|mle|ranks|single}": "1 where FedOUI's scores came from this fit (single: one participant)",
    "fit_{a|b}": "parameters of the Beta distribution that FedOUI fitted",
    "tau_eff": "FedNova's effective steps of the round",
    "weight_sum": "sum of the weights, for rules that do not normalise it to 1",
    "dropped_per_end": "values that the trimmed mean leaves out at each end",
    "{rule's own}": "what an aggregation rule says of its weights",
    "epsilon": "of differential privacy for a client, at update.delta, after the rounds so far; with noise alone",
    "bytes_down": "bytes that a real federation would send to the participants: float32, models and further vectors",
    "bytes_up": "bytes that the participants would send: updates as they are sent, statistics, 8 a scalar",
    "engine_bytes_{broadcast|reduced|states|slices}": "bytes that this round sent between nodes of the cluster",
    "seconds_train": "from the cohort to the last trained client",
    "seconds_dispatch": "of these, what the driver itself took",
    "seconds_aggregate": "from the last trained client to the next global model",
    "seconds_evaluate": "of evaluation and fine-tuning",
    "seconds_idle": "mean over workers of the time without work",
}
"""Name -> meaning. Braces stand for what varies; the last patterns are open to plug-ins."""

COLUMNS: dict[str, str] = {
    "round": "number of the round, from 1",
    "client": "id of the client, from 0",
    "n_real": "its real samples",
    "n_synthetic": "its synthetic samples",
    "steps": "local steps that it took",
    "loss": "its mean training loss per sample in the last local epoch",
    "update_norm": "Euclidean norm of its update",
    "seconds": "of its local training",
    "weight": "how much its update counted",
    "rare": "1 for a client that partition.rare cut",
    "noisy": "1 for a client with label noise",
    "input_noise": "standard deviation of the noise on its images, in units of the [0, 1] pixel range",
    "score": "its score, for rules that give one",
    "c_k_norm": "Euclidean norm of its control variate after the round (SCAFFOLD)",
    "oui": "its OUI, for rules that measure it",
    "{statistic}": "a further statistic that clients report",
}
"""Column name -> meaning, for clients.parquet: one row per participant and round."""

_OPEN = ("{statistic}_mean", "{rule's own}", "{statistic}")


def described(name: str, names: Mapping[str, str] = METRICS) -> str | None:
    """What a metric means; None for one that only the open patterns cover, that is, one of a plug-in's own."""
    for pattern, meaning in names.items():
        if pattern not in _OPEN and re.fullmatch(_as_regex(pattern), name):
            return meaning
    return None


def _as_regex(pattern: str) -> str:
    texts = re.split(r"\{(.*?)\}", pattern)  # what stands in braces has the odd places
    return "".join(_varying(text) if i % 2 else re.escape(text) for i, text in enumerate(texts))


def _varying(name: str) -> str:
    if "|" in name:
        return f"({name})"
    return r"\d+" if name == "class" else ".+"


def round_metrics(
    config: Config, round_: Round, table: RoundTable, weights: Weights, noisy_K: BoolArray, sent: "ModelSize"
) -> dict[str, float]:
    """The metrics of a round that is aggregated: all but evaluation, privacy and times.

    noisy_K: by client id, whether it has wrong labels or noisy images.
    """
    reports = round_.reports
    n_K = np.array([r.n_real + r.n_synthetic for r in reports])
    row: dict[str, float] = {
        "round": round_.number,
        "train_loss": float(np.average([r.loss for r in reports], weights=n_K)),
        "participants": len(reports),
        "dropped": len(round_.dropped),
        "samples": int(n_K.sum()),
        "steps": sum(r.steps for r in reports),
        "weight_max": float(weights.w_K.max()),
        "weight_entropy": weight_entropy(weights.w_K),
        "update_norm_mean": float(np.mean([r.delta_norm for r in reports])),
    }
    row |= weight_ratio(weights.w_K, noisy_K[table.client_K])
    row |= sent.bytes(config, reports)
    for name in sorted(reports[0].metrics):
        row[f"{name}_mean"] = float(table.columns[name].mean())
    for name, value in weights.info.items():  # metrics are numbers: a text becomes a 1 under its own name
        row |= {f"{name}_{value}": 1} if isinstance(value, str) else {name: value}
    return row


def vector_norms(model: ModelState) -> dict[str, float]:
    """Euclidean norm of each vector that goes to clients beside the model, by its name."""
    vectors = model.broadcast_vectors.items()
    return {f"{name}_norm": float(np.sqrt(np.square(v, dtype=np.float64).sum())) for name, v in vectors}


class ModelSize:
    """What a participant of a real federation would receive and send, in numbers of float32.

    parameters, float_buffers: of the model.  down, up: further vectors of P numbers each, to and from a client.
    unsent: how many of the statistics in a client's report are for the record alone.
    """

    def __init__(self, parameters: int, float_buffers: int, down: int, up: int, unsent: int = 0) -> None:
        self.parameters = parameters
        self.float_buffers = float_buffers
        self.down = down
        self.up = up
        self.unsent = unsent

    def bytes(self, config: Config, reports: Sequence[ClientReport]) -> dict[str, float]:
        """Bytes of a round, down and up: 4 a number, updates as they are sent, 8 a scalar.

        A client's own statistics go up, to be evaluated with; fixed ones go nowhere.
        """
        kind = config.aggregation.buffers
        buffers_down = self.float_buffers if kind == "average" else 0
        buffers_up = self.float_buffers if kind != "global" else 0
        down = 4 * (self.parameters + buffers_down + self.parameters * self.down)
        up = config.update.bytes_up(self.parameters) + 4 * (buffers_up + self.parameters * self.up)
        scalars = 8 * (3 + max((len(r.metrics) for r in reports), default=0) - self.unsent)
        return {"bytes_down": len(reports) * down, "bytes_up": len(reports) * (up + scalars)}


def client_table(number: int, reports: Sequence[ClientReport], weights: Weights, partition: Partition) -> ClientTable:
    """What there is to say of each participant of a round, in columns of K values (`COLUMNS`)."""
    clients_K = np.array([r.client for r in reports])
    columns: ClientTable = {
        "round": np.full(len(reports), number),
        "client": clients_K,
        "n_real": np.array([r.n_real for r in reports]),
        "n_synthetic": np.array([r.n_synthetic for r in reports]),
        "steps": np.array([r.steps for r in reports]),
        "loss": np.array([r.loss for r in reports]),
        "update_norm": np.array([r.delta_norm for r in reports]),
        "seconds": np.array([r.seconds for r in reports]),
        "weight": weights.w_K.astype(np.float64),
        "rare": partition.rare_K[clients_K].astype(np.int64),
        "noisy": partition.noisy_K[clients_K].astype(np.int64),
        "input_noise": partition.input_noise_K[clients_K].astype(np.float64),
    }
    for name in dict.fromkeys(name for report in reports for name in report.metrics):
        columns[name] = np.array([report.metrics.get(name, np.nan) for report in reports])
    if weights.scores_K is not None:
        columns["score"] = weights.scores_K.astype(np.float64)
    return columns


def weight_ratio(w_K: FloatArray, noisy_K: BoolArray) -> dict[str, float]:
    """Mean weight of the noisy clients of a round over that of the clean ones; nothing where a group has no weight."""
    if not noisy_K.any() or not w_K[~noisy_K].any():
        return {}
    return {"weight_ratio_noisy": float(w_K[noisy_K].mean() / w_K[~noisy_K].mean())}


def weight_entropy(w_K: FloatArray) -> float:
    """Entropy of the weights over its maximum: 1 for equal weights, 0 for one client that decides alone."""
    w = w_K[w_K > 0] / w_K[w_K > 0].sum()
    return float(-(w * np.log(w)).sum() / np.log(len(w_K))) if len(w_K) > 1 else 0.0
