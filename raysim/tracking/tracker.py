"""MLflow tracking: one run, written by the driver alone, in one batch call per round.

A store that is locked, full or lost does not stop a run: what could not be written waits and is tried again, at a cost
of about a tenth of the run's time, and what is still missing at the end is named in `problems`.
"""

import functools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raysim.core.errors import UserError
from raysim.core.secrets import plain_without_secrets, without_secrets
from raysim.tracking.about import DESCRIPTION, About
from raysim.tracking.mlflow_run import Opening, Params, adopt, describe, in_batches, load_mlflow, log_model
from raysim.tracking.samples import SystemSamples
from raysim.tracking.store import (
    Outbox,
    SqliteFile,
    Write,
    check_uri,
    clean_name,
    environment_tags,
    one_line,
    short,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run, RunTag

__all__ = ["NullTracker", "Tracker", "check_uri"]

METRICS_PER_REQUEST = 1000  # MLflow's own limit
OPENING_WAIT_S = 60.0  # seconds to wait for another run that makes the same sqlite file
START_WAIT_S = 10.0  # seconds to wait for another writer of it, when the run starts,
LATER_WAIT_S = 1.0  # during the run,
FINISH_WAIT_S = 5.0  # and at its end
FINISH_BUDGET_S = 15.0  # seconds for all requests that still wait at the end
LOST_CODES = frozenset({"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"})

Status = Literal["FINISHED", "FAILED", "KILLED"]


class NullTracker:
    """Tracking switched off (`tracking.uri: none`): has the methods of Tracker, which do nothing."""

    run_id = ""
    experiment_id = ""
    uri = "none"
    gather_s = 0.0

    @property
    def problems(self) -> list[str]:
        """What could not be logged, in sentences: here nothing."""
        return []

    @property
    def problems_so_far(self) -> list[str]:
        """As much of `problems` as is known without a wait."""
        return self.problems

    def describe(self, text: str, tags: Mapping[str, str]) -> None:
        """Ignore a new description."""

    def log_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Ignore the metrics of one round."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Ignore a file or a folder."""

    def log_figure(self, path: Path) -> None:
        """Ignore a figure."""

    def log_model_state(self, path: Path) -> None:
        """Ignore the safetensors file of a model."""

    def log_model(self, folder: Path) -> None:
        """Ignore the folder of a model."""

    def adopt(self, run_ids: Iterable[str]) -> None:
        """Ignore the runs of a sweep."""

    def idle(self) -> None:
        """Do nothing while nothing is asked for."""

    def finish(self, status: Status, message: str = "") -> None:
        """Ignore the end of the run."""


class Tracker(NullTracker):
    """One MLflow run; after `start`, no method raises because of the store.

    A store that is locked, read-only or out of reach when the run starts is opened later, if it comes back.
    run_id, experiment_id: empty as long as there is no run in the store.  gather_s: for how many seconds rounds may
    wait, to be sent together.
    """

    def __init__(self, opening: Opening, directory: Path, errors: tuple[type[Exception], ...]) -> None:
        self._opening = opening
        self._directory = directory
        self._errors = errors
        self._store = SqliteFile(opening.address)
        self._outbox = Outbox(self._store, errors, LOST_CODES)
        self.run_id = opening.resume_run_id or ""
        self.uri = without_secrets(opening.address)
        self._found: tuple[MlflowClient, Run, bool] | None = None
        self._opened: MlflowClient | None = None
        self._away = ""
        # a resumed run: the rounds that the store already has, by metric, looked up when first needed
        self._logged_steps: dict[str, set[int]] | None = None
        self._non_finite: Counter[str] = Counter()
        self._model_id = ""
        self._samples = SystemSamples()
        self.gather_s = 0.0
        self._gathered: list[tuple[int, list[Metric]]] = []
        self._gathered_tags: list[RunTag] = []
        self._sent_at = -math.inf
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
        about: About | None = None,
        driver: int = 0,
    ) -> NullTracker:
        """Open the store and start a run, or set the run `resume_run_id` back to RUNNING; empty: the one of this name.

        params: the nested, resolved configuration, logged flattened, and in full as the artifact config.yaml, both
        with secrets masked.
        directory: where the run's own files are, named in `problems`.  about: what the run says of itself.
        driver: the process whose use of the machine is measured while a run trains on a data set; 0: none is.
        Returns a NullTracker for the address "none".
        Raises UserError if the store can never be used; one that is only away for now is named in `problems`.
        """
        address = check_uri(uri)
        if address == "none":
            return NullTracker()
        errors = load_mlflow()
        at_start: tuple[type[Exception], ...] = (*errors, ImportError)  # a database's driver may be missing
        plain = plain_without_secrets(dict(params))
        folder = Path(directory).name
        opening = Opening(address, experiment, run_name, plain, tags, resume_run_id, folder, about or About())
        tracker = cls(opening, Path(directory), errors)
        tracker._samples = SystemSamples(driver if opening.about.dataset is not None else 0)
        try:
            tracker._open(START_WAIT_S, OPENING_WAIT_S)
        except at_start as error:
            if tracker._found is None and not tracker._store.is_away(error):
                cause = without_secrets(one_line(error), address)
                raise UserError(
                    f"tracking.uri: the MLflow store {tracker.uri} cannot be used: {cause}. Put that right, "
                    "name another store (tracking.uri=sqlite:///PATH), or run without one (tracking.uri=none)."
                ) from error
            tracker._away = one_line(error)
        except KeyboardInterrupt:
            if tracker._found is not None:
                tracker.finish("KILLED", "interrupted")
            raise
        return tracker

    def _open(self, wait_s: float, alone_s: float) -> None:
        if self._found is None:
            self._store.check(wait_s)
            with self._store.alone(alone_s), warnings.catch_warnings():
                self._store.check_room()
                warnings.simplefilter("ignore")  # making a store warns about MLflow's own tables
                self._found = self._opening.find_run()
            wanted = self._opening.resume_run_id
            _, run, resumed = self._found
            self.run_id = run.info.run_id
            self.experiment_id = run.info.experiment_id
            self._logged_steps = {} if resumed else None
            if wanted and not resumed:
                self._outbox.lose(Write(f"run {wanted}", lambda: None, error="it is gone; a new one takes its place"))
        client, run, _ = self._found
        tags = {**self._opening.about.tags, **self._opening.tags, **environment_tags()}
        describe(client, run, self._opening.params, tags, self._opening.about)
        self._opened = client

    @property
    def _client(self) -> "MlflowClient":
        if self._opened is None:
            self._open(LATER_WAIT_S, LATER_WAIT_S)
        assert self._opened is not None  # or `_open` would have raised
        return self._opened

    @property
    def problems(self) -> list[str]:
        """What the store lacks, in sentences; empty if it has everything."""
        return [without_secrets(problem, self._opening.address) for problem in self._problems()]

    def _problems(self) -> list[str]:
        missing = self._outbox.missing()
        if self._opened is None:
            error = next((write.error for write in reversed(missing) if write.error), self._away)
            since = " since it was resumed" if self._opening.resume_run_id else ""
            return [
                f"the MLflow store {self.uri} cannot be used for now ({error}); it has nothing of this run{since}, "
                f"whose metrics are in {self._directory}"
            ]
        found = [f"MLflow lacks {write.what}: {write.error}" for write in missing if not write.rounds]
        rounds = sorted({round for write in missing for round in write.rounds})
        if rounds:
            error = next(write.error for write in reversed(missing) if write.rounds)
            shown = ", ".join(map(str, rounds[:10])) + (", ..." if len(rounds) > 10 else "")
            which = f"round {shown}" if len(rounds) == 1 else f"{len(rounds)} rounds ({shown})"
            found.append(f"MLflow lacks the metrics of {which}, which are in {self._directory}: {error}")
        return found

    def log_round(self, round: int, metrics: Mapping[str, float]) -> None:
        """Log a round's metrics at step `round`, in one request per 1,000; may be repeated after a resume.

        Rounds that follow one another within `gather_s` share a request, which takes half the time.  Values that are
        not finite are never stored: the tag `non_finite_metrics` counts them by name.
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
        for some in list(in_batches(rows, METRICS_PER_REQUEST)) or [[]]:
            if sum(len(other) for _, other in self._gathered) + len(some) > METRICS_PER_REQUEST:
                self._send_gathered()
            self._gathered.append((round, some))
            self._gathered_tags = tags or self._gathered_tags
        self._sample()
        if time.monotonic() - self._sent_at >= self.gather_s:
            self._send_gathered()

    def _send_gathered(self) -> None:
        """Send the rounds that have not been sent."""
        if self._gathered:
            rounds = tuple(dict.fromkeys(round for round, _ in self._gathered if round >= 0))
            parts = [rows for _, rows in self._gathered]
            send = functools.partial(self._send_rows, parts, self._gathered_tags)
            self._gathered, self._gathered_tags, self._sent_at = [], [], time.monotonic()
            self._outbox.submit(Write("metrics", send, rounds))

    def _send_rows(self, parts: "list[list[Metric]]", tags: "list[RunTag]") -> None:
        """Send one request without the parts that the store has: each whole or not at all, so its first row tells."""
        client = self._client
        rows = [row for part in parts if not self._has(client, part) for row in part]
        if rows or tags:
            client.log_batch(self.run_id, metrics=rows, tags=tags)

    def _has(self, client: "MlflowClient", part: "list[Metric]") -> bool:
        """Whether the store has these rows of a resumed run."""
        if not part or self._logged_steps is None:
            return False
        key = part[0].key
        if key not in self._logged_steps:
            self._logged_steps[key] = {metric.step for metric in client.get_metric_history(self.run_id, key)}
        return part[0].step in self._logged_steps[key]

    def _submit(self, what: str, send: Callable[[], object]) -> None:
        """Send a request, after the rounds that have not been sent."""
        self._send_gathered()
        self._outbox.submit(Write(what, send))

    def _sampled(self, now_ms: int) -> "list[Metric]":
        from mlflow.entities import Metric

        values = self._samples.take()
        step = now_ms // 1000 if self._found is None else (now_ms - self._found[1].info.start_time) // 1000
        return [Metric(name, value, now_ms, step) for name, value in values.items()]

    def idle(self) -> None:
        """Send what waits to be sent with more, and see how busy the machine is."""
        self._sample()
        self._send_gathered()

    def _sample(self) -> None:
        """Measure what the machine and the processes of the run use, unless that was done a moment ago."""
        if self._opened is not None and not self._finished and self._samples.due():
            self._gathered.append((-1, self._sampled(int(time.time() * 1000))))

    def describe(self, text: str, tags: Mapping[str, str]) -> None:
        """Replace the description of the run, in Markdown, and set tags."""
        from mlflow.entities import RunTag

        new = [RunTag(clean_name(key), short(without_secrets(value))) for key, value in tags.items()]
        new.append(RunTag(DESCRIPTION, without_secrets(text)))
        self._submit("the description", lambda: self._client.log_batch(self.run_id, tags=new))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, or the files of a folder, into the run's artifacts, under `folder`."""

        def send() -> None:
            copy = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
            copy(self.run_id, str(path), folder)

        self._submit(f"the file {path}", send)

    def log_figure(self, path: Path) -> None:
        """Copy a figure into the run's artifacts, under figures/."""
        self.log_artifact(path, "figures")

    def log_model_state(self, path: Path) -> None:
        """Copy a safetensors file into the run's artifacts, under model/."""
        self.log_artifact(path, "model")

    def log_model(self, folder: Path) -> None:
        """Upload the folder of a model, as `tracking.model_folder` writes it, as the run's logged model."""

        def send() -> None:
            self._model_id = log_model(self._client, self.experiment_id, self.run_id, folder, self._model_id)

        self._submit("the model", send)

    def adopt(self, run_ids: Iterable[str]) -> None:
        """Make other runs of the store the children of this one, unless they have a parent."""
        ids = list(run_ids)
        self._submit("the runs of the sweep", lambda: adopt(self._client, self.run_id, ids))

    def finish(self, status: Status, message: str = "") -> None:
        """Send the requests that still wait, and end the run with the given status; only the first call counts."""
        if self._finished:
            return
        self.idle()
        self._finished = True
        if message:
            text = short(without_secrets(message))
            self._outbox.add(Write("the final message", lambda: self._client.set_tag(self.run_id, "message", text)))
        end = Write(f"the final status {status}", lambda: self._client.set_terminated(self.run_id, status))
        self._outbox.add(end)
        self._outbox.flush(FINISH_WAIT_S, FINISH_BUDGET_S, failures_allowed=Outbox.limit)
