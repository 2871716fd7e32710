"""`raysim.load_result`: the result of a run or a sweep, from its folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from raysim.lifecycle.directory import readable
from raysim.lifecycle.result import Result, load_run

if TYPE_CHECKING:
    from raysim.commands.sweep.sweep import SweepResult


def load_result(folder: str | Path) -> "Result | SweepResult":
    """Read what a run or a sweep found from its folder; a sweep that goes on gives the runs that have ended.

    Raises UserError for a folder that is neither, for a run that has not finished, and for files that are damaged.
    """
    path = Path(folder).expanduser()
    if not (path / "runs.csv").is_file():
        return load_run(path)
    import pandas as pd

    from raysim.commands.sweep.sweep import SweepResult

    with readable(path / "runs.csv"):
        runs = pd.read_csv(path / "runs.csv", dtype={"group": str})
        failed = runs.loc[runs["status"] == "FAILED", ["group", "seed", "error"]]
        causes = {f"{row.group}, seed {row.seed}": str(row.error) for row in failed.itertuples()}
    with readable(path / "table.csv"):
        table = pd.read_csv(path / "table.csv", dtype={"group": str})
    return SweepResult(runs, table, path, causes)
