"""Whole runs of raysim against the second simulator: parameters, statistics, metrics, every client's row.

raysim trains in float32 and the simulator in float64, so every configuration takes few steps: of 1e-6, rounding uses
about a fifth.
"""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from second_simulator import Outcome, Simulator, World

BOUND = 1e-6  # of parameters and statistics to the largest; of metrics to the value, or to 1 where that is smaller
MOVED = 2e-5  # of the parameters, relative to how far training has moved them
SIZES = [14, 9, 20, 6, 11, 3, 1, 16]  # samples of each client
CLASSES = 4

SMALL: dict[str, Any] = {
    "seed": 5, "rounds": 3, "clients_per_round": 5,
    "model": {"name": "mlp", "hidden": [10]},
    "local": {"name": "sgd", "epochs": 1, "batch_size": 8, "lr": 0.05},
    "aggregation": {"name": "fedavg"},
    "server": {"name": "sgd"},
}
MLP: dict[str, Any] = {}
LINEAR = {"model": {"name": "linear"}}
CNN = {"model": {"name": "cnn", "width": 3, "hidden": 8}, "local": {"lr": 0.2}}
HEAD = {"model": {"name": "mlp", "hidden": [10], "projection": 6}}
RESNET = {"model": {"name": "second_plugins:small_resnet"}}


def local(name: str = "sgd", **keys: Any) -> dict[str, Any]:
    return {"local": {"name": name, **keys}}


def rule(name: str, **keys: Any) -> dict[str, Any]:
    return {"aggregation": {"name": name, **keys}}


def server(name: str, **keys: Any) -> dict[str, Any]:
    return {"server": {"name": name, **keys}}


UNIFORM = rule("uniform")
SYNTHETIC = {"allocation": {"name": "missing_only", "level": 2}, "generator": {"name": "second_plugins:stripes"}}

CASES: dict[str, list[dict[str, Any]]] = {
    # local training
    "sgd": [MLP],
    "sgd, linear": [LINEAR],
    "sgd, cnn": [CNN],
    "sgd, two hidden layers": [{"model": {"name": "mlp", "hidden": [9, 7]}}],
    "sgd, projection": [HEAD],
    "sgd, colour": [CNN, {"data": "colour"}],
    "sgd, lenet": [{"model": {"name": "lenet"}, "data": "colour", "rounds": 2, "clients_per_round": 3}],
    "sgd, another seed": [{"seed": 6}],
    "sgd, all clients": [{"clients_per_round": 8}],
    "sgd, one client a round": [{"clients_per_round": 1}],
    "two epochs": [local(epochs=2)],
    "steps": [CNN, local(steps=4)],
    "momentum": [local(momentum=0.9)],
    "momentum, cnn": [CNN, local(momentum=0.5)],
    "nesterov": [local(momentum=0.7, nesterov=True)],
    "weight decay": [local(weight_decay=0.05)],
    "weight decay and momentum": [local(weight_decay=0.05, momentum=0.8)],
    "weight decay and nesterov": [LINEAR, local(weight_decay=0.05, momentum=0.8, nesterov=True)],
    "clip": [local(clip=0.8)],
    "clip, weight decay, momentum": [CNN, local(clip=0.5, weight_decay=0.05, momentum=0.5)],
    "lr decay": [local(lr_decay=0.5)],
    "lr warm-up": [local(schedule={"warmup": 3})],
    "lr steps": [local(schedule={"kind": "step", "every": 1, "factor": 0.3})],
    "lr cosine": [local(schedule={"kind": "cosine", "rounds": 3, "warmup": 1, "floor": 0.1})],
    "adamw": [local("adamw", lr=0.01, eps=1e-3)],
    "adamw, cnn": [CNN, local("adamw", lr=0.01, eps=1e-3, weight_decay=0.1, beta1=0.8, beta2=0.9)],
    "adamw, clip": [local("adamw", lr=0.01, eps=1e-2, clip=0.5)],
    "fedprox": [local("fedprox", mu=0.5, epochs=2)],
    "fedprox, cnn": [CNN, local("fedprox", mu=1.0, epochs=2, momentum=0.5)],
    "fedprox, clip": [local("fedprox", mu=2.0, epochs=2, clip=0.6)],
    "scaffold": [local("scaffold"), UNIFORM],
    "scaffold, all clients": [LINEAR, local("scaffold", epochs=2), UNIFORM, {"clients_per_round": 8}],
    "scaffold, cnn": [CNN, local("scaffold"), UNIFORM],
    "scaffold, server lr": [local("scaffold"), UNIFORM, server("sgd", lr=0.5)],
    "scaffold, weight decay": [local("scaffold", weight_decay=0.05), UNIFORM],
    "scaffold, lr decay": [local("scaffold", lr_decay=0.5), UNIFORM],
    "scaffold, momentum": [local("scaffold", momentum=0.5, allow_momentum=True), UNIFORM],
    "moon": [local("moon", mu=1.0, tau=0.5)],
    "moon, projection": [HEAD, local("moon", mu=5.0, tau=0.5), {"clients_per_round": 7}],
    "moon, cnn": [CNN, local("moon", mu=2.0, tau=0.2), {"clients_per_round": 7}],
    "feddyn": [local("feddyn", alpha=0.1), UNIFORM],
    "feddyn, cnn": [CNN, local("feddyn", alpha=0.5), UNIFORM],
    "feddyn, momentum": [local("feddyn", alpha=0.2, momentum=0.5), UNIFORM],
    # aggregation rules
    "uniform": [UNIFORM],
    "fixed denominator": [rule("fixed_denominator")],
    "fixed denominator, cap": [CNN, rule("fixed_denominator", cap=8)],
    "fednova": [rule("fednova")],
    "fednova, momentum": [local(momentum=0.9), rule("fednova")],
    "fednova, nesterov": [local(momentum=0.9, nesterov=True), rule("fednova")],
    "fednova, fedprox": [local("fedprox", mu=1.0, momentum=0.5), rule("fednova")],
    "fednova, weight decay": [local(weight_decay=0.5, momentum=0.5), rule("fednova")],
    "fednova, pull and momentum": [
        local("fedprox", mu=1.0, momentum=0.9, batch_size=1), rule("fednova"), {"rounds": 1, "clients_per_round": 8}
    ],
    "fednova, adamw": [local("adamw", lr=0.01, eps=1e-3), rule("fednova")],
    "fedoui": [rule("fedoui")],
    "fedoui, cnn": [CNN, rule("fedoui", probe_size=16)],
    "fedoui, colour": [CNN, rule("fedoui"), {"data": "colour"}],
    "fedoui, exponents": [rule("fedoui", rho=0.5, gamma=2.0, eps=0.01)],
    "fedoui, shared probe": [rule("fedoui", probe="shared", probe_size=20)],
    "fedoui, likelihood": [rule("fedoui", fit="mle")],
    "fedoui, window": [rule("fedoui", window=2)],
    "fedoui, smoothed": [rule("fedoui", ema=0.6), {"clients_per_round": 7}],
    "fedoui, layers": [CNN, rule("fedoui", layers=["body.2", "body.5", "body.8"])],
    "fedoui, layers, window, smoothed": [
        {"model": {"name": "mlp", "hidden": [9, 7]}, "clients_per_round": 7},
        rule("fedoui", layers=["body.2", "body.4"], window=2, ema=0.3),
    ],
    "fedoui, projection": [HEAD, rule("fedoui")],
    "fedoui, fedprox": [CNN, local("fedprox", mu=0.1), rule("fedoui")],
    "fedalign": [rule("fedalign")],
    "fedalign, exponents": [CNN, rule("fedalign", eta=2.0, rho=0.5, eps=0.05)],
    "fedoui_align": [rule("fedoui_align")],
    "fedoui_align, exponents": [CNN, rule("fedoui_align", eta=0.5, gamma=1.5, rho=0.0)],
    "krum": [rule("krum")],
    "multi_krum": [CNN, rule("multi_krum")],
    "multi_krum, two of seven": [rule("multi_krum", byzantine=2, keep=2), {"clients_per_round": 7}],
    "median of five": [rule("median")],
    "median of four": [CNN, rule("median"), {"clients_per_round": 4}],
    "trimmed_mean": [rule("trimmed_mean", trim=0.2)],
    "trimmed_mean of eight": [rule("trimmed_mean", trim=0.3), {"clients_per_round": 8}],
    # server optimisers
    "server lr": [server("sgd", lr=0.6)],
    "server momentum": [server("sgd", lr=0.5, momentum=0.9)],
    "adagrad": [server("adagrad", lr=0.03)],
    "adagrad, b1": [CNN, server("adagrad", lr=0.05, b1=0.9, tau=0.01)],
    "adam": [server("adam", lr=0.05, tau=0.01)],
    "adam, cnn": [CNN, server("adam", lr=0.05, b1=0.5, b2=0.9, tau=0.05)],
    "yogi": [server("yogi", lr=0.05, b2=0.7, tau=0.01)],
    "yogi, fedprox": [local("fedprox", mu=0.5), server("yogi", lr=0.05, b1=0.8, b2=0.9, tau=0.01)],
    "adam, scaffold": [local("scaffold"), UNIFORM, server("adam", lr=0.05, tau=0.01)],
    # synthetic images
    "synthetic images": [SYNTHETIC],
    "synthetic images, weighed": [SYNTHETIC, rule("fedavg", weight_by="total")],
    "synthetic images, fedoui": [CNN, SYNTHETIC, rule("fedoui")],
    # BatchNorm
    "batch norm": [RESNET],
    "batch norm, uniform": [RESNET, UNIFORM],
    "batch norm, own statistics": [RESNET, rule("fedavg", buffers="local"), {"clients_per_round": 7}],
    "batch norm, fixed statistics": [RESNET, rule("fedavg", buffers="global"), local(lr=0.2)],
    "batch norm, moon": [RESNET, local("moon", mu=1.0, tau=0.5), {"clients_per_round": 7}],
    "batch norm, fedoui": [RESNET, rule("fedoui")],
    "batch norm, scaffold": [RESNET, local("scaffold"), UNIFORM],
    "batch norm, synthetic images": [RESNET, SYNTHETIC, local(momentum=0.5)],
}

ALWAYS = [
    "sgd", "sgd, linear", "sgd, cnn", "sgd, lenet", "steps", "weight decay and nesterov",
    "clip, weight decay, momentum", "lr cosine", "adamw", "fedprox, cnn", "scaffold", "scaffold, momentum",
    "moon, projection", "feddyn", "uniform", "fixed denominator, cap", "fednova, momentum", "fedoui, cnn",
    "fedoui, likelihood", "fedoui, layers, window, smoothed", "fedalign", "fedoui_align, exponents",
    "krum", "multi_krum, two of seven",
    "median of four", "trimmed_mean", "server momentum", "adagrad", "adam, cnn", "yogi", "synthetic images, weighed",
    "batch norm", "batch norm, own statistics", "batch norm, moon",
]
"""One configuration at least of every algorithm, rule, optimiser and network; the others are marked slow."""


def config_of(name: str) -> dict[str, Any]:
    """The case over SMALL: sections are merged, but for a section that names another plug-in."""
    config = copy.deepcopy(SMALL)
    for change in CASES[name]:
        for key, value in change.items():
            inherits = key == "local" and isinstance(config.get(key), dict)
            config[key] = {**config[key], **value} if inherits else copy.deepcopy(value)
    config["data_name"] = config.pop("data", "grey")
    return config


@cache
def images(name: str) -> dict[str, np.ndarray]:
    """Real digits 0 to 3 of 8 x 8 pixels: 80 to train on and 60 to test on; or in colour, of 16 x 16."""
    from sklearn.datasets import load_digits

    bunch = load_digits(n_class=CLASSES)
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    if name == "colour":
        large = pixels.repeat(2, axis=2).repeat(2, axis=3)
        tint = np.array([1.0, 0.6, 0.3])[None, :, None, None]
        pixels = np.rint(large * tint + 20 * (labels % 3)[:, None, None, None]).clip(0, 255).astype(np.uint8)
    count = sum(SIZES)
    return {
        "train_images": pixels[:count], "train_labels": labels[:count],
        "test_images": pixels[count : count + 60], "test_labels": labels[count : count + 60],
    }


def clients() -> list[list[int]]:
    """Each client's rows: by class, so that most hold one or two classes, in an order of no meaning."""
    labels = images("grey")["train_labels"]
    order = np.argsort(labels, kind="stable")
    mixed = np.concatenate([order[::2], order[1::2]]).tolist()
    ends = np.cumsum(SIZES).tolist()
    return [mixed[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


@cache
def start_of(model: str, data: str, seed: int) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Initial parameters and buffers by name, and the names of the trainable ones."""
    from raysim.config.registry import resolve
    from raysim.models.flat_model import build_model

    keys = json.loads(model)
    build = resolve("model", keys.pop("name"))
    _, channels, height, width = images(data)["train_images"].shape
    module = build_model(lambda *given: build(*given, **keys), channels, (height, width), CLASSES, seed)
    start = {k: v.detach().numpy().copy() for k, v in module.state_dict().items()}
    return start, tuple(k for k, _ in module.named_parameters())


def world_of(config: dict[str, Any]) -> World:
    data, owned = images(config["data_name"]), clients()
    start, trainable = start_of(json.dumps(config["model"]), config["data_name"], config["seed"])
    quota = None
    if "allocation" in config:
        counts = np.stack([np.bincount(data["train_labels"][rows], minlength=CLASSES) for rows in owned])
        quota = np.where(counts == 0, config["allocation"]["level"], 0)
    return World(**data, clients=owned, start=start, trainable=list(trainable), quota=quota)


@cache
def simulated(name: str, dtype: torch.dtype = torch.float64) -> Outcome:
    config = config_of(name)
    return Simulator(config, world_of(config), dtype).run()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets and the partition, as raysim reads them."""
    folder = tmp_path_factory.mktemp("second")
    for name in ("grey", "colour"):
        np.savez(folder / f"{name}.npz", **images(name))
    (folder / "clients.json").write_text(json.dumps(clients()))
    return folder


def difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: list[str]) -> float:
    """The largest difference of the parameters, relative to the largest of them."""
    return max(float(np.abs(a[k] - b[k]).max()) for k in names) / max(float(np.abs(b[k]).max()) for k in names)


def statistics_agree(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: list[str], addends: int) -> bool:
    """Whether buffers agree within 1e-6 of the largest of each, and half a step of the grid that each addend is put on.

    raysim adds up running statistics as whole multiples of 2^-24, so that no order of clients changes a bit of the sum.
    """
    room = {k: BOUND * np.abs(b[k]).max() + addends * 2.0**-25 for k in names}
    return all(np.abs(a[k] - b[k]).max() <= room[k] for k in names)


def moved(a: dict[str, np.ndarray], b: dict[str, np.ndarray], start: dict[str, np.ndarray], names: list[str]) -> float:
    """||a - b|| / ||b - start|| over the parameters."""
    apart = sum(float(((a[k].astype(np.float64) - b[k]) ** 2).sum()) for k in names)
    way = sum(float(((b[k].astype(np.float64) - start[k]) ** 2).sum()) for k in names)
    return (apart / way) ** 0.5


def worst_metric(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> tuple[float, str]:
    """(largest difference, where), relative to the value where it is above 1."""
    worst, where = 0.0, ""
    for i, row in enumerate(wanted):
        for key, value in row.items():
            apart = abs(found[i][key] - value) / max(1.0, abs(value))
            if not apart <= worst:
                worst, where = apart, f"{key} of row {i}: {found[i][key]} and {value}"
    return worst, where


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only wait for each other on arrays this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in CASES])
def test_a_run_is_the_second_simulators(name: str, run: Callable[..., Any], files: Path, tmp_path: Path) -> None:
    """Parameters, statistics, all metrics that the simulator has, and who took part."""
    config = config_of(name)
    world, wanted = world_of(config), simulated(name)
    data = config.pop("data_name")
    result = run(
        {
            **config,
            "data": {"name": "npz", "path": str(files / f"{data}.npz")},
            "partition": {"name": "file", "path": str(files / "clients.json")},
            "resources": {"workers": 2}, "tracking": {"uri": "none"},
            "output": {"dir": str(tmp_path), "checkpoint_every": 100, "cache": None},
        }
    )
    found = load_file(result.directory / "model.safetensors")
    rows = [row for row in result.metrics.to_dict("records") if row["round"] > 0]
    client_rows = pd.read_parquet(result.directory / "clients.parquet").to_dict("records")
    assert sorted(found) == sorted(wanted.state)
    assert [(r["round"], r["client"]) for r in client_rows] == [(r["round"], r["client"]) for r in wanted.clients]
    assert difference(found, wanted.state, world.trainable) <= BOUND
    buffers = [k for k in found if k not in world.trainable]
    assert statistics_agree(found, wanted.state, buffers, config["rounds"] * config["clients_per_round"])
    assert moved(found, wanted.state, world.start, world.trainable) <= MOVED
    for found_rows, wanted_rows in ((rows, wanted.rounds), (client_rows, wanted.clients)):
        worst, where = worst_metric(found_rows, wanted_rows)
        assert worst <= BOUND, where


@pytest.mark.parametrize("names", [ALWAYS, pytest.param(list(CASES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_two_configurations_could_be_taken_for_each_other(names: list[str]) -> None:
    """What a configuration changes moves some parameter by 50 times the bound at least: else it would test nothing."""
    for i, one in enumerate(names):
        for other in names[:i]:
            a, b = simulated(one).state, simulated(other).state
            if all(k in b and b[k].shape == a[k].shape for k in a):
                world = world_of(config_of(other))
                assert difference(a, b, world.trainable) > 50 * BOUND, (one, other)


@pytest.mark.parametrize("name", ["sgd", "adamw, cnn", "batch norm"])
def test_float32_leaves_room_under_the_bound(name: str) -> None:
    """The simulator in float32 stays within half the bound of itself in float64: rounding hides no error above it."""
    exact, rounded = simulated(name), simulated(name, torch.float32)
    assert difference(rounded.state, exact.state, world_of(config_of(name)).trainable) < BOUND / 2
