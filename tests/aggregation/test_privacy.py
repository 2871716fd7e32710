"""The noise of a run and the epsilon claimed for it: against other accountants, and against an attack."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from raysim.aggregation import privacy
from raysim.aggregation.fedoui import fedalign, fedoui, fedoui_align
from raysim.aggregation.mean import fedavg, fednova, fixed_denominator, uniform
from raysim.aggregation.privacy import PrivacyMechanism, clients_keep_state
from raysim.aggregation.robust import krum, median, multi_krum, trimmed_mean
from raysim.config.schema import Update
from raysim.core.errors import RunError, UserError
from raysim.core.records import RoundTable
from raysim.local.moon import moon
from raysim.local.sgd import sgd

needs_library = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs the extra `privacy`")
OPTIONS = Update(clip=1.0, noise_multiplier=8.0)
DELTA = 1e-5


def mechanism(rule, n, per_round, z=8.0, *, keeps_state=False, drops=False, **keys) -> PrivacyMechanism:
    options = Update(clip=1.0, noise_multiplier=z, delta=DELTA, **keys)
    n_K = np.asarray(n)
    rule.register(n_K, per_round)
    return PrivacyMechanism.of(
        options, rule, type(rule).__name__, n_K, per_round, keeps_state=keeps_state, drops=drops
    )


def epsilon(clients: int, per_round: int, z: float, rounds: int) -> float:
    """What a run with equal weights reports."""
    return mechanism(uniform(), [100] * clients, per_round, z).epsilon(rounds, rounds)


# The noise is a constant of the run


def test_equal_weights_get_noise_for_one_client_of_the_cohort():
    """z = 8, clip 1, 4 of 10 clients: std 8 / 4, whatever the sizes."""
    assert mechanism(uniform(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4).std == 2.0


def test_a_fixed_denominator_gets_noise_for_the_largest_of_all_registered_clients():
    """Sizes 500 and 9 x 100, cap 200: sum of min(n, 200) = 1,100, q = 2/10, denominator 220; w_max = 200 / 220."""
    private = mechanism(fixed_denominator(cap=200), [500, *[100] * 9], 2, z=3.0)
    assert private.std == pytest.approx(3.0 * 200 / 220, rel=1e-15)


def test_fedavg_with_every_client_in_every_round_gets_noise_for_the_largest():
    """Sizes 3, 1: weights 0.75 and 0.25 in every round, nothing is drawn, so nothing is amplified."""
    private = mechanism(fedavg(), [3, 1], 2, z=2.0)
    assert private.std == 1.5
    assert not private.secret_cohorts


def test_fedavg_on_clients_of_equal_size_has_the_noise_of_equal_weights():
    assert mechanism(fedavg(), [7] * 10, 4).std == mechanism(uniform(), [7] * 10, 4).std


@pytest.mark.parametrize(
    ("rule", "n", "per_round"),
    [(uniform(), [5, 1, 1, 1], 2), (fixed_denominator(), [5, 1, 1, 1], 2), (fixed_denominator(cap=2), [5, 1, 1, 1], 3),
     (fedavg(), [5, 1, 1, 1], 4), (fedavg(), [2, 2, 2, 2], 3)],
    ids=str,
)
def test_no_client_of_any_cohort_weighs_more_than_the_noise_was_made_for(rule, n, per_round):
    from itertools import combinations

    private, n_K = mechanism(rule, n, per_round), np.array(n)
    for cohort in combinations(range(len(n)), per_round):
        w_K = rule.weights(RoundTable(1, np.array(cohort), n_K[list(cohort)]), None).w_K
        assert w_K == pytest.approx(rule.constant_weights(n_K, per_round)[list(cohort)], rel=1e-12)
        private.noisy(np.zeros(3), w_K, np.random.default_rng(0))


def test_a_weight_beyond_what_the_noise_was_made_for_ends_the_run():
    """A rule of the user's own may say one thing and do another."""
    private = mechanism(uniform(), [1, 1, 1, 1], 2)
    with pytest.raises(RunError, match=r"a client weighs 0\.6, and the noise is made for at most 0\.5"):
        private.noisy(np.zeros(3), np.array([0.6, 0.4]), np.random.default_rng(0))


def test_noise_at_the_client_is_the_same_for_every_rule_of_sizes_and_sent_updates():
    for rule in (fedavg(), uniform(), fixed_denominator(), fedalign(), krum(), multi_krum(), median(), trimmed_mean()):
        private = mechanism(rule, [500, *[100] * 9], 5, noise_at="client")
        assert private.std == 8.0
        assert not private.secret_cohorts
        assert private.noisy(np.ones(2), np.array([9.0]), np.random.default_rng(0)).tolist() == [1, 1]


# Refusals


UNEQUAL = [500, *[100] * 99]


@pytest.mark.parametrize("rule", [fedavg()], ids=str)
def test_weights_by_part_of_the_cohort_are_refused_with_the_remedies(rule):
    with pytest.raises(UserError, match=r"draws 10 of 100 clients.*aggregation\.name=uniform.*fixed_denominator"):
        mechanism(rule, UNEQUAL, 10)


@pytest.mark.parametrize(
    "rule", [fednova(), fedalign(), fedoui(), fedoui_align(), krum(), multi_krum(), median(), trimmed_mean()],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.parametrize("per_round", [10, 100])
def test_weights_from_what_clients_computed_are_refused_even_if_all_take_part(rule, per_round):
    name = type(rule).__name__
    with pytest.raises(UserError, match=rf"aggregation\.name = {name} weighs clients by what they computed.*uniform"):
        mechanism(rule, [100] * 100, per_round)


def test_clients_that_drop_out_are_refused_where_the_others_then_weigh_more():
    for rule in (uniform(), fedavg()):
        with pytest.raises(UserError, match=r"on_client_failure = drop.*fixed_denominator \(cap=1"):
            mechanism(rule, [100] * 10, 5, drops=True)
    assert mechanism(fixed_denominator(cap=1), UNEQUAL, 10, drops=True).std == mechanism(uniform(), UNEQUAL, 10).std


class Known:
    """Updates that are at hand, as rows."""

    def __init__(self, delta_KP):
        self.delta_KP = np.asarray(delta_KP, dtype=np.float64)

    def norms(self):
        return np.linalg.norm(self.delta_KP, axis=1)

    def dot(self, v_P):
        return self.delta_KP @ v_P

    def weighted_sum(self, w_K):
        return w_K @ self.delta_KP

    def gram(self):
        return self.delta_KP @ self.delta_KP.T


@pytest.mark.parametrize(
    ("rule", "moved"), [(fedalign(), 1.997), (multi_krum(byzantine=4), 10 / 7)], ids=["fedalign", "multi_krum"]
)
def test_one_update_moves_a_rule_that_looks_at_updates_by_far_more_than_its_own_weight(rule, moved):
    """Five updates +1, five -1, the eleventh +1 or -1: on its own weight it moves the sum by a third at most.

    fedalign: the mean is +1/11 or -1/11, so six of one side share all weight but what eps = 1e-3 leaves to the others.
    multi_krum keeps 7: the six of the larger side and one of the other: (6 - 1) / 7 to either side.
    """
    table, sums = RoundTable(1, np.arange(11), np.ones(11, dtype=np.int64)), []
    for last in (1.0, -1.0):
        updates = Known([[1.0]] * 5 + [[-1.0]] * 5 + [[last]])
        w_K = rule.weights(table, updates).w_K
        sums.append(updates.weighted_sum(w_K)[0])
        assert 2 * w_K.max() < 0.334
    assert sums[0] - sums[1] == pytest.approx(moved, abs=2e-3)


def by_whatever_the_table_holds(table):
    return np.ones(len(table.n_K))


def function_rule():
    from raysim.config.registry import complete

    return complete("aggregation", by_whatever_the_table_holds)()


@pytest.mark.parametrize(
    ("rule", "read"),
    [(fedoui(), "by oui"), (fedoui_align(), "by oui"), (fednova(), "by effective_steps"),
     (function_rule(), "is a plain function")],
    ids=lambda value: type(value).__name__,
)
def test_noise_at_the_client_refuses_a_rule_that_may_weigh_by_what_clients_report_without_noise(rule, read):
    with pytest.raises(UserError, match=rf"noise_at = client: .*{read}.*fedalign, krum") as refused:
        mechanism(rule, [100] * 10, 10, noise_at="client")
    assert "noise_at=client" not in str(refused.value)
    with pytest.raises(UserError) as refused:
        mechanism(rule, [100] * 10, 10)
    assert "noise_at=client" not in str(refused.value)


@pytest.mark.parametrize("rule", [fedalign(), krum(), median()], ids=lambda rule: type(rule).__name__)
def test_noise_at_the_client_is_recommended_for_rules_of_updates_alone(rule):
    with pytest.raises(UserError, match=r"set update\.noise_at=client"):
        mechanism(rule, [100] * 10, 10)


def test_noise_at_the_client_does_not_hide_which_clients_drop_out():
    with pytest.raises(UserError, match="on_client_failure = drop: whether a client is left out"):
        mechanism(fedavg(), [100] * 10, 5, drops=True, noise_at="client")


@pytest.mark.parametrize(("where", "columns"), [("client", []), ("server", ["clipped", "effective_steps"])])
def test_with_noise_at_the_client_a_rule_sees_sizes_alone(where, columns):
    """Norms, inner products and slices are those of the sent update; the table would add what has no noise."""
    from types import SimpleNamespace

    from raysim.federation.server import Server

    server = SimpleNamespace(privacy=mechanism(uniform(), [3, 5], 2, noise_at=where))
    columns_K = {"clipped": np.ones(2), "effective_steps": np.full(2, 7.0)}
    seen = Server._seen_by_rule(server, RoundTable(1, np.arange(2), np.array([3, 5]), columns_K))
    assert seen.n_K.tolist() == [3, 5]
    assert sorted(seen.columns) == columns


# What clients remember


def test_clients_with_a_memory_get_no_amplification():
    """What a client remembers depends on when it took part, so later rounds tell of earlier cohorts."""
    assert clients_keep_state(OPTIONS, moon(), "average")
    assert clients_keep_state(Update(clip=1.0, noise_multiplier=8.0, top_k=0.1), sgd(), "average")
    assert clients_keep_state(OPTIONS, sgd(), "local")
    assert not clients_keep_state(OPTIONS, sgd(), "average")
    assert not mechanism(uniform(), [100] * 100, 10, keeps_state=True).secret_cohorts


@needs_library
def test_where_cohorts_are_known_epsilon_is_that_of_the_client_that_took_part_most_often():
    """50 rounds, at most 7 of them with the same client: as 7 rounds in which all take part."""
    remembers = mechanism(uniform(), [100] * 100, 10, keeps_state=True)
    assert remembers.epsilon(50, 7) == epsilon(10, 10, 8.0, 7)
    local = mechanism(uniform(), [100] * 100, 5, noise_at="client")
    assert local.epsilon(50, 7) == remembers.epsilon(50, 7)


def outside(**keys) -> str:
    import pandas as pd

    told = mechanism(uniform(), [100] * 10, 5).summary(pd.DataFrame({"epsilon": [1.0]}), **keys)
    return "; ".join(told["outside_guarantee"])


@needs_library
def test_the_summary_names_what_training_reads_of_clients_data_without_noise():
    """Pixels enter the scale of inputs; the shipped weights are not known to be trained on public images."""
    assert "mean and standard deviation" in outside(oui=False)
    assert "synthetic images, whose" not in outside(oui=False)
    assert "generator was trained on clients' images or on unknown ones" in outside(oui=False, generator="ddpm")
    assert "whose generator" not in outside(oui=False, generator="oracle")
    assert "numbers of others" not in outside(oui=False, generator="oracle")
    assert "numbers of others" in outside(oui=False, generator="oracle", shared_budget=True)


# The accountant


@needs_library
def test_with_sampling_epsilon_is_never_above_the_bound_that_holds_without_it():
    """9 of 10 clients, z = 2, 10 rounds: 19.05 for a client in every round, and 23.66 by the analysis of sampling."""
    assert epsilon(10, 9, 2.0, 10) == epsilon(10, 10, 2.0, 10) == pytest.approx(19.05, abs=0.01)
    assert epsilon(1000, 10, 2.0, 10) < epsilon(10, 10, 2.0, 10) / 10


def gaussian_bound(sigma: float, times: int, delta: float) -> float:
    """An upper bound: min over a of a T / (2 sigma^2) + ln(1 / delta) / (a - 1)  (Mironov, arXiv 1702.07476)."""
    orders = [1 + i / 100 for i in range(1, 10_000)]
    return min(a * times / (2 * sigma**2) + math.log(1 / delta) / (a - 1) for a in orders)


@needs_library
@pytest.mark.parametrize("times", [1, 10, 100])
def test_without_sampling_epsilon_is_that_of_composed_gaussians_of_half_the_multiplier(times):
    """Replacing one client moves the sum by up to 2 clip. The library converts more tightly than the simple bound."""
    bound = gaussian_bound(4.0, times, DELTA)
    assert 0.7 * bound < epsilon(10, 10, 8.0, times) <= bound * 1.001


@needs_library
def test_epsilon_grows_with_rounds_and_falls_with_noise_and_with_sampling():
    once, often = epsilon(100, 5, 8.0, 1), epsilon(100, 5, 8.0, 50)
    assert 0 < once < often < epsilon(100, 100, 8.0, 50)
    assert epsilon(100, 5, 16.0, 50) < often


def exact_epsilon_without_sampling(sigma: float, times: int, delta: float) -> float:
    """Epsilon of T Gaussians, sensitivity 1 (Balle and Wang, arXiv 1805.06530, theorem 8): mu = sqrt(T) / sigma.

    delta = Phi(mu / 2 - eps / mu) - e^eps Phi(-mu / 2 - eps / mu)
    """
    from scipy.optimize import brentq

    mu = math.sqrt(times) / sigma
    return float(brentq(
        lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta, 1e-9, 500
    ))


def renyi_epsilon(q: float, sigma: float, times: int, delta: float) -> float:
    """The bound of Wang, Balle and Kasiviswanathan (arXiv 1808.00087, theorem 9) for any Gaussian, written out.

    (a - 1) eps'(a) = log(1 + q^2 C(a, 2) min(4 (e^eps(2) - 1), 2 e^eps(2)) + sum_{j>2} q^j C(a, j) 2 e^((j-1) eps(j))),
    eps(j) = j / (2 sigma^2); converted as in arXiv 2004.00010, proposition 12.
    """
    from scipy.special import gammaln, logsumexp

    best = math.inf
    for a in range(2, 200):
        j = np.arange(3, a + 1)
        comb = gammaln(a + 1) - gammaln(j + 1) - gammaln(a - j + 1)
        e2 = 2 / (2 * sigma**2)
        second = 2 * math.log(q) + math.log(a * (a - 1) / 2) + min(math.log(4 * math.expm1(e2)), math.log(2) + e2)
        terms = j * math.log(q) + comb + math.log(2) + (j - 1) * j / (2 * sigma**2)
        rdp = times * float(logsumexp([0.0, second, *terms])) / (a - 1)
        best = min(best, rdp + math.log1p(-1 / a) - math.log(delta * a) / (a - 1))
    return best


def attainable_epsilon(q: float, sigma: float, times: int, delta: float) -> float:
    """What an attack can reach on a cohort of fixed size, from dp-accounting's privacy loss distributions.

    Where all others send -u, replacing a client that sends -u by one that sends +u turns N(0, s^2) in every round into
    P = (1 - q) N(0, s^2) + q N(1, s^2), in units of the sensitivity: the pair of Poisson sampling under add or remove.
    (That this pair also bounds one round from above: Zhu, Dong and Wang, arXiv 2106.08567, proposition 30.)
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), times)
    return float(accountant.get_epsilon(delta))


GRID = [
    (q, z, rounds)
    for q in (0.01, 0.1, 0.5)
    for z in (2.0, 4.0, 8.0)
    for rounds in (10, 100)
    if not (q == 0.5 and z == 2.0)
]


@needs_library
@pytest.mark.parametrize(("q", "z", "rounds"), GRID)
def test_epsilon_lies_between_what_an_attack_can_reach_and_an_independent_renyi_bound(q, z, rounds):
    """Two accountants of their own: dp-accounting's privacy loss distributions, and the paper's theorem written out."""
    reported = epsilon(1000, round(1000 * q), z, rounds)
    assert attainable_epsilon(q, z / 2, rounds, DELTA) <= reported * 1.001
    assert reported <= renyi_epsilon(q, z / 2, rounds, DELTA) * 1.001


@needs_library
@pytest.mark.parametrize("z", [4.0, 8.0, 20.0])
@pytest.mark.parametrize("rounds", [1, 10, 100])
def test_without_sampling_epsilon_is_at_most_an_eighth_above_the_exact_one(z, rounds):
    exact = exact_epsilon_without_sampling(z / 2, rounds, DELTA)
    assert exact <= epsilon(10, 10, z, rounds) <= exact * 1.125


# An attack


@dataclass(frozen=True)
class Target:
    """The one client of 1,000 that is attacked: what it sends (+1 or -1, the norm of clip), what the others send."""

    size: int
    others: float


def advantage(
    rule: Any, std_of: Callable[[np.ndarray], float], target: Target, epsilon: float, rounds: int = 100,
    trials: int = 40_000,
) -> float:
    """By how much an attack beats (epsilon, DELTA): the largest TPR - e^epsilon FPR - DELTA less five deviations.

    1,000 clients, 10 a round; the target sends +1 (positive) or -1 (negative), the others of size 100 always the same.
    The attacker sees each round's noisy sum and, from the other coordinates of a large model, the level of its noise,
    and tests with the likelihood ratio, which no test beats.
    """
    n_K = np.array([target.size, *[100] * 999])
    rule.register(n_K, 10)
    weights = {
        there: rule.weights(RoundTable(1, np.array(ids), n_K[ids]), None).w_K
        for there, ids in ((True, [*range(10)]), (False, [*range(1, 11)]))
    }
    level = {there: std_of(w_K) for there, w_K in weights.items()}
    mean = {
        (there, sign): float(weights[there] @ np.array([sign if there else target.others, *[target.others] * 9]))
        for there in (True, False) for sign in (1.0, -1.0)
    }
    visible = not math.isclose(level[True], level[False], rel_tol=1e-9)
    draw, found = np.random.default_rng(7), {}
    for sign in (1.0, -1.0):
        there = draw.random((trials, rounds)) < 10 / 1000
        std = np.where(there, level[True], level[False])
        x = np.where(there, mean[True, sign], mean[False, sign]) + std * draw.standard_normal((trials, rounds))
        likelihood = {}
        for s in (1.0, -1.0):  # without the factor that both signs have in common
            with_it = 0.01 / level[True] * np.exp(-0.5 * ((x - mean[True, s]) / level[True]) ** 2)
            without = 0.99 / level[False] * np.exp(-0.5 * ((x - mean[False, s]) / level[False]) ** 2)
            likelihood[s] = np.where(there, with_it, without) if visible else with_it + without
        found[sign] = np.log(likelihood[1.0] / likelihood[-1.0]).sum(axis=1)
    best = -math.inf
    for positive, negative in ((found[1.0], found[-1.0]), (-found[-1.0], -found[1.0])):
        for threshold in np.quantile(negative, [0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999]):
            tpr, fpr = float((positive >= threshold).mean()), float((negative >= threshold).mean())
            deviation = math.sqrt((tpr * (1 - tpr) + math.exp(2 * epsilon) * fpr * (1 - fpr)) / trials)
            best = max(best, tpr - math.exp(epsilon) * fpr - DELTA - 5 * deviation)
    return best


@cache
def _claimed(clients: int, per_round: int, z: float, rounds: int) -> float:
    return epsilon(clients, per_round, z, rounds)


ACCEPTED = [
    (uniform(), 500), (fixed_denominator(), 500), (fixed_denominator(cap=200), 500), (fixed_denominator(cap=1), 500),
    (fixed_denominator(), 100), (fedavg(), 100),
]


@needs_library
@pytest.mark.parametrize("others", [0.0, -1.0], ids=["others silent", "others against"])
@pytest.mark.parametrize(("rule", "size"), ACCEPTED, ids=str)
def test_no_attack_beats_epsilon_with_any_accepted_rule(rule, size, others):
    """z = 2, 100 rounds, 10 of 1,000 clients: epsilon 1.48, true and false positives as (1.48, 1e-5) allows."""
    private = mechanism(rule, [size, *[100] * 999], 10, 2.0)
    claimed = private.epsilon(100, 100)
    assert claimed == _claimed(1000, 10, 2.0, 100)
    assert advantage(rule, lambda _: private.std, Target(size, others), claimed) <= 0


@needs_library
@pytest.mark.parametrize("others", [0.0, -1.0], ids=["others silent", "others against"])
def test_the_attack_beats_epsilon_where_noise_goes_by_the_largest_weight_of_the_cohort(others):
    """One client of 500 samples among others of 100 under fedavg: its 5/14 where it takes part, else 1/10.

    So the level of the noise tells when it does: no amplification is left, and 1.48 is far from true.
    """
    claimed = _claimed(1000, 10, 2.0, 100)
    assert claimed == pytest.approx(1.48, abs=0.01)
    assert advantage(fedavg(), lambda w_K: 2.0 * float(w_K.max()), Target(500, others), claimed) > 0.03


def test_without_the_library_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(privacy, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'raysim\[privacy\]'"):
        privacy.require_library()
