"""A plan as text of at most 100 columns."""

import json
import sys
from typing import TYPE_CHECKING, TextIO

import numpy as np

from raysim.allocation.imbalance import contributions_K, imbalance, missing_cells, top_share
from raysim.commands.plan.as_json import as_json, statistics
from raysim.commands.plan.plan import OverSeeds, Plan, PolicyPlan
from raysim.config.schema import Section
from raysim.core.secrets import plain_without_secrets, without_secrets
from raysim.core.validation import show
from raysim.ui.display import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100


def print_plan(planned: Plan, stream: TextIO | None = None) -> None:
    """Print the partition, a row for each policy, a row for each beta, and the spread over seeds if asked for."""
    from rich.console import Console

    console = Console(file=stream or sys.stdout, markup=False, highlight=False, emoji=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    for line in _heading(planned):
        console.print(without_secrets(line))
    _print_table(console, _policy_table(planned))
    for note in _policy_notes(planned):
        console.print(note)
    if planned.training is not None and planned.training.per_image_s is not None:
        _print_table(console, _time_table(planned))
    if planned.training is not None:
        console.print(planned.training.note)
    _print_table(console, _beta_table(planned))
    console.print(_rule(planned))
    if planned.seeds is not None:
        _print_table(console, _seed_table(planned.seeds))
        console.print(_rule_over_seeds(planned.seeds))


def print_json(planned: Plan, stream: TextIO | None = None) -> None:
    """Print the plan as one JSON object, with secrets masked."""
    print(json.dumps(plain_without_secrets(as_json(planned)), indent=2), file=stream or sys.stdout)


def size(bytes_: int) -> str:
    """Bytes with a unit: 512 B, 3.1 kB, 41.3 MB."""
    value = float(bytes_)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def _heading(planned: Plan) -> list[str]:
    counts_KC = planned.counts_KC
    config = planned.config
    K, C = counts_KC.shape
    contribution_K = contributions_K(counts_KC)
    sizes_K = counts_KC.sum(axis=1)
    return [
        f"{planned.dataset.name}: {int(counts_KC.sum()):,} real samples of {C} classes, "
        f"{K} clients of {sizes_K.min():,} "
        f"to {sizes_K.max():,}",
        f"partition {_described(config.partition)}, seed {config.partition_seed}",
        f"configured policy {_described(config.allocation)}",
        f"imbalance score {imbalance(counts_KC):.3f}, of which the top 20 % of clients hold "
        f"{top_share(contribution_K):.0%}",
        f"{int(missing_cells(counts_KC).sum()):,} of {K * C:,} (client, class) cells are empty; full class balancing "
        f"takes {planned.full_balance:,} images",
        *[f"note: {note}" for note in planned.notes],
    ]


def _described(section: Section) -> str:
    """A plug-in and its keys in one line, without those that are null."""
    shown = plain_without_secrets(section.model_dump())
    keys = {key: value for key, value in shown.items() if key != "name" and value is not None}
    if keys.get("at") == [0]:
        del keys["at"]
    return f"{section.name} {show(keys)}" if keys else section.name


def _table(*columns: str) -> "Table":
    """A table whose first column is aligned left, the others right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, heading in enumerate(columns):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True, vertical="bottom")
    return table


def _print_table(console: "Console", table: "Table") -> None:
    """Print a table without spaces at the ends of its lines."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.file.write(f"{line.rstrip()}\n")


def _policy_table(planned: Plan) -> "Table":
    has_time = planned.speed is not None and planned.speed.images_per_s is not None
    has_size = planned.bytes_per_image is not None
    table = _table(
        "policy", "images", "of full\nbalance", "synthetic\nshare", "imbalance\nremoved", "clients\ntouched",
        "empty\ncells", *(["time"] if has_time else []), *(["storage"] if has_size else []),
    )
    for row in planned.quotas.rows.values():
        table.add_row(*_policy_cells(planned, row, has_time, has_size))
    return table


def _policy_cells(planned: Plan, row: PolicyPlan, has_time: bool, has_size: bool) -> list[str]:
    name = f"{row.name} *" if row.matched else row.name
    if row.problem:
        return [name, "cannot"]
    seconds = planned.speed.seconds(row.images) if planned.speed else None
    effects = [f"{row.synthetic_share:.1%}", f"{row.removed:.1%}", f"{row.touched:,}", f"{row.missing:,}"]
    return [
        name, f"{row.images:,}", f"{row.of_full_frac:.1%}", *(["?"] * len(effects) if row.unforeseen else effects),
        *([duration(seconds)] if has_time and seconds is not None else []),
        *([size(row.images * (planned.bytes_per_image or 0))] if has_size else []),
    ]


def _time_table(planned: Plan) -> "Table":
    table = _table("a run with", "local steps\na round", "images", "rounds", "both")
    for row in planned.quotas.rows.values():
        training_s = planned.training_s(row)
        if row.problem or row.unforeseen or training_s is None:
            continue
        images_s = planned.speed.seconds(row.images) if planned.speed else None
        table.add_row(
            row.name, f"{planned.local_steps(row):,.0f}", "?" if images_s is None else duration(images_s),
            duration(training_s), "?" if images_s is None else duration(images_s + training_s),
        )
    return table


def _policy_notes(planned: Plan) -> list[str]:
    rows = planned.quotas.rows.values()
    notes = [f"{row.name} cannot be used here: {row.problem}" for row in rows if row.problem]
    if any(row.matched for row in rows):
        notes.append(f"* needs a total: asked for that of {planned.quotas.reference}")
    if looking := [row.name for row in rows if row.unforeseen]:
        notes.append(f"?: {', '.join(looking)} look at what training shows; only the number of images is known before")
    keep = planned.config.generator.keep
    if keep.rule != "none":
        notes.append(f"images: candidates; one in {keep.ratio:g} is kept ({keep.rule}), and the shares are of those")
    notes += [f"{row.name} leaves out {row.left_out:,} real samples" for row in rows if row.left_out]
    notes += [f"{row.name}: all clients have the same {row.images:,} images, made once" for row in rows if row.shared]
    notes.append("empty cells: (client, class) pairs that stay without a sample")
    if planned.speed is not None:
        notes.append(planned.speed.note)
    if planned.bytes_per_image is not None:
        notes.append(f"storage: {planned.bytes_per_image:,} bytes an image in the cache")
    return notes


def _beta_table(planned: Plan) -> "Table":
    table = _table("fedeas with beta", "images", "synthetic\nshare", "imbalance\nremoved", "")
    for row in planned.betas:
        mark = "<- selection rule" if planned.chosen is not None and row.beta == planned.chosen.beta else ""
        table.add_row(f"{row.beta:g}", f"{row.images:,}", f"{row.synthetic_share:.1%}", f"{row.removed:.1%}", mark)
    return table


def _rule(planned: Plan) -> str:
    rule = "selection rule (removes at least 50 % at under 25 % synthetic)"
    return f"{rule}: beta {planned.chosen.beta:g}" if planned.chosen else f"{rule}: no beta satisfies it"


def _seed_table(over: OverSeeds) -> "Table":
    table = _table(f"{len(over.seeds)} seeds", "images: mean", "sd", "min", "max", "removed: mean", "sd")
    for name, values in over.images.items():
        images = statistics(values)
        removed = statistics(over.removed[name])
        if not images["n"]:
            table.add_row(name, "cannot")
            continue
        short = f" ({images['n']} seeds)" if images["n"] < len(over.seeds) else ""
        table.add_row(
            name + short, f"{images['mean']:,.0f}", "-" if images["sd"] is None else f"{images['sd']:,.0f}",
            f"{images['min']:,.0f}", f"{images['max']:,.0f}",
            "?" if removed["mean"] is None else f"{removed['mean']:.1%}",
            "-" if removed["sd"] is None else f"{removed['sd']:.1%}",
        )
    return table


def _rule_over_seeds(over: OverSeeds) -> str:
    known = over.beta[np.isfinite(over.beta)]
    if not len(known):
        return "selection rule: no beta satisfies it for any of the seeds"
    text = f"selection rule: beta {np.median(known):g} (median), {known.min():g} to {known.max():g}"
    without = len(over.seeds) - len(known)
    return text + (f"; for {without} of {len(over.seeds)} seeds no beta satisfies it" if without else "")
