"""Combinations that cannot work are refused with the reason before Ray starts; those that can are not."""

from functools import cache
from typing import Any

import pytest

from raysim.config.load import load_config
from raysim.core.errors import UserError
from raysim.lifecycle.build import build_parts
from raysim.lifecycle.prepare import load_dataset, prepare

BASE = {
    "rounds": 1,
    "data": {"name": "digits", "train_samples": 200, "test_samples": 50},
    "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5},
    "model": {"name": "cnn", "width": 4, "hidden": 8},
}
BATCH_NORM = {"model": {"name": "tiny_models:batch_norm_cnn"}}


@cache
def dataset():
    return load_dataset(load_config(BASE))


def check(change: dict[str, Any]) -> None:
    config = load_config({**BASE, **change})
    build_parts(config, prepare(config, dataset()))


REFUSED = [
    ({"local": {"name": "scaffold", "momentum": 0.9}}, r"local\.momentum = 0\.9: SCAFFOLD"),
    ({"local": {"name": "scaffold", "clip": 1.0}}, r"local\.clip = 1\.0"),
    ({"local": {"name": "moon"}, **BATCH_NORM}, r"local\.name = moon: the model Sequential"),
    ({"local": {"name": "feddyn"}, "server": {"name": "adam"}}, r"server\.name: FedDyn"),
    ({"local": {"name": "feddyn"}, "aggregation": {"name": "fednova"}}, r"aggregation\.name: FedDyn needs a mean"),
    ({"local": {"name": "feddyn"}, "update": {"top_k": 0.1}}, r"update: local\.name = feddyn works out drift"),
    ({"local": {"name": "scaffold"}, "aggregation": {"name": "median"}}, r"also sums further vectors \(c_change\)"),
    ({"local": {"name": "feddyn"}, "aggregation": {"name": "multi_krum"}}, r"also sums further vectors \(drift\)"),
    ({"model": {"name": "tiny_models:three_classes"}}, r"tiny_models:three_classes: for 2 .* \(2, 3\), not \(2, 10\)"),
    ({"model": {"name": "linear"}, "aggregation": {"name": "fedoui"}}, r"no hidden activation"),
    ({"aggregation": {"name": "fedoui", "layers": ["body.99"]}}, r"no module 'body\.99'"),
    ({"aggregation": {"name": "krum", "byzantine": 3}}, r"aggregation\.byzantine: 3 needs at least 9"),
    ({"aggregation": {"name": "fedavg", "buffers": "local"}}, r"aggregation\.buffers = local: the model cnn has no"),
    ({"aggregation": {"name": "fedavg", "buffers": "global"}}, r"aggregation\.buffers = global"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_with_the_reason(change, message):
    with pytest.raises(UserError, match=message):
        check(change)


ALLOWED = [
    {"local": {"name": "scaffold", "momentum": 0.9, "allow_momentum": True}},
    {"local": {"name": "scaffold"}, "allocation": {"name": "fedeas", "beta": 2}},
    {"local": {"name": "fedprox"}, "aggregation": {"name": "fedoui"}},
    {"local": {"name": "moon"}, "aggregation": {"name": "fednova"}, "server": {"name": "yogi"}},
    {"local": {"name": "feddyn"}, "aggregation": {"name": "uniform"}},
    {"local": {"name": "scaffold"}, "aggregation": {"name": "fednova"}},
    {"local": {"name": "adamw"}, "aggregation": {"name": "median"}},
    {"local": {"name": "fedprox"}, "aggregation": {"name": "fedavg", "buffers": "local"}, **BATCH_NORM},
    {"local": {"name": "scaffold"}, "aggregation": {"name": "fedalign", "buffers": "global"}, **BATCH_NORM},
]


@pytest.mark.parametrize("change", ALLOWED, ids=lambda value: str(value)[:60])
def test_what_goes_together_is_accepted(change):
    check(change)
