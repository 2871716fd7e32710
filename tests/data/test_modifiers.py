"""Rare clients, wrong labels, noisy images."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.config.registry import available, check_parameters, resolve
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.data.modifiers import input_noise, label_noise, rare
from raysim.data.partitions import dirichlet, iid

LABELS = np.arange(2500) % 10


def owned(clients: int = 10):
    return iid(LABELS, 10, rng.stream(0, rng.PARTITION), clients=clients)


def test_forty_percent_symmetric_noise_changes_exactly_100_of_250_labels():
    """250 samples, rate 0.4: 100 labels differ, not the 90 that a draw from all ten classes would leave."""
    noisy = label_noise(owned(), rng.stream(1, rng.MODIFIER), fraction=0.3, rate=0.4)
    changed = noisy.labels != LABELS[noisy.indices]
    per_client = np.add.reduceat(changed, noisy.offsets_K1[:-1])
    assert noisy.noisy_K.sum() == 3
    assert per_client.tolist() == np.where(noisy.noisy_K, 100, 0).tolist()
    assert noisy.indices.tolist() == owned().indices.tolist()
    assert ((noisy.labels >= 0) & (noisy.labels < 10)).all()


def test_symmetric_noise_reaches_every_other_class_about_equally():
    """2,500 labels all replaced: 9 shifts of about 278 each, standard deviation 16."""
    noisy = label_noise(owned(1), rng.stream(0, rng.MODIFIER), fraction=1.0, rate=1.0)
    shifts = np.bincount((noisy.labels - LABELS[noisy.indices]) % 10, minlength=10)
    assert shifts[0] == 0 and (np.abs(shifts[1:] - 2500 / 9) < 80).all()


def test_pair_noise_moves_a_class_to_the_next_one():
    noisy = label_noise(owned(), rng.stream(0, rng.MODIFIER), fraction=1.0, rate=1.0, kind="pair")
    assert (noisy.labels == (LABELS[noisy.indices] + 1) % 10).all()


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 100))
def test_the_number_of_changed_labels_is_exact_for_any_rate(fraction, rate, seed):
    before = dirichlet(LABELS, 10, rng.stream(seed, rng.PARTITION), clients=10, alpha=1.0)
    noisy = label_noise(before, rng.stream(seed, rng.MODIFIER), fraction=fraction, rate=rate)
    assert noisy.noisy_K.sum() == round(round(fraction * 10, 9))
    for k in range(10):
        rows, labels = noisy.client(k)
        expected = round(round(rate * len(rows), 9)) if noisy.noisy_K[k] else 0
        assert (labels != LABELS[rows]).sum() == expected


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.9), st.integers(1, 400), st.integers(0, 100))
def test_rare_loses_no_sample_and_cuts_exactly_the_chosen_clients(fraction, max_samples, seed):
    before = dirichlet(LABELS, 10, rng.stream(seed, rng.PARTITION), clients=10, alpha=1.0)
    cut = rare(before, rng.stream(seed, rng.MODIFIER), fraction=fraction, max_samples=max_samples)
    assert sorted(cut.indices) == list(range(2500))
    assert (cut.labels == LABELS[cut.indices]).all()
    assert cut.rare_K.sum() == round(round(fraction * 10, 9))
    assert (cut.sizes_K[cut.rare_K] == np.minimum(before.sizes_K, max_samples)[cut.rare_K]).all()
    for k in np.flatnonzero(cut.rare_K):
        assert set(cut.client(k)[0]) <= set(before.client(k)[0])
    for k in np.flatnonzero(~cut.rare_K):
        assert set(cut.client(k)[0]) >= set(before.client(k)[0])
    received = (cut.sizes_K - before.sizes_K)[~cut.rare_K]
    assert received.max() - received.min() <= 1


def test_rare_keeps_wrong_labels_with_their_samples():
    noisy = label_noise(owned(), rng.stream(0, rng.MODIFIER), fraction=1.0, rate=0.5)
    label_of = dict(zip(noisy.indices, noisy.labels, strict=True))
    cut = rare(noisy, rng.stream(1, rng.MODIFIER), fraction=0.5, max_samples=3)
    assert all(label_of[row] == label for row, label in zip(cut.indices, cut.labels, strict=True))
    assert cut.noisy_K.all()


def test_rare_refuses_to_make_every_client_rare():
    with pytest.raises(UserError, match=r"partition\.rare\.fraction = 1\.0: all 10 clients would be rare"):
        rare(owned(), rng.stream(0, rng.MODIFIER), fraction=1.0, max_samples=3)
    assert rare(owned(), rng.stream(0, rng.MODIFIER), fraction=1.0, max_samples=250).rare_K.all()


def test_input_noise_marks_the_fraction_and_touches_nothing_else():
    before = owned()
    noisy = input_noise(before, rng.stream(0, rng.MODIFIER), fraction=0.2, std=0.25)
    assert sorted(noisy.input_noise_K.tolist()) == [0.0] * 8 + [0.25] * 2
    assert noisy.indices.tolist() == before.indices.tolist() and noisy.labels.tolist() == before.labels.tolist()
    assert not noisy.noisy_K.any()


@pytest.mark.parametrize("name", sorted(available("modifier")))
def test_modifiers_are_functions_of_their_stream_and_leave_their_input_alone(name):
    before = owned()
    digest = before.sha256()
    runs = [resolve("modifier", name)(before, rng.stream(seed, rng.MODIFIER), fraction=0.5) for seed in (0, 0, 1)]
    assert runs[0].sha256() == runs[1].sha256() != runs[2].sha256()
    assert before.sha256() == digest


@pytest.mark.parametrize("name", sorted(available("modifier")))
@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_outside_0_to_1_is_refused_by_name(name, fraction):
    with pytest.raises(UserError, match=rf"partition\.{name}\.fraction"):
        resolve("modifier", name)(owned(), rng.stream(0, rng.MODIFIER), fraction=fraction)
    assert check_parameters(resolve("modifier", name), {"fraction": fraction}, f"partition.{name}")[1]


def test_other_values_out_of_range_are_refused_by_name():
    draw = rng.stream(0, rng.MODIFIER)
    with pytest.raises(UserError, match=r"label_noise\.rate = 2"):
        label_noise(owned(), draw, rate=2)
    with pytest.raises(UserError, match=r"label_noise\.kind = 'odd'"):
        label_noise(owned(), draw, kind="odd")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"input_noise\.std = -1"):
        input_noise(owned(), draw, std=-1)
    with pytest.raises(UserError, match=r"rare\.max_samples = 0"):
        rare(owned(), draw, max_samples=0)
    with pytest.raises(UserError, match="one class, so no label can be wrong"):
        label_noise(iid(np.zeros(9, dtype=np.int64), 1, draw, clients=3), draw)


def test_a_client_of_one_sample_survives_every_modifier():
    """round(0.4 * 1) = 0 labels change; at most 1 sample is kept; nothing divides by zero."""
    one_each = iid(np.arange(3), 3, rng.stream(0, "t"), clients=3)
    draw = rng.stream(0, rng.MODIFIER)
    assert label_noise(one_each, draw, fraction=1.0, rate=0.4).labels.tolist() == one_each.labels.tolist()
    assert rare(one_each, draw, fraction=0.4, max_samples=1).sizes_K.tolist() == [1, 1, 1]
