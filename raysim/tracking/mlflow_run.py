"""Opening a run in an MLflow store: the client, the experiment, parameters, tags and the data set."""

import json
import logging
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from raysim.core.errors import UserError
from raysim.core.plain import PlainMapping
from raysim.core.secrets import without_secrets
from raysim.tracking.about import CHILD_OF, FOLDER, MODEL_NAME, About, DatasetAbout
from raysim.tracking.store import SqliteFile, clean_name, flatten, short

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

Item = TypeVar("Item")
OTHERS_PER_REQUEST = 100  # MLflow's own limit for parameters and tags
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # and not one of traces and prompts
ENVIRONMENT = {  # defaults only: what the user has set stays
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

Params = PlainMapping


def load_mlflow() -> tuple[type[Exception], ...]:
    """Import MLflow, which takes seconds, and stop it from writing to the terminal; returns the errors of a store."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow.exceptions
    import sqlalchemy.exc

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for logger in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    return (mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError)


@dataclass(frozen=True)
class Opening:
    """What is needed to begin a run in a store, or to go on with a run.

    address: of the store.  resume_run_id: the run to go on with; None: begin a new one; empty: the process that began
    the run died before it recorded the id, so the run is searched by the name of its folder.
    folder: that name.  about: what the run says of itself.
    """

    address: str
    experiment: str
    run_name: str
    params: Params
    tags: Mapping[str, str]
    resume_run_id: str | None
    folder: str = ""
    about: About = field(default_factory=About)

    def find_run(self) -> "tuple[MlflowClient, Run, bool]":
        """Find or make the run; returns (client, run, whether it is the run to resume)."""
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=self.address)
        old = None
        if self.resume_run_id is not None:
            old = _find_run(client, self.resume_run_id) if self.resume_run_id else self._find_by_name(client)
        if old is not None:
            client.update_run(old.info.run_id, status="RUNNING")
            return client, old, True
        experiment = _experiment(client, self.experiment, self.address)
        tags = {**self.about.own_tags(), **self.about.tags, FOLDER: self.folder}
        return client, client.create_run(experiment, run_name=self.run_name, tags=tags), False

    def _find_by_name(self, client: "MlflowClient") -> "Run | None":
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return None
        for wanted in (f'tags.{FOLDER} = "{self.folder}"', f'attributes.run_name = "{self.folder}"'):
            for run in client.search_runs([experiment.experiment_id], wanted, max_results=1):
                return run
        return None


def _find_run(client: "MlflowClient", run_id: str) -> "Run | None":
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _folder_name(experiment: str) -> str:
    """The name of an experiment as that of a folder: of at most 100 bytes, and never `..`."""
    plain = re.sub(r"[^\w.-]", "_", experiment).encode()[:100].decode(errors="ignore")
    return plain if plain.strip(".") else plain.replace(".", "_")


def _experiment(client: "MlflowClient", name: str, uri: str) -> str:
    """The id of the experiment, made if there is none; a local store keeps its artifacts beside the sqlite file."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        file = SqliteFile(uri).path
        folder = (file.parent / "mlartifacts" / _folder_name(name)).as_uri() if file else None
        try:
            return str(client.create_experiment(name, artifact_location=folder, tags=EXPERIMENT_TAGS))
        except MlflowException:  # another run may have made it at this moment
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment: {name!r} was deleted in {without_secrets(uri)}; choose another name, or restore it "
            f"with `mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def describe(client: "MlflowClient", run: "Run", params: Params, tags: dict[str, str], about: About) -> None:
    """Log parameters, tags and the data set.

    MLflow refuses to change a parameter, so a changed one (more rounds) becomes a tag.
    """
    import yaml
    from mlflow.entities import Param, RunTag

    known = run.data.params
    run_id = run.info.run_id
    flat = flatten(params)
    tags |= {f"resumed_with.{key}": value for key, value in flat.items() if known.get(key, value) != value}
    new = [Param(key, value) for key, value in flat.items() if key not in known]
    for some_params in in_batches(new, OTHERS_PER_REQUEST):
        client.log_batch(run_id, params=some_params)
    if about.dataset is not None and not (run.inputs and run.inputs.dataset_inputs):
        client.log_inputs(run_id, [_dataset_input(about.dataset)])
    all_tags = [RunTag(clean_name(k), short(str(v))) for k, v in tags.items()]
    for some_tags in in_batches(all_tags, OTHERS_PER_REQUEST):
        client.log_batch(run_id, tags=some_tags)
    client.log_text(run_id, yaml.safe_dump(dict(params), sort_keys=False, allow_unicode=True), "config.yaml")


def _dataset_input(dataset: DatasetAbout) -> "DatasetInput":
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(dataset.name, dataset.digest, "code", *map(json.dumps, dataset.as_mlflow()))
    return DatasetInput(entity, [InputTag("mlflow.data.context", "training")])


def log_model(client: "MlflowClient", experiment_id: str, run_id: str, folder: Path, model_id: str) -> str:
    """Upload the folder of a model (`tracking.model_folder`) as the logged model of a run; returns its id.

    model_id: of an earlier attempt, which is gone on with; empty at the first.
    """
    import yaml
    from mlflow.entities import LoggedModelOutput

    if model_id:
        model = client.get_logged_model(model_id)
    else:
        model = client.create_logged_model(experiment_id, MODEL_NAME, source_run_id=run_id, model_type="classifier")
    model_id = model.model_id
    description = folder / "MLmodel"
    own = {"artifact_path": model.artifact_location, "model_id": model_id, "run_id": run_id}
    description.write_text(yaml.safe_dump(yaml.safe_load(description.read_text()) | own, sort_keys=False))
    client.log_model_artifacts(model_id, str(folder))
    client.finalize_logged_model(model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])
    return model_id


def adopt(client: "MlflowClient", parent: str, run_ids: Iterable[str]) -> None:
    """Make runs the children of `parent`; those that have another parent, or are gone, stay as they are."""
    for run_id in run_ids:
        run = _find_run(client, run_id)
        if run is not None and CHILD_OF not in run.data.tags:
            client.set_tag(run_id, CHILD_OF, parent)


def in_batches(items: list[Item], size: int) -> Iterator[list[Item]]:
    """Split `items` into lists of at most `size`, in order."""
    return (items[i : i + size] for i in range(0, len(items), size))
