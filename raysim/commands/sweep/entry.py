"""`raysim sweep`: starts the MLflow process before the slow imports (torch, Ray), so that both load at once."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.core.signals import stoppable
from raysim.lifecycle.entry import only_one
from raysim.lifecycle.session import open_session
from raysim.tracking.process import MlflowProcess
from raysim.ui.notebook import quieten

if TYPE_CHECKING:
    from raysim.commands.sweep.sweep import SweepResult


@stoppable
def sweep(file: str | Path, overrides: Iterable[str] = ()) -> "SweepResult":
    """Run every combination of a sweep file, one after another on one Ray.

    overrides: dotted keys that change the base, `grid.KEY=[...]` one axis.
    A cell is one combination. Cells whose run is finished (same configuration and inputs, same rounds, in output.dir)
    are not run again; interrupted ones go on from their last checkpoint.  A cell that fails is recorded, and the other
    cells are run all the same.
    Raises ConfigError or UserError, before Ray starts, for input that cannot work in any cell.
    """
    kept = open_session()
    quieten()
    with only_one(), MlflowProcess() if kept is None else contextlib.nullcontext(kept.mlflow()) as mlflow:
        from raysim.commands.sweep.sweep import run_sweep

        if kept is None:
            return run_sweep(file, overrides, mlflow)
        return run_sweep(file, overrides, mlflow, kept.ray, kept.given)
