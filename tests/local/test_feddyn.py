"""FedDyn: two rounds by hand, partial participation, alpha = 0, its fixed point."""

import pytest
import torch
from two_clients import Server, quadratic, samples

from raysim.aggregation import server_optimisers
from raysim.aggregation.mean import fedavg, fednova, uniform
from raysim.core.errors import UserError
from raysim.local.feddyn import feddyn
from raysim.local.fedprox import fedprox
from raysim.local.sgd import sgd
from raysim.models import architectures


def close(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-6)


def serve(registered=2, alpha=0.5):
    return Server(quadratic(feddyn, alpha=alpha, lr=0.1, steps=2), uniform(), [samples(2)] * 2, registered=registered)


def kept(server):
    return [float(server.client_states[k]["g_k"][0]) for k in (0, 1)], float(server.broadcast_vectors["h"][0])


def test_first_round_by_hand():
    """alpha 0.5, lr 0.1, 2 steps from 0; g = 0, so the clients do what FedProx does with mu 0.5: 0.185 and -0.555.

    g_k = -0.5 * (w_k - 0) = -0.0925 and 0.2775;  h = -(0.5 / 2) (0.185 - 0.555) = 0.0925;
    w = (0.185 - 0.555) / 2 - 0.0925 / 0.5 = -0.185 - 0.185 = -0.37.
    """
    server = serve()
    assert server.round() == close([-0.37])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([0.185, -0.555])
    assert kept(server) == (close([-0.0925, 0.2775]), close(0.0925))


def test_second_round_by_hand():
    """From -0.37; the gradients are y - 1 + 0.0925 + 0.5 (y + 0.37) and y + 3 - 0.2775 + 0.5 (y + 0.37).

    Client 0: -1.2775: -0.24225; -1.24225 + 0.0925 + 0.063875 = -1.085875: -0.1336625. Drift 0.2363375.
    Client 1: 2.3525: -0.60525; 2.39475 - 0.2775 - 0.117625 = 1.999625: -0.8052125. Drift -0.4352125.
    g_0 = -0.0925 - 0.11816875 = -0.21066875;  g_1 = 0.2775 + 0.21760625 = 0.49510625
    h = 0.0925 - 0.25 (0.2363375 - 0.4352125) = 0.14221875;  w = -0.4694375 - 0.2844375 = -0.753875.
    """
    server = serve()
    server.round()
    assert server.round() == close([-0.753875])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([-0.1336625, -0.8052125])
    assert kept(server) == (close([-0.21066875, 0.49510625]), close(0.14221875))


def test_the_server_divides_by_all_registered_clients():
    """Two of four: h = -(0.5 / 4) (-0.37) = 0.04625; w = -0.185 - 0.0925 = -0.2775."""
    server = serve(registered=4)
    assert server.round() == close([-0.2775])
    assert kept(server)[1] == close(0.04625)


def test_an_absent_client_keeps_its_state():
    """Round 2 with client 0 alone: its drift is 0.2363375.

    h = 0.0925 - 0.25 * 0.2363375 = 0.033415625; w = -0.1336625 - 0.06683125 = -0.20049375.
    """
    server = serve()
    server.round()
    assert server.round([0]) == close([-0.20049375])
    assert kept(server) == (close([-0.21066875, 0.2775]), close(0.033415625))


def test_weights_by_size_leave_the_fixed_point_where_equal_weights_have_it():
    """Sizes 30 and 10: the weighted optimum is (30 - 3 * 10) / 40 = 0, but the method still ends at -1."""
    server = Server(quadratic(feddyn, lr=0.1, steps=10, alpha=0.5), fedavg(), [samples(30), samples(10)])
    for _ in range(300):
        x = server.round()
    assert x == pytest.approx([-1.0], abs=1e-3)


def test_first_local_phase_is_fedprox_bit_for_bit():
    data = [samples(30, 3, 8, k) for k in range(2)]
    keys = {"lr": 0.1, "batch_size": 8}
    servers = [Server(feddyn(alpha=0.3, **keys), uniform(), data, network()),
               Server(fedprox(mu=0.3, **keys), uniform(), data, network())]
    for server in servers:
        server.round()
    assert [servers[0].results[k]["y"] for k in (0, 1)] == [servers[1].results[k]["y"] for k in (0, 1)]


def test_without_regulariser_it_is_sgd_bit_for_bit():
    data = [samples(30, 3, 8, k) for k in range(2)]
    keys = {"lr": 0.1, "batch_size": 8, "momentum": 0.5}
    servers = [Server(algorithm, uniform(), data, network()) for algorithm in (feddyn(alpha=0, **keys), sgd(**keys))]
    for _ in range(3):
        assert servers[0].round() == servers[1].round()


def test_the_fixed_point_is_the_joint_minimum():
    """f_0 + f_1 is least at (1 - 3) / 2 = -1, whatever the number of local steps."""
    server = Server(quadratic(feddyn, alpha=0.5, lr=0.1, steps=15), uniform(), [samples(2)] * 2)
    for _ in range(40):
        x = server.round()
    assert x == pytest.approx([-1.0], abs=1e-3)


@pytest.mark.parametrize(
    "server",
    [server_optimisers.sgd(lr=0.5), server_optimisers.sgd(momentum=0.9), server_optimisers.adam()],
    ids=str,
)
def test_a_server_that_changes_the_step_is_refused(server):
    """The next model is mean w_k - h / alpha; half of that step would be neither FedDyn nor FedAvg."""
    with pytest.raises(UserError, match=r"server\.name: FedDyn sets the next model itself"):
        feddyn(alpha=0.1).check(network(), uniform(), server)
    feddyn(alpha=0.0).check(network(), uniform(), server)
    feddyn(alpha=0.1).check(network(), uniform(), server_optimisers.sgd())


def test_weights_that_do_not_sum_to_one_are_refused():
    with pytest.raises(UserError, match=r"aggregation\.name: FedDyn needs a mean"):
        feddyn(alpha=0.1).check(network(), fednova(), server_optimisers.sgd())


def network():
    torch.manual_seed(0)
    return architectures.mlp(1, (8, 8), 3, hidden=[6])
