"""Partitions: who owns which sample, and what is refused."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.allocation.imbalance import normalised_entropy_K
from raysim.config.registry import available, check_parameters, resolve
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.data import partitions as kinds
from raysim.data.assigning import cut_counts, keep_samples
from raysim.data.partitions import dirichlet, dirichlet_balanced, dirichlet_client, labels_per_client, shards

CIFAR10_LABELS = np.repeat(np.arange(10), 5000)
MIXED_LABELS = np.random.Generator(np.random.Philox(5)).permutation(np.repeat(np.arange(5), [40, 60, 80, 100, 120]))
WITH_REPLACEMENT = {"dirichlet_client"}
DISJOINT = sorted(set(available("partition")) - WITH_REPLACEMENT - {"file"})
DIRICHLET = sorted(name for name in available("partition") if name.startswith("dirichlet"))


def make(name: str, labels_N: np.ndarray, classes: int, seed: int = 0, **keys):
    return resolve("partition", name)(labels_N, classes, rng.stream(seed, rng.PARTITION), **keys)


# --- what is kept of a partition


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_so_many_samples_are_kept_of_each_class_and_more_keep_those_that_fewer_keep(one, other, seed):
    owned = make("dirichlet", MIXED_LABELS, 5, seed, clients=6, alpha=1.0)
    kept = {}
    for share in sorted((one, other)):
        keep_KC = np.floor(share * owned.counts_KC).astype(np.int64)
        part = keep_samples(owned, keep_KC, seed)
        assert (part.counts_KC == keep_KC).all() and (part.labels == MIXED_LABELS[part.indices]).all()
        kept[share] = [part.client(k)[0].tolist() for k in range(6)]
        for k in range(6):
            rows = owned.client(k)[0].tolist()
            assert kept[share][k] == [row for row in rows if row in set(kept[share][k])]  # in the order before
    for fewer, more in zip(kept[min(kept)], kept[max(kept)], strict=True):
        assert set(fewer) <= set(more)
    assert keep_samples(owned, owned.counts_KC, seed).sha256() == owned.sha256()


def test_other_seeds_keep_other_samples_and_clients_drawn_one_by_one_keep_all():
    owned = make("dirichlet", MIXED_LABELS, 5, clients=2, alpha=9.0)
    half_KC = owned.counts_KC // 2
    assert keep_samples(owned, half_KC, 1).indices.tolist() != keep_samples(owned, half_KC, 2).indices.tolist()
    drawn = make("dirichlet_client", MIXED_LABELS, 5, clients=3, alpha=1.0)
    drawn = replace(drawn, drawn=lambda client: (np.array([client]), np.array([0])))
    with pytest.raises(UserError, match=r"3 clients that are drawn when they train cannot be left out"):
        keep_samples(drawn, drawn.counts_KC // 2, 0)


# --- every kind


@pytest.mark.parametrize("name", DISJOINT)
@settings(max_examples=25, deadline=None)
@given(clients=st.integers(3, 12), seed=st.integers(0, 1000))
def test_every_sample_belongs_to_exactly_one_client(name, clients, seed):
    keys = {"clients": clients, **({"alpha": 1.0} if name in DIRICHLET else {})}
    if name in DIRICHLET:
        keys["min_samples"] = 1
    owned = make(name, MIXED_LABELS, 5, seed, **keys)
    assert owned.clients == clients and owned.classes == 5
    assert sorted(owned.indices) == list(range(len(MIXED_LABELS)))
    assert owned.sizes_K.sum() == len(MIXED_LABELS) and owned.sizes_K.min() >= 1
    assert (owned.labels == MIXED_LABELS[owned.indices]).all()
    assert owned.counts_KC.sum(axis=0).tolist() == np.bincount(MIXED_LABELS).tolist()
    assert not owned.rare_K.any() and not owned.noisy_K.any() and not owned.input_noise_K.any()


SCRIPT = """
import sys, numpy as np
from raysim.core import rng
from raysim.config.registry import available, resolve
labels_N = np.arange(600) % 6
for name in sorted(set(available("partition")) - {"file"}):
    for seed in (0, 1):
        owned = resolve("partition", name)(labels_N, 6, rng.stream(seed, rng.PARTITION), clients=8)
        print(name, seed, owned.sha256())
owned = resolve("partition", "file")(labels_N, 6, rng.stream(0, rng.PARTITION), path=sys.argv[1])
print("file", 0, owned.sha256())
"""


def test_fresh_processes_agree_on_every_kind_and_seeds_differ(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([[0, 5, 7], [599], [1, 2]]))
    runs = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in runs]
    assert outputs[0] == outputs[1] == outputs[2]
    hashes = {tuple(line.split()[:2]): line.split()[2] for line in outputs[0].splitlines()}
    assert {name for name, _ in hashes} == set(available("partition"))
    for name in set(available("partition")) - {"file"}:
        assert hashes[name, "0"] != hashes[name, "1"], name


@pytest.mark.parametrize("name", DIRICHLET)
@pytest.mark.parametrize("alpha", [0, -0.1, math.nan, math.inf, "0.1x", [0.1, 0.2], True, None])
def test_an_alpha_that_makes_no_sense_is_refused_by_name(name, alpha):
    with pytest.raises(UserError, match=r"partition\.alpha = .*greater than 0"):
        make(name, MIXED_LABELS, 5, clients=5, alpha=alpha)
    problems = check_parameters(resolve("partition", name), {"clients": 5, "alpha": alpha}, "partition")[1]
    assert problems and all("partition.alpha" in problem for problem in problems)


@pytest.mark.parametrize("name", DISJOINT)
def test_more_clients_than_samples_are_refused(name):
    with pytest.raises(UserError, match=r"partition\.clients = 500: there are only 400"):
        make(name, MIXED_LABELS, 5, clients=500)


@pytest.mark.parametrize("name", sorted(set(DIRICHLET) - WITH_REPLACEMENT))
def test_an_impossible_minimum_is_refused_before_any_draw_with_the_arithmetic(name):
    generator = rng.stream(0, rng.PARTITION)
    before = str(generator.bit_generator.state)
    with pytest.raises(UserError, match=r"min_samples = 41: 10 clients x 41 = 410, but there are 400 .* 0\.\.40"):
        resolve("partition", name)(MIXED_LABELS, 5, generator, clients=10, alpha=0.1, min_samples=41)
    assert str(generator.bit_generator.state) == before


@pytest.mark.parametrize("name", sorted(set(DIRICHLET) - WITH_REPLACEMENT))
def test_a_minimum_that_is_hardly_ever_reached_ends_in_bounded_time(name):
    """1,000 clients own 50 samples on average; at alpha 0.1 all of them having 40 does not happen."""
    began = time.perf_counter()
    with pytest.raises(UserError) as caught:
        make(name, CIFAR10_LABELS, 10, clients=1000, alpha=0.1, min_samples=40)
    assert time.perf_counter() - began < 10
    for part in ("min_samples = 40", "attempts", "alpha = 0.1", "clients = 1000", "best left a client with"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", DIRICHLET)
@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e300])
def test_extreme_alphas_give_a_partition_or_a_message(name, alpha):
    try:
        owned = make(name, MIXED_LABELS, 5, clients=5, alpha=alpha)
    except UserError as error:
        assert "partition.alpha" in str(error)
    else:
        assert owned.sizes_K.sum() == len(owned.indices)


def test_a_class_without_samples_is_dealt_to_nobody():
    labels_N = np.repeat([0, 2], 50)
    for name in (*DISJOINT, *WITH_REPLACEMENT):
        if name != "labels_per_client":
            owned = make(name, labels_N, 3, clients=4, **({"alpha": 5.0} if name in DIRICHLET else {}))
            assert owned.counts_KC[:, 1].sum() == 0 and owned.counts_KC.shape == (4, 3)


# --- single kinds


def test_iid_sizes_differ_by_at_most_one():
    """400 samples over 7 clients: 400 = 7 * 57 + 1."""
    assert make("iid", MIXED_LABELS, 5, clients=7).sizes_K.tolist() == [58, 57, 57, 57, 57, 57, 57]


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_balanced"])
def test_a_huge_alpha_looks_iid(name):
    owned = make(name, CIFAR10_LABELS, 10, clients=10, alpha=1e6)
    assert np.abs(owned.sizes_K - 5000).max() <= 50
    assert np.abs(owned.counts_KC / owned.sizes_K[:, None] - 0.1).max() <= 0.01
    assert normalised_entropy_K(owned.counts_KC).min() > 0.999


class Fixed(np.random.Generator):
    """Shares and u as given; rows in falling order."""

    def __init__(self, shares_CK: list[list[float]], u_C: list[float]) -> None:
        super().__init__(np.random.Philox(0))
        self.shares_CK, self.u_C = np.array(shares_CK), np.array(u_C)

    def dirichlet(self, alpha, size):  # type: ignore[override]
        return self.shares_CK

    def random(self, size):  # type: ignore[override]
        return self.u_C

    def permutation(self, rows):  # type: ignore[override]
        return rows[::-1]


@pytest.mark.parametrize(("u", "sizes"), [(0.0, [2, 5, 3]), (0.25, [2, 5, 3]), (0.5, [3, 5, 2]), (0.9, [3, 5, 2])])
def test_dirichlet_cuts_at_the_rounded_cumulated_shares(u, sizes):
    """Shares .25, .5, .25 of 10 samples, cumulated 2.5 and 7.5: floor(2.5 + u) and floor(7.5 + u) are 2 and 7 for
    u < .5, else 3 and 8."""
    owned = dirichlet(np.zeros(10, dtype=np.int64), 1, Fixed([[0.25, 0.5, 0.25]], [u]), clients=3)
    assert owned.sizes_K.tolist() == sizes
    assert owned.client(0)[0].tolist() == list(range(10 - sizes[0], 10))


def test_systematic_rounding_gives_each_client_its_share_on_average():
    """Shares .1, .2, .3, .4 of a class of 3: over u = .005, .015, ..., .995 the means are .3, .6, .9, 1.2 exactly."""
    u_M = (np.arange(100) + 0.5) / 100
    counts_MK = cut_counts(np.tile([0.1, 0.2, 0.3, 0.4], (100, 1)), np.full(100, 3), u_M)
    assert (counts_MK.sum(axis=1) == 3).all()
    assert counts_MK.mean(axis=0) == pytest.approx([0.3, 0.6, 0.9, 1.2])


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_balanced", "labels_per_client"])
def test_no_client_index_is_favoured_where_classes_are_small(name):
    """100 classes of 30 (of 15, dealt to 10 owners each) and 50 clients: means of about 60 (30) for every index."""
    per_class = 15 if name == "labels_per_client" else 30
    labels_N = np.repeat(np.arange(100), per_class)
    keys = {"labels": 20} if name == "labels_per_client" else {"alpha": 0.5, "min_samples": 0}
    mean_K = np.mean([make(name, labels_N, 100, seed, clients=50, **keys).sizes_K for seed in range(100)], axis=0)
    assert mean_K.mean() == pytest.approx(len(labels_N) / 50) and mean_K.max() / mean_K.min() < 1.1


def test_numpys_own_stream_takes_floors_as_earlier_code_did():
    """The counts of numpy.random.RandomState(0): np.split at floor(cumsum(shares) * n), the rest to the last client."""
    reference = np.random.RandomState(0)
    shares_CK = reference.dirichlet(np.full(20, 0.1), size=10)
    expected_KC = np.array([
        [len(part) for part in np.split(np.arange(5000), (np.cumsum(shares_K) * 5000).astype(int)[:-1])]
        for shares_K in shares_CK
    ]).T
    owned = dirichlet(CIFAR10_LABELS, 10, rng.numpy_stream(0), clients=20, alpha=0.1, min_samples=0)  # type: ignore[arg-type]
    assert (owned.counts_KC == expected_KC).all()


def test_dirichlet_reaches_the_minimum_it_was_asked_for():
    for seed in range(20):
        assert make("dirichlet", CIFAR10_LABELS, 10, seed, clients=20, alpha=0.1, min_samples=10).sizes_K.min() >= 10


def test_dirichlet_is_more_skewed_for_smaller_alpha():
    entropies = [
        normalised_entropy_K(make("dirichlet", CIFAR10_LABELS, 10, clients=20, alpha=alpha).counts_KC).mean()
        for alpha in (0.05, 0.5, 5.0)
    ]
    assert entropies == sorted(entropies)


@pytest.mark.parametrize(("first_share", "counts"), [(1.0, [[4, 0], [0, 4]]), (0.5, [[2, 3], [2, 1]])])
def test_balanced_gives_nothing_more_to_a_client_that_holds_its_part(first_share, counts):
    """8 samples, 2 clients: 4 is a full part.  If class 0 fell to client 0 whole, its share .9 of class 1 counts for 0;
    if it holds only 2, it gets floor(.9 * 4) = 3."""

    draw = Fixed([[first_share, 1 - first_share], [0.9, 0.1]], [0, 0])
    owned = dirichlet_balanced(np.repeat([0, 1], 4), 2, draw, clients=2, min_samples=1)
    assert owned.counts_KC.tolist() == counts


def test_a_full_last_client_gets_nothing_of_what_rounding_leaves():
    """Class 0 of 12 falls to the last of 4 clients, who holds more than 42 / 4.  The others' shares of class 1 are 1/6,
    4/6 and 1/6; their sums in doubles times 30 are 5, 24.999999999999996 and 29.999999999999996, so cuts at 5 and 24,
    and the 30th sample is client 2's.
    """
    assert (np.cumsum(np.array([1, 4, 1]) / 6) * 30 < [6, 25, 30]).all()
    draw = Fixed([[0, 0, 0, 1], [1, 4, 1, 5]], [0, 0])
    owned = dirichlet_balanced(np.repeat([0, 1], [12, 30]), 2, draw, clients=4, min_samples=1)
    assert owned.counts_KC.T.tolist() == [[0, 0, 0, 12], [5, 19, 6, 0]]


def test_balanced_sizes_are_closer_to_each_other_than_plain_ones():
    plain, balanced = (
        np.mean([make(name, CIFAR10_LABELS, 10, s, clients=10, alpha=0.1).sizes_K.std() for s in range(10)])
        for name in ("dirichlet", "dirichlet_balanced")
    )
    assert balanced < 0.75 * plain


def test_fedoui_variant_damps_by_what_a_client_holds():
    """Shares .5, .5; client 0 holds 6 of a class of 10: room 4 and 10, shares 2/7 and 5/7 of 10: floors 2 and 7; the
    remainder of one goes to client 0.  Where nobody has room, shares are equal: [5, 5] of 10, and 9 deal [5, 4]."""
    assert kinds._damped_counts(np.array([0.5, 0.5]), np.array([6, 0]), 10).tolist() == [3, 7]
    assert kinds._damped_counts(np.array([0.9, 0.1]), np.array([10, 10]), 10).tolist() == [5, 5]
    assert kinds._damped_counts(np.array([0.9, 0.1]), np.array([10, 12]), 9).tolist() == [5, 4]


def test_fedoui_variant_keeps_its_minimum_of_ten_by_default():
    for seed in range(10):
        assert make("dirichlet_fedoui", CIFAR10_LABELS[::17], 10, seed).sizes_K.min() >= 10


def test_a_client_of_dirichlet_client_is_the_same_among_ten_and_among_a_thousand():
    few = make("dirichlet_client", MIXED_LABELS, 5, clients=10, samples_per_client=30)
    many = make("dirichlet_client", MIXED_LABELS, 5, clients=1000, samples_per_client=30)
    assert few.sizes_K.tolist() == [30] * 10
    assert few.indices.tolist() == many.indices[:300].tolist()
    assert (few.labels == MIXED_LABELS[few.indices]).all()


def test_dirichlet_client_keeps_the_class_frequencies_on_average():
    """The mean class mix of many clients is the prior (10, 15, 20, 25, 30 %)."""
    owned = dirichlet_client(MIXED_LABELS, 5, rng.stream(0, "t"), clients=2000, alpha=10.0, samples_per_client=50)
    assert owned.counts_KC.sum(axis=0) / 100_000 == pytest.approx(np.array([0.1, 0.15, 0.2, 0.25, 0.3]), abs=0.02)


def test_shards_give_each_client_few_classes_and_equal_sizes():
    """20 shards of 500 from classes of 1,000: a shard has one class, so a client has at most two."""
    owned = shards(CIFAR10_LABELS[::5], 10, rng.stream(0, "t"), clients=10, shards_per_client=2)
    assert owned.sizes_K.tolist() == [1000] * 10
    assert ((owned.counts_KC > 0).sum(axis=1) <= 2).all()
    with pytest.raises(UserError, match=r"shards_per_client = 50: 10 clients x 50 = 500"):
        shards(MIXED_LABELS, 5, rng.stream(0, "t"), clients=10, shards_per_client=50)


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 15), labels=st.integers(1, 5), seed=st.integers(0, 99))
def test_labels_per_client_gives_exactly_that_many_classes(clients, labels, seed):
    if clients * labels < 5:
        with pytest.raises(UserError, match=r"partition\.labels"):
            labels_per_client(MIXED_LABELS, 5, rng.stream(seed, "t"), clients=clients, labels=labels)
        return
    owned = labels_per_client(MIXED_LABELS, 5, rng.stream(seed, "t"), clients=clients, labels=labels)
    assert ((owned.counts_KC > 0).sum(axis=1) == labels).all()
    owners_C = (owned.counts_KC > 0).sum(axis=0)
    assert owners_C.max() - owners_C.min() <= 1


def test_labels_per_client_refuses_a_class_too_small_for_its_owners():
    with pytest.raises(UserError, match=r"class 0 has 1 training samples for the 2 clients"):
        labels_per_client(np.array([0, 1, 1, 1]), 2, rng.stream(0, "t"), clients=2, labels=2)
