"""The arithmetic of reports on two to six numbers, worked out by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from raysim.commands.report import statistics


def runs_of(accuracies: dict[tuple[str, str, int], float | None]) -> pd.DataFrame:
    """Runs by (method, setting, seed) with this accuracy; None: still to come."""
    return pd.DataFrame(
        {
            "group": f"{method}, {setting}" if setting else method, "method": method, "setting": setting, "seed": seed,
            "status": "MISSING" if value is None else "FINISHED", "final_accuracy": value,
        }
        for (method, setting, seed), value in accuracies.items()
    )  # fmt: skip


def paired(differences: list[float]) -> pd.Series:
    """What `paired_differences` says of runs that differ by these numbers."""
    runs = runs_of({
        **{("a", "", seed): 0.5 for seed in range(len(differences))},
        **{("b", "", seed): 0.5 + d for seed, d in enumerate(differences)},
    })  # fmt: skip
    return statistics.paired_differences(runs, "a", ["final_accuracy"]).iloc[0]


def test_the_interval_and_p_value_of_a_paired_t_test():
    """Differences 1, 2, 3 hundredths: mean 2, sd 1, standard error 1 / sqrt 3.

    t = 2 sqrt 3 = 3.4641 on two degrees of freedom, where P(|T| > t) = 1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14)
    = 0.07418.  The quantile at 0.975 solves t / sqrt(2 + t^2) = 0.95: t = 0.95 sqrt(2 / (1 - 0.9025)) = 4.3027, so the
    95 % interval is 2 -+ 4.3027 / sqrt 3 = [-0.4841, 4.4841].
    """
    found = paired([0.01, 0.02, 0.03])
    assert found["final_accuracy_mean"] == pytest.approx(0.02)
    assert found["final_accuracy_sd"] == pytest.approx(0.01)
    assert found["final_accuracy_p_t"] == pytest.approx(1 - math.sqrt(12 / 14))
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3) / 100
    assert found["final_accuracy_low"] == pytest.approx(0.02 - half)
    assert found["final_accuracy_high"] == pytest.approx(0.02 + half)


def test_the_signed_rank_test_counts_sign_patterns():
    """Three differences above 0: of the 2^3 sign patterns one is as high and one as low, so p = 2 / 8.

    -1, 2, 3: the ranks of the positive ones sum to 5; of 6, 5, ..., as many patterns reach 5 or more (2: +++ and -++)
    as 1 or less, so p = 4 / 8.
    """
    assert paired([0.01, 0.02, 0.03])["final_accuracy_p_wilcoxon"] == pytest.approx(0.25)
    assert paired([-0.01, 0.02, 0.03])["final_accuracy_p_wilcoxon"] == pytest.approx(0.5)
    assert paired([-0.01, 0.02, 0.03])["final_accuracy_better"] == 2
    assert statistics.smallest_p_wilcoxon(3) == 0.25 and statistics.smallest_p_wilcoxon(5) == 0.0625


@pytest.mark.parametrize(("differences", "mean"), [([0.02], 0.02), ([0.0, 0.0, 0.0], 0.0)])
def test_one_pair_and_pairs_without_variation_have_no_p_value(differences, mean):
    found = paired(differences)
    assert found["final_accuracy_mean"] == pytest.approx(mean)
    assert all(math.isnan(found[f"final_accuracy_{key}"]) for key in ("low", "high", "p_t", "p_wilcoxon"))


def test_pairs_are_of_one_setting_and_seed_and_a_missing_one_leaves_no_mean():
    """y: 0.7 - 0.6 and 0.8 - 0.5, mean 0.2; x lacks the second seed of b, and z that of a."""
    runs = runs_of({
        ("a", "x", 0): 0.1, ("a", "x", 1): 0.2, ("a", "y", 0): 0.6, ("a", "y", 1): 0.5, ("a", "z", 0): 0.1,
        ("a", "z", 1): None, ("b", "x", 0): 0.3, ("b", "x", 1): None, ("b", "y", 0): 0.7, ("b", "y", 1): 0.8,
        ("b", "z", 0): 0.1, ("b", "z", 1): 0.2,
    })  # fmt: skip
    table = statistics.paired_differences(runs, "a", ["final_accuracy"]).set_index("group")
    assert list(table.index) == ["b, x", "b, y", "b, z"]
    assert list(table["n"]) == [1, 2, 1] and list(table["seeds"]) == [2, 2, 2]
    assert table["final_accuracy_mean"]["b, y"] == pytest.approx(0.2)
    assert table["final_accuracy_mean"].isna().tolist() == [True, False, True]


def test_a_mean_is_over_all_runs_or_there_is_none():
    """0.5 and 0.7: mean 0.6, sd 0.2 / sqrt 2; one run has no sd; with a run missing there is neither."""
    runs = runs_of({("a", "", 0): 0.5, ("a", "", 1): 0.7, ("b", "", 0): 0.9, ("c", "", 0): 0.9, ("c", "", 1): None})
    table = statistics.means(runs, ["final_accuracy"]).set_index("group")
    assert table["final_accuracy_mean"]["a"] == pytest.approx(0.6)
    assert table["final_accuracy_sd"]["a"] == pytest.approx(0.2 / math.sqrt(2))
    assert table["final_accuracy_mean"]["b"] == 0.9 and math.isnan(table["final_accuracy_sd"]["b"])
    assert math.isnan(table["final_accuracy_mean"]["c"]) and (table["n"]["c"], table["runs"]["c"]) == (1, 2)


def test_ties_share_their_rank_and_a_place_that_lacks_a_run_has_none():
    """Seed 0: 0.9, 0.8, 0.8 rank 1, 2.5, 2.5; seed 1: 0.7, 0.9, 0.8 rank 3, 1, 2: means 2, 1.75, 2.25."""
    values = {0: (0.9, 0.8, 0.8), 1: (0.7, 0.9, 0.8)}
    cells = {(m, "x", s): v for s, of_seed in values.items() for m, v in zip("abc", of_seed, strict=True)}
    means = statistics.mean_ranks(statistics.ranks(runs_of(cells), "final_accuracy"))
    assert list(means["rank"]) == [2, 1.75, 2.25] and list(means["blocks"]) == [2, 2, 2]
    ranked = statistics.ranks(runs_of({**cells, ("a", "x", 1): None}), "final_accuracy")
    assert ranked[ranked["seed"] == 1]["rank"].isna().all() and ranked[ranked["seed"] == 0]["rank"].notna().all()
    assert statistics.mean_ranks(ranked)["rank"].isna().all()


def test_the_share_of_the_gain_is_between_no_images_and_full_balance_of_the_same_other_keys():
    """none 0.60, full 0.80: 0.75 recovers 0.15 / 0.20; under other keys full gains nothing, so there is no share."""
    groups = {
        "none": (0.60, "none", "k"), "ours": (0.75, "fedeas", "k"), "full": (0.80, "full", "k"),
        "none 2": (0.60, "none", "j"), "ours 2": (0.75, "fedeas", "j"), "full 2": (0.60, "full", "j"),
        "alone": (0.75, "fedeas", "i"),
    }  # fmt: skip
    table = pd.DataFrame({"group": list(groups), "final_accuracy_mean": [mean for mean, _, _ in groups.values()]})
    kinds = pd.DataFrame(
        {"policy": [p for _, p, _ in groups.values()], "rest": [r for *_, r in groups.values()]}, index=list(groups)
    )
    shares = statistics.share_of_gain(table, "final_accuracy", kinds)
    assert shares["ours"] == pytest.approx(0.75) and shares.drop("ours").isna().all()
    table.loc[table["group"] == "full", "final_accuracy_mean"] = np.nan
    assert statistics.share_of_gain(table, "final_accuracy", kinds).isna().all()


METRICS = pd.DataFrame({
    "round": [0, 1, 2, 3], "accuracy": [0.9, 0.4, np.nan, 0.8], "seconds_train": [np.nan, 1.0, 2.0, 4.0],
    "seconds_evaluate": [0.5, 0.25, np.nan, 0.25],
})  # fmt: skip


def test_a_target_costs_the_seconds_until_the_first_evaluated_round_that_has_it():
    """Round 3: 1 + 2 + 4 of training, 0.5 + 0.25 + 0.25 of evaluation, 10 of making images; round 0 does not count."""
    found = statistics.cost_of_target(METRICS, 0.75, images=120, seconds_generate=10.0)
    assert found == {"rounds_to_target": 3, "images_to_target": 120, "seconds_to_target": 18.0}
    assert set(statistics.cost_of_target(METRICS, 0.85, 120, 10.0).values()) == {None}


def test_the_target_is_looked_for_on_the_validation_split_where_there_is_one():
    on_validation = METRICS.assign(validation_accuracy=[0.0, 0.8, np.nan, 0.1])
    assert statistics.cost_of_target(on_validation, 0.75, 0, 0.0)["rounds_to_target"] == 1
