"""Flat models and image scaling: views, layouts, read-only inputs, frozen copies, augmentation."""

import copy
import hashlib
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raysim.core import rng
from raysim.core.records import ModelState
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale, build_model

LAYOUTS = pytest.mark.parametrize("channels_last", [False, True])


def network():
    """Convolutions, BatchNorm with all its buffers, a linear layer, and a parameter that does not train."""
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(2, 4, (3, 2)), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    module[5].bias.requires_grad_(False)
    with torch.no_grad():
        module[1].running_mean.copy_(torch.arange(4.0))
        module[1].num_batches_tracked.fill_(7)
    return module


@LAYOUTS
def test_wrapping_changes_no_value_and_no_name(channels_last):
    module = network()
    before = {k: v.clone().numpy() for k, v in module.state_dict().items()}
    after = FlatModel(module, channels_last=channels_last).state_dict()
    assert list(before) == list(after)
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
        assert after[name].flags.c_contiguous


def test_parameters_and_gradients_are_views_of_the_flat_tensors():
    """4*2*3*2 + 4 (convolution), 4 + 4 (BatchNorm), 3*4 (linear, its bias does not train): 72 parameters."""
    model = FlatModel(network())
    trainable = [p for p in model.module.parameters() if p.requires_grad]
    assert len(model.params_P) == len(model.grad_P) == 72
    model.params_P.fill_(0.5)
    assert all((p == 0.5).all() for p in trainable)
    model.module(torch.randn(3, 2, 6, 6)).sum().backward()
    assert sum(float(p.grad.square().sum()) for p in trainable) == pytest.approx(float(model.grad_P.square().sum()))
    assert model.grad_P.abs().max() > 0
    trainable[0].data[1, 0, 2, 1] = 9.0
    assert (model.params_P == 9.0).sum() == 1


def test_channels_last_weights_lie_in_that_order():
    """A 4 x 2 x 3 x 2 weight: the flat tensor holds out, height, width, channel."""
    module = network()
    weight = module[0].weight.detach().clone()
    model = FlatModel(module)
    assert torch.equal(model.params_P[:48], weight.permute(0, 2, 3, 1).flatten())
    assert model.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not FlatModel(architectures.mlp(1, (4, 4), 2)).channels_last


def test_buffers_are_views_too():
    """Float buffers: running mean and variance of 4 channels; integers: the batch counter."""
    model = FlatModel(network())
    assert model.buffers_F.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert model.counters.tolist() == [7]
    model.module.train()
    model.module(torch.randn(3, 2, 6, 6))
    assert model.counters.tolist() == [8]
    assert model.buffers_F[0] == model.module[1].running_mean[0] != 0.0


@LAYOUTS
def test_state_and_load_are_inverse_to_the_bit(channels_last):
    model, other = FlatModel(network(), channels_last=channels_last), FlatModel(network(), channels_last=channels_last)
    with torch.no_grad():
        model.params_P.normal_()
        model.buffers_F.uniform_()
        model.counters.fill_(3)
    other.load(model.state())
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], values)


def test_both_layouts_are_the_same_function():
    one, two = FlatModel(network(), channels_last=True), FlatModel(network(), channels_last=False)
    x = torch.randn(5, 2, 8, 8)
    torch.testing.assert_close(one.module(x), two.module(x), rtol=1e-5, atol=1e-6)


def test_state_is_a_copy():
    model = FlatModel(network())
    state = model.state()
    before = state.params_P.copy()
    model.params_P.zero_()
    model.buffers_F.zero_()
    np.testing.assert_array_equal(state.params_P, before)
    assert state.buffers_F.any()


def digest(*arrays):
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def test_read_only_arrays_load_without_warning_and_stay_as_they_are():
    model = FlatModel(network())
    state = model.state()
    arrays = (state.params_P, state.buffers_F, state.counters)
    for a in arrays:
        a.flags.writeable = False
    before = digest(*arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load(ModelState(*arrays))
        model.params_P.add_(1.0)
        model.buffers_F.add_(1.0)
        model.counters.add_(1)
    assert digest(*arrays) == before


def test_a_snapshot_is_a_copy_of_what_exists():
    model = FlatModel(network())
    snapshot = model.snapshot()
    assert sorted(snapshot) == ["buffers", "counters", "params"]
    before = snapshot["params"].clone()
    model.params_P.zero_()
    assert torch.equal(snapshot["params"], before)
    assert sorted(FlatModel(architectures.mlp(1, (4, 4), 2)).snapshot()) == ["params"]


def test_a_frozen_copy_holds_the_snapshot_and_nothing_moves_it():
    """Neither training of the model nor the copy's own forward pass; and the model does not notice the copy."""
    model = FlatModel(network())
    snapshot = model.snapshot()
    frozen = model.frozen("global", snapshot)
    twin = copy.deepcopy(frozen.state_dict())
    x = torch.randn(3, 2, 6, 6)
    model.module.train()
    model.module(x).sum().backward()
    model.params_P.add_(1.0)
    assert not frozen(x).requires_grad
    assert not frozen.training
    assert all(p.grad is None for p in frozen.parameters())
    assert all(torch.equal(v, twin[k]) for k, v in frozen.state_dict().items())
    assert model.module.training
    assert model.grad_P.abs().max() > 0


def test_frozen_copies_are_made_once_a_name():
    model = FlatModel(network())
    first = model.frozen("a", model.snapshot())
    model.params_P.fill_(2.0)
    assert model.frozen("a", model.snapshot()) is first
    assert model.frozen("b", model.snapshot()) is not first
    assert (first[0].weight == 2.0).all()


def test_the_initial_model_is_a_function_of_the_seed_alone():
    build = architectures.mlp
    torch.manual_seed(5)
    one, before = build_model(build, 1, (4, 4), 2, seed=3), torch.get_rng_state()
    torch.manual_seed(6)
    two, other = build_model(build, 1, (4, 4), 2, seed=3), build_model(build, 1, (4, 4), 2, seed=4)
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    torch.manual_seed(5)
    assert torch.equal(before, torch.get_rng_state())


# Images


@LAYOUTS
def test_normalisation_by_hand(channels_last):
    """mean 0.5, std 0.25 of the [0, 1] range: 0 -> -2, 255 -> 2, 51 -> (0.2 - 0.5) / 0.25 = -1.2."""
    scale = ImageScale((0.5, 0.0), (0.25, 1.0))
    images = torch.tensor([[[[0, 255, 51]], [[0, 255, 51]]]], dtype=torch.uint8)
    x = scale(images, channels_last)
    assert x.dtype == torch.float32
    assert x[0, 0, 0].tolist() == pytest.approx([-2.0, 2.0, -1.2], abs=1e-6)
    assert x[0, 1, 0].tolist() == pytest.approx([0.0, 1.0, 0.2], abs=1e-6)


def test_scaling_and_augmenting_leave_the_source_unchanged():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (9, 3, 8, 8), dtype=np.uint8))
    before = digest(images.numpy())
    scale = ImageScale((0.5,) * 3, (0.25,) * 3, crop=True, flip=True)
    generator = rng.stream(0, rng.AUGMENT, 1, 2)
    for channels_last in (False, True):
        x = scale(scale.augment(images, generator), channels_last)
        x.zero_()
        scale(images, channels_last).zero_()
    assert digest(images.numpy()) == before


def crops(image, padding):
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    height, width = image.shape[1:]
    span = range(2 * padding + 1)
    return [padded[:, i : i + height, j : j + width] for i in span for j in span]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(3, 7), st.integers(3, 7),
       st.integers(0, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_augmented_image_is_a_crop_of_its_own_image_or_of_its_mirror_image(
    seed, count, channels, height, width, padding, flip
):
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    scale = ImageScale((0.5,) * channels, (0.25,) * channels, crop=True, flip=flip, padding=padding)
    made = scale.augment(torch.from_numpy(images), generator).numpy()
    assert (made.dtype, made.shape) == (np.uint8, images.shape)
    for image, result in zip(images, made, strict=True):
        possible = crops(image, padding) + (crops(image[:, :, ::-1], padding) if flip else [])
        assert any(np.array_equal(result, each) for each in possible)


def test_mirroring_is_each_images_own_and_half_of_them():
    """1,000 images, p = 1/2: standard deviation 15.8, so 400 to 600 is beyond 6 of them."""
    images = torch.zeros(1000, 1, 1, 2, dtype=torch.uint8)
    images[..., 1] = 255
    made = ImageScale((0.5,), (0.25,), flip=True).augment(images, np.random.default_rng(0))
    assert 400 < int((made[:, 0, 0, 0] == 255).sum()) < 600


def test_augmentation_is_a_function_of_its_stream():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (9, 3, 8, 8), dtype=np.uint8))
    scale = ImageScale((0.5,) * 3, (0.25,) * 3, crop=True, flip=True)
    made = [scale.augment(images, rng.stream(0, rng.AUGMENT, 1, k)) for k in (2, 2, 3)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
