"""Claims about every aggregation rule that `raysim list aggregation` shows, whatever it weighs clients by."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_updates import MatrixUpdates

from raysim.config.registry import available, parameters, resolve
from raysim.core.errors import RunError, UserError
from raysim.core.records import RoundTable

RULES = sorted(available("aggregation"))
SELECTING = {"krum", "multi_krum"}  # of equal clients they choose some
quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
cohorts = st.integers(5, 9)  # enough for the default of every rule


def remembering():
    """Each rule with its defaults, and with each key that makes it remember earlier rounds."""
    for name in RULES:
        yield pytest.param(name, {}, id=name)
        fields = parameters(resolve("aggregation", name)).model_fields
        for key, value in {"window": 3, "ema": 0.4}.items():
            if key in fields:
                yield pytest.param(name, {key: value}, id=f"{name}-{key}")


def make(name, sizes=(120, 40, 7, 300, 60), **keys):
    """The rule with its defaults, told the sizes of all registered clients, of whom each takes part in every round."""
    rule = resolve("aggregation", name)(**keys)
    rule.register(np.array(sizes), len(sizes))
    return rule


def table(rng, count, round_=1, **given_columns):
    """Random sizes, OUIs (multiples of 1/512, as probes of 32 images and 16 units give) and steps; all read-only."""
    columns = {"oui": rng.integers(1, 512, count) / 512, "effective_steps": rng.integers(1, 40, count) * 1.0}
    columns |= given_columns
    found = RoundTable(round_, np.arange(count) * 3 + 1, rng.integers(1, 500, count), columns)
    for array in (found.client_K, found.n_K, *columns.values()):
        array.flags.writeable = False
    return found


def updates(rng, count, parameters=6):
    """Random updates of different lengths that share a direction."""
    return MatrixUpdates(rng.normal(0.3, 1, (count, parameters)) * rng.uniform(0.1, 3, (count, 1)))


def rearranged(found, order):
    columns = {name: values[order] for name, values in found.columns.items()}
    return RoundTable(found.round, found.client_K[order], found.n_K[order], columns)


def combined(rule, found, given_updates):
    """(weights, the combined update), as the server works them out."""
    weights = rule.weights(found, given_updates)
    update_P = rule.aggregate(found, given_updates)
    assert (update_P is None) == rule.is_weighted_sum
    return weights, given_updates.weighted_sum(weights.w_K) if update_P is None else update_P


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds, count=cohorts)
def test_weights_are_shares_and_the_update_lies_among_the_clients(name, seed, count):
    """Finite, not negative, of sum 1; each coordinate of the combined update between the clients' lowest and highest.

    By Jensen's inequality FedNova's sum, E[a] E[1 / a] over clients drawn by size, is 1 or more. A fixed denominator is
    here that of the one cohort there is.
    """
    rng = np.random.default_rng(seed)
    given_updates = updates(rng, count)
    found = table(rng, count)
    rule = make(name, found.n_K)
    weights, update_P = combined(rule, found, given_updates)
    assert weights.w_K.shape == (count,) and weights.w_K.dtype == np.float64
    assert np.isfinite(weights.w_K).all() and (weights.w_K >= 0).all()
    assert weights.scores_K is None or weights.scores_K.shape == (count,)
    total = math.fsum(weights.w_K)
    assert total >= 1 - 1e-12
    assert total <= 1 + 1e-12 or not rule.normalises
    update_P = update_P / total
    assert (update_P >= given_updates.delta_KP.min(axis=0) - 1e-12).all()
    assert (update_P <= given_updates.delta_KP.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds, count=cohorts)
def test_the_order_of_clients_moves_no_bit(name, seed, count):
    rng = np.random.default_rng(seed)
    found, given_updates, order = table(rng, count), updates(rng, count), rng.permutation(count)
    weights, update_P = combined(make(name, found.n_K), found, given_updates)
    moved_updates = MatrixUpdates(given_updates.delta_KP[order])
    moved, moved_P = combined(make(name, found.n_K), rearranged(found, order), moved_updates)
    assert moved.w_K.tobytes() == weights.w_K[order].tobytes()
    np.testing.assert_allclose(moved_P, update_P, rtol=0, atol=1e-14)  # a mean of sorted values is rounded once more


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds, count=cohorts, size=st.integers(1, 300), oui=st.integers(0, 512), steps=st.integers(1, 40))
def test_clients_that_are_alike_weigh_alike_and_give_their_common_update(name, seed, count, size, oui, steps):
    columns = {"oui": np.full(count, oui / 512), "effective_steps": np.full(count, float(steps))}
    found = RoundTable(1, np.arange(count), np.full(count, size), columns)
    one_P = np.random.default_rng(seed).normal(0, 1, 6)
    weights, update_P = combined(make(name, found.n_K), found, MatrixUpdates([one_P] * count))
    np.testing.assert_allclose(update_P, one_P, rtol=0, atol=1e-13)
    if name in SELECTING:
        assert len(np.unique(weights.w_K[weights.w_K > 0])) == 1
    else:
        assert len(np.unique(weights.w_K)) == 1


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds, count=cohorts)
def test_clients_that_learnt_nothing_move_nothing(name, seed, count):
    found = table(np.random.default_rng(seed), count)
    weights, update_P = combined(make(name, found.n_K), found, MatrixUpdates([[0.0] * 6] * count))
    assert np.isfinite(weights.w_K).all() and math.fsum(weights.w_K) >= 1 - 1e-12
    assert not update_P.any()


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds)
def test_a_client_alone_is_taken_as_it_is_or_refused_before_the_run(name, seed):
    rng = np.random.default_rng(seed)
    found, given_updates = table(rng, 1), updates(rng, 1)
    rule = make(name, found.n_K)
    try:
        rule.check(1)
    except UserError as error:
        assert "aggregation." in str(error)
        return
    weights, update_P = combined(rule, found, given_updates)
    assert weights.w_K.tolist() == [1.0]
    np.testing.assert_allclose(update_P, given_updates.delta_KP[0], rtol=1e-15)


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds, count=cohorts, factor=st.integers(2, 50))
def test_only_the_proportions_of_sizes_count(name, seed, count, factor):
    """Every client with `factor` times as many samples: the same weights."""
    rng = np.random.default_rng(seed)
    found, given_updates = table(rng, count), updates(rng, count)
    larger = RoundTable(1, found.client_K, found.n_K * factor, found.columns)
    one = make(name, found.n_K).weights(found, given_updates)
    other = make(name, larger.n_K).weights(larger, given_updates)
    np.testing.assert_allclose(other.w_K, one.w_K, rtol=1e-9)


@pytest.mark.parametrize(("name", "keys"), list(remembering()))
@quick
@given(seed=seeds, count=cohorts, rounds=st.integers(1, 3))
def test_what_it_remembers_survives_json(name, keys, seed, count, rounds):
    """Saved after some rounds and taken up by a fresh rule, the next round is the same to the bit."""
    rng = np.random.default_rng(seed)
    before, fresh = make(name, **keys), make(name, **keys)
    for number in range(1, rounds + 1):
        before.weights(table(rng, count, number), updates(rng, count))
    fresh.load_state(json.loads(json.dumps(before.state())))
    found, given_updates = table(rng, count, rounds + 1), updates(rng, count)
    one, other = combined(before, found, given_updates), combined(fresh, found, given_updates)
    assert one[0].w_K.tobytes() == other[0].w_K.tobytes() and one[1].tobytes() == other[1].tobytes()
    assert one[0].info == other[0].info


@pytest.mark.parametrize(("name", "keys"), list(remembering()))
@quick
@given(seed=seeds, count=cohorts)
def test_a_saved_state_is_a_copy(name, keys, seed, count):
    """A round that follows changes nothing of what was saved before it."""
    rng, rule = np.random.default_rng(seed), make(name, **keys)
    rule.weights(table(rng, count), updates(rng, count))
    saved = rule.state()
    as_text = json.dumps(saved, sort_keys=True)
    rule.weights(table(rng, count, 2), updates(rng, count))
    assert json.dumps(saved, sort_keys=True) == as_text


@pytest.mark.parametrize("name", [name for name in RULES if resolve("aggregation", name).streams])
@quick
@given(seed=seeds, count=cohorts)
def test_a_rule_that_streams_needs_neither_updates_nor_columns(name, seed, count):
    rng = np.random.default_rng(seed)
    found = table(rng, count)
    bare = RoundTable(1, found.client_K, found.n_K)
    assert make(name).weights(bare, None).w_K.tobytes() == make(name).weights(found, updates(rng, count)).w_K.tobytes()


@pytest.mark.parametrize("name", RULES)
@quick
@given(seed=seeds, registered=st.integers(5, 12), equal=st.booleans())
def test_weights_that_it_calls_constant_are_those_of_every_cohort(name, seed, registered, equal):
    """Five of all clients take part; what is said beforehand to weigh them is what weighs them."""
    rng = np.random.default_rng(seed)
    sizes_K = np.full(registered, 30) if equal else rng.integers(1, 300, registered)
    said_K = make(name, sizes_K).constant_weights(sizes_K, 5)
    if said_K is None:
        return
    rule = resolve("aggregation", name)()
    rule.register(sizes_K, 5)
    for number in range(1, 4):
        cohort = np.sort(rng.choice(registered, 5, replace=False))
        found = RoundTable(number, cohort, sizes_K[cohort], table(rng, 5).columns)
        np.testing.assert_allclose(rule.weights(found, updates(rng, 5)).w_K, said_K[cohort], rtol=1e-14)


@pytest.mark.parametrize("name", RULES)
def test_a_cohort_without_samples_has_weights_unless_the_rule_says_so(name):
    """Clients with synthetic images alone, weighed by real ones."""
    rule, rng = make(name), np.random.default_rng(0)
    found = RoundTable(1, np.arange(5), np.zeros(5, dtype=np.int64), table(rng, 5).columns)
    if rule.needs_samples():
        with pytest.raises(RunError, match="add up to 0"):
            rule.weights(found, updates(rng, 5))
        return
    weights, update_P = combined(rule, found, updates(rng, 5))
    assert np.isfinite(weights.w_K).all() and np.isfinite(update_P).all()


@pytest.mark.parametrize("name", RULES)
def test_its_info_is_numbers_and_words(name):
    """What is logged each round; the table and the updates are read-only, so that changing them would have failed."""
    rng = np.random.default_rng(0)
    info = make(name).weights(table(rng, 6), updates(rng, 6)).info
    assert all(isinstance(key, str) and isinstance(value, str | float) for key, value in info.items())
