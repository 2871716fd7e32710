"""The three meanings of `aggregation.buffers`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from raysim import Result
from raysim.federation.server import Server
from raysim.local import batchnorm
from raysim.models.flat_model import FlatModel

Run = Callable[..., Result]
MEAN = "1.running_mean"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.Dropout())


def test_fixed_statistics_are_used_and_not_changed_until_training_mode_is_set_again():
    """Running mean 0 and variance 1: BatchNorm leaves its input alone (but for eps 1e-5); dropout still trains."""
    module = network().train()
    batchnorm.fix(module)
    x = torch.randn(4, 3, 5, 5) + 3
    torch.testing.assert_close(module[1](x), x, rtol=1e-4, atol=1e-4)
    assert module[1].running_mean.tolist() == [0, 0, 0]
    assert module[1].num_batches_tracked == 0
    assert module[3].training
    module.train()
    assert abs(module[1](x).mean().item()) < 0.1
    assert module[1].running_mean.min() > 0.1


def test_a_clients_own_statistics_come_back_and_leave_its_other_state_alone():
    model = FlatModel(network())
    model.buffers_F.fill_(4.0)
    model.counters.fill_(7)
    state = {"c_k": torch.ones(2), **batchnorm.save_to(model)}
    model.buffers_F.zero_()
    model.counters.zero_()
    batchnorm.restore_from(model, state)
    assert (model.buffers_F == 4).all()
    assert model.counters.tolist() == [7]
    assert list(state) == ["c_k"]
    batchnorm.restore_from(model, state)  # a client that takes part for the first time
    assert (model.buffers_F == 4).all()


@pytest.fixture
def normalised(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "model": {"name": "tiny_models:batch_norm_cnn"}}


def with_buffers(run: Run, config: dict[str, Any], kind: str, **keys: Any) -> tuple[Result, dict[str, Any]]:
    result = run(config, aggregation={"name": "fedavg", "buffers": kind}, **keys)
    return result, load_file(result.directory / "model.safetensors")


def test_statistics_are_averaged_by_size_or_own_or_fixed(run: Run, normalised: dict[str, Any]):
    """After three rounds of 4 of 6 clients.

    global: the initial statistics, bit for bit, and no byte for them.  local: other statistics than the average once
    clients come back, not sent down; the same parameters, since training normalises with those of the batch.
    """
    (average, a), (local, o), (fixed, g) = (
        with_buffers(run, normalised, kind) for kind in ("average", "local", "global")
    )
    assert g[MEAN].tolist() == [0] * 8
    assert g["1.running_var"].tolist() == [1] * 8
    assert int(g["1.num_batches_tracked"]) == 0
    assert np.abs(a[MEAN]).max() > 0.01
    assert not np.array_equal(a[MEAN], o[MEAN])
    assert np.array_equal(a["0.weight"], o["0.weight"])
    assert local.metrics["train_loss"][1:].tolist() == average.metrics["train_loss"][1:].tolist()
    assert fixed.metrics["train_loss"][1] != average.metrics["train_loss"][1]
    statistics = 4 * 4 * 32  # 4 clients, float32, mean and variance of 8 channels, twice
    down, up = (
        [r.metrics[name][1] for r in (average, local, fixed)] for name in ("bytes_down", "bytes_up")
    )
    assert down == [down[2] + statistics, down[2], down[2]]
    assert up == [up[2] + statistics, up[2] + statistics, up[2]]


def test_of_batch_counters_the_largest_counts(run: Run, normalised: dict[str, Any]):
    """Everyone takes part for one round of as many steps as its samples make: the counter is that of the largest."""
    result, model = with_buffers(run, normalised, "average", clients_per_round=1.0, rounds=1)
    steps = -(-max(result.summary["sizes_K"]) // 16)
    assert int(model["1.num_batches_tracked"]) in (steps, steps - 1)  # a last batch of one joins the one before


@pytest.mark.parametrize("rule", ["uniform", "median"])
def test_a_round_in_which_nobody_has_a_real_sample_keeps_the_statistics(
    run: Run, normalised: dict[str, Any], rule: str
):
    """One client a round, in rounds 2 and 4 one with synthetic images alone, which weigh the statistics nothing."""
    normalised |= {
        "seed": 5, "rounds": 4, "clients_per_round": 1, "aggregation": {"name": rule},
        "data": {"name": "digits", "train_samples": 300, "test_samples": 100, "public_frac": 0.2},
        "partition": {"name": "dirichlet", "clients": 30, "alpha": 0.05, "min_samples": 0},
        "allocation": {"name": "uniform", "total": 600}, "generator": {"name": "oracle"},
    }
    result = run(normalised)
    model = load_file(result.directory / "model.safetensors")
    clients = pd.read_parquet(result.directory / "clients.parquet")
    assert 0 < (clients["n_real"] == 0).sum() < 4
    assert clients["n_real"].iloc[-1] == 0
    assert np.isfinite(result.metrics["loss"]).all()
    assert model["1.running_var"].min() > 0
    assert np.abs(model[MEAN]).max() > 0.01


def test_statistics_are_averaged_whatever_the_rule():
    """n = 10 and 30, running mean 0 and 4: 0.25 * 0 + 0.75 * 4 = 3, though the rule weighs updates 0.9 and 0.1."""
    server = object.__new__(Server)
    from raysim.config.load import load_config
    from raysim.core.records import ClientTask

    server.config = load_config({"rounds": 1, "data": {"name": "digits"}})
    server.sizes_K = np.array([10, 30])
    sum_weights = server._sum_weights([ClientTask(0, 10), ClientTask(1, 30)], np.array([0.9, 0.1]))
    assert [s.update for s in sum_weights.values()] == [0.9, 0.1]
    assert sum(s.buffers * mean for s, mean in zip(sum_weights.values(), (0.0, 4.0), strict=True)) == 3.0
