"""A plan as plain data, for other programs."""


import numpy as np

from raysim.allocation import fedeas_budget
from raysim.allocation.imbalance import contributions_K, imbalance, missing_cells, top_share
from raysim.commands.plan.plan import OverSeeds, Plan, PolicyPlan
from raysim.core.plain import PlainDict
from raysim.core.records import FloatArray


def as_json(planned: Plan) -> PlainDict:
    """Return the plan as plain data: `real`, `full_balance`, `policies` by name, `betas`, and further values."""
    counts_KC = planned.counts_KC
    chosen = planned.chosen
    content: PlainDict = {
        "real": int(counts_KC.sum()),
        "full_balance": planned.full_balance,
        "clients": len(counts_KC),
        "classes": counts_KC.shape[1],
        "seed": planned.config.seed,
        "partition_sha256": planned.partition.sha256(),
        "imbalance": imbalance(counts_KC),
        "missing_cells": int(missing_cells(counts_KC).sum()),
        "top_20_percent_share": top_share(contributions_K(counts_KC)),
        "policies": {name: _policy_json(planned, row) for name, row in planned.quotas.rows.items()},
        "betas": [_beta_json(row) for row in planned.betas],
        "selected_beta": chosen.beta if chosen else None,
        "generation": None if planned.speed is None else {
            "images_per_s": planned.speed.images_per_s, "lanes": planned.speed.lanes, "note": planned.speed.note,
        },
        "training": None if planned.training is None else {
            "per_image_s": planned.training.per_image_s, "per_test_image_s": planned.training.per_test_image_s,
            "lanes": planned.training.lanes, "note": planned.training.note,
        },
        "notes": planned.notes,
    }
    if planned.seeds is not None:
        content["seeds"] = _seeds_json(planned.seeds)
    return content


def _policy_json(planned: Plan, row: PolicyPlan) -> PlainDict:
    if row.problem:
        return {"images": None, "imbalance_removed": None, "synthetic_share": None, "problem": row.problem}
    per_image = planned.bytes_per_image
    speed = planned.speed
    if row.unforeseen:
        return {
            "images": row.images, "imbalance_removed": None, "synthetic_share": None,
            "note": "it looks at what training shows; only the number of images is known before",
            "total_of": planned.quotas.reference if row.matched else None,
            "seconds": speed.seconds(row.images) if speed else None,
            "storage_bytes": row.images * per_image if per_image is not None else None,
        }
    return {
        "images": row.images,
        "left_out": row.left_out,
        "imbalance_removed": row.removed,
        "synthetic_share": row.synthetic_share,
        "of_full_balance": row.of_full_frac,
        "clients_touched": row.touched,
        "missing_cells": row.missing,
        "top_20_percent_share": row.top_share,
        "total_of": planned.quotas.reference if row.matched else None,
        "seconds": speed.seconds(row.images) if speed else None,
        "training_seconds": planned.training_s(row),
        "storage_bytes": row.images * per_image if per_image is not None else None,
    }


def _beta_json(row: fedeas_budget.BetaRow) -> PlainDict:
    return {
        "beta": row.beta, "images": row.images, "synthetic_share": row.synthetic_share,
        "imbalance_removed": row.removed, "satisfies_rule": row.satisfies,
    }


def _seeds_json(over: OverSeeds) -> PlainDict:
    return {
        "seeds": over.seeds,
        "full_balance": statistics(over.full_balance),
        "policies": {
            name: {"images": statistics(over.images[name]), "imbalance_removed": statistics(over.removed[name])}
            for name in over.images
        },
        "selected_beta": statistics(over.beta),
    }


def statistics(values: FloatArray) -> PlainDict:
    """Compute n, mean, sd (ddof 1), median, min and max of the finite values; None where there are too few."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {"n": 0, "mean": None, "sd": None, "median": None, "min": None, "max": None}
    return {
        "n": len(known),
        "mean": float(known.mean()),
        "sd": float(known.std(ddof=1)) if len(known) > 1 else None,
        "median": float(np.median(known)),
        "min": float(known.min()),
        "max": float(known.max()),
    }
