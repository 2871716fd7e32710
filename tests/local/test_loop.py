"""The local training loop: which sample is seen when, tiny clients, randomness by key, sources left alone."""

import hashlib
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raysim.local.contract import ClientData, Job
from raysim.local.loop import batches, client_data, train_client
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

SIZES = st.integers(1, 50)


def drawn(n, batch_size, epochs=1, steps=None, norm=False, seed=0):
    return list(batches(n, batch_size, epochs, steps, np.random.default_rng(seed), norm))


@given(SIZES, st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**32))
def test_every_epoch_sees_every_sample_once(n, batch_size, epochs, seed):
    """ceil(n / batch) batches an epoch, all full but the last, which is marked."""
    made = drawn(n, batch_size, epochs, seed=seed)
    per_epoch = -(-n // batch_size)
    assert len(made) == epochs * per_epoch
    for e in range(epochs):
        epoch = made[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(np.concatenate([rows for rows, _ in epoch])) == list(range(n))
        assert [last for _, last in epoch] == [False] * (per_epoch - 1) + [True]
        assert all(len(rows) == batch_size for rows, _ in epoch[:-1])


@given(SIZES, st.integers(1, 20), st.integers(1, 200))
def test_steps_replace_epochs(n, batch_size, steps):
    """Exactly `steps` batches, the first ones of as many epochs as it takes; the last one ends an epoch."""
    made = drawn(n, batch_size, steps=steps)
    assert len(made) == steps
    assert made[-1][1]
    longer = drawn(n, batch_size, epochs=-(-steps // -(-n // batch_size)))
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(made, longer[:steps], strict=True))


@given(SIZES, st.integers(2, 20), st.integers(1, 3))
def test_batch_normalisation_never_meets_a_single_sample(n, batch_size, epochs):
    """A last batch of one joins the one before; a client of one sample sees it twice; nobody loses a sample."""
    made = drawn(n, batch_size, epochs, norm=True)
    assert all(2 <= len(rows) <= batch_size + 1 for rows, _ in made)
    seen = np.bincount(np.concatenate([rows for rows, _ in made]), minlength=n)
    assert (seen == (2 * epochs if n == 1 else epochs)).all()


def test_merging_by_hand():
    """65 samples in batches of 64: one batch of 65 with batch normalisation, 64 and 1 without."""
    assert [len(rows) for rows, _ in drawn(65, 64, norm=True)] == [65]
    assert [len(rows) for rows, _ in drawn(65, 64)] == [64, 1]
    assert [len(rows) for rows, _ in drawn(5, 2, norm=True)] == [2, 3]
    assert [rows.tolist() for rows, _ in drawn(1, 64, norm=True)] == [[0, 0]]


def test_the_order_changes_from_epoch_to_epoch():
    first, second = (rows for rows, _ in drawn(40, 40, epochs=2))
    assert not np.array_equal(first, second)


def batchnorm_network():
    """BatchNorm after global pooling: one value per sample and channel."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5))
    return architectures.Classifier(body, 4, 3, None)


def data_of(n, seed=0):
    generator = np.random.default_rng(seed)
    return ClientData(generator.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), generator.integers(0, 3, n), n)


def train(model, data, algorithm=None, *, round_=1, client=0, seed=0, scale=None):
    algorithm = algorithm or sgd(lr=0.1, batch_size=64)
    job = Job(model, model.params_P.clone(), algorithm.learning_rate(round_), round_, client, len(data.labels_N))
    return train_client(job, algorithm, data, scale or ImageScale((0.5,), (0.25,)), seed)


@pytest.mark.parametrize(("n", "steps"), [(65, 1), (1, 1), (129, 2), (130, 3)])
def test_batch_normalisation_trains_on_any_number_of_samples(n, steps):
    model = FlatModel(batchnorm_network())
    start = model.params_P.clone()
    result = train(model, data_of(n))
    assert result.steps == steps
    assert np.isfinite(result.loss)
    assert torch.isfinite(model.params_P).all()
    assert not torch.equal(model.params_P, start)
    assert model.counters.tolist() == [steps]


def test_the_same_keys_give_the_same_bits_and_other_keys_do_not():
    """Order, crops and dropout are functions of (seed, round, client); the global generator is left as it was."""
    scale, ends = ImageScale((0.5,), (0.25,), crop=True, flip=True), []
    for noise, keys in enumerate(({}, {}, {"round_": 2}, {"client": 1}, {"seed": 1})):
        model = FlatModel(batchnorm_network())
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        train(model, data_of(40), sgd(lr=0.1, batch_size=8), scale=scale, **keys)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(model.params_P.tolist())
    assert ends[0] == ends[1]
    assert len({tuple(end) for end in ends}) == 4


def test_sources_are_left_alone_with_augmentation_and_normalisation():
    """Three rounds over shared read-only images: no byte changes, and nothing warns of arrays that are not writable."""
    images = np.random.default_rng(0).integers(0, 256, (50, 1, 8, 8), dtype=np.uint8)
    synthetic, labels_N = images[:6].copy(), np.arange(30) % 3
    for array in (images, synthetic, labels_N):
        array.flags.writeable = False
    before = [hashlib.sha256(a.tobytes()).hexdigest() for a in (images, synthetic, labels_N)]
    model, scale = FlatModel(batchnorm_network()), ImageScale((0.5,), (0.25,), crop=True, flip=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round_ in (1, 2, 3):
            made = (synthetic, np.array([1, 2, 3])) if round_ > 1 else ()
            data = client_data(images, np.arange(30), labels_N, *made)
            assert not np.shares_memory(data.images, images)
            assert not np.shares_memory(data.labels_N, labels_N)
            train(model, data, round_=round_, scale=scale)
    assert [hashlib.sha256(a.tobytes()).hexdigest() for a in (images, synthetic, labels_N)] == before


def test_synthetic_samples_follow_the_real_ones_by_class():
    """Quota 1, 0, 2: labels 0, 2, 2 after the client's own."""
    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)
    made = np.array([10, 11, 12], dtype=np.uint8).reshape(3, 1, 1, 1)
    data = client_data(images, np.array([4, 1]), np.array([1, 1]), made, np.array([1, 0, 2]))
    assert data.images.ravel().tolist() == [4, 1, 10, 11, 12]
    assert data.labels_N.tolist() == [1, 1, 0, 2, 2]
    assert data.n_real == 2


def test_input_noise_is_on_real_images_alone_and_stays_in_range():
    """std 0.1 is 25.5 grey levels; around 128 hardly anything is clipped. Synthetic images keep their bytes."""
    images, made = np.full((1, 1, 64, 64), 128, np.uint8), np.full((1, 1, 64, 64), 128, np.uint8)
    data = client_data(
        images, np.array([0]), np.array([0]), made, np.array([1]), noise_std=0.1, noise_rng=np.random.default_rng(0)
    )
    assert data.images[0].std() == pytest.approx(25.5, rel=0.05)
    assert (data.images[1] == 128).all()
    assert data.images.dtype == np.uint8
    extreme = client_data(
        np.full_like(images, 255), np.array([0]), np.array([0]), noise_std=1.0, noise_rng=np.random.default_rng(0)
    )
    assert extreme.images.max() == 255
    assert 0.45 < (extreme.images == 255).mean() < 0.55
    assert (images == 128).all()


def test_bf16_trains_close_to_float32_and_keeps_float32_parameters():
    ends = []
    for bf16 in (False, True):
        model, data = FlatModel(batchnorm_network()), data_of(40)
        algorithm = sgd(lr=0.1, batch_size=8)
        job = Job(model, model.params_P.clone(), 0.1, 1, 0, 40)
        train_client(job, algorithm, data, ImageScale((0.5,), (0.25,)), 0, bf16)
        assert model.params_P.dtype == torch.float32
        ends.append(model.params_P.clone())
    assert 0 < (ends[0] - ends[1]).abs().max() < 0.05


def test_a_client_without_samples_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="without samples"):
        drawn(0, 4, steps=3)
