"""raysim: exact, fast federated-learning simulation on label-skewed data."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim.config.load import load_config
    from raysim.lifecycle.entry import run
    from raysim.lifecycle.summary import Result

__version__ = "0.1.0"
__all__ = ["Result", "__version__", "load_config", "run"]

_HOMES = {"run": "raysim.lifecycle.entry", "Result": "raysim.lifecycle.summary", "load_config": "raysim.config.load"}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used, so that `import raysim` stays light."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'raysim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return sorted(__all__)
