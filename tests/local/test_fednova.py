"""FedNova: normalised averaging over clients that take different numbers of steps."""

import math

import numpy as np
import pytest
from two_clients import Server, quadratic, samples

from raysim.aggregation.mean import fedavg, fednova
from raysim.core.errors import RunError
from raysim.core.records import RoundTable
from raysim.local.adamw import adamw
from raysim.local.sgd import sgd


def weights(n, a):
    table = RoundTable(1, np.arange(len(n)), np.array(n), {"effective_steps": np.array(a, dtype=float)})
    return fednova().weights(table, None)


def test_two_rounds_by_hand():
    """32 and 96 samples in batches of 32: 1 and 3 steps; p = 1/4, 3/4; tau_eff = 0.25 + 2.25 = 2.5; lr 0.1.

    w = 0.25 * 2.5 / 1 = 0.625 and 0.75 * 2.5 / 3 = 0.625.
    Round 1 from 0: y = 0.1 and -3 + 3 * 0.729 = -0.813: 0.625 * -0.713 = -0.445625 (fedavg: -0.58475).
    Round 2: y = 0.9 * -0.445625 + 0.1, a move of 0.1445625, and -3 + 2.554375 * 0.729, a move of -0.692235625:
    -0.445625 - 0.625 * 0.547673125 = -0.787920703.
    """
    data = [samples(32), samples(96)]
    server = Server(quadratic(sgd, lr=0.1, batch_size=32), fednova(), data)
    assert server.round() == pytest.approx([-0.445625], rel=1e-6)
    assert server.round() == pytest.approx([-0.787920703], rel=1e-6)
    assert Server(quadratic(sgd, lr=0.1, batch_size=32), fedavg(), data).round() == pytest.approx([-0.58475], rel=1e-6)


def test_momentum_counts_as_effective_steps():
    """Momentum 0.9, 1 and 3 steps: ||a|| = 1 and 5.61; tau_eff = 0.25 + 0.75 * 5.61 = 4.4575.

    w = 0.25 * 4.4575 = 1.114375 and 0.75 * 4.4575 / 5.61 = 0.595922.
    """
    server = Server(quadratic(sgd, lr=0.1, momentum=0.9), fednova(), [samples(32), samples(96)])
    server.round()
    assert [server.results[k]["effective_steps"] for k in (0, 1)] == pytest.approx([1, 5.61])
    answer = weights([32, 96], [1, 5.61])
    assert answer.w_K == pytest.approx([1.114375, 0.595922], abs=1e-6)
    assert answer.info == {"tau_eff": pytest.approx(4.4575), "weight_sum": pytest.approx(1.710297, abs=1e-6)}


def test_weight_decay_shortens_effective_steps():
    """Momentum 0.9, 3 steps, lr 0.1, decay 0.3: with s = lr decay, 5.61 - 4.8 s + s^2 = 5.4669 in place of 5.61."""
    server = Server(quadratic(sgd, lr=0.1, momentum=0.9, weight_decay=0.3), fednova(), [samples(32), samples(96)])
    server.round()
    assert [server.results[k]["effective_steps"] for k in (0, 1)] == pytest.approx([1, 5.4669])


def test_equal_steps_are_fedavg_bit_for_bit():
    """7 steps each: tau_eff = 7 (33 + 64) / 97 is 7 exactly, so every weight is p_k times 1."""
    data = [samples(n) for n in (33, 64)]
    servers = [Server(quadratic(sgd, lr=0.1, steps=7), rule, data) for rule in (fednova(), fedavg())]
    for _ in range(3):
        assert servers[0].round() == servers[1].round()


def test_adamw_clients_are_normalised_by_their_steps():
    server = Server(quadratic(adamw, lr=0.1, weight_decay=0.0), fednova(), [samples(32), samples(96)])
    server.round()
    assert [server.results[k]["effective_steps"] for k in (0, 1)] == [1, 3]


def test_equal_moves_per_step_give_tau_eff_of_them():
    """x - y_k = a_k v for every client: x moves by tau_eff v, since the p_k sum to 1."""
    n, a = [10, 30, 5], [1.0, 8.0, 3.0]
    answer = weights(n, a)
    assert math.fsum(answer.w_K * np.array(a)) == pytest.approx(answer.info["tau_eff"])


def test_the_weights_may_sum_to_far_more_than_one():
    """Steps in proportion to size, 99 clients of 1 and one of 99: p = 1/198 and 1/2.

    tau_eff = 99 / 198 + 99 / 2 = 50; sum of p_k / a_k = 99 / 198 + 1 / 198 = 100 / 198; their product 25.252525.
    """
    answer = weights([1] * 99 + [99], [1.0] * 99 + [99.0])
    assert answer.info["weight_sum"] == pytest.approx(25.252525)


def test_no_sample_at_all_is_refused():
    with pytest.raises(RunError, match="add up to 0"):
        weights([0, 0], [1.0, 1.0])
