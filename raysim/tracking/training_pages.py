"""MLflow's pages as `raysim ui` serves them: they open on model training, and not on traces and prompts.

An app of MLflow (`mlflow server --app-name raysim`, found through the entry point `mlflow.app`).  MLflow keeps that
choice in the browser, begins with traces, and does not ask an experiment for its kind (issue 24498 of mlflow/mlflow).
So its one page of HTML is served with a line that makes the choice where none was made; its own switch still works.
"""

from pathlib import Path

from mlflow.server import app as pages

try:
    from mlflow.server.fastapi_app import app
except ImportError:  # before MLflow 3.4, which has no other app
    app = pages

_KEY = "mlflow.workflowType_v1"
_SCRIPT = f"<script>localStorage['{_KEY}'] ??= '\"machine_learning\"'</script>"
_PAGE = Path(pages.static_folder or "") / "index.html"

__all__ = ["app"]


def training_first() -> str:
    """MLflow's page of HTML, which loads everything else, with that line at its beginning."""
    return _PAGE.read_text(encoding="utf-8").replace("<head>", f"<head>{_SCRIPT}", 1)


if "serve" in pages.view_functions and _PAGE.is_file():
    pages.view_functions["serve"] = training_first
