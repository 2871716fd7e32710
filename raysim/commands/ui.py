"""`raysim ui`: MLflow's pages of the store that runs write to, and the address of the page that is wanted."""

from collections.abc import Callable
from pathlib import Path

from raysim.core.errors import UserError
from raysim.core.plain import PlainDict
from raysim.core.secrets import without_secrets
from raysim.lifecycle.directory import SUMMARY, RunDirectory, readable
from raysim.tracking import links, pages
from raysim.tracking.store import SqliteFile, check_uri


def ui(folder: str | None, store: str | None, port: int, say: Callable[[str], object]) -> None:
    """Serve the pages until the process that does so ends, or is interrupted; says where the wanted page is.

    folder: of a run or a sweep, whose page is wanted; None: the list of runs of the newest experiment.  store: as
    `tracking.uri`; None: that of `folder`, or `auto`.  Pages of a server are only named, as the server serves them.
    Raises UserError for a folder without a run in MLflow, a store that is not there, and a port that is taken.
    """
    found = {} if folder is None else _in_mlflow(Path(folder).expanduser())
    uri = check_uri(store or found.get("mlflow_uri", "auto"))
    if uri == "none":
        raise UserError("tracking.uri = none: nothing was written to MLflow; name a store (--store sqlite:///PATH)")
    if uri.startswith("http"):
        say(_page(found, uri, port) or uri)
        return
    path = SqliteFile(uri).path
    if path is not None and not path.is_file():
        raise UserError(f"there is no {path}: no run has written to it; go to where runs were started, or name --store")
    pages.check_port(port)
    say(f"MLflow of {without_secrets(uri)} starts, which takes some seconds")
    with pages.served(uri, port) as process:
        say(_page(found, uri, port) or links.base(uri, port))
        say("Ctrl-C ends it")
        process.wait()


def _page(found: PlainDict, uri: str, port: int) -> str:
    """The page of what was found, of the newest experiment where that is nothing; empty in an empty store."""
    experiment, run = found.get("mlflow_experiment_id", ""), found.get("mlflow_run_id", "")
    if found.get("sweep"):
        return links.runs_page(uri, experiment, port)
    if run:
        return links.run_page(uri, experiment, run, port)
    experiment = pages.newest_experiment(links.base(uri, port))
    return links.runs_page(uri, experiment, port) if experiment else ""


def _in_mlflow(folder: Path) -> PlainDict:
    """The entries `mlflow_...` of the folder of a run or a sweep, and whether it is a `sweep`."""
    directory = RunDirectory(folder)
    for name in (SUMMARY, "sweep.json"):
        if (folder / name).is_file():
            with readable(folder / name):
                content = directory.read_json(name)
            if not content.get("mlflow_experiment_id") or not content.get("mlflow_run_id"):
                raise UserError(f"{folder}: it has no run in MLflow; without a folder, `raysim ui` shows the store")
            return {**content, "sweep": name != SUMMARY}
    raise UserError(f"{folder}: not the folder of a run that has finished, nor of a sweep")
