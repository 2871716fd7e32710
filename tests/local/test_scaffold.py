"""SCAFFOLD: two rounds by hand, partial participation, the learning rate of the round, momentum."""

import numpy as np
import pytest
import torch
from two_clients import Scalar, Server, quadratic, samples, train

from raysim.aggregation.mean import fedavg, uniform
from raysim.core.errors import UserError
from raysim.local.scaffold import scaffold
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel


def close(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-6)


def serve(registered=2, **keys):
    return Server(quadratic(scaffold, lr=0.1, steps=2, **keys), uniform(), [samples(2)] * 2, registered=registered)


def variates(server):
    return [float(server.client_states[k]["c_k"][0]) for k in (0, 1)], float(server.broadcast_vectors["c"][0])


def test_first_round_by_hand():
    """lr 0.1, 2 steps from 0: y = 1 - 0.81 = 0.19 and -3 + 3 * 0.81 = -0.57, so x = -0.19.

    c_k+ = (0 - y) / (2 * 0.1) = -0.95 and 2.85 (the mean gradients); c = (-0.95 + 2.85) / 2 = 0.95.
    """
    server = serve()
    assert server.round() == close([-0.19])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([0.19, -0.57])
    assert variates(server) == (close([-0.95, 2.85]), close(0.95))


def test_the_server_divides_by_all_registered_clients():
    """Two of four clients: c = (-0.95 + 2.85) / 4 = 0.475."""
    server = serve(registered=4)
    assert server.round() == close([-0.19])
    assert variates(server)[1] == close(0.475)


def test_second_round_by_hand():
    """From x = -0.19 with c = 0.95; client 0 adds c - c_0 = 1.9 to its gradients, client 1 adds 0.95 - 2.85 = -1.9.

    Client 0: -1.19 + 1.9 = 0.71: -0.261; -1.261 + 1.9 = 0.639: -0.3249. c_0+ = (-1.19 - 1.261) / 2 = -1.2255.
    Client 1: 2.81 - 1.9 = 0.91: -0.281; 2.719 - 1.9 = 0.819: -0.3629. c_1+ = (2.81 + 2.719) / 2 = 2.7645.
    x = -0.3439; c = (-1.2255 + 2.7645) / 2 = 0.7695.
    """
    server = serve()
    server.round()
    assert server.round() == close([-0.3439])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([-0.3249, -0.3629])
    assert variates(server) == (close([-1.2255, 2.7645]), close(0.7695))


def test_variates_use_the_learning_rate_of_the_round():
    """Decay 0.5: round 2 at 0.05. Client 0: -0.19 - 0.05 * 0.71 = -0.2255; its gradients -1.19 and -1.2255.

    c_0+ = -1.20775; dividing by the first round's 0.1 would give -1.9 + 0.069225 / 0.2 = -1.553875.
    """
    server = serve(lr_decay=0.5)
    server.round()
    server.round()
    assert variates(server)[0][0] == close(-1.20775)


def test_an_absent_client_keeps_its_variate_and_c_moves_by_the_present_ones_share():
    """Round 2 with client 0 alone: c = 0.95 + (-1.2255 + 0.95) / 2 = 0.81225; c_1 stays 2.85; x = -0.3249."""
    server = serve()
    server.round()
    assert server.round([0]) == close([-0.3249])
    assert variates(server) == (close([-1.2255, 2.85]), close(0.81225))


def test_c_is_the_mean_of_the_clients_variates_when_all_take_part():
    server = Server(scaffold(lr=0.1, batch_size=8), uniform(), [samples(30, 3, 8, k) for k in range(3)], network())
    for _ in range(3):
        server.round()
        mean_P = np.mean([server.client_states[k]["c_k"] for k in range(3)], axis=0)
        np.testing.assert_allclose(server.broadcast_vectors["c"], mean_P, atol=1e-6)


def network():
    torch.manual_seed(0)
    return architectures.mlp(1, (8, 8), 3, hidden=[6])


def test_first_round_is_uniform_fedavg_bit_for_bit():
    """All variates are 0. Clients of equal size, so that the size weights are the uniform ones; the second differs."""
    data = [samples(30, 3, 8, k) for k in range(2)]
    servers = [
        Server(scaffold(lr=0.1, batch_size=8), uniform(), data, network()),
        Server(sgd(lr=0.1, batch_size=8), uniform(), data, network()),
        Server(sgd(lr=0.1, batch_size=8), fedavg(), data, network()),
    ]
    first = [server.round() for server in servers]
    assert first[0] == first[1] == first[2]
    assert servers[0].round() != servers[1].round()


def test_the_fixed_point_is_the_joint_minimum():
    """f_0 + f_1 is least at (1 - 3) / 2 = -1, whatever the number of local steps."""
    server = Server(quadratic(scaffold, lr=0.1, steps=10), uniform(), [samples(2)] * 2)
    for _ in range(60):
        x = server.round()
    assert x == pytest.approx([-1.0], abs=1e-3)


def test_weights_by_size_leave_the_fixed_point_where_equal_weights_have_it():
    """Sizes 30 and 10: the weighted optimum is (30 - 3 * 10) / 40 = 0, but the method still ends at -1."""
    keys = {"lr": 0.1, "steps": 10}
    server = Server(quadratic(scaffold, **keys), fedavg(), [samples(30), samples(10)])
    plain = Server(quadratic(sgd, **keys), fedavg(), [samples(30), samples(10)])
    for _ in range(200):
        x, y = server.round(), plain.round()
    assert x == pytest.approx([-1.0], abs=1e-3)
    assert y == pytest.approx([0.0], abs=1e-3)


def test_the_norm_of_a_clients_variate_is_logged():
    """c_k+ = -0.95 and 2.85 after round 1, as by hand above."""
    algorithm = quadratic(scaffold, lr=0.1, steps=2)
    for client, expected in ((0, 0.95), (1, 2.85)):
        job, _ = train(algorithm, FlatModel(Scalar()), samples(2), client=client)
        assert [job.scratch[name] for name in algorithm.logged] == [pytest.approx(expected, rel=1e-5)]


def test_momentum_is_refused_unless_allowed():
    with pytest.raises(UserError, match=r"local\.momentum = 0\.9.*local\.allow_momentum"):
        scaffold(momentum=0.9)
    scaffold(momentum=0.9, allow_momentum=True)


def test_clipping_is_refused_because_the_variates_come_from_the_corrected_steps():
    with pytest.raises(UserError, match=r"local\.clip = 1\.0.*set it to null"):
        scaffold(clip=1.0)


def test_with_momentum_the_variate_of_a_constant_gradient_is_that_gradient():
    """f(x) = 2 x: 3 steps of momentum 0.9 move by -lr * 2 * 5.61; over ||a||_1 lr that is 2 (over 3 lr: 3.74)."""

    class Slope(scaffold):
        def loss(self, job, x, y_B):
            return 2 * job.model.module.x.sum()

    algorithm = Slope(lr=0.1, steps=3, momentum=0.9, allow_momentum=True)
    _, result = train(algorithm, FlatModel(Scalar()), samples(2))
    assert result.state["c_k"].item() == close(2.0)
