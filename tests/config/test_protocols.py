"""Plug-ins are what their protocols say: built-in ones name by name, a user's own with defaults for what they omit."""

import inspect
import sys

import numpy as np
import pytest

from raysim.aggregation.mean import fedavg
from raysim.aggregation.robust import krum, median
from raysim.config.plugin_help import describe
from raysim.config.protocols import POLICY_INPUTS, PROTOCOLS
from raysim.config.registry import KINDS, available, check_parameters, complete, resolve
from raysim.core import rng
from raysim.core.errors import RunError
from raysim.core.records import RoundTable
from raysim.local.contract import Job

EVERY = [(kind, name) for kind in KINDS for name in available(kind)]
CLASSES = ("generator", "local", "aggregation", "server")
TABLE = RoundTable(2, np.array([3, 5]), np.array([4, 16]))

MINE = '''
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from raysim.plugins_api import sgd

def by_root(table, *, power: float = 0.5):
    """Weigh clients by a power of their size."""
    return table.n_K ** power
def of_one(table): return np.ones(1)
def negative(table): return np.array([1.0, -1.0])
def nothing(table): return np.zeros(2)
def not_finite(table): return np.array([1.0, np.nan])
def texts(table): return ["a", "b"]
def two(table, updates): ...
number_rule = np.ones

class bare_rule:
    """All weight to the first client."""
    def weights(self, table, updates): return None

class by_coordinate(bare_rule):
    def aggregate(self, table, updates): return np.zeros(3)

class bare_generator:
    """Grey."""
    def __init__(self, dataset, device, *, level: int = 128): self.level = level
    def sample(self, labels_B, seeds_B): ...
    def fingerprint(self): return f"grey {self.level}"

class bare_local:
    """No step at all."""
    epochs, steps, batch_size = 1, None, 8
    def learning_rate(self, round_): return 0.1
    def loss(self, job, x, y_B): ...
    def step(self, job): ...

class forgotten(sgd):
    """A dataclass but for its first line."""
    beta: float = 0.1
class forgotten_rule:
    beta: float = 0.1
    def weights(self, table, updates): ...
class shadows(sgd):
    lr = 0.5
@dataclass
class shadows_too(sgd):
    momentum = 0.9
@dataclass
class right(sgd):
    """Nothing is wrong here."""
    beta: float = 0.1
    further: ClassVar[int] = 3
    lr: float = 0.5
class right_too(sgd):
    """No key is declared."""
    further: ClassVar[int] = 3
    _private: int = 4
class own_init(sgd):
    """Takes its keys itself."""
    state: dict
    def __init__(self, *, beta: float = 0.1): super().__init__(lr=beta)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_doors.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_doors", None)


def positional(function) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind}:{name}" for kind, name in EVERY])
def test_every_plugin_has_the_members_of_its_protocol_with_the_same_parameters(kind, name):
    plugin, protocol = resolve(kind, name), PROTOCOLS[kind]
    if kind not in CLASSES:
        asked = [n for n in positional(vars(protocol)["__call__"])[1:] if n not in ("args", "keys")]
        given = [p for p in inspect.signature(plugin).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert [p.name for p in given][: len(asked)] == asked
        named = POLICY_INPUTS if kind == "allocation" else ()
        assert all(p.default is not p.empty or p.name in named for p in given[len(asked) :])
        return
    assert complete(kind, plugin) is plugin  # nothing had to be filled in
    for member, what in vars(protocol).items():
        if member.startswith("_") or not inspect.isfunction(getattr(protocol, member)):
            continue
        asked = [n for n in positional(getattr(protocol, member)) if n not in ("args", "keys")]
        assert [n for n in positional(getattr(plugin, member)) if n not in ("args", "keys")] == asked, (member, what)


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind}:{name}" for kind, name in EVERY])
def test_the_keys_of_every_plugin_can_be_shown(kind, name):
    lines = describe(kind, name)
    assert lines[0].startswith(f"{kind} {name}: ") and len(lines) > 2
    assert any("default " in line or "required" in line or "takes no keys" in line for line in lines)


def test_a_default_that_is_an_object_is_shown_by_its_fields():
    [line] = [line for line in describe("local", "fedprox") if "local.schedule:" in line]
    assert "kind: constant" in line and "floor: 0.0" in line


def test_a_plain_function_is_a_rule_whose_numbers_are_divided_by_their_sum(mine):
    """Sizes 4 and 16 to the power 0.5 are 2 and 4, so the weights are 1/3 and 2/3."""
    kind = resolve("aggregation", "my_doors:by_root")
    keys, problems = check_parameters(kind, {}, "aggregation")
    assert (keys, problems) == ({"power": 0.5}, [])
    assert check_parameters(kind, {"powr": 1.0}, "aggregation")[1][0].startswith("aggregation.powr = 1.0: no such key")
    rule = kind(**keys)
    assert rule.weights(TABLE, None).w_K.tolist() == [1 / 3, 2 / 3]
    assert rule.is_weighted_sum and not rule.streams and rule.needs == ()
    assert describe("aggregation", "my_doors:by_root")[0].endswith("Weigh clients by a power of their size.")


@pytest.mark.parametrize("name", ["of_one", "negative", "nothing", "not_finite", "texts"])
def test_a_function_that_gives_no_weights_ends_the_run_by_name(mine, name):
    rule = resolve("aggregation", f"my_doors:{name}")()
    with pytest.raises(RunError, match=rf"round 2: the aggregation rule my_doors:{name} .*for each of the 2 clients"):
        rule.weights(TABLE, None)


def test_what_a_rule_leaves_out_has_a_default(mine):
    rule = resolve("aggregation", "my_doors:bare_rule")()
    assert (rule.needs, rule.streams, rule.robust, rule.state()) == ((), False, False, {})
    assert rule.check(3) is None and rule.load_state({}) is None and rule.aggregate(TABLE, None) is None
    assert rule.is_weighted_sum
    assert not resolve("aggregation", "my_doors:by_coordinate")().is_weighted_sum


def test_rules_that_give_the_update_themselves_are_told_from_weighted_sums():
    assert fedavg().is_weighted_sum and krum().is_weighted_sum and not median().is_weighted_sum


def test_what_a_generator_leaves_out_has_a_default(mine):
    kind = resolve("generator", "my_doors:bare_generator")
    assert kind.image_seed(3, 1, 2, 5) == rng.integer(3, rng.SYNTHETIC, 1, 2, 5)
    assert kind.notes(None, np.ones((1, 1)), level=3) == []
    assert kind(None, "cpu", level=3).fingerprint() == "grey 3"


def test_what_a_local_algorithm_leaves_out_has_a_default(mine):
    """Without momentum, FedNova's ||a||_1 is the number of steps."""
    algorithm = resolve("local", "my_doors:bare_local")()
    job = Job(None, None, 0.1, 1, 0, 5, steps=7)
    assert (algorithm.summed, algorithm.broadcast, algorithm.server_only) == ((), (), ())
    assert algorithm.finish(job) is None and algorithm.effective_steps(job) == 7
    update_P = np.ones(2)
    assert algorithm.server_update({"v": update_P}, {}, update_P) == ({"v": update_P}, update_P)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("local", "forgotten", r"'forgotten' is no dataclass.*\(beta\).*write @dataclass above it"),
        ("aggregation", "forgotten_rule", r"'forgotten_rule' is no dataclass.*\(beta\).*write @dataclass above it"),
        ("local", "shadows", "lr of class 'shadows' has no annotation, so it changes no key"),
        ("local", "shadows_too", "momentum of class 'shadows_too' has no annotation"),
        ("local", "by_root", "it has no batch_size, epochs.*; derive from raysim.plugins_api.sgd"),
        ("aggregation", "right", "it has no weights; derive from raysim.plugins_api.AggregationRule"),
        ("aggregation", "two", r"it must take \(table\), and its keys as keyword-only"),
        ("generator", "bare_rule", r"it has no fingerprint, sample; derive from raysim.plugins_api.ImageGenerator"),
        ("server", "bare_local", "it has no init"),
    ],
)
def test_a_class_that_cannot_be_its_kind_is_refused_with_the_cause(mine, kind, name, said):
    with pytest.raises(LookupError, match=said):
        resolve(kind, f"my_doors:{name}")


@pytest.mark.parametrize("name", ["right", "right_too", "own_init"])
def test_what_is_declared_rightly_is_taken(mine, name):
    algorithm = resolve("local", f"my_doors:{name}")()
    assert algorithm.lr == {"right": 0.5, "right_too": 0.05, "own_init": 0.1}[name]
