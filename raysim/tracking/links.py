"""The addresses of MLflow's pages."""

HOST = "127.0.0.1"
PORT = 5000
_TRAINING = "?workflowType=machine_learning"  # without it, MLflow may open a page for traces and prompts


def base(uri: str, port: int = PORT) -> str:
    """Where the pages of a store are: a server's own address, for any other store that of `raysim ui`."""
    return uri.rstrip("/") if uri.startswith("http") else f"http://{HOST}:{port}"


def run_page(uri: str, experiment_id: str, run_id: str, port: int = PORT) -> str:
    """The page of a run; empty where the store has no such run."""
    return f"{base(uri, port)}/#/experiments/{experiment_id}/runs/{run_id}" if experiment_id and run_id else ""


def runs_page(uri: str, experiment_id: str, port: int = PORT) -> str:
    """The page that lists the runs of an experiment, as those of a sweep."""
    return f"{base(uri, port)}/#/experiments/{experiment_id}/runs{_TRAINING}"
