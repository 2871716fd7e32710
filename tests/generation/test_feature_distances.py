"""Distances in feature space, on few numbers whose values follow by hand."""

import numpy as np
import pytest

from raysim.generation.feature_distances import frechet, neighbourhoods


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def test_the_frechet_distance_of_two_normal_variables():
    """Means 0 and 3, deviations 1 and 2 (of N - 1): 3^2 + (1 - 2)^2 = 10."""
    a = column(-1, 0, 1)
    assert frechet(a, 2 * a + 3) == pytest.approx(10.0)
    assert frechet(a, a) == pytest.approx(0.0, abs=1e-12)


def test_the_frechet_distance_where_the_covariances_do_not_commute():
    """Against the formula as it is written, with scipy's square root of the matrix A B."""
    from scipy.linalg import sqrtm

    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(n, 3)) @ draw.normal(size=(3, 3)) + shift for n, shift in ((50, 0), (40, 1)))
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    means = np.square(a.mean(0) - b.mean(0)).sum()
    expected = means + np.trace(cov_a + cov_b - 2 * sqrtm(cov_a @ cov_b).real)
    assert frechet(a, b) == pytest.approx(expected)
    assert frechet(a, b) == pytest.approx(frechet(b, a))


def test_features_that_never_vary_have_no_covariance_and_a_distance():
    """A feature that is 0 for all images, as after a ReLU, adds nothing."""
    a = np.hstack([column(-1, 0, 1), np.zeros((3, 1))])
    assert frechet(a, a + np.array([3.0, 0.0])) == pytest.approx(9.0)


def test_neighbourhoods_on_a_line():
    """k = 1. Real 0, 1, 3, 6 reach 1, 1, 2, 3; made 0.5, 0.6, 20, reach 0.1, 0.1, 19.4.

    0.5 and 0.6 are within reach of 0, 1 (and not of 3: 2.5 and 2.4 > 2, nor of 6); 20 of none: precision 2/3, density
    (2 + 2 + 0)/3, coverage 2/4. Real images within reach of a made one: of 20, from 0.6 on, 1, 3 and 6: recall 3/4.
    """
    found = neighbourhoods(column(0, 1, 3, 6), column(0.5, 0.6, 20), k=1)
    assert found == pytest.approx({"precision": 2 / 3, "recall": 3 / 4, "density": 4 / 3, "coverage": 2 / 4})


def test_one_image_made_over_and_over_is_precise_and_covers_little():
    draw = np.random.default_rng(1)
    real, other = draw.normal(size=(100, 2)), draw.normal(size=(100, 2))
    collapsed = neighbourhoods(real, np.tile(real[:1], (100, 1)))
    assert collapsed["precision"] == 1.0 and collapsed["recall"] <= 0.01 and collapsed["coverage"] < 0.2
    assert neighbourhoods(real, other)["coverage"] > 0.8
    far = neighbourhoods(real, other + 100)
    assert far["precision"] == far["density"] == far["coverage"] == 0.0


def test_too_few_images_are_an_error():
    with pytest.raises(ValueError, match="5 neighbours need 6"):
        neighbourhoods(np.zeros((5, 2)), np.zeros((9, 2)))
    with pytest.raises(ValueError, match="2 images"):
        frechet(np.zeros((1, 2)), np.zeros((9, 2)))
