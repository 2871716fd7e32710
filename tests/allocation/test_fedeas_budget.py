"""The published budgets of FedEAS, and the rule that chooses beta."""

import math

import numpy as np
import pytest

from raysim.allocation import fedeas_budget, policies
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.data.partitions import dirichlet

CIFAR10_LABELS = np.repeat(np.arange(10), 5000)


def counts(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def reference_counts(seed: int, clients: int, alpha: float, min_samples: int) -> np.ndarray:
    """numpy's legacy generator has the two methods that `dirichlet` draws from: published counts can be remade."""
    legacy = np.random.RandomState(seed)
    return dirichlet(CIFAR10_LABELS, 10, legacy, clients=clients, alpha=alpha, min_samples=min_samples).counts_KC


@pytest.mark.parametrize(
    ("clients", "alpha", "min_samples", "full", "fedeas"),
    [
        (20, 0.05, 10, 301_155, 18_271),
        (20, 0.1, 10, 255_490, 13_988),
        (20, 0.3, 10, 166_752, 5_363),
        (100, 0.05, 1, 335_958, 42_695),
        (100, 0.1, 1, 280_206, 35_086),
        (100, 0.3, 1, 180_668, 15_986),
    ],
)
def test_mean_totals_over_30_seeds_are_the_published_ones(clients, alpha, min_samples, full, fedeas):
    """Means over seeds 0..29 of numpy's RandomState, to the image."""
    tables = [reference_counts(seed, clients, alpha, min_samples) for seed in range(30)]
    assert round(np.mean([policies.full(t).sum() for t in tables])) == full
    assert round(np.mean([policies.fedeas(t).sum() for t in tables])) == fedeas


def test_our_own_streams_have_the_published_distribution():
    """100 seeds against the means of 30 published ones: within 3 standard errors of the difference, sd as published."""
    tables = [
        dirichlet(CIFAR10_LABELS, 10, rng.stream(s, rng.PARTITION), clients=20, alpha=0.1, min_samples=10).counts_KC
        for s in range(100)
    ]
    for policy, mean, sd in ((policies.full, 255_490, 19_095), (policies.fedeas, 13_988, 1_247)):
        totals = np.array([policy(t).sum() for t in tables])
        standard_error = math.hypot(sd / math.sqrt(30), totals.std() / math.sqrt(100))
        assert abs(totals.mean() - mean) < 3 * standard_error
    published_fedeas = 13_437
    assert totals.min() < published_fedeas < totals.max()


def test_the_selection_rule_gives_beta_12():
    tables = [fedeas_budget.beta_table(reference_counts(seed, 20, 0.1, 10)) for seed in range(20)]
    chosen = [fedeas_budget.select_beta(table) for table in tables]
    betas = [row.beta for row in chosen if row is not None]
    assert len(betas) == 20 and np.median(betas) == 12 and min(betas) >= 11 and max(betas) <= 14


def test_auto_beta_uses_the_rule_and_says_so_where_nothing_satisfies_it():
    table = reference_counts(0, 20, 0.1, 10)
    row = fedeas_budget.select_beta(fedeas_budget.beta_table(table))
    assert row is not None and row.removed >= 0.5 and row.synthetic_share < 0.25
    assert policies.fedeas(table, beta="auto").tolist() == policies.fedeas(table, beta=row.beta).tolist()
    with pytest.raises(UserError, match=r"allocation\.beta = 'auto'.*no beta removes 50 %"):
        policies.fedeas(reference_counts(0, 100, 0.05, 1), beta="auto")
    assert policies.fedeas(counts([9, 9], [4, 4]), beta="auto").sum() == 0


def test_beta_table_counts_what_fedeas_would_make():
    """(32, 0), beta 2: 8 images, 8 / 40 synthetic; after (32, 8): H = entropy(.8, .2) / ln 2 = 0.721928 is removed."""
    (row,) = fedeas_budget.beta_table(counts([32, 0]), [2])
    assert (row.images, row.synthetic_share) == (8, 0.2)
    assert row.removed == pytest.approx(0.721928, abs=1e-6)
    assert row.satisfies
