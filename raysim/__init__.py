"""raysim: exact, fast federated-learning simulation on label-skewed data."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_config", "run"]


def __getattr__(name: str) -> Any:
    """Import the public functions when they are first used, so that `import raysim` stays light."""
    if name == "run":
        from raysim.runner import run

        return run
    if name == "load_config":
        from raysim.config import load_config

        return load_config
    raise AttributeError(f"module 'raysim' has no attribute {name!r}")
