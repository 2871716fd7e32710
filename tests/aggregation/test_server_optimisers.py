"""Server optimisers: one and two steps by hand, and the properties that every one of them has."""

import numpy as np
import pytest

from raysim.aggregation.server_optimisers import adagrad, adam, sgd, yogi

ALL = [sgd(), sgd(lr=0.5, momentum=0.9), adagrad(), adam(), yogi()]


def steps(optimiser, *updates):
    """The step taken for each update of one weight, in turn."""
    state, taken = optimiser.init(1), []
    for update in updates:
        state, step_P = optimiser.step(state, np.array([update]))
        taken.append(step_P.item())
    return taken


def test_adam_steps_with_the_momentum_and_without_bias_correction():
    """Delta 1, lr 0.1: m = 0.1, v = 0.01, 0.1 * 0.1 / (0.1 + 0.001) = 0.01 / 0.101 = 0.0990099."""
    assert steps(adam(lr=0.1), 1.0) == [pytest.approx(0.0990099, abs=1e-7)]


def test_adam_second_step():
    """Then Delta 0: m = 0.09, v = 0.0099, 0.009 / (0.0994987 + 0.001) = 0.0895534."""
    assert steps(adam(lr=0.1), 1.0, 0.0)[1] == pytest.approx(0.0895534, abs=1e-7)


def test_the_second_moment_may_start_above_zero():
    """Delta 1, lr 0.1, v from 0.01: adam and yogi v = 0.0199 and 0.02, m = 0.1; adagrad v = 1.01, m = 1.

    0.01 / (0.1410674 + 0.001), 0.01 / (0.1414214 + 0.001) and 0.1 / (1.0049876 + 0.001).
    """
    assert steps(adam(lr=0.1, v_start=0.01), 1.0) == [pytest.approx(0.0703891, abs=1e-7)]
    assert steps(yogi(lr=0.1, v_start=0.01), 1.0) == [pytest.approx(0.0702141, abs=1e-7)]
    assert steps(adagrad(lr=0.1, v_start=0.01), 1.0) == [pytest.approx(0.0994048, abs=1e-7)]


def test_yogi_moves_its_second_moment_by_at_most_the_squared_update():
    """Delta 2, then 1. v = 0 + 0.01 * 4 = 0.04; 4 > 0.04. Then 1 > 0.04: v = 0.05; m = 0.2, then 0.28.

    0.1 * 0.2 / 0.201 = 0.0995025; 0.028 / (0.2236068 + 0.001) = 0.1246623.
    """
    assert steps(yogi(lr=0.1), 2.0, 1.0) == pytest.approx([0.0995025, 0.1246623], abs=1e-7)


def test_yogi_shrinks_its_second_moment_slowly_where_updates_get_small():
    """v = 0.04 after Delta 2; Delta 0.1: v - 0.01 * 0.01 = 0.0399, where adam would have 0.0397."""
    state, _ = yogi().step(yogi().init(1), np.array([2.0]))
    state, _ = yogi().step(state, np.array([0.1]))
    assert state["v"].item() == pytest.approx(0.0399, abs=1e-12)


def test_adagrad_sums_squared_updates():
    """Delta 3, then 4, no momentum: v = 9, then 25; 0.1 * 3 / 3.001 and 0.1 * 4 / 5.001."""
    assert steps(adagrad(lr=0.1), 3.0, 4.0) == pytest.approx([0.3 / 3.001, 0.4 / 5.001], rel=1e-12)


def test_fedavgm_keeps_a_running_sum():
    """lr 0.5, momentum 0.9, Delta 1 twice: m = 1, then 1.9; steps 0.5, then 0.95."""
    assert steps(sgd(lr=0.5, momentum=0.9), 1.0, 1.0) == pytest.approx([0.5, 0.95], rel=1e-15)


def test_sgd_of_rate_one_takes_the_update_itself():
    update_P = np.array([0.1, -1e-30, 3e8, 0.0])
    state, step_P = sgd().step(sgd().init(4), update_P)
    assert state == {}
    assert step_P.tobytes() == update_P.tobytes()


@pytest.mark.parametrize("optimiser", ALL, ids=str)
def test_the_step_goes_towards_the_clients(optimiser):
    _, step_P = optimiser.step(optimiser.init(3), np.array([2.0, -2.0, 0.0]))
    assert step_P[0] > 0
    assert step_P[1] == -step_P[0]
    assert step_P[2] == 0


@pytest.mark.parametrize("optimiser", ALL, ids=str)
def test_a_step_changes_neither_its_state_nor_its_update(optimiser):
    """Called twice on the same state it answers the same, in float64."""
    update_P = np.linspace(-1, 1, 5)
    state, _ = optimiser.step(optimiser.init(5), update_P)
    before = {name: value.copy() for name, value in state.items()}
    first_state, first = optimiser.step(state, update_P)
    second_state, second = optimiser.step(state, update_P)
    assert first.tobytes() == second.tobytes()
    assert first.dtype == np.float64
    for name in before:
        assert state[name].tobytes() == before[name].tobytes()
        assert first_state[name].tobytes() == second_state[name].tobytes()
    assert update_P.tobytes() == np.linspace(-1, 1, 5).tobytes()
