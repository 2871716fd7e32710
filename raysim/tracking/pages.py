"""MLflow's pages of a store, served on this machine by a process of its own."""

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from raysim.core.errors import RunError, UserError
from raysim.core.plain import PlainDict
from raysim.core.secrets import without_secrets
from raysim.tracking import links

START_S = 300.0  # seconds until the pages must be there; MLflow itself loads for many
LOOK_S = 0.2
_APP = "raysim"  # raysim.tracking.training_pages
_ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def check_port(port: int) -> None:
    """Raise UserError where another program listens on this port, or none may."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((links.HOST, port))
        except OSError as error:
            raise UserError(
                f"--port = {port}: it cannot be used ({error.strerror}), perhaps by an earlier `raysim ui`; "
                f"end that, or choose another port: raysim ui --port {port + 1}"
            ) from error


@contextlib.contextmanager
def served(uri: str, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A context in which the pages of a store are at 127.0.0.1, on this port; ends their process.

    uri: of a sqlite file or a database.  Raises RunError where MLflow ends instead, with what it said.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", links.HOST]
    command += ["--port", str(port), "--workers", "1"]
    if importlib.metadata.entry_points(group="mlflow.app", name=_APP):  # an older installation lacks it
        command += ["--app-name", _APP]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, env={**os.environ, **_ENVIRONMENT}, stdout=said, stderr=said, start_new_session=True
        )
        try:
            give_up_at = time.monotonic() + START_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > give_up_at:
                    said.seek(0)
                    last = " ".join(said.read().decode(errors="replace").split()[-60:])
                    raise RunError(f"the pages of {without_secrets(uri)} could not be served: {without_secrets(last)}")
                time.sleep(LOOK_S)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{links.HOST}:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def newest_experiment(base: str) -> str:
    """The id of the experiment of a server that changed last, and holds runs of raysim; empty without any."""
    asked = {"max_results": 1, "order_by": ["last_update_time DESC"], "filter": "name != 'Default'"}
    found = _ask(base, "experiments/search", asked).get("experiments", [])
    return str(found[0]["experiment_id"]) if found else ""


def _ask(base: str, what: str, question: PlainDict) -> PlainDict:
    request = urllib.request.Request(
        f"{base}/api/2.0/mlflow/{what}", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: PlainDict = json.load(answer)
            return found
    except (urllib.error.URLError, OSError, ValueError):
        return {}
