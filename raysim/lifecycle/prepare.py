"""Loads the data of a configuration, partitions them among clients, and computes the quota of synthetic images."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raysim.allocation.schedule import AllocationSchedule
from raysim.config.plugin_guard import ask_partition
from raysim.config.registry import resolve
from raysim.config.schema import MODIFIERS, PLUGIN_SECTIONS, Config
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.host import physical_bytes
from raysim.core.records import Allocation, Dataset, IntArray, Partition
from raysim.data.assigning import keep_samples


@dataclass(frozen=True)
class Prepared:
    """The data set, its partition, and what the allocation policy makes of it.

    partition: the real samples that clients train on.  allocation: what clients have before round 1.  dealt: all real
    samples that clients own; those of `partition`, unless the policy leaves some out.  schedule: when the policy is
    asked again; None for a policy that is asked once, before round 1.  foreseen: what clients have after the last date;
    None where that depends on the training.  budget: images in all; None where that, too, is decided during training.
    notes: messages about how the data were read.
    """

    dataset: Dataset
    partition: Partition
    allocation: Allocation
    dealt: Partition
    schedule: AllocationSchedule | None
    foreseen: Allocation | None
    budget: int | None
    notes: list[str] = field(default_factory=list)

    @property
    def quota_KC(self) -> IntArray:
        """Synthetic images of each class that each client trains on: K x C."""
        return self.allocation.quota_KC

    @property
    def images(self) -> int:
        """How many images are made in the run, as far as that is known before it."""
        return self.allocation.images if self.budget is None else self.budget

    @property
    def makes_images(self) -> bool:
        """Whether images are made, or may be."""
        return self.schedule is not None or bool(self.allocation.images)

    @property
    def left_out(self) -> int:
        """How many real samples the policy leaves out."""
        return int(self.dealt.offsets_K1[-1] - self.partition.offsets_K1[-1])


def load_dataset(config: Config, notes: list[str] | None = None) -> Dataset:
    """Load the configured data set, set public and validation images apart, and reduce it to the configured numbers.

    notes: messages of the data set and of the cache of decoded images are appended to it.
    """
    from raysim.data.reader import open_reader, read_dataset
    from raysim.data.splits import hold_out, subset, validation_split

    name = config.data.name
    reader = open_reader(config.output.cache, [] if notes is None else notes)
    dataset = read_dataset(name, resolve("data", name), config.data.params, reader)
    dataset = validation_split(hold_out(dataset, config.data.public_frac), config.data.validation_fraction)
    return subset(dataset, config.data.train_samples, config.data.test_samples)


def make_partition(config: Config, dataset: Dataset) -> Partition:
    """Partition the training samples and apply the modifiers; the result depends on data, section and seed alone."""
    section = config.partition
    seed = config.partition_seed
    draw = rng.stream(seed, rng.PARTITION) if section.stream == "raysim" else _numpy_stream(config)
    try:
        partition = ask_partition(section.name, resolve("partition", section.name), dataset, draw, section.params)
    except UserError as error:
        raise UserError(f"{error}{_left_by_validation(config, len(dataset.train_labels_N))}") from error
    for i, key in enumerate(MODIFIERS):
        params = getattr(section, key)
        if params is not None:
            partition = resolve("modifier", key)(partition, rng.stream(seed, rng.MODIFIER, -1, i), **params)
    return partition


def _left_by_validation(config: Config, left: int) -> str:
    """For a message about too few samples: how many a validation split has left to the clients."""
    fraction = config.data.validation_fraction
    return f" (data.validation_fraction = {fraction:g} leaves {left:,} training images)" if fraction else ""


def partition_notes(config: Config) -> list[str]:
    """Notes on a partition that was made: that a file does not tell for which training labels it was written."""
    if config.partition.name != "file":
        return []
    from raysim.data.partition_file import unchecked_note

    return unchecked_note(config.partition.params["path"])


def _numpy_stream(config: Config) -> np.random.RandomState:
    if config.partition.name == "dirichlet_client":
        raise UserError("partition.stream = numpy: each client of dirichlet_client has a stream of its own; use raysim")
    seed = config.partition_seed
    if seed >= 2**32:
        key = "seed" if config.partition.seed is None else "partition.seed"
        raise UserError(f"{key} = {seed}: partition.stream = numpy takes seeds below 2^32 = {2**32}")
    return rng.numpy_stream(seed)


def allocate(config: Config, partition: Partition) -> tuple[AllocationSchedule | None, Allocation, Allocation | None]:
    """Ask the allocation policy: (when it is asked again, what clients have before round 1, what they have at the end).

    See `Prepared`.  Raises UserError for a client without any sample, real or synthetic, before round 1.
    """
    section = config.allocation
    if partition.drawn is not None and section.name == "none" and not section.params.get("total"):
        nothing = Allocation(np.broadcast_to(np.int64(0), (partition.clients, partition.classes)))  # takes no memory
        return None, nothing, nothing
    counts_KC = partition.counts_KC
    apart = "" if partition.sizes_K.all() else _left_by_validation(config, int(partition.offsets_K1[-1]))
    try:
        schedule = AllocationSchedule.of(section, counts_KC, config.generator.keep.candidates)
        start = schedule.start(counts_KC, config.seed)
        foreseen = schedule.foreseen(counts_KC, config.seed) if schedule.is_later else start
    except UserError as error:
        raise UserError(f"{error}{apart}") from error
    empty = np.flatnonzero(partition.sizes_K + start.quota_KC.sum(axis=1) == 0)
    if len(empty):
        raise UserError(
            f"client {empty[0]} has no sample, real or synthetic, before round 1; raise partition.min_samples or use "
            f"fewer clients{apart}"
        )
    return (schedule if schedule.is_later else None), start, foreseen


def _check_measured(config: Config, schedule: AllocationSchedule, dataset: Dataset, partition: Partition) -> None:
    """Refuse a policy that asks for what cannot be measured."""
    if schedule.asks_measured and config.update.private:
        raise UserError(
            f"allocation.name = {schedule.name}: it looks at what clients' models have learnt, which the noise of "
            "update.noise_multiplier does not hide; use a policy that looks at counts, or no noise"
        )
    if not schedule.measures:
        return
    if dataset.validation_labels_N is None or not len(dataset.validation_labels_N):
        raise UserError(
            f"allocation.name = {schedule.name}: it asks for {schedule.measures[0]}, measured on a validation split, "
            "and there is none; set data.validation_fraction, such as data.validation_fraction=0.1"
        )
    if partition.drawn is not None:
        raise UserError(
            f"allocation.name = {schedule.name}: it asks for {schedule.measures[0]} of {partition.clients:,} clients, "
            "which are drawn when they train; use a policy that looks at counts, or fewer than 100,000 clients"
        )


def _check_keep(config: Config) -> None:
    """Refuse a rule that has no model to judge candidates by when the first are made."""
    keep, at = config.generator.keep, config.allocation.at
    if keep.rule == "none" or (keep.rule == "confidence" and keep.classifier is not None):
        return
    if at[0] == 0:
        remedy = "set generator.keep.classifier to the folder of a run, or " if keep.rule == "confidence" else ""
        raise UserError(
            f"generator.keep.rule = {keep.rule}: before round 1 there is no classifier to judge images by; {remedy}ask "
            f"for images after a round, such as allocation.at=[1] (here {at})"
        )
    if keep.rule == "discrepancy" and config.update.private:
        raise UserError(
            "generator.keep.rule = discrepancy: it looks at what clients' models have learnt, which the noise of "
            "update.noise_multiplier does not hide; use another rule, or no noise"
        )


def named(config: Config) -> dict[str, str]:
    """The plug-ins of a configuration by key, such as local.name -> sgd."""
    return {f"{section}.name": getattr(config, section).name for section in PLUGIN_SECTIONS}


def prepare(config: Config, dataset: Dataset | None = None, partition: Partition | None = None) -> Prepared:
    """Load the data, partition them (unless given), compute the quota.  Raises UserError for what cannot work."""
    notes: list[str] = []
    dataset = dataset or load_dataset(config, notes)
    partition = make_partition(config, dataset) if partition is None else partition
    if isinstance(config.clients_per_round, int) and config.clients_per_round > partition.clients:
        raise UserError(
            f"clients_per_round = {config.clients_per_round}: there are only {partition.clients} clients; "
            f"use at most {partition.clients}, or a fraction such as 1.0"
        )
    schedule, start, foreseen = allocate(config, partition)
    budget = None if foreseen is None else foreseen.images
    if schedule is not None:
        _check_measured(config, schedule, dataset, partition)
        budget = schedule.total(partition.counts_KC) if foreseen is None else budget
    _check_memory(start.images if budget is None else budget, dataset)
    notes += partition_notes(config)
    notes += unread_keys(config, dataset, schedule is not None or bool(start.images))
    if schedule is not None or start.images:
        _check_keep(config)
    keep_KC = start.keep_KC
    kept = partition if keep_KC is None else keep_samples(partition, keep_KC, config.partition_seed)
    return Prepared(dataset, kept, start, partition, schedule, foreseen, budget, notes)


def unread_keys(config: Config, dataset: Dataset, images: bool) -> list[str]:
    """Notes on the keys that the user has set and that have no effect on these data, one line for each reason.

    images: whether any synthetic image is asked for.  Keys without effect by the configuration alone are in
    `config.unread`.
    """
    notes = unread_data_keys(config, dataset)
    if "data.flips" in config.chosen and not config.output.quality:
        notes.append("data.flips has no effect: only `raysim pretrain` and output.quality mirror images by it")
    if not images:
        made = sorted(key.removeprefix("generator.") for key in config.chosen if key.startswith("generator."))
        if made:
            notes.append(f"{_have_no_effect('generator', made)}: no synthetic image is asked for (allocation)")
        if "aggregation.weight_by" in config.chosen and config.aggregation.weight_by == "total":
            notes.append("aggregation.weight_by = total has no effect: there is no synthetic image to count")
    return notes


def unread_data_keys(config: Config, dataset: Dataset) -> list[str]:
    """A note on the keys of `data` that the user has set and that the data set did not use; none if it used all."""
    own = [key for key in dataset.unread if f"data.{key}" in config.chosen]
    return [f"{_have_no_effect('data', own)}: the data set {dataset.name} has a test split of its own"] if own else []


def _have_no_effect(section: str, keys: Sequence[str]) -> str:
    return ", ".join(f"{section}.{key}" for key in keys) + (" has no effect" if len(keys) == 1 else " have no effect")


def _check_memory(images: int, dataset: Dataset) -> None:
    """Refuse more images than this machine has memory for, since most of them would be on the disk."""
    height, width = dataset.image_size
    needed = images * dataset.image_bytes
    memory = physical_bytes()
    if needed > memory:
        raise UserError(
            f"allocation: it asks for {images:,} images of {dataset.channels} x {height} x {width} bytes, "
            f"{needed / 1e9:,.0f} GB in all, and this machine has {memory / 1e9:,.0f} GB of memory; ask for a smaller "
            "budget (`raysim plan` shows what each takes)"
        )
