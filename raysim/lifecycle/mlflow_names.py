"""The names of metrics in MLflow: those of metrics.parquet, in groups, so that its first screen shows what matters.

MLflow's page has a section for all that is before the last `/`, in alphabetical order, and the names without one at its
end. What matters is therefore there twice: under its plain name, to search and compare by, and in the first section.
The files of a run keep the plain names.
"""

import re
from collections.abc import Mapping

FIRST = ("accuracy", "loss", "train_loss", "validation_accuracy", "validation_loss")
GROUPS: dict[str, str] = {
    r"accuracy_class_(\d+)": r"class/accuracy_\1",
    r"worst_class_accuracy": "class/worst",
    r"((?:validation_)?denoising_error)": r"generator/\1",
    r"evaluated_classes": "class/evaluated",
    r"client_accuracy_(\w+)": r"client/\1",
    r"tuned_client_accuracy_(\w+)": r"tuned_client/\1",
    r"(participants|dropped|samples|steps|synthetic_images)": r"round/\1",
    r"weight_(\w+)": r"weight/\1",
    r"update_norm_(\w+)": r"update/norm_\1",
    r"(clipped_mean|tau_eff|\w+_norm|\w+_norm_mean)": r"update/\1",
    r"oui_mean": "oui/mean",
    r"oui\.(.+)": r"oui/\1",
    r"(fit_\w+)": r"oui/\1",
    r"epsilon": "privacy/epsilon",
    r"bytes_(\w+)": r"bytes/\1",
    r"engine_bytes_(\w+)": r"bytes/engine_\1",
    r"seconds_(\w+)": r"seconds/\1",
}
"""Pattern of a name in the files -> its name in MLflow; the first that fits counts."""
OTHER = "other/"
FIRST_SECTION = "accuracy and loss/"


def mlflow_name(name: str) -> str:
    """The name in MLflow of a metric of metrics.parquet; one that no pattern knows, as of a plug-in, is in `other/`."""
    if name in FIRST:
        return name
    for pattern, grouped in GROUPS.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(grouped)
    return OTHER + name


def by_mlflow_name(row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a round as MLflow gets them, without its number."""
    found = {mlflow_name(name): value for name, value in row.items() if name != "round"}
    return {FIRST_SECTION + name: value for name, value in found.items() if "/" not in name} | found
