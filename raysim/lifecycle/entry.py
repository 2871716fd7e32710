"""`raysim.run`: starts the MLflow process before the slow imports (torch, Ray), so that both load at once."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.config.load import read_config
from raysim.config.schema import Config
from raysim.config.yaml_io import parse_overrides
from raysim.core.errors import ConfigError, UserError
from raysim.core.records import Dataset
from raysim.core.signals import stoppable
from raysim.lifecycle.session import open_session
from raysim.tracking.process import MlflowProcess
from raysim.ui.notebook import quieten

if TYPE_CHECKING:
    from raysim.engine.session import Session
    from raysim.lifecycle.build import Source
    from raysim.lifecycle.result import Result


_RUNNING = threading.RLock()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """A context that one thread of a process has at a time, as a process has one connection to Ray.

    Raises UserError in any other thread.
    """
    if not _RUNNING.acquire(blocking=False):
        raise UserError(
            "another run of this process has not ended, and a process has one connection to Ray: start this one after "
            "it, or in a process of its own (`python -m raysim run`)"
        )
    try:
        yield
    finally:
        _RUNNING.release()


@stoppable
def run(
    source: "Source",
    overrides: Iterable[str] = (),
    *,
    resume: bool | str | Path = False,
    accept_changes: bool = False,
    session: "Session | None" = None,
    dataset: Dataset | None = None,
    **keys: Any,
) -> "Result":
    """Run a configuration: a YAML file, a mapping, or a Config.

    overrides: dotted keys as on the command line (`allocation.beta=8`).  keys: top-level keys, such as rounds=5;
    a mapping sets the keys of its section that it names, and the others stay.
    Inside `raysim.session`, keys of `resources` that the configuration does not set are those of the session.
    resume: go on with the newest run of this configuration, or with the one in this folder, from its last checkpoint,
    to the same result.
    accept_changes: resume although code or versions have changed, which may change the result.
    session: an open Ray session; None: that of `raysim.session` where one is open, else one for this run alone.
    dataset: a loaded data set, for runs that follow one another.
    Raises ConfigError or UserError, before Ray starts, for input that cannot work and while another run of this process
    goes on, and RunError for a run that failed.
    """
    overrides = list(overrides)
    kept = open_session()
    quieten()
    with only_one(), contextlib.ExitStack() as owned:
        mlflow = None
        if _tracks(source, overrides, keys):
            mlflow = kept.mlflow() if kept is not None else owned.enter_context(MlflowProcess())
        from raysim.lifecycle.inputs import Inputs
        from raysim.lifecycle.runner import run_experiment

        return run_experiment(
            source,
            overrides,
            keys,
            resume=resume,
            accept_changes=accept_changes,
            session=session if session is not None or kept is None else kept.ray,
            inputs=None if dataset is None else Inputs(dataset),
            mlflow=mlflow,
            resources=kept.given if session is None and kept is not None else {},
        )


def _tracks(source: "Source", overrides: Iterable[str], keys: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for an MLflow run, from a first look at it, which finds no fault."""
    try:
        if isinstance(source, Config):
            plain = source.resolved()
        else:
            plain = dict(source) if isinstance(source, Mapping) else read_config(source)[0]
        uri = None
        changes = [(["tracking"], plain.get("tracking")), (["tracking"], keys.get("tracking"))]
        for steps, value in [*changes, *parse_overrides(overrides)]:
            if steps == ["tracking"] and isinstance(value, Mapping):
                uri = value.get("uri", uri)
            uri = value if steps == ["tracking", "uri"] else uri
    except (ConfigError, OSError, AttributeError):
        return False  # it comes again, and is reported, where the configuration is read in full
    return uri != "none"
