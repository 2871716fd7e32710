"""The running mean of the global model: its recurrence, and that the steps are those of the optimiser inside."""

import numpy as np
import pytest

from raysim.aggregation.running_mean import mean_of, running_mean
from raysim.aggregation.server_optimisers import adam


def test_the_mean_follows_its_recurrence():
    """Model 0 -> 1 -> 3 by updates of 1 and 2; d_1 = 2/11, d_2 = min(0.2, 3/12) = 0.2.

    ema_1 = 2/11 * 0 + 9/11 * 1 = 9/11;  ema_2 = 0.2 * 9/11 + 0.8 * 3 = 2.5636...
    """
    optimiser = running_mean({"name": "sgd"}, 0.2)
    state, model = optimiser.init(1), np.zeros(1, np.float32)
    means = []
    for update in (1.0, 2.0):
        state, step_P = optimiser.step(state, np.array([update]))
        model = (model + step_P).astype(np.float32)
        means.append(float(mean_of(model, state)[0]))
    assert model.tolist() == [3.0]
    assert means == pytest.approx([9 / 11, 0.2 * 9 / 11 + 0.8 * 3])


def test_its_steps_are_those_of_the_optimiser_inside_and_nothing_is_changed_in_place():
    inner, outer = adam(lr=0.1), running_mean({"name": "adam", "lr": 0.1}, 0.9)
    one, two = inner.init(2), outer.init(2)
    for update in ([1.0, -2.0], [0.5, 0.5]):
        before = {name: values.copy() for name, values in two.items()}
        given = two
        one, expected = inner.step(one, np.array(update))
        two, step_P = outer.step(two, np.array(update))
        assert np.array_equal(step_P, expected)
        assert all(np.array_equal(given[name], values) for name, values in before.items())


def test_without_a_running_mean_it_is_the_model_itself():
    model = np.ones(2, np.float32)
    assert mean_of(model, adam().init(2)) is model
