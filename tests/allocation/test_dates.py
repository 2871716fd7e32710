"""When a policy is asked, what it gets to spend, and which dates are refused before anything starts."""

from typing import Any

import numpy as np
import pytest
from policy_inputs import shown

from raysim.allocation.schedule import AllocationSchedule
from raysim.config.load import load_config
from raysim.config.schema import AllocationSection
from raysim.core.errors import ConfigError, UserError
from raysim.lifecycle.prepare import prepare

COUNTS = np.array([[6, 0, 0], [1, 4, 2], [3, 3, 3]])


def schedule(name: str, at: list[int], **params: Any) -> AllocationSchedule:
    return AllocationSchedule.of(AllocationSection(name=name, at=at, **params), COUNTS)


def test_a_budget_is_spent_in_equal_parts_and_what_was_given_stays():
    """20 images over 3 dates: 6, 7 and 7, which end at 6, 13 and 20."""
    drawn = schedule("random", [0, 2, 5], total=20)
    assert drawn.parts == (6, 7, 7) and drawn.total(COUNTS) == 20
    so_far = drawn.start(COUNTS, seed=1)
    for date, images in ((1, 13), (2, 20)):
        more = drawn.ask(date, COUNTS, 1, so_far)
        assert more.images == images and (more.quota_KC >= so_far.quota_KC).all()
        assert (more.quota_KC != so_far.quota_KC).any()
        so_far = more
    foreseen = drawn.foreseen(COUNTS, 1)
    assert foreseen is not None and (foreseen.quota_KC == so_far.quota_KC).all()


def test_what_training_shows_is_not_foreseen_and_its_total_is_known():
    asks = schedule("gap", [1, 3], total={"of": "uniform", "total": 30})
    assert asks.foreseen(COUNTS, 0) is None and asks.total(COUNTS) == 30
    assert asks.start(COUNTS, 0).images == 0 and asks.measures == ("global_accuracy_KC", "local_accuracy_KC")
    assert asks.ask(0, COUNTS, 0, None, shown(COUNTS)).images == 15


def test_fedeas_goes_on_filling_where_it_stopped():
    """Class by class, no client gets less at a date than it had, and the whole budget is placed."""
    later = schedule("fedeas", [0, 1, 2, 3], total=21).foreseen(COUNTS, 0)
    assert later is not None and later.images == 21 and later.quota_KC[2].sum() == 0  # the balanced client


@pytest.mark.parametrize(
    ("name", "at", "params", "said"),
    [
        ("gap", [0], {"total": 9}, r"allocation.at = \[0\]: `gap` asks for global_accuracy_KC, and before round 1"),
        ("gap", [0, 3], {"total": 9}, r"allocation.at = \[0, 3\]: `gap` asks for"),
        ("random", [0, 1, 2], {"total": 2}, r"total = 2: the budget is spent before the last of the 3 dates"),
        ("random", [0, 1], {}, r"allocation.at = \[0, 1\]: without a budget there is nothing to spend over 2 dates"),
        ("uniform", [0, 1], {"total": 9}, r"`uniform` looks at nothing that changes during training"),
    ],
)
def test_dates_that_do_not_suit_the_policy_or_its_budget_are_refused(name, at, params, said):
    with pytest.raises(UserError, match=said):
        schedule(name, at, **params)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at": [1, 1]}, r"allocation.at = \[1, 1\]: each round must be later than the one before; write \[1\]"),
        ({"at": [2, 1]}, r"write \[1, 2\]"),
        ({"at": [1, 3]}, r"allocation.at = \[1, 3\]: the run has 3 rounds, so nothing is trained after round 3"),
        ({"at": []}, r"allocation.at = \[\]: must be a list of length at least 1"),
        ({"at": [-1]}, r"allocation.at"),
    ],
)
def test_rounds_that_make_no_sense_are_refused(small, change, said):
    with pytest.raises(ConfigError, match=said):
        load_config({**small, "allocation": {"name": "gap", "total": 9, **change}})


def test_what_cannot_be_measured_or_left_out_later_is_refused(small):
    gap = {**small, "allocation": {"name": "gap", "total": 9, "at": [1]}}
    with pytest.raises(UserError, match=r"measured on a validation split, and there is none; set data.valid"):
        prepare(load_config(gap))
    with pytest.raises(UserError, match=r"which the noise of update.noise_multiplier does not hide"):
        prepare(load_config(gap, ["data.validation_fraction=0.1", "update={clip: 1.0, noise_multiplier: 1.0}"]))
    with pytest.raises(UserError, match=r"allocation.at = \[1\]: `fbl` leaves real samples out, and on what"):
        prepare(load_config({**small, "allocation": {"name": "fbl", "at": [1]}}))
    with pytest.raises(UserError, match=r"allocation\.total is required by `random`"):
        prepare(load_config({**small, "allocation": {"name": "random", "at": [1]}}))
