"""FedProx: two rounds by hand, mu = 0, the reference of the proximal term."""

import numpy as np
import pytest
from two_clients import Scalar, Server, quadratic, samples, train

from raysim.aggregation.mean import uniform
from raysim.local.fedprox import fedprox
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel


def close(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_two_steps_by_hand():
    """f = (x - 1)^2 / 2, lr 0.1, mu 0.5: 0 + 0.1 = 0.1; gradient -0.9 + 0.5 * 0.1 = -0.85: 0.185 (0.19 without)."""
    for steps, expected in ((1, 0.1), (2, 0.185)):
        job, _ = train(quadratic(fedprox, lr=0.1, mu=0.5, steps=steps), FlatModel(Scalar()), samples(2))
        assert job.model.params_P.item() == close(expected)


def test_two_rounds_by_hand():
    """lr 0.1, mu 0.5, 2 steps.

    Round 1 from 0: client 0 as above, 0.185. Client 1: -0.3; gradient 2.7 - 0.15 = 2.55: -0.555. Mean -0.185.
    Round 2 from -0.185, where the pull starts at 0 again:
      client 0: gradient -1.185: -0.0665; -1.0665 + 0.5 * 0.1185 = -1.00725: 0.034225.
      client 1: gradient 2.815: -0.4665; 2.5335 - 0.5 * 0.2815 = 2.39275: -0.705775.  Mean -0.335775.
    """
    server = Server(quadratic(fedprox, lr=0.1, mu=0.5, steps=2), uniform(), [samples(2)] * 2)
    assert server.round() == close([-0.185])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([0.185, -0.555])
    assert server.round() == close([-0.335775])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([0.034225, -0.705775])


def trained(algorithm):
    model = FlatModel(architectures.mlp(1, (8, 8), 3, hidden=[8]))
    model.load(START)
    job, _ = train(algorithm, model, samples(40, 3, 8))
    return model.state().params_P, float((model.params_P - job.start_P).norm()), algorithm.effective_steps(job)


START = FlatModel(architectures.mlp(1, (8, 8), 3, hidden=[8])).state()


def test_without_pull_it_is_sgd_bit_for_bit():
    keys = {"lr": 0.1, "epochs": 2, "batch_size": 8, "momentum": 0.9}
    plain, prox = trained(sgd(**keys)), trained(fedprox(mu=0, **keys))
    np.testing.assert_array_equal(plain[0], prox[0])
    assert plain[2] == prox[2]


def test_a_stronger_pull_leaves_less_drift():
    keys = {"lr": 0.05, "epochs": 3, "batch_size": 8}
    drifts = [trained(fedprox(mu=mu, **keys))[1] for mu in (0, 0.01, 1, 10)]
    assert drifts == sorted(drifts, reverse=True)
    assert len(set(drifts)) == 4


def test_effective_steps_by_hand():
    """lr 0.1, mu 0.5: each step shrinks what came before by 0.95; 2 steps: 0.95 + 1 = 1.95 = (1 - 0.95^2) / 0.05."""
    algorithm = quadratic(fedprox, lr=0.1, mu=0.5, steps=2)
    job, _ = train(algorithm, FlatModel(Scalar()), samples(2))
    assert algorithm.effective_steps(job) == pytest.approx(1.95, rel=1e-12)
