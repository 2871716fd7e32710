"""Which candidate images are kept: two rules by hand, and the best of each client and class."""

import numpy as np

from raysim.evaluation.candidates import best, confidence, discrepancy


def logs(*rows: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows))


def test_images_that_the_classifier_finds_right_come_before_all_others():
    """Right with 0.4 of three classes gives 1.4, wrong with 0.45 gives 0.45; what is not finite comes last."""
    log_p_NC = logs([0.4, 0.3, 0.3], [0.45, 0.55, 0.0], [0.9, 0.05, 0.05], [np.nan, np.nan, np.nan])
    score_N = confidence(log_p_NC, np.array([0, 0, 0, 0]))
    np.testing.assert_allclose(score_N, [1.4, 0.45, 1.9, -1.0])


def test_discrepancy_is_the_total_variation_distance():
    """|0.8 - 0.5| + |0.2 - 0.5| over 2 is 0.3; equal predictions 0; opposite ones 1."""
    found = discrepancy(logs([0.8, 0.2], [0.3, 0.7], [1.0, 0.0]), logs([0.5, 0.5], [0.3, 0.7], [0.0, 1.0]))
    np.testing.assert_allclose(found, [0.3, 0.0, 1.0])


def test_the_best_of_each_cell_are_kept_and_of_equals_the_first_made():
    """Client 0 keeps 1 of class 0 (index 1 scores most) and 2 of class 1 (a tie: 0 and 1); client 1 keeps none."""
    keys_M3 = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 1, 2], [1, 0, 5]])
    score_M = np.array([0.1, 0.9, 0.5, 0.5, 0.5, 0.7])
    assert best(keys_M3, score_M, np.array([[1, 2], [0, 0]])).tolist() == [1, 2, 3]
    assert best(keys_M3[:0], score_M[:0], np.zeros((2, 2), np.int64)).tolist() == []
