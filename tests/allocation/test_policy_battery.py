"""Every allocation policy that `raysim list` shows keeps the promises of its kind; a new one is tested by existing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from policy_inputs import shown

from raysim.allocation.common import OWN_COUNTS_ALONE, looks_at_others
from raysim.config.plugin_guard import ask_policy
from raysim.config.protocols import MEASURED_INPUTS
from raysim.config.registry import asked_for, available, check_parameters, resolve
from raysim.core.errors import UserError
from raysim.core.records import Allocation

NAMES = sorted(available("allocation"))
quick = settings(max_examples=40, deadline=None)
WEIGHTS: dict[str, Callable[..., np.ndarray]] = {  # whole numbers in proportion to which a policy spreads its total
    "gap": lambda _, given: np.maximum(0, 8 * (given["global_accuracy_KC"] - given["local_accuracy_KC"])),
    "loss_guided": lambda n_KC, given: given["global_loss_KC"] * (n_KC.max(axis=1, keepdims=True) - n_KC),
}
every_policy = pytest.mark.parametrize("name", NAMES)
counts_matrices = st.tuples(st.integers(1, 6), st.integers(1, 5)).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(0, 60))
)


def decided(name: str, counts_KC: np.ndarray, **keys: Any) -> Allocation | None:
    """What a policy answers for its default keys, or for a total of 40 where it needs one; None where it refuses."""
    plugin = resolve("allocation", name)
    for given_keys in (keys, {"total": 40, **keys}):
        checked, problems = check_parameters(plugin, given_keys, "allocation")
        assert not problems
        try:
            return ask_policy(name, plugin, counts_KC, checked, given=shown(counts_KC))
        except UserError as error:
            assert str(error).startswith("allocation."), "a refusal names its key"
    return None


@every_policy
@quick
@given(counts_KC=counts_matrices)
def test_a_quota_is_whole_numbers_for_every_client_and_class(name, counts_KC):
    """ask_policy refuses all else, and hands out counts that cannot be written to."""
    before = counts_KC.copy()
    answer = decided(name, counts_KC)
    assert (counts_KC == before).all()
    if answer is None:
        return
    quota_KC = answer.quota_KC
    keep_KC = counts_KC if answer.keep_KC is None else answer.keep_KC
    assert quota_KC.dtype == np.int64 and quota_KC.shape == counts_KC.shape and quota_KC.min() >= 0
    assert keep_KC.min() >= 0 and (keep_KC <= counts_KC).all()
    assert ((keep_KC + quota_KC).sum(axis=1) > 0).all()  # every client can train
    again = decided(name, counts_KC)
    assert again is not None and (again.quota_KC == quota_KC).all()
    assert (keep_KC == (counts_KC if again.keep_KC is None else again.keep_KC)).all()


@pytest.mark.parametrize("name", sorted(OWN_COUNTS_ALONE))
@quick
@given(counts_KC=counts_matrices, others_KC=counts_matrices)
def test_what_a_client_gets_by_its_own_counts_does_not_change_with_others(name, counts_KC, others_KC):
    keys: dict[str, object] = {"level": 3} if name == "missing_only" else {}
    assert name in NAMES and not looks_at_others(name, keys)
    others_KC = np.resize(others_KC, (len(others_KC), counts_KC.shape[1]))
    alone, together = (decided(name, rows, **keys) for rows in (counts_KC, np.concatenate([counts_KC, others_KC])))
    if alone is not None and together is not None:
        assert (together.quota_KC[: len(counts_KC)] == alone.quota_KC).all()


def test_a_client_may_get_what_the_counts_of_others_say():
    """With a total, by the rule for beta, and in any policy that is not known to look at a client alone."""
    assert looks_at_others("fedeas", {"beta": "auto"}) and looks_at_others("full", {"total": 9})
    assert looks_at_others("iid_fill", {}) and looks_at_others("my_module:mine", {})
    assert not looks_at_others("fedeas", {"beta": 12.0, "total": None})


@every_policy
@quick
@given(counts_KC=counts_matrices, total=st.integers(0, 5000))
def test_an_asked_for_total_is_met_exactly(name, counts_KC, total):
    try:
        answer = ask_policy(name, resolve("allocation", name), counts_KC, {"total": total}, given=shown(counts_KC))
    except UserError as error:
        assert "allocation." in str(error)
        return
    assert answer.images == total and answer.quota_KC.min() >= 0 and answer.quota_KC.dtype == np.int64


@every_policy
@quick
@given(counts_KC=counts_matrices, other=st.sampled_from(sorted(set(NAMES) - {"none"})))
def test_the_total_of_another_policy_is_met_exactly(name, counts_KC, other):
    wanted = decided(other, counts_KC)
    if wanted is None:
        return
    total = {"of": other} if not set(asked_for(resolve("allocation", other))) & set(MEASURED_INPUTS) else wanted.images
    try:
        answer = ask_policy(name, resolve("allocation", name), counts_KC, {"total": total}, given=shown(counts_KC))
    except UserError as error:
        assert "allocation." in str(error)
        return
    assert answer.images in (wanted.images, 40)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"random"}))  # which draws for each place
@quick
@given(counts_KC=counts_matrices, seed=st.integers(0, 99))
def test_nobody_is_served_by_place(name, counts_KC, seed):
    """Clients and classes in another order get the same images, where no remainder has to go to the first of equals."""
    rng = np.random.default_rng(seed)
    clients, classes = (rng.permutation(n) for n in counts_KC.shape)
    plugin = resolve("allocation", name)
    exact: dict[str, Any] = {}
    if name == "fbl":
        counts_KC = counts_KC * counts_KC.shape[1]  # every client's number of samples is a multiple of the classes
    if "level" in plugin.__kwdefaults__:
        exact = {"level": 5}
    elif "per_class" in plugin.__kwdefaults__:
        exact = {"per_class": 5}
    elif name in WEIGHTS:
        weight_KC = WEIGHTS[name](counts_KC, shown(counts_KC))
        exact = {"total": int(weight_KC.sum()) or counts_KC.size}
    elif name in ("uniform", "size_proportional"):
        samples = int(counts_KC.sum())
        exact = {"total": counts_KC.size * max(samples, 1)}  # a whole number of images for every cell
    try:
        straight = ask_policy(name, plugin, counts_KC, exact, given=shown(counts_KC))
        moved_KC = np.ascontiguousarray(counts_KC[clients][:, classes])
        shuffled = ask_policy(name, plugin, moved_KC, exact, given=shown(moved_KC))
    except UserError:
        return
    assert (shuffled.quota_KC == straight.quota_KC[clients][:, classes]).all()
    assert (shuffled.keep_KC is None) == (straight.keep_KC is None)
    if shuffled.keep_KC is not None and straight.keep_KC is not None:
        assert (shuffled.keep_KC == straight.keep_KC[clients][:, classes]).all()
