"""Builds the plug-ins of a configuration, and refuses what cannot work together."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import nn

from raysim.aggregation.common import registered_sizes
from raysim.aggregation.privacy import PrivacyMechanism, clients_keep_state, reads_updates_alone, require_library
from raysim.config.load import load_config, with_resources
from raysim.config.plugin_guard import blaming
from raysim.config.plugin_source import with_source
from raysim.config.protocols import AggregationRule, ImageGenerator, LocalAlgorithm, ServerOptimiser
from raysim.config.registry import resolve
from raysim.config.schema import AggregationSection, Config, Section
from raysim.core.errors import UserError
from raysim.core.plain import PlainMapping
from raysim.core.records import Dataset, IntArray, sha256
from raysim.engine.messages import Plugin, WorkerSetup
from raysim.engine.placement import local_node, place_here
from raysim.engine.versions import installed
from raysim.evaluation.task import CLASSIFICATION, Task
from raysim.federation.cohort import cohort, cohort_size
from raysim.lifecycle.prepare import Prepared, named
from raysim.local.batchnorm import check_batch_size
from raysim.models.flat_model import FlatModel, build_model

Source = str | Path | PlainMapping | Config
_TEST_SPLITS = "parquet: test-*.parquet; image_folder: test/; npz: test_images and test_labels"


@dataclass(frozen=True)
class Components:
    """The plug-ins of a run as the driver needs them.

    model: the global model before round 1.  privacy: the noise and its guarantee; None without noise.
    generator_fingerprint: identifies the generator's images; empty where none are made.  task: what the model is for.
    notes: what the user should know about the combination.
    """

    rule: AggregationRule
    algorithm: LocalAlgorithm
    optimiser: ServerOptimiser
    model: FlatModel
    privacy: PrivacyMechanism | None = None
    generator_fingerprint: str = ""
    notes: list[str] = field(default_factory=list)
    task: Task = CLASSIFICATION


def read_config(
    source: Source, overrides: Iterable[str], keys: PlainMapping, say: Callable[[str], object] = lambda _: None,
    resources: PlainMapping = MappingProxyType({}),
) -> Config:
    """Read the configuration given to `raysim.run`: a YAML file, a mapping or a Config, with changes to its keys.

    say: told of code that a file names, before it runs.  resources: values of that section for keys that nothing sets.
    """
    if isinstance(source, Config):
        plain = source.resolved()
        plain["resources"] = {k: v for k, v in plain["resources"].items() if f"resources.{k}" in source.chosen}
        source = plain
    return with_resources(load_config(source, overrides, changes=keys, say=say), resources)


@overload
def plugin(kind: Literal["generator"], section: Section) -> Plugin[ImageGenerator]: ...
@overload
def plugin(kind: Literal["model"], section: Section) -> Plugin[nn.Module]: ...
@overload
def plugin(kind: Literal["local"], section: Section) -> Plugin[LocalAlgorithm]: ...
@overload
def plugin(kind: Literal["aggregation"], section: Section) -> Plugin[AggregationRule]: ...
@overload
def plugin(kind: Literal["server"], section: Section) -> Plugin[ServerOptimiser]: ...


def plugin(kind: str, section: Section) -> Plugin[Any]:  # Any: each kind builds something else, as said above
    """The plug-in of a section of the configuration, which can be sent to another process and built there."""
    return Plugin(kind, section.name, section.params)


def build_components(config: Config, prepared: Prepared, task: Task = CLASSIFICATION) -> Components:
    """Build the plug-ins before anything starts; UserError if one refuses its keys, the data or the cohort."""
    if not len(prepared.dataset.test_labels_N):
        raise UserError(
            f"data.name = {config.data.name}: there is no test image, so nothing could be measured; add a test "
            f"split ({_TEST_SPLITS}), or raise data.test_fraction where there is none"
        )
    with blaming(named(config)):
        return _build(config, prepared, task)


def _build(config: Config, prepared: Prepared, task: Task) -> Components:
    rule: AggregationRule = plugin("aggregation", config.aggregation).build()
    participants = cohort_size(config.clients_per_round, prepared.partition.clients)
    n_K = registered_sizes(prepared.partition.sizes_K, prepared.quota_KC, config.aggregation.weight_by)
    if prepared.schedule is not None and config.aggregation.weight_by == "total":
        _check_sizes(config, rule)
    rule.check(participants)
    rule.register(n_K, participants)
    _check_cohorts(config, rule, n_K, participants)
    algorithm = plugin("local", config.local).build()
    model = initial_model(config, prepared)
    if ":" in config.model.name:
        task.check(model, prepared.dataset, config.model.name)
    optimiser = plugin("server", config.server).build()
    algorithm.check(model.module, rule, optimiser)
    _check_combination(config, rule, algorithm, statistics=len(model.buffers_F) + len(model.counters))
    fixed = config.aggregation.buffers == "global"
    check_batch_size("local.batch_size", algorithm.batch_size, model, fixed)
    if config.fine_tuning.every is not None:
        check_batch_size("fine_tuning.batch_size", config.fine_tuning.batch_size, model, fixed)
    derived = [name for name in algorithm.summed if name in algorithm.server_only]
    if derived and config.update.changes_updates:
        raise UserError(
            f"update: local.name = {config.local.name} works out {', '.join(derived)} from the updates as they were "
            "computed; switch off update.top_k, quantise, clip and noise, or use another algorithm"
        )
    privacy = None
    if config.update.private:
        sent = 0 if config.aggregation.buffers == "global" else len(model.buffers_F)
        _check_privacy(config, rule, algorithm, float_buffers=sent)
        privacy = PrivacyMechanism.of(
            config.update, rule, config.aggregation.name, n_K, participants,
            keeps_state=clients_keep_state(config.update, algorithm, config.aggregation.buffers),
            drops=config.resources.on_client_failure == "drop",
        )
    if "oui" in rule.needs:
        from raysim.aggregation.oui import find_activation

        channels = prepared.dataset.channels
        size = prepared.dataset.image_size
        find_activation(model.module, torch.zeros(3, channels, *size), config.aggregation.params.get("layers"))
    fingerprint = ""
    if prepared.makes_images:
        generator = build_generator(config, prepared.dataset)
        _check_generator_memory(config, generator.memory_bytes())
        fingerprint = generator_fingerprint(config, prepared.dataset, generator)
    notes = _notes(config, rule, algorithm, n_K)
    return Components(rule, algorithm, optimiser, model, privacy, fingerprint, notes, task)


def generator_plugin(config: Config, dataset: Dataset) -> Plugin[ImageGenerator]:
    """The generator of a run as workers build it, whatever files their machines have."""
    section = config.generator
    return Plugin("generator", section.name, resolve("generator", section.name).settled(dataset, **section.params))


def build_generator(config: Config, dataset: Dataset) -> ImageGenerator:
    """The generator of a run, on the driver; UserError if it cannot make images like those of the data set."""
    from raysim.generation.find_weights import UnsuitableWeights, remedy

    try:
        return generator_plugin(config, dataset).build(dataset, "cpu")
    except UnsuitableWeights as error:
        if not config.source:
            raise
        file, *overrides = config.source
        raise UserError(f"{error.problem}; {remedy(file, overrides)}") from error


def generator_fingerprint(config: Config, dataset: Dataset, generator: ImageGenerator) -> str:
    """What identifies the images of a run: the generator, and the classifier that chooses among them, if any."""
    fingerprint = with_source(config.generator.name, generator.fingerprint())
    folder = config.generator.keep.classifier
    if config.generator.keep.rule != "confidence" or folder is None:
        return fingerprint
    from raysim.lifecycle.kept_model import load_classifier

    state = load_classifier(folder, dataset)[1]
    chosen_by = sha256(state.params_P, state.buffers_F, state.counters)
    return hashlib.sha256(f"{fingerprint} chosen by {chosen_by}".encode()).hexdigest()


def _notes(config: Config, rule: AggregationRule, algorithm: LocalAlgorithm, n_K: IntArray) -> list[str]:
    """Notes on combinations that work, though perhaps not as the user intends."""
    if not algorithm.equal_clients:
        return []
    weights_K = rule.constant_weights(n_K, len(n_K))
    if weights_K is not None and np.allclose(weights_K, weights_K[0]):
        return []
    return [
        f"local.name = {config.local.name} minimises the mean over clients, each counted alike, whatever "
        f"aggregation.name = {config.aggregation.name} weighs them by; the paper's choice is aggregation.name=uniform"
    ]


def _check_generator_memory(config: Config, each: int) -> None:
    """Refuse a generator that the memory of this machine cannot hold once for each worker that is started here."""
    if not each or config.resources.address is not None:
        return
    placement = place_here(config.resources)
    memory = local_node().memory_bytes or 0
    if placement.device == "cpu" and memory and placement.workers * each > memory:
        fit = memory // each
        remedy = f"set resources.workers to at most {fit}" if fit else "use a smaller model, or a machine with more"
        raise UserError(
            f"generator.name = {config.generator.name}: its weights take {each / 1e9:,.1f} GB in each of "
            f"{placement.workers} workers, and this machine has {memory / 1e9:,.1f} GB of memory; {remedy}"
        )


def _check_sizes(config: Config, rule: AggregationRule) -> None:
    """Refuse a rule that is told the sizes of all clients once, where these grow during the training."""
    if type(rule).register is not AggregationRule.register or config.update.private:
        reader = "the noise" if config.update.private else config.aggregation.name
        raise UserError(
            f"aggregation.weight_by = total: {reader} reads the sizes of all clients before round 1, and "
            f"with allocation.at = {config.allocation.at} they change later; use aggregation.weight_by=real"
        )


def _check_cohorts(config: Config, rule: AggregationRule, n_K: IntArray, participants: int) -> None:
    """Refuse a run with a round that draws only clients of weight 0, which is known before the run."""
    if not rule.needs_samples() or np.count_nonzero(n_K == 0) < participants:
        return
    for round_ in range(1, config.rounds + 1):
        drawn = cohort(config.seed, round_, len(n_K), participants)
        if not n_K[drawn].any():
            shown = ", ".join(map(str, drawn[:10])) + (", ..." if len(drawn) > 10 else "")
            raise UserError(
                f"aggregation.name = {config.aggregation.name}: it weighs by {config.aggregation.weight_by} samples, "
                f"and the clients of round {round_} [{shown}] have none; set aggregation.weight_by=total, raise "
                "partition.min_samples or clients_per_round, or use aggregation.name=uniform"
            )


def _check_combination(config: Config, rule: AggregationRule, algorithm: LocalAlgorithm, statistics: int) -> None:
    """Refuse combinations that contradict each other or have no effect."""
    if algorithm.summed and (rule.robust or not rule.is_weighted_sum):
        raise UserError(
            f"aggregation.name = {config.aggregation.name}: local.name = {config.local.name} also sums further vectors "
            f"({', '.join(algorithm.summed)}) over all clients, so a single one could still move the model without "
            "bound; use a rule that is a mean, or an algorithm that sends updates alone"
        )
    if config.aggregation.buffers != "average" and not statistics:
        raise UserError(
            f"aggregation.buffers = {config.aggregation.buffers}: the model {config.model.name} has no running "
            "statistics, so nothing would change; leave it at average, or use a model with batch normalisation"
        )


def _check_privacy(config: Config, rule: AggregationRule, algorithm: LocalAlgorithm, float_buffers: int) -> None:
    """Refuse what would send more than the noise hides, or what has no bound on a client's influence."""
    if algorithm.summed:
        sent = ", ".join(algorithm.summed)
        raise UserError(
            f"update.noise_multiplier: local.name = {config.local.name} sends further vectors ({sent}) that no noise "
            "hides; use an algorithm that sends updates alone, such as sgd or fedprox"
        )
    if float_buffers:
        raise UserError(
            f"update.noise_multiplier: model.name = {config.model.name} has running statistics (batch normalisation) "
            "that no noise hides; use a model without them"
        )
    if config.update.noise_at == "server" and not rule.is_weighted_sum:
        remedy = "update.noise_at=client or another rule" if reads_updates_alone(rule) else "another rule"
        raise UserError(
            f"update.noise_at = server: {config.aggregation.name} is no weighted sum, so what one client can change "
            f"of it is not bounded; use {remedy}"
        )
    require_library()


def measures(section: AggregationSection, rule: AggregationRule) -> dict[str, PlainMapping]:
    """The statistics of trained clients that a rule needs, with their options from its own keys."""
    options = {key: section.params.get(key) for key in ("probe", "probe_size", "layers")}
    return dict.fromkeys(rule.needs, options)


def initial_model(config: Config, prepared: Prepared) -> FlatModel:
    """The global model before round 1, a function of the model's configuration and seed, and the data's shape."""
    dataset = prepared.dataset
    build = plugin("model", config.model).build
    module = build_model(build, dataset.channels, dataset.image_size, dataset.classes, config.model_seed)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise UserError(
            f"model.name = {config.model.name}: {lazy[0]} has no size before the first images (a lazy layer, such as "
            "nn.LazyLinear); give the size, or run the module once on zeros of the images' shape where it is built"
        )
    return FlatModel(module)


def worker_setup(config: Config, rule: AggregationRule, task: Task = CLASSIFICATION) -> WorkerSetup:
    """The settings that every worker needs."""
    return WorkerSetup(
        config.seed, plugin("model", config.model), plugin("local", config.local), tuple(config.data.augment),
        config.resources.precision == "bf16", measures(config.aggregation, rule),
        update=config.update, buffers=config.aggregation.buffers, versions=installed(),
        batch_trainer=None if config.resources.client_batching == "off" else "dense", model_seed=config.model_seed,
        partition_seed=config.partition_seed, task=task,
    )
