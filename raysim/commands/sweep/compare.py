"""What a sweep promises to hold equal in all cells that it compares: images, epochs or local steps (`compare`)."""

from dataclasses import dataclass, field

from raysim.commands.plan.training import local_steps
from raysim.commands.sweep.grid import Cell, named
from raysim.config.schema import Config
from raysim.lifecycle.prepare import Prepared

_REMEDY = {
    "equal_images": "give every policy the same total, such as allocation.total={of: fedeas}, and put policies that "
    "cannot have it into a sweep of their own",
    "equal_epochs": "set the same rounds and local.epochs, and no local.steps",
    "equal_steps": "set local.steps, and the same rounds, in the base",
}


@dataclass
class Comparison:
    """The work of the cells of a sweep, as far as `compare` asks for it.

    kinds: what is to be equal.  found: by kind, then by clients (partition and seed), then by what a cell does, the
    names of the cells that do it.
    """

    kinds: tuple[str, ...]
    found: dict[str, dict[tuple[str, int], dict[str, list[str]]]] = field(default_factory=dict)

    def add(self, cell: Cell, prepared: Prepared) -> None:
        """Take in a cell; cells are compared with those on the same clients and with the same seed."""
        if not self.kinds:
            return
        clients = prepared.dealt.sha256(), cell.config.seed
        work = _work(cell.config, prepared)
        for kind in self.kinds:
            if work[kind]:
                self.found.setdefault(kind, {}).setdefault(clients, {}).setdefault(work[kind], []).append(cell.name)

    def problems(self) -> list[str]:
        """One line for each kind that is not equal, with the cells of the first clients where it is not."""
        lines = []
        for kind, groups in self.found.items():
            differing = [works for works in groups.values() if len(works) > 1]
            if differing:
                told = "; ".join(f"{work}: {named(cells)}" for work, cells in differing[0].items())
                more = f" (and so for {len(differing) - 1} more seeds or partitions)" if len(differing) > 1 else ""
                lines.append(f"compare = {kind}: cells on the same clients differ: {told}{more}; {_REMEDY[kind]}")
        return lines


def _work(config: Config, prepared: Prepared) -> dict[str, str]:
    """What a cell does, by kind, as a text that is equal where the work is; empty where there is nothing to compare.

    A cell that makes no image is the reference of any budget.
    """
    images = f"{prepared.images:,} images" if prepared.images else ""
    if prepared.budget is None:
        images = "a number of images that is decided during training"
    steps_K = local_steps(config, prepared.partition.sizes_K + prepared.quota_KC.sum(axis=1))
    epochs = config.local.params.get("epochs")
    steps = config.local.params.get("steps")
    each = f"{steps_K.min():,} to {steps_K.max():,} a client, " if steps_K.min() < steps_K.max() else ""
    if prepared.schedule is not None and not steps:
        each = f"steps that grow with the images ({prepared.schedule.name}), from "
    cohort = f" of {config.clients_per_round}" if config.clients_per_round != 1.0 else ""
    return {
        "equal_images": images,
        "equal_epochs": f"{config.rounds} rounds of " + (f"{steps} local steps" if steps else f"{epochs} local epochs"),
        "equal_steps": f"{config.rounds} rounds{cohort} of {each}{steps_K.sum():,} local steps",
    }
