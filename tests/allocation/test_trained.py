"""Policies that look at what training has shown: each by hand on three clients and three classes."""

import numpy as np
import pytest

from raysim.allocation import trained
from raysim.core.errors import UserError

COUNTS = np.array([[4, 0, 2], [3, 3, 3], [0, 1, 1]])
NOTHING = np.zeros_like(COUNTS)
nan = np.nan


def rows(*values: float) -> np.ndarray:
    """The same for all clients."""
    return np.tile(np.array(values), (3, 1))


def test_gap_by_hand():
    """d_0 = (0, 0.6, 0.1), d_1 = 0, d_2 = (0.3, 0, 0): of 10 images 6, 1 and 3."""
    local = np.array([[0.9, 0.0, 0.4], [0.8, 0.6, 0.5], [0.5, 0.6, 0.5]])
    quota_KC = trained.gap(COUNTS, rows(0.8, 0.6, 0.5), local, total=10)
    assert quota_KC.tolist() == [[0, 6, 1], [0, 0, 0], [3, 0, 0]]


def test_gap_without_a_gap_is_even_and_a_class_without_images_to_measure_on_gets_none():
    assert trained.gap(COUNTS, rows(0.5, 0.5, 0.5), rows(0.5, 0.6, 0.7), total=9).tolist() == [[1, 1, 1]] * 3
    local = np.array([[0.0, nan, 0.5], [0.5, nan, 0.5], [0.5, nan, 0.5]])
    assert trained.gap(COUNTS, rows(0.5, nan, 0.5), local, total=9).tolist() == [[9, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_loss_guided_by_hand():
    """Lacks (0, 4, 2), 0 and (1, 0, 0), times the losses (1, 2, 4): w_0 = (0, 8, 8), w_2 = (1, 0, 0), 17 in all."""
    quota_KC = trained.loss_guided(COUNTS, NOTHING, rows(1, 2, 4), total=17)
    assert quota_KC.tolist() == [[0, 8, 8], [0, 0, 0], [1, 0, 0]]


def test_loss_guided_counts_the_images_that_clients_have():
    """With 2 images of class 2, client 0 lacks (0, 4, 0): w_0 = (0, 8, 0), w_2 = (1, 0, 0); of 9 images 8 and 1."""
    has_KC = NOTHING.copy()
    has_KC[0, 2] = 2
    assert trained.loss_guided(COUNTS, has_KC, rows(1, 2, 4), total=9).tolist() == [[0, 8, 0], [0, 0, 0], [1, 0, 0]]


def test_loss_guided_where_nothing_is_lacking_is_even_and_losses_that_are_not_finite_count_as_none():
    even = np.full((3, 3), 5)
    assert trained.loss_guided(even, NOTHING, rows(1, 2, 4), total=9).tolist() == [[1, 1, 1]] * 3
    assert trained.loss_guided(COUNTS, NOTHING, rows(np.inf, nan, 4), total=6).tolist() == [[0, 0, 6], [0] * 3, [0] * 3]


def test_both_need_a_total():
    with pytest.raises(UserError, match=r"allocation\.total is required by `gap`"):
        trained.gap(COUNTS, rows(1, 1, 1), rows(0, 0, 0))
    with pytest.raises(UserError, match=r"allocation\.total is required by `loss_guided`"):
        trained.loss_guided(COUNTS, NOTHING, rows(1, 1, 1))
