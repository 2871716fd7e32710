"""Aggregation rules: the published weights, identities, fallbacks of the Beta fit, and robust rules by hand."""

import csv
import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from raysim.aggregation.fedoui import fedalign, fedoui, fedoui_align
from raysim.aggregation.mean import fedavg, uniform
from raysim.aggregation.robust import krum, median, multi_krum, trimmed_mean
from raysim.core.errors import DivergenceError, RunError, UserError
from raysim.core.records import RoundTable

PUBLISHED_OUI = [0.12646484375, 0.25732421875, 0.31005859375, 0.31787109375, 0.37158203125]
PUBLISHED_N = [210, 226, 66, 40, 17]


class Known:
    """Updates given as a K x P matrix."""

    def __init__(self, delta_KP):
        self.delta_KP = np.asarray(delta_KP, dtype=np.float64)

    def norms(self):
        return np.sqrt(np.square(self.delta_KP).sum(axis=1))

    def dot(self, v_P):
        return np.array([math.fsum(row * v_P) for row in self.delta_KP])

    def weighted_sum(self, w_K):
        return np.array([math.fsum(column * w_K) for column in self.delta_KP.T])

    def gram(self):
        return np.array([[math.fsum(a * b) for b in self.delta_KP] for a in self.delta_KP])

    def by_coordinate(self, fn):
        halves = np.array_split(self.delta_KP, 2, axis=1)
        return np.concatenate([fn(half) for half in halves])


class WithAlignment(Known):
    """Updates whose cosines with their weighted mean are given: K unit vectors that answer a fixed direction."""

    def __init__(self, a_K):
        self.a_K = np.asarray(a_K)

    def norms(self):
        return np.ones(len(self.a_K))

    def dot(self, v_P):
        return self.a_K * v_P[0]

    def weighted_sum(self, w_K):
        return np.array([0.25])


def table(n, oui=None, round_=1, clients=None, **columns):
    given_columns = {"oui": oui, **columns} if oui is not None else columns
    return RoundTable(
        round_,
        np.arange(len(n)) if clients is None else np.asarray(clients),
        np.asarray(n, dtype=np.int64),
        {name: np.asarray(values, dtype=np.float64) for name, values in given_columns.items()},
    )


def traces():
    rounds = defaultdict(list)
    with (Path(__file__).parents[1] / "golden" / "fedoui_traces.csv").open() as file:
        for row in csv.DictReader(file):
            rounds[row["method"], int(row["seed"]), int(row["round"])].append(row)
    return rounds


def test_every_published_round_is_reproduced():
    """360 rounds of 5 clients: given n_k, OUI and alignment, the published scores and weights to 1e-6."""
    rules = {"fedoui": fedoui(), "fedoui_align": fedoui_align(), "fedalign": fedalign()}
    rounds = traces()
    for (method, _, round_), rows in rounds.items():
        n, oui, a, s, w = (
            np.array([float(r[key]) for r in rows]) for key in ("n_k", "oui", "alignment_a", "score_s", "weight")
        )
        answer = rules[method].weights(table(n, oui, round_), WithAlignment(a))
        np.testing.assert_allclose(answer.scores_K, a if method == "fedalign" else s, atol=1e-6)
        np.testing.assert_allclose(answer.w_K, w, atol=1e-6)
        assert method == "fedalign" or answer.info["fit_mode"] == "moments"
    assert len(rounds) == 360


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        ("moments", [0.053786, 0.689048, 0.153403, 0.085398, 0.018365]),
        ("mle", [0.047234, 0.700485, 0.151274, 0.083780, 0.017226]),
    ],
)
def test_a_published_round_under_both_fits(fit, expected):
    answer = fedoui(fit=fit).weights(table(PUBLISHED_N, PUBLISHED_OUI), None)
    assert answer.w_K == pytest.approx(expected, abs=1e-6)
    assert answer.info["fit_mode"] == fit


# Size weights


def test_weights_are_shares_of_the_participants_samples():
    """Two of four clients take part, n = 10 and 30: 1/4 and 3/4; parameters of 1 and 1 stay exactly 1."""
    answer = fedavg().weights(table([10, 30], clients=[1, 3]), None)
    assert answer.w_K.tolist() == [0.25, 0.75]
    assert Known([[1.0], [1.0]]).weighted_sum(answer.w_K).tolist() == [1.0]


def test_weights_count_samples_not_batches():
    """33 and 64 samples are two batches of 32 each, yet weigh 33/97 and 64/97."""
    assert fedavg().weights(table([33, 64]), None).w_K == pytest.approx([0.340206, 0.659794], abs=1e-6)


def test_uniform_ignores_size():
    assert uniform().weights(table([1, 100, 7, 12]), None).w_K.tolist() == [0.25] * 4


RULES = [
    *(fedavg(), uniform(), fedoui(), fedoui(fit="mle"), fedoui(gamma=3, rho=0.5), fedalign(), fedalign(eta=2)),
    *(fedoui_align(), krum(), multi_krum(), median(), trimmed_mean(trim=0.3)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_identical_clients_give_their_common_update(rule):
    """Whatever the scores, weights sum to 1, so the mean of five equal updates is that update."""
    updates = Known([[0.5, -2.0, 1e-3]] * 5)
    answer = rule.weights(table(PUBLISHED_N, PUBLISHED_OUI), updates)
    assert math.fsum(answer.w_K) == pytest.approx(1, abs=1e-15)
    assert updates.weighted_sum(answer.w_K) == pytest.approx([0.5, -2.0, 1e-3], rel=1e-12)


@pytest.mark.parametrize("n", [[0, 0], [0]])
@pytest.mark.parametrize("rule", [fedavg(), fedoui(), fedalign()], ids=str)
def test_a_total_weight_of_zero_is_an_error_that_names_the_clients(rule, n):
    with pytest.raises(RunError, match=r"round 4: .*clients \[7.*add up to 0"):
        rule.weights(table(n, [0.3] * len(n), 4, clients=[7, 9][: len(n)]), Known([[1.0]] * len(n)))


@pytest.mark.parametrize("rule", [fedavg(), uniform()], ids=str)
def test_no_participant_is_an_error(rule):
    with pytest.raises(RunError, match="add up to 0"):
        rule.weights(table([]), None)


# Identities

ouis = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(ouis, st.data())
@settings(max_examples=60, deadline=None)
def test_exponent_zero_is_fedavg_bit_for_bit(oui, data):
    n = data.draw(st.lists(st.integers(1, 100_000), min_size=len(oui), max_size=len(oui)))
    rows = table(n, oui)
    updates = Known(np.random.default_rng(0).normal(size=(len(n), 3)))
    expected = fedavg().weights(rows, None).w_K.tobytes()
    assert fedoui(gamma=0).weights(rows, None).w_K.tobytes() == expected
    assert fedalign(eta=0).weights(rows, updates).w_K.tobytes() == expected
    assert fedoui_align(gamma=0, eta=0).weights(rows, updates).w_K.tobytes() == expected
    assert fedoui_align(eta=0).weights(rows, updates).w_K.tobytes() == fedoui().weights(rows, None).w_K.tobytes()


@given(st.lists(st.floats(0, 1), min_size=5, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_permuting_clients_permutes_weights_bit_for_bit(oui, data):
    n = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=len(oui), max_size=len(oui))))
    order = np.array(data.draw(st.permutations(range(len(oui)))))
    delta_KP = np.random.default_rng(1).normal(size=(len(n), 4))
    for rule in (fedavg(), uniform(), fedoui(), fedoui(fit="mle"), fedalign(), fedoui_align(), krum(), multi_krum()):
        straight = rule.weights(table(n, oui), Known(delta_KP)).w_K
        permuted = rule.weights(table(n[order], np.array(oui)[order]), Known(delta_KP[order])).w_K
        assert permuted.tobytes() == straight[order].tobytes()


@given(ouis)
@settings(max_examples=200, deadline=None)
def test_scores_are_probabilities_and_weights_a_distribution(oui):
    for rule in (fedoui(), fedoui(fit="mle"), fedoui(gamma=2, rho=0)):
        answer = rule.weights(table([5] * len(oui), oui), None)
        assert ((answer.scores_K >= 0) & (answer.scores_K <= 1)).all()
        assert (answer.w_K > 0).all()
        assert math.fsum(answer.w_K) == pytest.approx(1, abs=1e-12)


# The Beta fit and its fallbacks


@pytest.mark.parametrize("oui", [[0.3] * 5, [0.1] * 3, [0.3], [0.3, 0.3], [0.0] * 4, [1.0] * 4, [1.0]])
@pytest.mark.parametrize("fit", ["moments", "mle"])
def test_equal_ouis_and_single_participants_weigh_by_size(oui, fit):
    """No Beta has variance 0: average ranks (K + 1) / 2 give every score 2 * 1/2 = 1, so w = n / sum n."""
    n = [3, 1, 4, 1, 5][: len(oui)]
    answer = fedoui(fit=fit).weights(table(n, oui), None)
    assert answer.scores_K.tolist() == [1.0] * len(n)
    assert answer.w_K == pytest.approx(np.array(n) / sum(n), rel=1e-12)
    assert answer.info["fit_mode"] == ("single" if len(n) == 1 else "ranks")


@pytest.mark.parametrize("spread", [1e-16, 1e-12, 1e-10, 2e-9, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("centre", [0.001, 0.3, 0.999])
@pytest.mark.parametrize("fit", ["moments", "mle"])
def test_nearly_equal_ouis_give_finite_scores(spread, centre, fit):
    oui = centre + spread * np.array([-0.5, 0.5, 0.1, -0.2, 0.3])
    answer = fedoui(fit=fit).weights(table([1, 2, 3, 4, 5], oui), None)
    assert ((answer.scores_K >= 0) & (answer.scores_K <= 1)).all()
    assert math.fsum(answer.w_K) == pytest.approx(1, abs=1e-12)


def test_a_narrow_fit_is_the_normal_distribution():
    """Spread 1e-6 about 0.3: the Beta CDF at (x - mean) / sd = -1.2112 is Phi(-1.2112) = 0.112901; s is twice that."""
    oui = 0.3 + 1e-6 * np.array([0, 0.2, 0.5, 0.7, 1])
    z = (0 - 0.48) / np.std([0, 0.2, 0.5, 0.7, 1], ddof=1)
    answer = fedoui().weights(table([1] * 5, oui), None)
    assert answer.info["fit_mode"] == "moments"
    assert answer.scores_K[0] == pytest.approx(1 + math.erf(z / math.sqrt(2)), abs=1e-4)


def test_moments_that_fit_no_beta_fall_back_to_likelihood():
    """OUI 0 and 1: mean 1/2, variance 1/2 > m (1 - m), c < 0. By symmetry both score alike: weights by size."""
    answer = fedoui().weights(table([1, 3], [0.0, 1.0]), None)
    assert answer.info["fit_mode"] == "mle"
    assert answer.info["fit_a"] == pytest.approx(answer.info["fit_b"], rel=1e-6)
    assert answer.w_K == pytest.approx([0.25, 0.75], abs=1e-6)


def test_ranks_average_ties_and_favour_the_middle():
    """All below 1e-3, so all equal to the fit. Ranks 1.5, 1.5, 3 over 4: 2 min(p, 1 - p) = 0.75, 0.75, 0.5."""
    answer = fedoui().weights(table([1, 1, 1], [0.0, 0.0, 0.0005]), None)
    assert answer.info["fit_mode"] == "ranks"
    assert answer.scores_K.tolist() == [0.75, 0.75, 0.5]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=9))
@settings(max_examples=50, deadline=None)
def test_ranks_agree_with_scipy(steps):
    """OUIs of 0 to 4 times 1e-4 are clipped to one value: the ranks decide."""
    p_K = rankdata(steps) / (len(steps) + 1)
    answer = fedoui().weights(table([1] * len(steps), np.array(steps) * 1e-4), None)
    assert answer.scores_K == pytest.approx(2 * np.minimum(p_K, 1 - p_K), rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.5])
def test_an_impossible_oui_names_the_client(value):
    with pytest.raises(DivergenceError, match="client 8 failed in round 2: oui is"):
        fedoui().weights(table([1, 1], [0.5, value], 2, clients=[6, 8]), None)


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="no column 'oui'"):
        fedoui().weights(table([1, 1]), None)


# Options of FedOUI


def test_window_fits_the_ouis_of_the_last_rounds():
    """Window 2: round 3 is scored against rounds 2 and 3 together, as if all their clients had taken part in one."""
    rule, ouis_of = fedoui(window=2), [[0.9, 0.8, 0.7], [0.2, 0.3, 0.45], [0.1, 0.35, 0.6]]
    for round_, oui in enumerate(ouis_of):
        answer = rule.weights(table([1, 1, 1], oui, round_), None)
    pooled = fedoui().weights(table([1] * 6, ouis_of[1] + ouis_of[2]), None)
    assert answer.scores_K.tolist() == pooled.scores_K[3:].tolist()
    assert answer.scores_K.tolist() != fedoui().weights(table([1, 1, 1], ouis_of[2]), None).scores_K.tolist()


def test_ema_smooths_each_clients_oui():
    """ema 0.75: client 1 has 0.2, then 0.75 * 0.2 + 0.25 * 0.6 = 0.3; clients 2 and 3 are new, so as measured."""
    rule = fedoui(ema=0.75)
    rule.weights(table([1, 1], [0.9, 0.2], 0, clients=[0, 1]), None)
    answer = rule.weights(table([1, 1, 1], [0.6, 0.5, 0.4], 1, clients=[1, 2, 3]), None)
    plain = fedoui().weights(table([1, 1, 1], [0.3, 0.5, 0.4]), None)
    assert answer.scores_K == pytest.approx(plain.scores_K, rel=1e-9)


def test_several_layers_average_their_scores():
    layered = fedoui(layers=["a", "b"])
    rows = table([1, 1, 1], **{"oui.a": [0.1, 0.3, 0.6], "oui.b": [0.5, 0.9, 0.7]})
    answer = layered.weights(rows, None)
    one, two = (fedoui().weights(table([1, 1, 1], rows.columns[c]), None).scores_K for c in ("oui.a", "oui.b"))
    assert answer.scores_K == pytest.approx((one + two) / 2, rel=1e-15)
    assert {"fit_mode.a", "fit_mode.b"} <= set(answer.info)


@pytest.mark.parametrize("rule", [fedoui(window=3, ema=0.5), fedoui_align(window=2), fedoui()], ids=str)
def test_a_rule_resumed_from_its_json_state_continues_bit_for_bit(rule):
    rng = np.random.default_rng(5)
    rounds = [table([2, 3, 4], rng.uniform(0.1, 0.9, 3), r, clients=rng.permutation(5)[:3]) for r in range(6)]
    updates = Known(rng.normal(size=(3, 2)))
    for rows in rounds[:3]:
        rule.weights(rows, updates)
    resumed = dataclasses.replace(rule)
    resumed.load_state(json.loads(json.dumps(rule.state())))
    for rows in rounds[3:]:
        assert resumed.weights(rows, updates).w_K.tobytes() == rule.weights(rows, updates).w_K.tobytes()
    assert resumed.state() == rule.state()


def test_the_history_stays_as_long_as_the_window():
    rule = fedoui(window=3)
    for round_ in range(10):
        rule.weights(table([1, 1], [0.1, 0.1 + round_ / 20], round_), None)
    assert len(rule.state()["pools"]["oui"]) == 3
    plain = fedoui()
    plain.weights(table([1, 1], [0.1, 0.2]), None)
    assert not any(plain.state()["pools"].values())


# Alignment


def test_alignment_is_the_cosine_with_the_size_weighted_mean():
    """n = (3, 1), updates (1, 0) and (0, 1): mean (0.75, 0.25), norm sqrt(0.625); cosines 0.948683 and 0.316228.

    w ~ 3 * 0.949683 = 2.849050 and 0.317228: shares 0.899810 and 0.100190.
    """
    answer = fedalign().weights(table([3, 1]), Known([[1, 0], [0, 1]]))
    assert answer.scores_K == pytest.approx([0.948683, 0.316228], abs=1e-6)
    assert answer.w_K == pytest.approx([0.899810, 0.100190], abs=1e-6)


def test_an_update_against_the_mean_keeps_only_epsilon():
    """n = (3, 1), updates (1) and (-1): mean 0.5, a = (1, 0): 3 * 1.001 = 3.003 against 0.001."""
    answer = fedalign().weights(table([3, 1]), Known([[1.0], [-1.0]]))
    assert answer.scores_K.tolist() == [1.0, 0.0]
    assert answer.w_K == pytest.approx([3.003 / 3.004, 0.001 / 3.004], rel=1e-12)


@pytest.mark.parametrize("delta_KP", [[[0.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [-1.0, -2.0]]])
def test_zero_and_opposite_updates_weigh_by_size(delta_KP):
    """Both n are 5, so the mean is the zero vector, every alignment 0, and eps cancels: 1/2 each."""
    answer = fedalign().weights(table([5, 5]), Known(delta_KP))
    assert answer.scores_K.tolist() == [0.0, 0.0]
    assert answer.w_K.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_updates_that_cancel_but_for_rounding_weigh_by_size(dtype):
    """(.1, .7) + (.2, -.3) + (-.3, -.4) is 0 on paper and 1e-17 or 1e-8 in floating point, in no direction that counts.

    Next to it, a mean that is small but real: the third update shorter by a thousandth leaves a mean along (3, 4), and
    the first a cosine of (0.1 * 0.6 + 0.7 * 0.8) / sqrt(0.5) = 0.8768.
    """
    delta_KP = np.array([[0.1, 0.7], [0.2, -0.3], [-0.3, -0.4]], dtype=dtype).astype(np.float64)
    assert np.abs(delta_KP.sum(axis=0)).max() > 0
    for rule in (fedalign(), fedalign(eta=3)):
        answer = rule.weights(table([5, 5, 5]), Known(delta_KP))
        assert answer.scores_K.tolist() == [0, 0, 0]
        assert answer.w_K.tolist() == pytest.approx([1 / 3] * 3, rel=1e-15)
    delta_KP[2] *= 0.999
    assert fedalign().weights(table([5, 5, 5]), Known(delta_KP)).scores_K[0] == pytest.approx(0.8768, abs=1e-3)


def test_one_zero_update_among_others_has_alignment_zero():
    answer = fedalign().weights(table([1, 1, 1]), Known([[1.0], [0.0], [1.0]]))
    assert answer.scores_K.tolist() == [1.0, 0.0, 1.0]


def test_alignment_does_not_depend_on_the_scale_of_the_updates():
    """Scales far below and above the usual ones, as powers of two, which are exact."""
    delta_KP = np.random.default_rng(2).normal(size=(4, 5))
    expected = fedalign().weights(table([1, 2, 3, 4]), Known(delta_KP)).w_K
    for scale in (2.0**-100, 2.0**100):
        assert fedalign().weights(table([1, 2, 3, 4]), Known(delta_KP * scale)).w_K == pytest.approx(
            expected, rel=1e-12
        )


# Robust rules


def test_krum_takes_the_update_amid_its_neighbours():
    """K = 5, f = 1: 2 nearest each. 0: 1 + 4 = 5; 1: 1 + 1 = 2; 2: 1 + 1 = 2; 3: 1 + 4; 100: far. First of 1 and 2."""
    answer = krum(byzantine=1).weights(table([9, 1, 1, 1, 9]), Known([[0.0], [1.0], [2.0], [3.0], [100.0]]))
    assert answer.w_K.tolist() == [0, 1, 0, 0, 0]
    assert answer.scores_K.tolist() == [-5, -2, -2, -5, -(97**2 + 98**2)]


def test_multi_krum_averages_the_best():
    """The same with m = K - f = 4: all but the outlier; m = 2: the middle two."""
    updates = Known([[0.0], [1.0], [2.0], [3.0], [100.0]])
    assert multi_krum(byzantine=1).weights(table([1] * 5), updates).w_K.tolist() == [0.25] * 4 + [0]
    assert multi_krum(byzantine=1, keep=2).weights(table([1] * 5), updates).w_K.tolist() == [0, 0.5, 0.5, 0, 0]


@pytest.mark.parametrize("rule", [krum(byzantine=2), multi_krum(byzantine=2)], ids=str)
def test_krum_with_too_few_clients_is_refused_before_and_during_the_run(rule):
    """f = 2 needs 2 * 2 + 3 = 7."""
    rule.check(7)
    with pytest.raises(UserError, match=r"aggregation\.byzantine: 2 needs at least 7 clients per round, there are 6"):
        rule.check(6)
    with pytest.raises(UserError, match="at least 7"):
        rule.weights(table([1] * 6), Known(np.eye(6)))


def test_multi_krum_cannot_keep_more_than_there_are():
    with pytest.raises(UserError, match=r"aggregation\.keep: 8 updates of 7"):
        multi_krum(byzantine=1, keep=8).check(7)


def test_median_of_each_coordinate_is_not_moved_by_an_outlier():
    """Odd K: the middle value; even K: the mean of the middle two."""
    updates = [[1.0, 5.0, 0.0], [2.0, -1e9, 0.0], [1e9, 4.0, 3.0]]
    assert median().aggregate(table([1] * 3), Known(updates)).tolist() == [2.0, 4.0, 0.0]
    assert median().aggregate(table([1] * 4), Known([*updates, [3.0, 0.0, 1.0]])).tolist() == [2.5, 2.0, 0.5]


def test_trimmed_mean_drops_the_extremes_of_each_coordinate():
    """K = 5, trim 0.2: one at each end; (2 + 3 + 4) / 3 and (0 + 0 + 3) / 3."""
    updates = Known([[1.0, -1e9], [2.0, 0.0], [3.0, 0.0], [4.0, 3.0], [1e9, 6.0]])
    assert trimmed_mean(trim=0.2).aggregate(table([1] * 5), updates).tolist() == [3.0, 1.0]
    assert trimmed_mean(trim=0.2).weights(table([1] * 5), updates).info == {"dropped_per_end": 1.0}


@pytest.mark.parametrize(("trim", "clients", "dropped"), [(0.29, 100, 29), (0.1, 9, 0), (0.49, 3, 1), (0.0, 4, 0)])
def test_trim_counts_are_exact(trim, clients, dropped):
    """0.29 * 100 is 28.999999999999996 in floating point and 29 on paper."""
    assert trimmed_mean(trim=trim).weights(table([1] * clients), None).info["dropped_per_end"] == dropped
