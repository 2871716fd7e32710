"""MLflow tracking: one run, written by the driver alone, in one batch call per round.

The store may be locked, full or gone without hurting a run: what could not be written waits and is tried again, at a
cost of about a tenth of the run's time, and what is still missing at the end is named in `problems`.
"""

import functools
import json
import logging
import math
import os
import re
import sqlite3
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from raysim.errors import UserError
from raysim.tracking_store import (
    Outbox,
    SqliteFile,
    Write,
    check_uri,
    clean_name,
    environment_tags,
    flatten,
    one_line,
    short,
    without_password,
)

__all__ = ["NullTracker", "Tracker", "check_uri"]

METRICS_PER_REQUEST, OTHERS_PER_REQUEST = 1000, 100  # MLflow's own limits
OPENING_WAIT_S = 60.0  # for another run that makes the same sqlite file
START_WAIT_S, FINISH_WAIT_S, FINISH_BUDGET_S = 20.0, 5.0, 15.0  # for another writer of it
LOST_CODES = frozenset({"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"})
ENVIRONMENT = {  # defaults only: what the user has set stays
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

Status = Literal["FINISHED", "FAILED", "KILLED"]
Params = Mapping[str, Any]


class NullTracker:
    """Tracking switched off (`tracking.uri: none`): takes everything and keeps nothing."""

    run_id, uri = "", "none"

    @property
    def problems(self) -> list[str]:
        """What could not be logged."""
        return []

    def log_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one round."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Take a file or a folder."""

    def log_figure(self, path: Path) -> None:
        """Take a figure."""

    def log_model_state(self, path: Path) -> None:
        """Take the safetensors file of a model."""

    def log_dict(self, content: Params, name: str) -> None:
        """Take a small dictionary."""

    def finish(self, status: Status, message: str = "") -> None:
        """Take the outcome."""


class Tracker(NullTracker):
    """One MLflow run; after `start`, no method raises because of the store."""

    def __init__(self, client: Any, run_id: str, uri: str, directory: Path, outbox: Outbox, resumed: bool) -> None:
        self._client, self._directory, self._outbox = client, directory, outbox
        self.run_id, self.uri = run_id, without_password(uri)
        # a resumed run: the rounds that the store already has, by metric, looked up when first needed
        self._logged_steps: dict[str, set[int]] | None = {} if resumed else None
        self._non_finite: Counter[str] = Counter()
        self._finished = False

    @classmethod
    def start(
        cls,
        uri: str,
        experiment: str,
        run_name: str,
        params: Params,
        tags: Mapping[str, str],
        resume_run_id: str | None,
        directory: Path,
    ) -> NullTracker:
        """Open the store and start a run, or set the run `resume_run_id` back to RUNNING.

        params: the nested, resolved configuration, logged flattened, and in full as the artifact config.yaml.
        directory: where the run's own files are, named in `problems`.  Returns a NullTracker for the address "none".
        Raises UserError if the store cannot be used.
        """
        address = check_uri(uri)
        if address == "none":
            return NullTracker()
        store = SqliteFile(address)
        errors = _load_mlflow()
        try:
            store.prepare(START_WAIT_S)
            with store.alone(OPENING_WAIT_S), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # making a store warns about MLflow's own tables
                client, run, resumed = _open_run(address, experiment, run_name, resume_run_id)
            _describe(client, run, params, {**environment_tags(), **tags})
        except errors as error:
            raise UserError(
                f"tracking.uri: the MLflow store {without_password(address)} cannot be used: {one_line(error)}. "
                "Put that right, name another store (tracking.uri=sqlite:///PATH), or run without one "
                "(tracking.uri=none)."
            ) from error
        outbox = Outbox(store, errors, LOST_CODES)
        if resume_run_id and not resumed:
            outbox.lose(Write("the rounds before the resume", lambda: None, error=f"run {resume_run_id} is gone"))
        return cls(client, run.info.run_id, address, Path(directory), outbox, resumed)

    @property
    def problems(self) -> list[str]:
        """What the store does not have, in sentences; empty if all is there."""
        missing = self._outbox.missing()
        found = [f"MLflow lacks {write.what}: {write.error}" for write in missing if write.round is None]
        rounds = sorted({write.round for write in missing if write.round is not None})
        if rounds:
            error = next(write.error for write in reversed(missing) if write.round is not None)
            shown = ", ".join(map(str, rounds[:10])) + (", ..." if len(rounds) > 10 else "")
            which = f"round {shown}" if len(rounds) == 1 else f"{len(rounds)} rounds ({shown})"
            found.append(f"MLflow lacks the metrics of {which}, which are in {self._directory}: {error}")
        return found

    def log_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Log a round's metrics at step `round`, in one request per 1,000; may be repeated after a resume.

        Values that are not finite are never stored: the tag `non_finite_metrics` counts them by name.
        """
        from mlflow.entities import Metric, RunTag

        now_ms = int(time.time() * 1000)  # kept over retries, so that the store knows a repeated row as the same row
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        self._non_finite.update(key for key in metrics if key not in finite)
        tags = []
        if len(finite) < len(metrics):
            counts = ", ".join(f"{key} ({times})" for key, times in sorted(self._non_finite.items()))
            tags = [RunTag("non_finite_metrics", short(f"{self._non_finite.total()} not stored: {counts}"))]
        rows = [Metric(clean_name(key), value, now_ms, round) for key, value in finite.items()]
        for part in list(_parts(rows, METRICS_PER_REQUEST)) or [[]]:
            self._outbox.submit(Write("metrics", functools.partial(self._send_rows, part, tags), round))

    def _send_rows(self, rows: list[Any], tags: list[Any]) -> None:
        """One request.  The rows of a request are stored together or not at all, so one of them tells for all."""
        if rows and self._logged_steps is not None:
            key = rows[0].key
            if key not in self._logged_steps:
                history = self._client.get_metric_history(self.run_id, key)
                self._logged_steps[key] = {metric.step for metric in history}
            if rows[0].step in self._logged_steps[key]:
                return
        if rows or tags:
            self._client.log_batch(self.run_id, metrics=rows, tags=tags)

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, or the files of a folder, into the run's artifacts, under `folder`."""
        copy = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
        self._outbox.submit(Write(f"the file {path}", functools.partial(copy, self.run_id, str(path), folder)))

    def log_figure(self, path: Path) -> None:
        """Copy a figure into the run's artifacts, under figures/."""
        self.log_artifact(path, "figures")

    def log_model_state(self, path: Path) -> None:
        """Copy a safetensors file into the run's artifacts, under model/."""
        self.log_artifact(path, "model")

    def log_dict(self, content: Params, name: str) -> None:
        """Write a dictionary of plain values as the artifact `name`, which ends in .json or .yaml."""
        copied = json.loads(json.dumps(content, default=str))
        send = functools.partial(self._client.log_dict, self.run_id, copied, name)
        self._outbox.submit(Write(f"the file {name}", send))

    def finish(self, status: Status, message: str = "") -> None:
        """Write what still waits and end the run truthfully; only the first call counts."""
        if self._finished:
            return
        self._finished = True
        if message:
            tell = functools.partial(self._client.set_tag, self.run_id, "message", short(message))
            self._outbox.add(Write("the final message", tell))
        end = functools.partial(self._client.set_terminated, self.run_id, status)
        self._outbox.add(Write(f"the final status {status}", end))
        self._outbox.flush(FINISH_WAIT_S, FINISH_BUDGET_S, failures_allowed=Outbox.limit)


def _load_mlflow() -> tuple[type[Exception], ...]:
    """Import MLflow (seconds), keep it from writing to the terminal, and name the errors of a store."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow.exceptions
    import sqlalchemy.exc

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for logger in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    return (mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError)


def _open_run(uri: str, experiment: str, run_name: str, resume_run_id: str | None) -> tuple[Any, Any, bool]:
    """(client, run, whether it is the one to resume)."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    old = _find_run(client, resume_run_id) if resume_run_id else None
    if old is not None:
        client.update_run(old.info.run_id, status="RUNNING")
        return client, old, True
    return client, client.create_run(_experiment(client, experiment, uri), run_name=run_name), False


def _find_run(client: Any, run_id: str) -> Any | None:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _experiment(client: Any, name: str, uri: str) -> str:
    """The id of the experiment, made if there is none; a local store keeps its artifacts beside the sqlite file."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        file = SqliteFile(uri).path
        folder = (file.parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", name)).as_uri() if file else None
        try:
            return str(client.create_experiment(name, artifact_location=folder))
        except MlflowException:  # another run may have made it at this moment
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment: {name!r} was deleted in {without_password(uri)}; choose another name, or restore it "
            f"with `mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def _describe(client: Any, run: Any, params: Params, tags: dict[str, str]) -> None:
    """Log parameters and tags.  MLflow refuses to change a parameter, so a changed one (more rounds) becomes a tag."""
    import yaml
    from mlflow.entities import Param, RunTag

    known, run_id = run.data.params, run.info.run_id
    flat = flatten(params)
    tags |= {f"resumed_with.{key}": value for key, value in flat.items() if known.get(key, value) != value}
    for part in _parts([Param(key, value) for key, value in flat.items() if key not in known], OTHERS_PER_REQUEST):
        client.log_batch(run_id, params=part)
    for part in _parts([RunTag(clean_name(k), short(str(v))) for k, v in tags.items()], OTHERS_PER_REQUEST):
        client.log_batch(run_id, tags=part)
    client.log_text(run_id, yaml.safe_dump(dict(params), sort_keys=False, allow_unicode=True), "config.yaml")


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))
