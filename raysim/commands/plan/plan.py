"""What each policy would cost and remove, from label counts alone: before any image is made or any worker starts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raysim.allocation import fedeas_budget
from raysim.allocation.imbalance import contributions_K, missing_cells, removed_fraction, top_share
from raysim.allocation.policies import full_balance
from raysim.allocation.schedule import AllocationSchedule
from raysim.commands.plan.speed import Speed, bytes_per_image, measure
from raysim.commands.plan.training import TrainingSpeed, local_steps
from raysim.commands.plan.training import measure as measure_training
from raysim.config.load import load_config
from raysim.config.protocols import MEASURED_INPUTS
from raysim.config.registry import asked_for, available, check_name, check_parameters, parameters, resolve
from raysim.config.schema import AllocationSection, Config
from raysim.core.errors import UserError
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import Allocation, Dataset, FloatArray, IntArray, Partition
from raysim.core.signals import stoppable
from raysim.federation.cohort import cohort_size
from raysim.lifecycle.figures import lorenz_curves
from raysim.lifecycle.prepare import load_dataset, make_partition, partition_notes, unread_data_keys

BETAS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0)
MOST_SEEDS = 10_000
_SECTIONS = ("data", "partition", "allocation")
_TIMED = ("generator", "model", "local", "aggregation", "server")


@dataclass(frozen=True)
class PolicyPlan:
    """What one policy would do.

    images: how many it would make.  of_full_frac: images as a fraction of what full class balancing takes.
    removed: fraction of the imbalance removed.  touched: clients that get images.  missing: empty (client, class) cells
    left.  after_KC: what clients then train on, real and synthetic.  left_out: real samples that it leaves out.
    shared: whether all clients have the same images.  matched: it was asked for the total of the reference policy,
    because it needs a total and none was given.  problem: why it cannot be used; the quota is then all zero.
    unforeseen: it looks at what training shows, so only its number of images is known; the quota is all zero, too.
    """

    name: str
    quota_KC: IntArray
    images: int
    of_full_frac: float
    synthetic_share: float
    removed: float
    touched: int
    missing: int
    top_share: float
    after_KC: IntArray
    left_out: int = 0
    shared: bool = False
    matched: bool = False
    problem: str = ""
    unforeseen: bool = False


@dataclass(frozen=True)
class Quotas:
    """The plans of all policies on one partition.  reference: the policy whose total the others were asked for."""

    rows: dict[str, PolicyPlan]
    reference: str


@dataclass(frozen=True)
class OverSeeds:
    """The plans over several seeds of the partition.

    images, removed: by policy, one number per seed, NaN where the policy cannot be used.  full_balance: images that
    full class balancing takes, per seed.  beta: that of the selection rule, per seed, NaN where none satisfies it.
    """

    seeds: list[int]
    images: dict[str, FloatArray]
    removed: dict[str, FloatArray]
    full_balance: FloatArray
    beta: FloatArray


@dataclass(frozen=True)
class Plan:
    """Everything that `raysim plan` shows.  chosen: the beta of the selection rule, None where no beta satisfies it."""

    config: Config
    dataset: Dataset
    partition: Partition
    counts_KC: IntArray
    quotas: Quotas
    betas: list[fedeas_budget.BetaRow]
    chosen: fedeas_budget.BetaRow | None
    speed: Speed | None
    training: TrainingSpeed | None
    seeds: OverSeeds | None
    notes: list[str] = field(default_factory=list)

    @property
    def full_balance(self) -> int:
        """How many images full class balancing takes."""
        return full_balance(self.counts_KC)

    @property
    def bytes_per_image(self) -> int | None:
        """The bytes of one image in the cache; None for data without images."""
        return bytes_per_image(self.dataset)

    def training_s(self, row: PolicyPlan) -> float | None:
        """The estimated seconds of all rounds with the images of a policy; None if they were not measured."""
        if self.training is None:
            return None
        return self.training.seconds(self.config, self.dataset, self._sizes_K(row))

    def local_steps(self, row: PolicyPlan) -> float:
        """Local steps of all clients in a round with the images of a policy; the mean where not all take part."""
        K = len(self.counts_KC)
        part = cohort_size(self.config.clients_per_round, K) / K
        return part * float(local_steps(self.config, self._sizes_K(row)).sum())

    def _sizes_K(self, row: PolicyPlan) -> IntArray:
        sizes_K: IntArray = row.after_KC.sum(axis=1)
        return sizes_K

    def check(self) -> None:
        """Raise UserError if the configured policy cannot be used on this partition."""
        problem = self.quotas.rows[self.config.allocation.name].problem
        if problem:
            raise UserError(problem)


@stoppable
def plan(
    source: str | Path | PlainMapping,
    overrides: Iterable[str] = (),
    *,
    policies: str | Sequence[str] | None = None,
    betas: str | Sequence[float] | None = None,
    seeds: str | Sequence[int] | None = None,
    measure_speed: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Plan a configuration: a YAML file or a mapping.

    policies: names, as a list or comma-separated; by default all built-in ones; the configured one is always there.
    betas: for the table of budgets.  seeds: `0-29` or a list, to see how totals vary with the partition.
    measure_speed: time one small batch of the generator and a few local steps; without it torch is not imported.
    say: told of code that the file names, before it runs.
    Raises ConfigError or UserError for input that cannot work.
    """
    config = load_config(source, overrides, (*_SECTIONS, *_TIMED) if measure_speed else _SECTIONS, say=say)
    names = _policies(policies, config)
    beta_list = _betas(betas, config)
    seed_list = parse_seeds(seeds) if seeds is not None else []
    notes: list[str] = []
    dataset = load_dataset(config, notes)
    partition = make_partition(config, dataset)
    counts_KC = partition.counts_KC
    ablation = _ablation(config)
    return Plan(
        config, dataset, partition, counts_KC,
        plan_policies(config, counts_KC, names),
        fedeas_budget.beta_table(counts_KC, beta_list, **ablation),
        choose_beta(counts_KC, **ablation),
        measure(config, dataset) if measure_speed else None,
        measure_training(config, dataset) if measure_speed else None,
        plan_seeds(config, dataset, names, seed_list) if seed_list else None,
        [*config.notes, *notes, *partition_notes(config), *unread_data_keys(config, dataset)],
    )


def plan_policies(config: Config, counts_KC: IntArray, names: Sequence[str]) -> Quotas:
    """Plan every named policy on these counts; those that need a total get that of the configured policy."""
    own = config.allocation
    rows = {own.name: _row(own.name, counts_KC, own.params, config, at=own.at)}
    reference = rows[own.name]
    if not reference.images and own.name != "fedeas":
        reference = rows["fedeas"] if "fedeas" in rows else _row("fedeas", counts_KC, {}, config)
    for name in names:
        if name not in rows:
            row = _row(name, counts_KC, {}, config)
            takes_total = "total" in parameters(resolve("allocation", name)).model_fields
            if row.problem and takes_total and not reference.problem:
                row = _row(name, counts_KC, {"total": reference.images}, config, matched=True)
            rows[name] = row
    return Quotas({name: rows[name] for name in names}, reference.name)


def _row(
    name: str, counts_KC: IntArray, params: PlainDict, config: Config, matched: bool = False,
    at: Sequence[int] | None = None,
) -> PolicyPlan:
    """What a policy would do in all.  at: when it is asked; None: once, before round 1 if it can be."""
    ratio, seed = config.generator.keep.candidates, config.seed
    asked = Allocation(np.zeros_like(counts_KC))
    problem, unforeseen = "", None
    try:
        policy = resolve("allocation", name)
        checked, problems = check_parameters(policy, params, "allocation")
        if problems:
            raise UserError("; ".join(problems))
        dates = list(at) if at else [int(bool(set(asked_for(policy)) & set(MEASURED_INPUTS)))]
        schedule = AllocationSchedule.of(AllocationSection(name=name, at=dates, **checked), counts_KC, ratio)
        foreseen = schedule.foreseen(counts_KC, seed)
        if foreseen is None:
            unforeseen = schedule.total(counts_KC)
            if unforeseen is None and "total" in checked:
                raise UserError(f"allocation.total is required by `{name}`: give a number of images")
        else:
            asked = foreseen
    except UserError as error:
        problem = str(error)
    real_KC = counts_KC if asked.keep_KC is None else asked.keep_KC
    after_KC = real_KC + asked.quota_KC
    images = asked.images if unforeseen is None else unforeseen
    return PolicyPlan(
        name, asked.quota_KC, images,
        of_full_frac=images / max(full_balance(counts_KC), 1),
        synthetic_share=int(asked.quota_KC.sum()) / max(int(after_KC.sum()), 1),
        removed=removed_fraction(counts_KC, after_KC),
        touched=int((asked.quota_KC.sum(axis=1) > 0).sum()),
        missing=int(missing_cells(after_KC).sum()),
        top_share=top_share(contributions_K(after_KC)),
        after_KC=after_KC,
        left_out=int((counts_KC - real_KC).sum()),
        shared=asked.shared,
        matched=matched,
        problem=problem,
        unforeseen=not problem and foreseen is None,
    )


def choose_beta(
    counts_KC: IntArray, *, entropy: bool = True, size: fedeas_budget.Size = "sqrt"
) -> fedeas_budget.BetaRow | None:
    """The beta that the selection rule chooses, or None; betas are tried in order until a quarter is synthetic."""
    for beta in fedeas_budget.BETAS:
        row = fedeas_budget.beta_table(counts_KC, [beta], entropy=entropy, size=size)[0]
        if row.satisfies:
            return row
        if row.synthetic_share >= 0.25:
            break
    return None


def plan_seeds(config: Config, dataset: Dataset, names: Sequence[str], seeds: Sequence[int]) -> OverSeeds:
    """Plan the policies on the partition of each seed."""
    quotas: list[Quotas] = []
    full, betas = [], []
    for seed in seeds:
        seeded = config.model_copy(update={"partition": config.partition.model_copy(update={"seed": seed})})
        counts_KC = make_partition(seeded, dataset).counts_KC
        quotas.append(plan_policies(seeded, counts_KC, names))
        full.append(full_balance(counts_KC))
        chosen = choose_beta(counts_KC, **_ablation(config))
        betas.append(chosen.beta if chosen else np.nan)

    def column(name: str, attribute: str) -> FloatArray:
        rows = [q.rows[name] for q in quotas]
        unknown = [row.problem or (row.unforeseen and attribute != "images") for row in rows]
        values = [np.nan if hidden else getattr(row, attribute) for row, hidden in zip(rows, unknown, strict=True)]
        return np.array(values, dtype=np.float64)

    return OverSeeds(
        list(seeds),
        {name: column(name, "images") for name in names},
        {name: column(name, "removed") for name in names},
        np.array(full, dtype=np.float64),
        np.array(betas, dtype=np.float64),
    )


def draw(planned: Plan, folder: str | Path) -> list[Path]:
    """Draw heat maps of the counts, Lorenz curves, and images against imbalance removed; returns the files."""
    from raysim.ui import plots

    target = Path(folder).expanduser()
    counts_KC = planned.counts_KC
    usable = [row for row in planned.quotas.rows.values() if row.images and not row.unforeseen]
    names = planned.dataset.class_names
    paths = [
        plots.client_counts(
            row.after_KC - row.quota_KC, row.quota_KC, names, target / f"counts_{_slug(row.name)}.png", row.name
        )
        for row in usable
    ]
    after = {f"with {row.name}": row.after_KC for row in usable}
    paths.append(plots.lorenz(lorenz_curves({"real samples": counts_KC, **after}), target / "lorenz.png"))
    columns = np.array([[row.images, row.removed, row.beta] for row in planned.betas]).T
    paths.append(plots.budget_curve(columns[0], columns[1], columns[2], target / "budget.png"))
    return paths


def parse_seeds(seeds: str | Sequence[int]) -> list[int]:
    """Parse seeds: `0-2,7` gives [0, 1, 2, 7]; UserError for anything else, and for a seed that is named twice."""
    if not isinstance(seeds, str):
        return [int(seed) for seed in seeds]
    found: list[int] = []
    for part in seeds.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UserError(f"--seeds = {seeds!r}: {part.strip()!r} is not a seed or a range; write 0-29, or 0,1,5")
        some = range(int(first), int(last or first) + 1)
        if len(some) > MOST_SEEDS:
            raise UserError(f"--seeds = {seeds!r}: {len(some):,} seeds are too many; use at most {MOST_SEEDS:,}")
        found += some
    if len(set(found)) < len(found):
        raise UserError(f"--seeds = {seeds!r}: a seed is named twice; write each once")
    return found


def _policies(given: str | Sequence[str] | None, config: Config) -> list[str]:
    if isinstance(given, str):
        names = [name.strip() for name in given.split(",")]
    else:
        names = list(given or available("allocation"))
    for name in names:
        problem = check_name("allocation", name)
        if problem:
            raise UserError(f"--policies: {name!r}: {problem}")
    return list(dict.fromkeys([*names, config.allocation.name]))


def _betas(given: str | Sequence[float] | None, config: Config) -> list[float]:
    """The betas of the table; the configured one is always among them."""
    own = config.allocation.params.get("beta") if config.allocation.name == "fedeas" else None
    if given is None:
        given = [float(beta) for beta in fedeas_budget.BETAS] if own == "auto" else list(BETAS)
    parts = given.split(",") if isinstance(given, str) else given
    try:
        betas = [float(beta) for beta in parts]
    except ValueError as error:
        raise UserError(f"--betas = {given!r}: {error}; write numbers, such as 4,8,12") from error
    if not all(0 < beta < np.inf for beta in betas):
        raise UserError(f"--betas = {given!r}: each must be a finite number greater than 0, such as 4,8,12")
    return sorted({*betas, *([float(own)] if isinstance(own, int | float) else [])})


def _ablation(config: Config) -> PlainDict:
    """The factors of FedEAS that the configuration leaves out, for the table of betas."""
    params = config.allocation.params if config.allocation.name == "fedeas" else {}
    return {key: params[key] for key in ("entropy", "size") if key in params}


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
