"""The arithmetic of comparisons: means, paired differences, ranks, cost of a target accuracy, share of a gain.

All of it works on a table with a row for each run: `group` (what the run is called but for its seed), `method` and
`setting` (what is compared, and where), `seed`, `status` and the metrics.  What lacks a run is NaN, never the mean of
those that are there.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raysim.core.plain import PlainDict
from raysim.core.records import FloatArray

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = 0.95
ENOUGH_PAIRS = 5
TARGET = "rounds_to_target"
TARGET_COSTS = (TARGET, "images_to_target", "seconds_to_target")


def means(runs: "pd.DataFrame", metrics: Sequence[str]) -> "pd.DataFrame":
    """Mean and standard deviation (n - 1 in the denominator) of each metric over the runs of a group.

    Returns one row per group, in the order of `runs`: `runs` (how many there are to be), n (finished), failed, and
    `METRIC_mean`, `METRIC_sd`: NaN where a run is not finished or has no value; the sd also where there is one run.
    """
    import pandas as pd

    lines = []
    for group, members in runs.groupby("group", sort=False):
        status = members["status"]
        finished = int((status == "FINISHED").sum())
        line: PlainDict = {"group": group, "runs": len(members), "n": finished}
        line["failed"] = int((status == "FAILED").sum())
        for name in metrics:
            values = pd.to_numeric(members[name]).where(status == "FINISHED")
            line[f"{name}_mean"] = values.mean(skipna=False)
            line[f"{name}_sd"] = values.std(ddof=1, skipna=False)
        lines.append(line)
    return pd.DataFrame(lines)


def paired_differences(runs: "pd.DataFrame", label: str, metrics: Sequence[str]) -> "pd.DataFrame":
    """Differences of each method from the method `label`, on the same setting and seed.

    Returns one row per group: n pairs and `seeds` that there are to be; for each metric the mean difference, its
    standard deviation over pairs (n - 1), `_low` and `_high`, the ends of the 95 % t interval, the two-sided p-values
    `_p_t` (paired t-test) and `_p_wilcoxon` (signed ranks), and `_better`, in how many pairs it is above 0.
    All but the counts are NaN where a pair is missing; interval and p-values where fewer than two pairs, or pairs
    without any variation, give none.
    """
    import pandas as pd

    keys = ["setting", "seed"]
    finished = runs[runs["status"] == "FINISHED"]
    reference = finished[finished["method"] == label].set_index(keys)[list(metrics)].astype(float)
    lines = []
    for group, members in runs[runs["method"] != label].groupby("group", sort=False):
        done = members[members["status"] == "FINISHED"].set_index(keys)[list(metrics)].astype(float)
        differences = (done - reference.reindex(done.index)).dropna()
        line: PlainDict = {"group": group, "n": len(differences), "seeds": len(members)}
        for name, values in differences.items():
            is_whole = len(values) == len(members)
            found = _paired(values.to_numpy() if is_whole else np.full(1, np.nan))
            line |= {f"{name}_{key}": value for key, value in found.items()}
            line[f"{name}_better"] = int((values > 0).sum())
        lines.append(line)
    return pd.DataFrame(lines)


def _paired(differences: FloatArray) -> PlainDict:
    """Mean, sd, interval and p-values of paired differences."""
    from scipy import stats

    n = len(differences)
    sd = float(differences.std(ddof=1)) if n > 1 else np.nan
    found: PlainDict = {"mean": float(differences.mean()), "sd": sd}
    found |= dict.fromkeys(("low", "high", "p_t", "p_wilcoxon"), np.nan)
    if not sd > 1e-12:
        return found
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(CONFIDENCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with ties or zeros the p-value is an approximation
        signed = stats.wilcoxon(differences)
    found |= {"low": float(interval.low), "high": float(interval.high)}
    return found | {"p_t": float(test.pvalue), "p_wilcoxon": float(signed.pvalue)}


def smallest_p_wilcoxon(pairs: int) -> float:
    """The smallest two-sided p-value that the signed-rank test can give with this many pairs: 2 / 2^n."""
    return 2.0 ** (1 - pairs)


def ranks(runs: "pd.DataFrame", metric: str) -> "pd.DataFrame":
    """The rank of each run among the methods of its setting and seed: 1 for the highest; ties share their mean rank.

    Returns `method`, `setting`, `seed` and `rank`, a row per run; NaN for all of a setting and seed that lack a run.
    """
    from scipy.stats import rankdata

    table = runs[["method", "setting", "seed"]].copy()
    values = runs[metric].astype(float).where(runs["status"] == "FINISHED")
    methods = runs["method"].nunique()
    for _, rows in table.groupby(["setting", "seed"]).groups.items():
        block = values[rows].to_numpy()
        is_whole = len(block) == methods and np.isfinite(block).all()
        table.loc[rows, "rank"] = rankdata(-block) if is_whole else np.nan
    return table


def mean_ranks(ranked: "pd.DataFrame") -> "pd.DataFrame":
    """By method: its mean `rank` over all settings and seeds, and how many those are (`blocks`); NaN where one is."""
    by_method = ranked.groupby("method", sort=False)["rank"]
    return by_method.agg(rank=lambda r: r.mean(skipna=False), blocks="size").reset_index()


def share_of_gain(table: "pd.DataFrame", metric: str, kinds: "pd.DataFrame") -> "pd.Series":
    """How much of what full balance gains on no images at all each group gains: (a - none) / (full - none), of means.

    table: from `means`.  kinds: by group, `policy` and `rest`, which is equal for groups that differ in nothing else.
    NaN where one of the three is missing, where full balance gains nothing, and for `none` and `full` themselves.
    """
    import pandas as pd

    mean = table.set_index("group")[f"{metric}_mean"]
    known = kinds.join(mean.rename("mean")).dropna(subset=["mean"])
    ends = {
        policy: known[known["policy"] == policy].drop_duplicates("rest").set_index("rest")["mean"]
        for policy in ("none", "full")
    }
    shares = {}
    for group, row in known.iterrows():
        none, full = (ends[policy].get(row["rest"], np.nan) for policy in ("none", "full"))
        is_between = row["policy"] not in ends and full - none > 1e-12
        shares[group] = (row["mean"] - none) / (full - none) if is_between else np.nan
    return pd.Series(shares, dtype=float).reindex(mean.index)


def cost_of_target(metrics: "pd.DataFrame", target: float, images: float, seconds_generate: float) -> PlainDict:
    """What a run took to reach an accuracy: the first evaluated round that has it, the images, the seconds until then.

    The accuracy is that on the validation split, or where there is none, on the test split.
    metrics: one row per round.  All images are made before the first round, so that a run that reaches the target has
    cost all of them; seconds are those of making them and of the rounds.  All None where it was never reached.
    """
    accuracy = metrics["validation_accuracy" if "validation_accuracy" in metrics else "accuracy"]
    reached = metrics[(metrics["round"] > 0) & (accuracy >= target)]
    if reached.empty:
        return dict.fromkeys(TARGET_COSTS)
    number = int(reached["round"].iloc[0])
    columns = [name for name in ("seconds_train", "seconds_aggregate", "seconds_evaluate") if name in metrics]
    until = metrics[metrics["round"] <= number]
    seconds = float(np.nansum(until[columns].to_numpy(dtype=float))) + seconds_generate
    return dict(zip(TARGET_COSTS, (number, int(images), seconds), strict=True))
