"""Claims about every server optimiser that `raysim list server` shows."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raysim.config.registry import available, resolve

OPTIMISERS = sorted(available("server"))
quick = settings(max_examples=40, deadline=None)
numbers = st.floats(-100, 100, allow_subnormal=False)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))
several_updates = shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=numbers))


def variants():
    """Each optimiser with its defaults and, where it has one, with momentum."""
    for name in OPTIMISERS:
        yield pytest.param(name, {}, id=name)
        fields = getattr(resolve("server", name), "__dataclass_fields__", {})
        for key in sorted({"momentum", "b1"} & set(fields)):
            yield pytest.param(name, {key: 0.7}, id=f"{name}-{key}")


every = pytest.mark.parametrize(("name", "keys"), list(variants()))


def frozen(vector):
    vector = np.array(vector, dtype=np.float64)
    vector.flags.writeable = False
    return vector


def steps_of(name, keys, updates_TP):
    """(the steps of successive updates from the start, the last state); whatever it is given is read-only."""
    optimiser = resolve("server", name)(**keys)
    state, steps = optimiser.init(updates_TP.shape[1]), []
    for update_P in updates_TP:
        state = {key: frozen(vector) for key, vector in state.items()}
        state, step_P = optimiser.step(state, frozen(update_P))
        steps.append(step_P)
    return np.array(steps), state


@every
@given(parameters=st.integers(1, 50))
def test_nothing_moves_from_rest_without_an_update(name, keys, parameters):
    steps_TP, _ = steps_of(name, keys, np.zeros((3, parameters)))
    assert not steps_TP.any()


@every
@quick
@given(updates_TP=several_updates)
def test_steps_and_state_are_finite_float64_vectors_of_one_length_and_names_stay(name, keys, updates_TP):
    parameters = updates_TP.shape[1]
    start = resolve("server", name)(**keys).init(parameters)
    steps_TP, state = steps_of(name, keys, updates_TP)
    assert sorted(state) == sorted(start)
    for vector in (*start.values(), *state.values(), *steps_TP):
        assert vector.shape == (parameters,) and vector.dtype == np.float64 and np.isfinite(vector).all()


@every
@quick
@given(updates_TP=several_updates)
def test_the_same_updates_give_the_same_bits(name, keys, updates_TP):
    one, other = steps_of(name, keys, updates_TP), steps_of(name, keys, updates_TP)
    assert one[0].tobytes() == other[0].tobytes()
    assert all(one[1][key].tobytes() == other[1][key].tobytes() for key in one[1])


@every
@quick
@given(updates_TP=several_updates, next_P=arrays(np.float64, 6, elements=numbers))
def test_a_state_that_was_written_and_read_goes_on_to_the_bit(name, keys, updates_TP, next_P):
    """As in a checkpoint: arrays by name, in a file."""
    optimiser, state = resolve("server", name)(**keys), steps_of(name, keys, updates_TP)[1]
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    with np.load(file) as archive:
        restored = {key: archive[key] for key in archive.files}
    next_P = next_P[: updates_TP.shape[1]]
    (state, step_P), (again, again_P) = optimiser.step(state, next_P), optimiser.step(restored, next_P)
    assert step_P.tobytes() == again_P.tobytes() and sorted(state) == sorted(again)


@every
@quick
@given(update_P=arrays(np.float64, 5, elements=numbers))
def test_the_first_step_goes_where_the_update_points(name, keys, update_P):
    """An update points from the old model to the clients, so that a step against it would climb."""
    steps_TP, _ = steps_of(name, keys, update_P[None])
    assert (np.sign(steps_TP[0]) == np.sign(update_P)).all() or np.abs(update_P[update_P != 0]).min() < 1e-150


@every
@quick
@given(updates_TP=several_updates)
def test_opposite_updates_give_opposite_steps(name, keys, updates_TP):
    assert (steps_of(name, keys, -updates_TP)[0] == -steps_of(name, keys, updates_TP)[0]).all()


@every
@quick
@given(updates_TP=several_updates)
def test_each_parameter_has_its_own_step(name, keys, updates_TP):
    """The step of a parameter is the same in a model that has no other."""
    together = steps_of(name, keys, updates_TP)[0]
    alone = [steps_of(name, keys, updates_TP[:, [i]])[0] for i in range(updates_TP.shape[1])]
    np.testing.assert_allclose(np.hstack(alone), together, rtol=1e-15, atol=0)
