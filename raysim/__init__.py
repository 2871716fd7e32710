"""raysim: exact, fast federated-learning simulation on label-skewed data."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim.commands.load_result import load_result
    from raysim.commands.plan.plan import plan
    from raysim.commands.pretrain import pretrain
    from raysim.commands.report.report import report
    from raysim.commands.sweep.entry import sweep
    from raysim.config.load import load_config
    from raysim.lifecycle.entry import run
    from raysim.lifecycle.kept_model import load_model
    from raysim.lifecycle.result import Result
    from raysim.lifecycle.session import session

__version__ = "0.1.0"
__all__ = [
    "Result", "__version__", "load_config", "load_model", "load_result", "plan", "pretrain", "report", "run", "session",
    "sweep",
]  # fmt: skip

_HOMES = {
    "Result": "raysim.lifecycle.result",
    "load_config": "raysim.config.load",
    "load_model": "raysim.lifecycle.kept_model",
    "load_result": "raysim.commands.load_result",
    "plan": "raysim.commands.plan.plan",
    "pretrain": "raysim.commands.pretrain",
    "report": "raysim.commands.report.report",
    "run": "raysim.lifecycle.entry",
    "session": "raysim.lifecycle.session",
    "sweep": "raysim.commands.sweep.entry",
}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used, so that `import raysim` stays light."""
    if name in _HOMES:
        from raysim.core.signals import Signals

        with Signals() as signals:  # Ctrl-C in the middle of it would leave torch half imported
            found = getattr(importlib.import_module(_HOMES[name]), name)
            signals.check()
        return found
    raise AttributeError(f"module 'raysim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return sorted(__all__)
