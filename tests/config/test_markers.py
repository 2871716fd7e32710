"""A key that the user has set and that nothing reads is named, with the reason; no key that is read ever is."""

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import yaml
from pydantic import Field

from raysim.config.load import load_config
from raysim.config.markers import AtMost, NotWith, OnlyWith, ReplacedBy, markers_of
from raysim.config.registry import KINDS, available, parameters, resolve
from raysim.config.schema import SECTIONS, Config
from raysim.core.errors import ConfigError
from raysim.lifecycle.prepare import prepare

BASE = {"data": {"name": "digits"}, "rounds": 3}
IID = {**BASE, "partition": {"name": "iid"}}
LIGHT = ("data", "partition", "allocation", "local", "aggregation", "server", "model")
ROOT = Path(__file__).parents[2]

UNREAD = [
    (["local.nesterov=true"], "local.nesterov = true has no effect: it is read only where local.momentum is set (here "
     "local.momentum = 0.0)"),
    (["allocation.name=fedeas", "allocation.beta=12", "allocation.total=50"],
     "allocation.total = 50 takes the place of allocation.beta = 12.0, which is not used"),
    (["local.steps=5", "local.epochs=1"], "local.steps = 5 takes the place of local.epochs = 1, which is not used"),
    (["local.schedule.every=5"], "local.schedule.every = 5 has no effect: it is read only where local.schedule.kind is "
     "step (here local.schedule.kind = constant)"),
    (["local.schedule.kind=cosine", "local.schedule.rounds=9", "local.schedule.factor=0.5"],
     "local.schedule.factor = 0.5 has no effect"),
    (["local.schedule.kind=step", "local.schedule.floor=0.5"], "local.schedule.floor = 0.5 has no effect"),
    (["local.schedule.rounds=30"], "local.schedule.rounds = 30 has no effect"),
    (["update.noise_at=client"], "update.noise_at = client has no effect: it is read only where update.noise_multiplier"
     " is set (here update.noise_multiplier = 0.0)"),
    (["update.delta=1e-6"], "update.delta = 1.0e-06 has no effect"),
    *([[f"fine_tuning.{key}=3"], f"fine_tuning.{key} = 3"] for key in ("clients", "epochs", "batch_size", "lr")),
    (["fine_tuning.test_images=null"], "fine_tuning.test_images = null has no effect"),
    (["resources.object_store_bytes=90000000", "resources.address=auto"], "resources.object_store_bytes = 90000000 has "
     "no effect: it is read only where resources.address is null (here resources.address = auto)"),
    (["tracking.uri=none", "tracking.experiment=x"], "tracking.experiment = x has no effect: it is read only where "
     "tracking.uri is not none (here tracking.uri = none)"),
    (["partition.name=file", "partition.path=p.json", "partition.stream=numpy"], "partition.stream = numpy has no"),
    (["partition.name=file", "partition.path=p.json", "partition.seed=3"], "partition.seed = 3 has no effect"),
    (["partition.rare.fraction=0", "partition.rare.max_samples=9"], "partition.rare.max_samples = 9 has no effect"),
    (["partition.label_noise={fraction: 0, kind: pair}"], "partition.label_noise.kind = pair has no effect"),
    (["partition.input_noise={fraction: 0, std: 0.3}"], "partition.input_noise.std = 0.3 has no effect"),
    (["local.name=scaffold", "local.allow_momentum=true"], "local.allow_momentum = true has no effect"),
    (["local.name=moon", "local.mu=0", "local.tau=0.3"], "local.tau = 0.3 has no effect"),
    (["model.name=resnet18", "model.norm=batch", "model.groups=8"], "model.groups = 8 has no effect"),
    (["aggregation.name=fedoui", "aggregation.gamma=0", "aggregation.eps=0.1"], "aggregation.eps = 0.1 has no effect"),
    (["aggregation.name=fedalign", "aggregation.eta=0", "aggregation.eps=0.1"], "aggregation.eps = 0.1 has no effect"),
    (["aggregation.name=fedoui_align", "aggregation.eta=0", "aggregation.gamma=0", "aggregation.eps=0.1"],
     "aggregation.eps = 0.1 has no effect"),
]  # fmt: skip

READ = [
    ["local.nesterov=true", "local.momentum=0.9"],
    ["allocation.name=fedeas", "allocation.beta=8"],
    ["allocation.name=fedeas", "allocation.total=50", "allocation.size=linear", "allocation.entropy=false"],
    ["local.epochs=3"],
    ["local.schedule={kind: step, every: 5, factor: 0.5, warmup: 2}"],
    ["local.schedule={kind: cosine, rounds: 5, floor: 0.5}"],
    ["update.noise_multiplier=1", "update.clip=1", "update.noise_at=client", "update.delta=1e-6"],
    ["fine_tuning.every=2", "fine_tuning.epochs=3", "fine_tuning.test_images=null"],
    ["resources.object_store_bytes=90000000"],
    ["tracking.experiment=x"],
    ["partition.name=file", "partition.path=p.json", "partition.seed=3", "partition.rare.fraction=0.5"],
    ["aggregation.name=fedoui_align", "aggregation.eta=0", "aggregation.eps=0.1"],
    ["model.name=resnet18", "model.groups=8"],
    ["server.name=adam", "server.b1=0", "server.tau=0.1"],
]


@pytest.mark.parametrize(("overrides", "said"), UNREAD, ids=[" ".join(o[-2:]) for o, _ in UNREAD])
def test_a_key_that_nothing_reads_is_named_with_the_reason(overrides, said):
    [note] = load_config(BASE, overrides, LIGHT).notes
    assert note.startswith(said)


@pytest.mark.parametrize("overrides", READ, ids=" ".join)
def test_a_key_that_is_read_is_not_named(overrides):
    assert load_config(BASE, overrides, LIGHT).notes == []


def test_defaults_are_no_choice_of_the_user():
    assert load_config(BASE, (), LIGHT).chosen == {"data.name", "rounds"}
    assert load_config(BASE, (), LIGHT).notes == []


def test_a_default_that_the_user_wrote_counts_and_one_in_a_section_written_in_full_does_not():
    """`beta: 12` is the default: beside a total it is a mistake, but not in a file that raysim itself has written."""
    written = load_config(BASE, ["allocation={name: fedeas, beta: 12, total: 50}"], LIGHT)
    assert len(written.notes) == 1
    again = load_config(written.resolved(), (), LIGHT)
    assert again.notes == [] and again.hash() == written.hash()
    other = load_config(BASE, ["allocation={name: fedeas, beta: 8, total: 50}"], LIGHT)
    assert load_config(other.resolved(), (), LIGHT).notes == other.notes != []


SHIPPED = [
    path
    for path in sorted(ROOT.glob("experiments/**/*.yaml"))
    if path.parent.name not in ("cluster", "generators") and "grid" not in yaml.safe_load(path.read_text())
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_experiment_that_is_shipped_has_a_key_without_effect(path):
    assert load_config(path).unread == []


EVERY = [(kind, name) for kind in KINDS for name in available(kind)]


def fields_of_everything():
    """(where, its fields) of every mapping of keys: sections, plug-ins, and the models inside them."""
    for name, model in {"": Config, **SECTIONS}.items():
        yield name, model.model_fields
    for kind, name in EVERY:
        found = parameters(resolve(kind, name)).model_fields
        yield f"{kind} {name}", {**(SECTIONS[kind].model_fields if kind in SECTIONS else {}), **found}
        for key, field in found.items():
            if hasattr(field.annotation, "model_fields"):
                yield f"{kind} {name}.{key}", field.annotation.model_fields


def test_every_condition_names_a_key_that_is_there():
    """Else a misspelt name would have every use of a key reported, or none."""
    conditions = 0
    for where, fields in fields_of_everything():
        for name, field in fields.items():
            for marker in markers_of(field):
                if isinstance(marker, OnlyWith | NotWith | ReplacedBy):
                    assert marker.key in fields and marker.key != name, f"{where}: {name} with {marker.key}"
                    conditions += 1
    assert conditions > 30


@dataclasses.dataclass
class mine:
    """A server optimiser of the user's own."""

    lr: Annotated[float, Field(gt=0), AtMost(100)] = 1.0
    warm: bool = False
    warmth: Annotated[int, OnlyWith("warm")] = 3

    def init(self, parameters: int) -> dict:
        return {}

    def step(self, state: dict, update_P: np.ndarray) -> tuple[dict, np.ndarray]:
        return {}, update_P


def test_the_markers_work_in_plugins_of_the_users_own():
    name = f"server.name={__name__}:mine"
    assert load_config(BASE, [name, "server.warmth=4", "server.warm=true"], LIGHT).notes == []
    [note] = load_config(BASE, [name, "server.warmth=4"], LIGHT).notes
    assert note == (
        "server.warmth = 4 has no effect: it is read only where server.warm is set (here server.warm = false)"
    )
    with pytest.raises(ConfigError, match=r"server\.lr = 101: more than 100, the most that makes sense here"):
        load_config(BASE, [name, "server.lr=101"], LIGHT)


@pytest.mark.parametrize(
    "override",
    [
        "rounds=1000000000000", "seed=99999999999999999999", "local.epochs=1000000000000", "local.steps=10000000000000",
        "local.batch_size=1000000000000", "partition.clients=1000000000000", "partition.seed=9223372036854775808",
        "resources.workers=1000000000", "resources.threads_per_worker=1000000", "resources.task_timeout_s=1e300",
        "fine_tuning.epochs=1000000000000", "resources.object_store_bytes=99999999999999999999999",
        "model.seed=9223372036854775808",
    ],
)  # fmt: skip
def test_a_value_far_beyond_sense_is_refused(override):
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [override], LIGHT)
    [problem] = caught.value.problems
    assert problem.startswith(override.partition("=")[0]) and ": more than " in problem


def _npz(folder: Path, test: bool) -> str:
    images, labels = np.zeros((40, 4, 4), np.uint8), np.repeat([0, 1], 20)
    arrays = {"test_images": images, "test_labels": labels} if test else {}
    np.savez(folder / f"{test}.npz", train_images=images, train_labels=labels, **arrays)
    return f"data={{name: npz, path: {folder / f'{test}.npz'}, test_fraction: 0.2, flips: true}}"


def test_keys_that_these_data_leave_without_effect_are_named(tmp_path):
    """test_fraction where there is a test split; what a generator is told where no image is asked for."""
    with_split = load_config(IID, [_npz(tmp_path, True), "data.split_seed=3", "generator.steps=9"])
    assert prepare(with_split).notes == [
        "data.test_fraction, data.split_seed have no effect: the data set npz has a test split of its own",
        "data.flips has no effect: only `raysim pretrain` and output.quality mirror images by it",
        "generator.steps has no effect: no synthetic image is asked for (allocation)",
    ]
    without = [_npz(tmp_path, False), "output.quality=true", "generator.steps=9", "allocation.name=full"]
    assert prepare(load_config(IID, without)).notes == []
    [note] = prepare(load_config(BASE, ["aggregation.weight_by=total"], LIGHT)).notes
    assert note == "aggregation.weight_by = total has no effect: there is no synthetic image to count"
