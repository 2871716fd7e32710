"""Shares and fractions that become whole numbers without losing one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raysim.core.rounding import (
    even_over_classes,
    floor_count,
    fraction_of,
    largest_remainder,
    largest_remainder_rows,
    split_evenly,
)

quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize(("fraction", "n", "right"), [(0.29, 100, 29), (0.58, 50, 29), (0.35, 180, 63), (0.5, 5, 2)])
def test_fractions_do_not_lose_one_to_floating_point(fraction, n, right):
    """0.29 * 100 is 28.999999999999996 in doubles; 29 on paper.  Halves go to the even neighbour: 2.5 to 2."""
    assert fraction_of(fraction, n) == right


def test_floor_keeps_what_is_whole_on_paper():
    assert floor_count(np.array([11.999999999999998, -1e-16, 0.29 * 100, 3.7])).tolist() == [12, 0, 29, 3]


def test_largest_remainder_breaks_ties_in_cell_order():
    """10 over 4 equal cells: 2.5 each, the two spare units to the first two; 7 in ratio 1:2:4 is 1, 2, 4."""
    assert largest_remainder(np.array([[1, 1], [1, 1]]), 10).tolist() == [[3, 3], [2, 2]]
    assert largest_remainder(np.array([1, 2, 4]), 7).tolist() == [1, 2, 4]
    assert largest_remainder(np.array([0.1, 0.2, 0.7]), 10).tolist() == [1, 2, 7]
    assert largest_remainder(np.full(3, 1 / 3), 4).tolist() == [2, 1, 1]
    with pytest.raises(ValueError, match="weight 0"):
        largest_remainder(np.zeros(3), 1)


@quick
@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.integers(0, 9)), st.floats(0, 1))
def test_rows_are_rounded_like_arrays_of_their_own(weights_KC, share):
    total_K = (share * weights_KC.sum(axis=1)).astype(np.int64)
    counts_KC = largest_remainder_rows(weights_KC, total_K)
    rows = [largest_remainder(w, int(n)).tolist() for w, n in zip(weights_KC, total_K, strict=True)]
    assert counts_KC.tolist() == rows
    assert (counts_KC <= weights_KC).all()
    assert largest_remainder_rows(weights_KC * 2**40, total_K).tolist() == counts_KC.tolist()
    with pytest.raises(ValueError, match="weight 0"):
        largest_remainder_rows(np.zeros((1, 2), np.int64), np.array([1]))


def test_largest_remainder_is_exact_beyond_64_bits():
    """2^40 and 3 * 2^40 in ratio 1:3; the products with 2^40 + 2 need 82 bits: shares 2^38 + 0.5 and 3 * 2^38 + 1.5."""
    assert largest_remainder(np.array([2**40, 3 * 2**40]), 2**40 + 2).tolist() == [2**38 + 1, 3 * 2**38 + 1]


@quick
@given(arrays(np.int64, st.integers(1, 30), elements=st.integers(0, 1000)), st.integers(0, 5000))
def test_largest_remainder_is_exact_and_within_one_of_the_share(weights, total):
    weights[0] += 1
    parts = largest_remainder(weights, total)
    assert parts.sum() == total
    assert (np.abs(parts - weights / weights.sum() * total) < 1).all()


@quick
@given(arrays(np.int64, st.integers(1, 40), elements=st.integers(0, 7)), st.integers(1, 9), st.integers(0, 300))
def test_large_and_small_weights_in_one_ratio_give_the_same_parts(weights, factor, total):
    """Small weights are divided once for each value, large ones cell by cell."""
    weights[0] += 1
    parts = largest_remainder(weights, total)
    assert parts.tolist() == largest_remainder(weights * factor * 1000, total).tolist()
    sum_weights = [int(w) * total for w in weights]
    order = sorted(range(len(sum_weights)), key=lambda i: (-(sum_weights[i] % int(weights.sum())), i))
    expected = [share // int(weights.sum()) for share in sum_weights]
    for i in order[: total - sum(expected)]:
        expected[i] += 1
    assert parts.tolist() == expected


@quick
@given(arrays(np.int64, st.integers(1, 8), elements=st.integers(0, 50)), st.integers(1, 5), st.integers(0, 500))
def test_even_over_classes_equals_largest_remainder_of_its_cells(weights_K, classes, total):
    weights_K[0] += 1
    cells_KC = np.repeat(weights_K[:, None], classes, axis=1)
    assert even_over_classes(weights_K, classes, total).tolist() == largest_remainder(cells_KC, total).tolist()


def test_split_evenly_gives_the_larger_parts_first():
    assert split_evenly(8, 3).tolist() == [3, 3, 2]
