"""Policies of other papers: each by hand on three clients and three classes, and what each promises."""

import numpy as np
import pytest
from count_matrices import counts, counts_matrices, quick
from hypothesis import given
from hypothesis import strategies as st

from raysim.allocation import policies, rivals
from raysim.core.errors import UserError


def test_fbl_by_hand():
    """n / C is 2, 7 / 3 and 3; of 7 samples the largest class gets the third place: targets (2, 3, 2)."""
    answer = rivals.fbl(counts([6, 0, 0], [1, 4, 2], [3, 3, 3]))
    assert answer.quota_KC.tolist() == [[0, 2, 2], [1, 0, 0], [0, 0, 0]]
    assert answer.keep_KC is not None and answer.keep_KC.tolist() == [[2, 0, 0], [1, 3, 2], [3, 3, 3]]


def test_fbl_with_a_total_by_hand():
    """Room for 8 = 4 + 4 images; 4 of them are half of every cell. Client 1 has 1 and 3 above its target of 4.

    It gets 2 images, so it leaves out 2 in proportion 1 : 3, which is 0.5 and 1.5: the larger remainder is a tie, which
    goes to the first class: 1 and 1.
    """
    answer = rivals.fbl(counts([6, 0, 0], [5, 7, 0]), total=4)
    assert answer.quota_KC.tolist() == [[0, 1, 1], [0, 0, 2]]
    assert answer.keep_KC is not None and answer.keep_KC.tolist() == [[4, 0, 0], [4, 6, 0]]
    with pytest.raises(UserError, match=r"allocation\.total = 9: `fbl` keeps every client's number .* at most 8"):
        rivals.fbl(counts([6, 0, 0], [5, 7, 0]), total=9)


@quick
@given(counts_matrices, st.floats(0, 1))
def test_fbl_keeps_every_client_s_number_of_samples_and_balances_it(counts_KC, share):
    answer = rivals.fbl(counts_KC)
    assert answer.keep_KC is not None
    after_KC = answer.keep_KC + answer.quota_KC
    assert (after_KC.sum(axis=1) == counts_KC.sum(axis=1)).all()
    assert (after_KC.max(axis=1) - after_KC.min(axis=1) <= 1).all()
    part = rivals.fbl(counts_KC, total=int(share * answer.images))
    assert part.keep_KC is not None and part.images == int(share * answer.images)
    assert ((part.keep_KC + part.quota_KC).sum(axis=1) == counts_KC.sum(axis=1)).all()
    assert (part.quota_KC <= answer.quota_KC).all() and (part.keep_KC >= answer.keep_KC).all()


def test_iid_fill_by_hand():
    """N = (8, 4, 4). Shares: 4/8, 4/4 and 3/4, so the clients are filled to (4, 2, 2), (8, 4, 4) and (6, 3, 3)."""
    quota_KC = rivals.iid_fill(counts([4, 0, 0], [2, 4, 1], [2, 0, 3]))
    assert quota_KC.tolist() == [[0, 2, 2], [6, 0, 3], [4, 3, 0]]
    assert rivals.iid_fill(counts([4, 0, 0], [2, 4, 1], [2, 0, 3]), total=20).tolist() == quota_KC.tolist()
    with pytest.raises(UserError, match=r"allocation\.total = 5: the policy places no image"):
        rivals.iid_fill(counts([2, 4], [1, 2]), total=5)


@quick
@given(counts_matrices)
def test_iid_fill_ends_within_half_an_image_of_the_global_mix(counts_KC):
    """After it, a client has round(r N_c) samples of class c, r its largest share, and no fewer than before."""
    after_KC = counts_KC + rivals.iid_fill(counts_KC)
    N_C = counts_KC.sum(axis=0)
    r_K = (counts_KC / np.maximum(N_C, 1)).max(axis=1, keepdims=True)
    assert (np.abs(after_KC - r_K * N_C) <= 0.5 + 1e-9).all() and (after_KC >= counts_KC).all()


def test_every_quota_of_a_total_is_equally_likely_as_a_random_one():
    """2 images for 2 cells: (2, 0), (1, 1), (0, 2), each a third of 3000 seeds: 1000 +- 4 standard deviations of 26."""
    drawn = np.array([rivals.random(counts([5, 5]), seed, total=2)[0, 0] for seed in range(3000)])
    assert (np.abs(np.bincount(drawn) - 1000) < 104).all()
    three = counts([6, 0, 0], [1, 4, 2], [3, 3, 3])
    assert rivals.random(three, 7, total=50).tolist() == rivals.random(three, 7, total=50).tolist()
    assert rivals.random(three, 7, total=50).tolist() != rivals.random(three, 8, total=50).tolist()
    with pytest.raises(UserError, match=r"allocation\.total is required by `random`"):
        rivals.random(three)


def test_a_server_pool_by_hand():
    """7 images of 3 classes: 3, 2, 2, for each of 3 clients, made once."""
    answer = rivals.server_pool(counts([6, 0, 0], [1, 4, 2], [3, 3, 3]), total=7)
    assert answer.quota_KC.tolist() == [[3, 2, 2]] * 3 and answer.shared and answer.images == 7
    assert rivals.server_pool(counts([6, 0, 0]), per_class=5).images == 15
    for keys in ({}, {"total": 3, "per_class": 1}):
        with pytest.raises(UserError, match=r"`server_pool` needs exactly one of them"):
            rivals.server_pool(counts([6, 0, 0]), **keys)


def test_the_total_of_another_policy_counts_a_shared_pool_once():
    skewed = counts([6, 0, 0], [1, 4, 2])
    assert policies.uniform(skewed, total={"of": "server_pool", "per_class": 2}).sum() == 6
    assert policies.uniform(skewed, total={"of": "fbl"}).sum() == rivals.fbl(skewed).images == 5


@pytest.mark.parametrize("policy", [rivals.fbl, rivals.iid_fill])
def test_an_empty_client_is_named(policy):
    with pytest.raises(UserError, match=r"client 1\b"):
        policy(counts([5, 1], [0, 0]))
