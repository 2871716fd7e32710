"""What an MLflow run says of itself, and the names under which MLflow's pages look for it.  Needs no MLflow."""

import getpass
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from raysim.core.plain import PlainDict

DESCRIPTION = "mlflow.note.content"
CHILD_OF = "mlflow.parentRunId"
FOLDER = "folder"  # of the run, the name of its folder in output.dir
MODEL_NAME = "model"


@dataclass(frozen=True)
class DatasetAbout:
    """The data set of a run.  digest: of all its arrays, at most 36 characters.

    image: channels, height and width.  counts: how many images, by split.  classes: their names.  made_by: the section
    of the configuration that names it.
    """

    name: str
    digest: str
    image: tuple[int, int, int]
    counts: Mapping[str, int]
    classes: tuple[str, ...]
    made_by: Mapping[str, str]

    def as_mlflow(self) -> tuple[PlainDict, PlainDict, PlainDict]:
        """(source, schema, profile) as MLflow's pages read them."""
        features = {"type": "tensor", "tensor-spec": {"dtype": "uint8", "shape": [-1, *self.image]}}
        targets = {"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1]}}
        schema = {"mlflow_tensorspec": {"features": json.dumps([features]), "targets": json.dumps([targets])}}
        profile = {**{f"{split}_images": n for split, n in self.counts.items()}, "classes": len(self.classes)}
        return {"tags": dict(self.made_by)}, schema, profile


@dataclass(frozen=True)
class About:
    """What a run says of itself beside its parameters and metrics.

    description: in Markdown.  source: what was run, such as the name of a configuration file.  tags: by name, to
    search, group and compare by.  parent: the id of the sweep's run, or empty.
    """

    description: str = ""
    source: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    dataset: DatasetAbout | None = None
    parent: str = ""

    def own_tags(self) -> dict[str, str]:
        """The tags with names of MLflow's own, which a run has from its first moment on."""
        found = {
            DESCRIPTION: self.description, "mlflow.source.name": self.source, "mlflow.source.type": "LOCAL",
            CHILD_OF: self.parent, "mlflow.user": _user(),
        }  # fmt: skip
        return {name: value for name, value in found.items() if value}


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        return ""
