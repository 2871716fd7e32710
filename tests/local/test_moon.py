"""MOON: the contrastive loss by hand, two rounds against plain arithmetic, which model is `previous`, no growth."""

import gc
import math

import numpy as np
import pytest
import torch
from torch import nn
from two_clients import Scalar, Server, samples, train

from raysim.aggregation.mean import uniform
from raysim.core.errors import UserError
from raysim.local.contract import ClientData
from raysim.local.moon import contrastive, moon
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel


class Arrow(nn.Module):
    """Two parameters w that are both the features and the logits of every image."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 0.5]))
        self.classifier = nn.Identity()

    def features(self, x):
        return self.w.expand(len(x), 2)

    def forward(self, x):
        return self.classifier(self.features(x))


def cosine(a, b):
    return (a[0] * b[0] + a[1] * b[1]) / (math.hypot(*a) * math.hypot(*b))


def arrow_step(w, label, w_glob, w_prev, lr, mu, tau):
    """One step of plain arithmetic: softmax - onehot, plus mu times the gradient of log(1 + e^((p - g) / tau)).

    d cos(w, v) / dw = v / (|w| |v|) - cos(w, v) w / |w|^2.
    """
    e = [math.exp(z) for z in w]
    gradient = [e[i] / sum(e) - (i == label) for i in (0, 1)]
    if w_prev is not None:
        p, g = cosine(w, w_prev), cosine(w, w_glob)
        pull = mu / tau / (1 + math.exp((g - p) / tau))
        for i in (0, 1):
            dp = w_prev[i] / (math.hypot(*w) * math.hypot(*w_prev)) - p * w[i] / math.hypot(*w) ** 2
            dg = w_glob[i] / (math.hypot(*w) * math.hypot(*w_glob)) - g * w[i] / math.hypot(*w) ** 2
            gradient[i] += pull * (dp - dg)
    return [w[i] - lr * gradient[i] for i in (0, 1)]


def arrow_clients():
    images = np.zeros((4, 1, 1, 1), np.uint8)
    return [ClientData(images, np.full(4, label), 4) for label in (0, 1)]


def test_two_rounds_against_plain_arithmetic():
    """Clients of label 0 and 1, 3 steps a round, lr 0.2, mu 2, tau 0.5; in round 1 there is no previous model."""
    server = Server(moon(lr=0.2, steps=3, mu=2.0, tau=0.5), uniform(), arrow_clients(), Arrow())
    w_glob, previous = [1.0, 0.5], [None, None]
    for _ in range(2):
        ends = []
        for label in (0, 1):
            w = w_glob
            for _ in range(3):
                w = arrow_step(w, label, w_glob, previous[label], 0.2, 2.0, 0.5)
            ends.append(w)
        previous, w_glob = ends, [(a + b) / 2 for a, b in zip(*ends, strict=True)]
        assert server.round() == pytest.approx(w_glob, rel=1e-5)
        for label in (0, 1):
            assert server.results[label]["y"] == pytest.approx(ends[label], rel=1e-5)
    plain = Server(sgd(lr=0.2, steps=3), uniform(), arrow_clients(), Arrow())
    plain.round()
    assert max(abs(a - b) for a, b in zip(plain.round(), w_glob, strict=True)) > 1e-3


def test_contrastive_loss_by_hand():
    """z along the global features and across the previous ones, tau 0.5: g = 2, p = 0.

    -log(e^2 / (e^2 + 1)) = 0.126928; with the two exchanged log(1 + e^2) = 2.126928; the mean of both 1.126928.
    """
    east, north = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.1]])
    assert float(contrastive(east, east, north, 0.5)) == pytest.approx(0.126928, abs=1e-6)
    assert float(contrastive(east, north, east, 0.5)) == pytest.approx(2.126928, abs=1e-6)
    both = contrastive(east.repeat(2, 1), torch.cat([east, north]), torch.cat([north, east]), 0.5)
    assert float(both) == pytest.approx(1.126928, abs=1e-6)


def test_equal_models_give_ln_2_and_no_gradient():
    """Up to rounding; the first participation, below, is exact."""
    z = torch.randn(5, 8, requires_grad=True)
    other = torch.randn(5, 8)
    loss = contrastive(z, other, other, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert z.grad.abs().max() < 1e-7


def test_features_of_zero_length_give_no_nan():
    z = torch.zeros(2, 4, requires_grad=True)
    contrastive(z, torch.zeros(2, 4), torch.ones(2, 4), 0.5).backward()
    assert torch.isfinite(z.grad).all()


def network(projection=8):
    torch.manual_seed(0)
    return architectures.mlp(1, (8, 8), 3, hidden=[6], projection=projection)


def batchnorm_network():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return architectures.Classifier(body, 4, 3, None)


KEYS = {"lr": 0.1, "batch_size": 8, "epochs": 2}


@pytest.mark.parametrize("build", [network, batchnorm_network])
def test_a_first_participation_is_sgd_bit_for_bit(build):
    """l_con is ln 2 and its gradient 0: parameters and BatchNorm statistics are those of sgd, the loss mu ln 2 more."""
    data = samples(30, 3, 8)
    ours, plain = FlatModel(build()), FlatModel(build())
    _, with_moon = train(moon(mu=5.0, **KEYS), ours, data)
    _, without = train(sgd(**KEYS), plain, data)
    for name, values in plain.snapshot().items():
        assert torch.equal(ours.snapshot()[name], values), name
    assert with_moon.loss == pytest.approx(without.loss + 5 * math.log(2), abs=1e-5)


def test_weight_0_is_sgd_bit_for_bit():
    data = [samples(30, 3, 8, k) for k in range(2)]
    servers = [Server(algorithm, uniform(), data, network()) for algorithm in (moon(mu=0, **KEYS), sgd(**KEYS))]
    for _ in range(3):
        assert servers[0].round() == servers[1].round()


def test_the_previous_model_is_the_clients_own_result():
    """Round 2: the state given back is what the client's training ended in, not the aggregate; l_con is not ln 2."""
    data = [samples(30, 3, 8, k) for k in range(2)]
    server = Server(moon(mu=1.0, **KEYS), uniform(), data, batchnorm_network())
    aggregate = server.round()
    for k in (0, 1):
        own = server.results[k]["after"]
        np.testing.assert_array_equal(server.client_states[k]["params"], own.params_P)
        np.testing.assert_array_equal(server.client_states[k]["buffers"], own.buffers_F)
        assert server.client_states[k]["params"].tolist() != aggregate
    other = Server(sgd(**KEYS), uniform(), data, batchnorm_network())
    other.round()
    assert other.round() != server.round()
    contrast = [server.results[k]["loss"] - other.results[k]["loss"] for k in (0, 1)]
    assert all(abs(c - math.log(2)) > 1e-4 for c in contrast)


def test_a_returning_client_is_compared_with_its_last_participation():
    """Client 0 trains in rounds 1 and 3: in round 3 its previous model is that of round 1, although round 2 passed."""
    server = Server(moon(mu=1.0, **KEYS), uniform(), [samples(30, 3, 8, k) for k in range(2)], network())
    server.round()
    first = server.client_states[0]["params"].copy()
    server.round([1])
    seen = {}

    class Watching(moon):
        def start(self, job):
            super().start(job)
            seen["previous"] = job.model._frozen["previous"].params_P.clone()
            seen["global"] = job.model._frozen["global"].params_P.clone()

    server.algorithm = Watching(mu=1.0, **KEYS)
    before = server.state.params_P
    server.round([0])
    np.testing.assert_array_equal(seen["previous"].numpy(), first)
    np.testing.assert_array_equal(seen["global"].numpy(), before)


def test_frozen_models_have_no_gradient_do_not_move_and_do_not_pile_up():
    """30 rounds: two frozen modules, the same ones; as many live tensors after round 30 as after round 2."""
    server = Server(moon(mu=1.0, **KEYS), uniform(), [samples(30, 3, 8, k) for k in range(2)], batchnorm_network())
    counts = []
    for _ in range(30):
        before, previous = server.state, server.client_states.get(1)
        server.round()
        if previous is None:
            continue
        if server.number in (2, 30):
            gc.collect()
            counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        frozen = server.model._frozen
        assert sorted(frozen) == ["global", "previous"]
        for twin in frozen.values():
            assert not twin.module.training
            assert all(p.grad is None and not p.requires_grad for p in twin.module.parameters())
        np.testing.assert_array_equal(frozen["global"].buffers_F.numpy(), before.buffers_F)
        np.testing.assert_array_equal(frozen["previous"].buffers_F.numpy(), previous["buffers"])
    assert len(counts) == 2
    assert counts[0] == counts[1]


def test_a_model_without_features_is_refused():
    moon().check(network(), uniform(), None)
    with pytest.raises(UserError, match=r"local\.name = moon: the model Scalar \(model\.name\) has no `features"):
        moon().check(Scalar(), uniform(), None)
