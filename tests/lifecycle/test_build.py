"""Combinations that cannot work are refused with the reason before Ray starts; those that can are not."""

from functools import cache
from typing import Any

import pytest

from raysim.config.load import load_config
from raysim.core.errors import UserError
from raysim.lifecycle.build import build_components
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
    build_components(config, prepare(config, dataset()))


NOISE = {"update": {"clip": 1.0, "noise_multiplier": 1.0}}
AT_CLIENT = {"update": {**NOISE["update"], "noise_at": "client"}}
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
    ({"model": {"name": "tiny_models:lazy"}}, r"tiny_models:lazy: 1\.weight has no size before the first images"),
    ({"model": {"name": "linear"}, "aggregation": {"name": "fedoui"}}, r"no hidden activation"),
    ({"aggregation": {"name": "fedoui", "layers": ["body.99"]}}, r"no module 'body\.99'"),
    ({"aggregation": {"name": "krum", "byzantine": 3}}, r"aggregation\.byzantine: 3 needs at least 9"),
    ({"aggregation": {"name": "fedavg", "buffers": "local"}}, r"aggregation\.buffers = local: the model cnn has no"),
    ({"aggregation": {"name": "fedavg", "buffers": "global"}}, r"aggregation\.buffers = global"),
    ({"local": {"name": "sgd", "batch_size": 1}, **BATCH_NORM}, r"local\.batch_size = 1: the model has batch norm"),
    ({"fine_tuning": {"every": 1, "batch_size": 1}, **BATCH_NORM}, r"fine_tuning\.batch_size = 1: the model has batch"),
    ({"local": {"name": "feddyn"}, "aggregation": {"name": "fixed_denominator"}}, r"FedDyn needs a mean, and fixed"),
    ({**NOISE, "clients_per_round": 4}, r"fedavg weighs a client by its part .* 4 of 8 .*fixed_denominator"),
    ({**NOISE, "aggregation": {"name": "fednova"}}, r"fednova weighs clients by what they computed"),
    ({**NOISE, "aggregation": {"name": "fedalign"}}, r"fedalign weighs clients by what they computed"),
    ({**NOISE, "aggregation": {"name": "fedoui"}}, r"fedoui weighs clients by what they computed"),
    ({**NOISE, "aggregation": {"name": "krum"}}, r"krum weighs clients by what they computed"),
    ({**NOISE, "aggregation": {"name": "median"}}, r"median is no weighted sum"),
    ({**NOISE, "aggregation": {"name": "tiny_algorithms:by_square_of_size"}}, r"weighs clients by what they computed"),
    ({**NOISE, "aggregation": {"name": "uniform"}, "resources": {"on_client_failure": "drop"}}, r"failure = drop"),
    ({**AT_CLIENT, "aggregation": {"name": "fedoui"}}, r"noise_at = client: .*fedoui weighs clients by oui"),
    ({**AT_CLIENT, "aggregation": {"name": "fednova"}}, r"noise_at = client: .*fednova weighs clients by effective_st"),
    ({**AT_CLIENT, "aggregation": {"name": "tiny_algorithms:by_square_of_size"}}, r"by_square_of_size is a plain func"),
    ({**AT_CLIENT, "resources": {"on_client_failure": "drop"}}, r"failure = drop: whether a client is left out"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_with_the_reason(change, message):
    with pytest.raises(UserError, match=message):
        check(change)


ALLOWED = [
    {"local": {"name": "sgd", "batch_size": 1}},
    {"local": {"name": "sgd", "batch_size": 1}, "aggregation": {"name": "fedavg", "buffers": "global"}, **BATCH_NORM},
    {**NOISE},
    {**NOISE, "clients_per_round": 4, "aggregation": {"name": "uniform"}},
    {**NOISE, "clients_per_round": 4, "aggregation": {"name": "fixed_denominator", "cap": 20}},
    {**NOISE, "aggregation": {"name": "fixed_denominator"}, "resources": {"on_client_failure": "drop"}},
    {**AT_CLIENT, "clients_per_round": 4},
    *({**AT_CLIENT, "aggregation": {"name": name}} for name in ("multi_krum", "krum", "median", "fedalign")),
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


EMPTY = {
    "rounds": 20,
    "clients_per_round": 1,
    "data": {"name": "digits", "train_samples": 200, "test_samples": 50, "public_frac": 0.2},
    "partition": {"name": "dirichlet", "clients": 30, "alpha": 0.05, "min_samples": 0},
    "allocation": {"name": "uniform", "total": 300},
    "generator": {"name": "oracle"},
}


def build(change: dict[str, Any]) -> tuple[Any, Any]:
    config = load_config({**BASE, **EMPTY, **change})
    prepared = prepare(config, load_dataset(config))
    return prepared, build_components(config, prepared)


@pytest.mark.parametrize(
    "aggregation",
    [{"name": "fedavg"}, {"name": "fednova"}, {"name": "fedoui"}, {"name": "fedalign", "rho": 0}],
    ids=str,
)
def test_a_round_whose_cohort_weighs_nothing_is_refused_by_its_number_before_it_starts(aggregation):
    """One client a round, some of which have synthetic images alone: who is drawn when is known beforehand."""
    with pytest.raises(UserError, match=r"the clients of round \d+ \[\d+\] have none; set aggregation.weight_by=total"):
        build({"aggregation": aggregation})


@pytest.mark.parametrize(
    "change",
    [
        {"aggregation": {"name": "uniform"}}, {"aggregation": {"name": "fedavg", "weight_by": "total"}},
        {"aggregation": {"name": "fedoui", "rho": 0}}, {"clients_per_round": 30},
    ],
    ids=str,
)
def test_clients_of_synthetic_images_alone_are_accepted_where_their_cohorts_weigh_something(change):
    prepared, _ = build(change)
    assert (prepared.partition.sizes_K == 0).any()


@pytest.mark.parametrize("local", ["scaffold", "feddyn"])
def test_methods_that_count_clients_alike_say_so_where_weights_go_by_size(local):
    def notes(aggregation: str, **change: Any) -> list[str]:
        config = load_config({**BASE, "local": {"name": local}, "aggregation": {"name": aggregation}, **change})
        return build_components(config, prepare(config, dataset())).notes

    assert any(f"{local} minimises the mean over clients" in note for note in notes("fedavg"))
    assert notes("uniform") == []
    equal = {"partition": {"name": "iid", "clients": 8}}
    assert notes("fedavg", **equal) == []
