"""Allocation policies and matched budgets."""

import math
import time

import numpy as np
import pytest
from count_matrices import counts, counts_matrices, quick
from hypothesis import given
from hypothesis import strategies as st
from policy_inputs import shown

from raysim.allocation import fedeas_budget, policies, rivals
from raysim.config.plugin_guard import ask_policy
from raysim.config.registry import available, check_parameters, resolve
from raysim.core import rng
from raysim.core.errors import ConfigError, UserError
from raysim.data.partitions import dirichlet

MEASURING = ("gap", "loss_guided")
CIFAR10_LABELS = np.repeat(np.arange(10), 5000)

def test_policies_differ_exactly_as_named():
    """(80, 10, 0): balance adds 80 - n; missing-only touches class 2 alone; uniform ignores the counts: 90 / 3 = 30."""
    one = counts([80, 10, 0])
    assert policies.none(one).tolist() == [[0, 0, 0]]
    assert policies.full(one).tolist() == [[0, 70, 80]]
    assert policies.missing_only(one, level=50).tolist() == [[0, 0, 50]]
    assert policies.uniform(one, total=90).tolist() == [[30, 30, 30]]


def test_missing_only_gives_nothing_to_a_client_that_lacks_nothing():
    """7 images over the 3 missing cells in order: 3, 2, 2."""
    quota_KC = policies.missing_only(counts([1, 1, 1], [0, 4, 0], [3, 0, 9]), total=7)
    assert quota_KC.tolist() == [[0, 0, 0], [3, 0, 2], [0, 2, 0]]


def test_size_proportional_ignores_skew():
    """Clients of 30 and 10 samples, 2 classes, 8 images: 3/4 of 8 is 6, 3 a class; 1/4 of 8 is 2, 1 a class."""
    assert policies.size_proportional(counts([30, 0], [5, 5]), total=8).tolist() == [[3, 3], [1, 1]]


def test_fedeas_fills_to_the_threshold():
    """Client 0: N = 32, C = 2, nbar = 16, H = 0: b = floor(4 * 1 * 2) = 8, so class 1 gets 8.  Client 1: b = 0."""
    assert policies.fedeas(counts([32, 0], [9, 9]), beta=2).tolist() == [[0, 8], [0, 0]]


def test_fedeas_ablations_change_one_factor_each():
    """nbar = 16, H = 0, beta 2: sqrt 8, linear 32, none 2; without entropy the client of nbar 9 has b = 6 <= 9."""
    pair = counts([32, 0], [9, 9])
    assert policies.fedeas(pair, beta=2, size="linear").tolist() == [[0, 32], [0, 0]]
    assert policies.fedeas(pair, beta=2, size="none").tolist() == [[0, 2], [0, 0]]
    assert policies.fedeas(pair, beta=2, entropy=False).tolist() == [[0, 8], [0, 0]]
    assert policies.fedeas(pair, beta=4, entropy=False).tolist() == [[0, 16], [3, 3]]


@pytest.mark.parametrize("n", [1, 3, 7, 4999])
@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100])
def test_a_uniform_client_gets_nothing_however_large_beta_is(n, classes):
    """1 - H would be +-1e-16 in doubles; times a large beta that must still be 0 images."""
    assert policies.fedeas(np.full((1, classes), n), beta=1e12).sum() == 0


@quick
@given(counts_matrices, st.floats(0.1, 60))
def test_fedeas_never_exceeds_its_threshold_nor_removes_samples(counts_KC, beta):
    quota_KC = policies.fedeas(counts_KC, beta=beta)
    b_K = fedeas_budget.threshold_K(fedeas_budget.strength_K(counts_KC), beta)
    after_KC = counts_KC + quota_KC
    assert (quota_KC >= 0).all()
    assert (after_KC <= np.maximum(counts_KC, b_K[:, None])).all()
    assert (after_KC >= b_K[:, None]).all()


@quick
@given(counts_matrices, st.floats(0.1, 40), st.floats(0, 40))
def test_a_larger_beta_never_makes_fewer_images_in_any_cell(counts_KC, beta, more):
    assert (policies.fedeas(counts_KC, beta=beta + more) >= policies.fedeas(counts_KC, beta=beta)).all()


@quick
@given(counts_matrices)
def test_full_balance_leaves_every_client_balanced(counts_KC):
    after_KC = counts_KC + policies.full(counts_KC)
    assert (after_KC == after_KC.max(axis=1, keepdims=True)).all()


@quick
@given(
    counts_matrices,
    st.sampled_from([np.uint64, np.int32, np.uint8, np.bool_]),
    st.sampled_from(["C", "F", "reversed"]),
    st.sampled_from(sorted(set(available("allocation")) - {"none"})),
    st.integers(0, 3000),
)
def test_type_and_memory_order_of_the_counts_change_nothing(counts_KC, dtype, order, name, total):
    """Unsigned minus signed numbers are floating-point in numpy; reshape(-1) of a Fortran-ordered array is a copy."""
    counts_KC = counts_KC.astype(dtype).astype(np.int64)
    counts_KC[counts_KC.sum(axis=1) == 0] = 1
    given_KC = np.array(counts_KC, dtype=dtype, order="F" if order == "F" else "C")
    if order == "reversed":
        given_KC = given_KC[::-1][::-1]
    for keys in ({"total": total}, {"level": 3} if name == "missing_only" else {}):
        if name in ("uniform", "size_proportional", "missing_only", "random", "server_pool", *MEASURING) and not keys:
            continue
        try:
            expected = ask_policy(name, resolve("allocation", name), counts_KC, keys, given=shown(counts_KC))
        except UserError:
            continue  # what cannot be placed cannot be placed in any type
        answer = ask_policy(name, resolve("allocation", name), given_KC, keys, given=shown(counts_KC))
        assert answer.quota_KC.dtype == np.int64 and (answer.quota_KC == expected.quota_KC).all()
        assert (answer.keep_KC is None and expected.keep_KC is None) or (answer.keep_KC == expected.keep_KC).all()
        assert "total" not in keys or answer.images == total


def test_missing_only_places_every_image_on_a_fortran_ordered_array():
    """[[5, 0, 0], [0, 0, 7]] lacks 4 cells; 6 images are 1 each and one more for the first two."""
    counts_KC = np.asfortranarray(counts([5, 0, 0], [0, 0, 7]))
    assert policies.missing_only(counts_KC, total=6).tolist() == [[0, 2, 2], [1, 1, 0]]


@pytest.mark.parametrize(
    "wrong", [np.array([[0.5]]), np.array([1, 2]), np.array([[2**63]], dtype=np.uint64), -np.eye(2)]
)
def test_counts_that_are_no_whole_numbers_in_range_are_refused(wrong):
    with pytest.raises(ValueError, match="counts_KC must be"):
        policies.full(wrong)


def test_policies_do_not_change_their_input():
    before = counts([80, 10, 0], [1, 2, 3])
    for name in available("allocation"):
        given_KC = before.copy()
        total = 0 if name == "none" else 17
        ask_policy(name, resolve("allocation", name), given_KC, {"total": total}, given=shown(before))
        assert given_KC.tolist() == before.tolist()


# --- matched budgets


@quick
@given(counts_matrices, st.integers(0, 3000), st.sampled_from(sorted(set(available("allocation")) - {"none"})))
def test_every_policy_meets_an_exact_total_or_says_why_not(counts_KC, total, name):
    try:
        answer = ask_policy(name, resolve("allocation", name), counts_KC, {"total": total}, given=shown(counts_KC))
    except UserError as error:
        nothing_to_place = {
            "fedeas": (counts_KC == counts_KC.max(axis=1, keepdims=True)).all(),
            "full": (counts_KC == counts_KC.max(axis=1, keepdims=True)).all(),
            "missing_only": (counts_KC > 0).all(),
            "fbl": rivals.fbl(counts_KC).images < total,
            "iid_fill": not rivals.iid_fill(counts_KC).any(),
        }
        assert nothing_to_place[name] and f"allocation.total = {total}" in str(error)
        return
    assert answer.images == total and (answer.quota_KC >= 0).all() and answer.quota_KC.dtype == np.int64


@quick
@given(counts_matrices, st.integers(1, 3000), st.booleans(), st.sampled_from(["sqrt", "linear", "none"]))
def test_trimmed_fedeas_stays_below_the_threshold_of_the_solved_beta(counts_KC, total, entropy, size):
    strength = fedeas_budget.strength_K(counts_KC, entropy, size)
    if strength.max() == 0:
        return
    beta = fedeas_budget.solve_beta(counts_KC, strength, total)
    untrimmed_KC = fedeas_budget.fill(counts_KC, fedeas_budget.threshold_K(strength, beta))
    quota_KC = policies.fedeas(counts_KC, entropy=entropy, size=size, total=total)
    assert quota_KC.sum() == total <= untrimmed_KC.sum()
    assert (quota_KC <= untrimmed_KC).all()


def test_the_solved_beta_is_the_least_that_reaches_the_total():
    """One client (32, 0), nbar 16, H 0: b = floor(4 beta), so 9 images are made by beta in [9/4, 10/4).

    Two such clients make 2 b, never 9: the least that has more is 2 * 5, at beta = 5/4.
    """
    one, two = counts([32, 0]), counts([32, 0], [32, 0])
    assert 2.25 <= fedeas_budget.solve_beta(one, fedeas_budget.strength_K(one), 9) < 2.5
    assert fedeas_budget.solve_beta(two, fedeas_budget.strength_K(two), 9) == pytest.approx(1.25)
    assert policies.fedeas(two, total=9).tolist() == [[0, 5], [0, 4]]
    skewed = dirichlet(CIFAR10_LABELS, 10, rng.stream(0, rng.PARTITION), clients=20, alpha=0.1).counts_KC
    strength = fedeas_budget.strength_K(skewed)
    beta = fedeas_budget.solve_beta(skewed, strength, 13_437)
    assert fedeas_budget.images(skewed, fedeas_budget.threshold_K(strength, beta)) >= 13_437
    assert fedeas_budget.images(skewed, fedeas_budget.threshold_K(strength, beta * (1 - 1e-6))) < 13_437


def test_the_total_that_fedeas_takes_gives_back_fedeas_itself():
    skewed = dirichlet(CIFAR10_LABELS, 10, rng.stream(1, rng.PARTITION), clients=20, alpha=0.1).counts_KC
    plain = policies.fedeas(skewed, beta=12)
    assert policies.fedeas(skewed, total={"of": "fedeas", "beta": 12}).tolist() == plain.tolist()
    assert policies.uniform(skewed, total={"of": "fedeas"}).sum() == plain.sum()


@pytest.mark.parametrize("total", [-1, 2.5, "many", True, {"beta": 12}, {"of": "nobody"}, {"of": "fedeas", "bta": 1}])
def test_a_total_that_makes_no_sense_is_refused_by_name(total):
    for name in ("uniform", "fedeas", "full"):
        with pytest.raises(UserError, match=r"allocation\.total"):
            resolve("allocation", name)(counts([5, 1]), total=total)


def test_bad_keys_of_a_matched_policy_are_reported_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"allocation\.total\.bta.*did you mean 'beta'"):
        policies.uniform(counts([5, 1]), total={"of": "fedeas", "bta": 1})


def test_what_a_policy_cannot_place_is_refused():
    with pytest.raises(UserError, match=r"allocation\.total = 5: no client lacks a class"):
        policies.missing_only(counts([5, 1]), total=5)
    with pytest.raises(UserError, match=r"allocation\.total = 5: every client is balanced"):
        policies.fedeas(counts([5, 5]), total=5)
    with pytest.raises(UserError, match=r"allocation\.total = 5: .* `none` makes no image"):
        policies.none(counts([5, 5]), total=5)
    with pytest.raises(UserError, match=r"allocation\.total is required by `uniform`"):
        policies.uniform(counts([5, 5]))
    with pytest.raises(UserError, match=r"exactly one"):
        policies.missing_only(counts([5, 5]))
    with pytest.raises(UserError, match=r"exactly one"):
        policies.missing_only(counts([5, 5]), total=1, level=1)


@pytest.mark.parametrize("beta", [0, -1, math.nan, math.inf, "twelve", True])
def test_a_beta_that_makes_no_sense_is_refused_by_name(beta):
    with pytest.raises(UserError, match=r"allocation\.beta"):
        policies.fedeas(counts([5, 1]), beta=beta)
    assert check_parameters(policies.fedeas, {"beta": beta}, "allocation")[1]


def test_an_empty_client_is_named_unless_the_policy_can_fill_it():
    pair = counts([5, 1], [0, 0])
    for name in ("none", "full", "fedeas"):
        with pytest.raises(UserError, match=r"client 1\b"):
            resolve("allocation", name)(pair)
    with pytest.raises(UserError, match=r"client 1\b"):
        policies.size_proportional(pair, total=8)
    with pytest.raises(UserError, match=r"client 0, 1\b"):
        policies.size_proportional(np.zeros_like(pair), total=8)
    assert policies.uniform(pair, total=8).tolist() == [[2, 2], [2, 2]]
    assert policies.missing_only(pair, level=3).tolist() == [[0, 0], [3, 3]]


def test_a_hundred_thousand_clients_of_a_hundred_classes_take_a_fraction_of_a_second_each():
    """A tenth of the largest population intended; processor time, which other work on the machine does not stretch."""
    large_KC = rng.stream(0, rng.PARTITION).integers(0, 3, size=(100_000, 100))
    began = time.process_time()
    policies.fedeas(large_KC)
    policies.full(large_KC)
    for policy in (policies.fedeas, policies.uniform, policies.size_proportional):
        assert policy(large_KC, total=1_234_567).sum() == 1_234_567
    assert time.process_time() - began < 5


def test_the_beta_of_many_clients_is_the_least_that_reaches_the_total():
    """40,000 clients, whose beta is first guessed from every fourth; totals small and large."""
    counts_KC = rng.stream(3, rng.PARTITION).integers(0, 9, size=(40_000, 5))
    strength = fedeas_budget.strength_K(counts_KC)
    for total in (1, 999, 123_457, 7_654_321):
        beta = fedeas_budget.solve_beta(counts_KC, strength, total)
        assert fedeas_budget.images(counts_KC, fedeas_budget.threshold_K(strength, beta)) >= total
        assert fedeas_budget.images(counts_KC, fedeas_budget.threshold_K(strength, beta * (1 - 1e-9))) <= total
        assert policies.fedeas(counts_KC, total=total).sum() == total
