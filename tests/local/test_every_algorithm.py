"""Claims about every local algorithm: any model, any rule, tiny clients, two rounds, no trace left behind."""

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from torch import nn
from two_clients import Server, samples, train

from raysim.aggregation.mean import fedavg, fednova, uniform
from raysim.config.registry import available
from raysim.models import architectures
from raysim.models.flat_model import FlatModel

ALGORITHMS = {
    name: getattr(importlib.import_module(module), name) for name, (module, _) in sorted(available("local").items())
}


def plain_network():
    torch.manual_seed(0)
    return architectures.cnn(1, (8, 8), 3, width=4, hidden=6, projection=5)


def batchnorm_network():
    """BatchNorm over maps and, after global pooling, over single values."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.BatchNorm1d(4),
    )
    return architectures.Classifier(body, 4, 3, None)


CLIENTS = [samples(65, 3, 8, 0), samples(1, 3, 8, 1), samples(20, 3, 8, 2)]  # with batches of 64: 64 + 1, 1, 20


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("build", [plain_network, batchnorm_network])
@pytest.mark.parametrize("rule", [fedavg, uniform, fednova])
def test_two_rounds_keep_names_order_and_shapes(name, build, rule):
    """Clients of 65, 1 and 20 samples, batches of 64; the second round leaves one client out."""
    server = Server(ALGORITHMS[name](batch_size=64, lr=0.02), rule(), CLIENTS, build())
    before = server.model.state_dict()
    server.round()
    server.round([0, 1])
    server.model.load(server.state)
    after = server.model.state_dict()
    assert [(k, v.shape, v.dtype) for k, v in before.items()] == [(k, v.shape, v.dtype) for k, v in after.items()]
    assert all(np.isfinite(v).all() for v in after.values())
    assert all((before[k] != after[k]).any() for k in before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_does_not_depend_on_who_trained_before_it_on_the_same_model(name):
    """Two rounds of clients 0 and 2, on one model in either order, give each the same bits."""
    servers = [Server(ALGORITHMS[name](batch_size=16), uniform(), CLIENTS, batchnorm_network()) for _ in range(2)]
    for order in ([0, 2], [2, 0]):
        server = servers.pop(0)
        server.round(order)
        first = {k: server.results[k]["after"] for k in order}
        if servers:
            kept = first
    for k in (0, 2):
        np.testing.assert_array_equal(first[k].params_P, kept[k].params_P)
        np.testing.assert_array_equal(first[k].buffers_F, kept[k].buffers_F)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_it_keeps_is_its_own_memory(name):
    """State and summed vectors survive the next client's training on the same model, and are float32 of length P."""
    algorithm, model = ALGORITHMS[name](batch_size=16), FlatModel(batchnorm_network())
    start = model.state()
    job, result = train(algorithm, model, CLIENTS[0], start=start)
    kept = {**(result.state or {}), **{n: job.scratch[n] for n in algorithm.summed}}
    copies = {n: t.clone() for n, t in kept.items()}
    train(algorithm, model, CLIENTS[2], start=start, client=2)
    assert all(torch.equal(kept[n], copies[n]) for n in kept)
    for n in algorithm.summed:
        assert (job.scratch[n].dtype, job.scratch[n].shape) == (torch.float32, model.params_P.shape)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_it_is_given_it_leaves_unchanged(name):
    """The client's former state, the server's vectors and the start point are the same before and after."""
    algorithm, model = ALGORITHMS[name](batch_size=16), FlatModel(batchnorm_network())
    _, first = train(algorithm, model, CLIENTS[0])
    broadcast_vectors = {n: torch.full_like(model.params_P, 0.01) for n in algorithm.broadcast}
    state = first.state
    copies = {n: t.clone() for n, t in {**broadcast_vectors, **(state or {})}.items()}
    job, _ = train(algorithm, model, CLIENTS[0], round_=2, vectors=broadcast_vectors, state=state)
    assert all(torch.equal(t, copies[n]) for n, t in {**broadcast_vectors, **(state or {})}.items())
    assert not torch.equal(job.start_P, model.params_P)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_server_update_leaves_its_arguments_unchanged(name):
    algorithm = ALGORITHMS[name]()
    broadcast_vectors = {n: np.full(3, 0.5) for n in algorithm.broadcast}
    sums = {n: np.full(3, 0.25) for n in algorithm.summed}
    after, update_P = algorithm.server_update(broadcast_vectors, sums, np.ones(3))
    assert all((v == 0.5).all() for v in broadcast_vectors.values())
    assert all((v == 0.25).all() for v in sums.values())
    assert sorted(after) == sorted(algorithm.broadcast)
    assert update_P.shape == (3,)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_server_only_names_are_among_those_the_algorithm_uses(name):
    algorithm = ALGORITHMS[name]
    assert set(algorithm.server_only) <= {*algorithm.broadcast, *algorithm.summed}
    assert dataclasses.is_dataclass(algorithm)
