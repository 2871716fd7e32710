"""Entropy, the imbalance score, and who causes it."""

import math
import warnings

import numpy as np
import pytest
from count_matrices import counts, counts_matrices, quick
from hypothesis import given

from raysim.allocation import imbalance


def test_entropy_of_a_client_with_absent_classes_is_finite_and_exact():
    """p = .5, .3, .2: -(.5 ln .5 + .3 ln .3 + .2 ln .2) = 1.029653 nats; / ln 10 = 0.447173; no warning from 0 ln 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entropy = imbalance.normalised_entropy_K(counts([500, 300, 200, 0, 0, 0, 0, 0, 0, 0]))[0]
    assert entropy * math.log(10) == pytest.approx(1.029653, abs=1e-6)
    assert entropy == pytest.approx(0.447173, abs=1e-6)


def test_entropy_is_0_for_one_class_1_for_equal_counts_and_defined_at_the_edges():
    assert imbalance.normalised_entropy_K(counts([7, 0, 0], [7, 7, 7], [0, 0, 0])).tolist() == [0.0, 1.0, 0.0]
    assert imbalance.normalised_entropy_K(counts([7], [0])).tolist() == [1.0, 0.0]  # one class is always balanced


def test_imbalance_weighs_clients_by_their_samples():
    """30 samples of one class (H = 0) and 10 balanced ones (H = 1): I = 30/40 * 1 + 10/40 * 0 = 0.75."""
    before = counts([30, 0], [5, 5])
    assert imbalance.imbalance(before) == pytest.approx(0.75)
    assert imbalance.contributions_K(before).tolist() == pytest.approx([0.75, 0.0])
    assert imbalance.removed_fraction(before, counts([30, 30], [5, 5])) == 1.0
    assert imbalance.removed_fraction(before, before) == 0.0
    assert imbalance.removed_fraction(counts([5, 5]), counts([5, 5])) == 0.0


def test_lorenz_curve_and_top_share_of_four_clients():
    """Contributions 0, 1, 1, 2: cumulated 0, 1/4, 2/4, 4/4.  The top 20 % are 0.8 of the last client: 0.8 * 2/4."""
    x, y = imbalance.lorenz_curve(np.array([2.0, 0.0, 1.0, 1.0]))
    assert x.tolist() == [0, 0.25, 0.5, 0.75, 1] and y.tolist() == [0, 0, 0.25, 0.5, 1]
    assert imbalance.top_share(np.array([2.0, 0.0, 1.0, 1.0])) == pytest.approx(0.4)
    assert imbalance.top_share(np.zeros(4)) == 0.0
    assert imbalance.lorenz_curve(np.zeros(2))[1].tolist() == [0, 0.5, 1]


def test_the_top_fifth_of_clients_that_are_no_multiple_of_five_is_interpolated():
    """1..12 sum to 78; 9.6 clients hold 45 + 0.6 * 10 = 51, so the other 2.4 hold 27 of 78, 35 %.  Of 0..9, the top two
    hold 17 of 45.  Of equal clients, a fifth holds a fifth, however many there are."""
    assert imbalance.top_share(np.arange(1.0, 13.0)) == pytest.approx(27 / 78)
    assert imbalance.top_share(np.arange(10.0)) == pytest.approx(17 / 45)
    for clients in (1, 2, 3, 7, 12):
        assert imbalance.top_share(np.ones(clients)) == pytest.approx(0.2)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_negative_or_endless_contributions_are_refused(wrong):
    with pytest.raises(ValueError, match="finite and not negative"):
        imbalance.lorenz_curve(np.array([1.0, wrong]))


def test_missing_cells_are_the_zero_counts():
    assert imbalance.missing_cells(counts([3, 0], [0, 0])).tolist() == [[False, True], [True, True]]


@quick
@given(counts_matrices)
def test_entropy_and_imbalance_stay_in_0_to_1(counts_KC):
    entropy_K = imbalance.normalised_entropy_K(counts_KC)
    assert ((entropy_K >= 0) & (entropy_K <= 1)).all()
    assert 0 <= imbalance.imbalance(counts_KC) <= 1 + 1e-12
