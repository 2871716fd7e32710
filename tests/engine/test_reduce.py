"""Sums over clients are exact, hence the same in any order and grouping."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysim.engine.messages import PartialSum
from raysim.engine.reduce import BUFFER_BITS, PARAM_BITS, ExactSum, add_sums, from_units, limit, scale, within


def add_all(values: list[np.ndarray], weights: list[float], bits: int = PARAM_BITS) -> np.ndarray:
    running = ExactSum(len(values[0]), bits)
    for v, w in zip(values, weights, strict=True):
        running.add(torch.from_numpy(v), w)
    return running.units.numpy()


def joined(sums: list[np.ndarray]) -> np.ndarray:
    none = np.zeros(0)
    return add_sums([PartialSum(units, none, np.zeros(1, np.int64), {}) for units in sums]).params_P


def test_a_weighted_sum_of_two_numbers():
    """0.25 * 3 + 0.75 * -1 = 0, 0.25 * 1 + 0.75 * 2 = 1.75; all of it exact in binary."""
    units = add_all([np.array([3.0, 1.0], np.float32), np.array([-1.0, 2.0], np.float32)], [0.25, 0.75])
    assert from_units(units, PARAM_BITS).tolist() == [0.0, 1.75]


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 5))
def test_any_order_and_grouping_gives_the_same_bits(seed: int, clients: int, groups: int):
    """Values span nine orders of magnitude, where ordinary float sums do depend on the order."""
    rng = np.random.default_rng(seed)
    values = [(rng.normal(size=40) * 10.0 ** rng.integers(-6, 3)).astype(np.float32) for _ in range(clients)]
    w = rng.dirichlet(np.ones(clients))
    whole = from_units(add_all(values, w.tolist()), PARAM_BITS)
    order = rng.permutation(clients)
    owner = rng.integers(0, groups, clients)
    sums = [
        add_all([values[k] for k in order if owner[k] == g], [w[k] for k in order if owner[k] == g])
        for g in range(groups)
        if (owner == g).any()
    ]
    assert from_units(joined(sums), PARAM_BITS).tobytes() == whole.tobytes()


def test_the_error_is_at_most_half_a_grid_step_a_client():
    rng = np.random.default_rng(0)
    values = [rng.normal(size=100).astype(np.float32) for _ in range(50)]
    w = rng.dirichlet(np.ones(50))
    exact = sum(np.longdouble(wk) * v.astype(np.longdouble) for wk, v in zip(w, values, strict=True))
    found = from_units(add_all(values, w.tolist()), PARAM_BITS)
    assert np.abs(found - exact).max() <= 50 * 2.0**-PARAM_BITS / 2 + 1e-18


@pytest.mark.parametrize("bits", [PARAM_BITS, BUFFER_BITS])
def test_the_largest_allowed_values_do_not_overflow(bits: int):
    """Four weights of 1 (the largest sum allowed) times the limit: 4 * 2^50 = 2^52 units, below 2^53, and exact."""
    largest = np.array([limit(bits), -limit(bits)], np.float32)
    units = add_all([largest] * 4, [1.0] * 4, bits)
    assert np.abs(units).max() == 2.0**52
    assert from_units(units, bits).tolist() == [4 * limit(bits), -4 * limit(bits)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1025.0, -1e30])
def test_values_outside_the_range_are_noticed(bad: float):
    assert not within(torch.tensor([0.0, bad]), PARAM_BITS)
    assert within(torch.tensor([0.0, 1024.0, -1024.0]), PARAM_BITS)
    assert within(torch.empty(0), PARAM_BITS)


@pytest.mark.parametrize("bad", [[float("nan"), 0.5], [float("inf")]])
def test_weights_that_are_not_finite_are_refused(bad: list[float]):
    with pytest.raises(ValueError, match="finite"):
        scale(np.array(bad))


@pytest.mark.parametrize(("w", "by"), [([0.2, 0.8], 1), ([4.0], 1), ([3.0, -3.0], 2), ([25.25], 8), ([0.0], 1)])
def test_large_weights_are_scaled_by_the_least_power_of_two_that_fits(w: list[float], by: float):
    """6 / 2 = 3 and 25.25 / 8 = 3.2 fit into 4, 25.25 / 4 = 6.3 does not."""
    assert scale(np.array(w)) == by


def test_weights_known_beforehand_that_add_up_to_more_than_four_are_scaled_by_a_power_of_two():
    """Weights 5 and 6 (of a fixed denominator): 11 / 4 is at most 4, so 1.25 and 1.5 enter the running sums.

    Weights that add up to 1 enter as they are.
    """
    from types import SimpleNamespace

    from raysim.engine.messages import SumWeights
    from raysim.engine.rounds import Round

    def entered(*weights: float) -> tuple[float, list[float]]:
        by_client = {k: SumWeights(w, 0.5, 0.25) for k, w in enumerate(weights)}
        round_ = Round(SimpleNamespace(here="here"), 1, None, [], by_client, 3)
        assert round_.sum_weights is not None
        assert all((w.buffers, w.vectors) == (0.5, 0.25) for w in round_.sum_weights.values())
        return round_.scale, [w.update for w in round_.sum_weights.values()]

    assert entered(5.0, 6.0) == (4.0, [1.25, 1.5])
    assert entered(0.7, 0.3) == (1.0, [0.7, 0.3])
