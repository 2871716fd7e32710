"""Architectures: the published layers, any image size, features as the classifier's input, pickling, determinism."""

import pickle

import pytest
import torch

from raysim.core.errors import UserError
from raysim.models import architectures

EVERY = [
    ("cnn", {}),
    ("cnn", {"width": 4, "hidden": 6}),
    ("mlp", {}),
    ("mlp", {"hidden": [5, 3]}),
    ("linear", {}),
    ("lenet", {}),
    ("resnet18", {}),
    ("resnet18", {"norm": "batch"}),
]


def build(name, channels=3, image_size=(28, 28), classes=4, **keys):
    torch.manual_seed(0)
    return getattr(architectures, name)(channels, image_size, classes, **keys)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_cnn_is_the_papers_network():
    """32x32x3: 3*9*32+32 = 896; 32*9*64+64 = 18,496; 64*8*8*128+128 = 524,416; 128*10+10 = 1,290; sum 545,098."""
    assert parameters(build("cnn", image_size=(32, 32), classes=10)) == 545_098


def test_lenet_is_the_benchmarks_network():
    """32x32x3: 456 + 2,416 + 400*120+120 = 48,120 + 84*121 = 10,164 + 850; sum 62,006."""
    assert parameters(build("lenet", image_size=(32, 32), classes=10)) == 62_006


def test_mlp_has_the_layers_asked_for():
    """2x2x1 -> 5 -> 3 -> 4: 25 + 18 + 16."""
    assert parameters(build("mlp", channels=1, image_size=(2, 2), hidden=[5, 3])) == 59


def test_linear_is_one_layer():
    assert parameters(build("linear", channels=1, image_size=(2, 3))) == 6 * 4 + 4


def test_resnet18_has_the_cifar_stem():
    """torchvision's 11,689,512 - 1000-class head 513,000 - 7x7 stem 9,408 + 3x3 stem 1,728 + 10-class head 5,130."""
    model = build("resnet18", image_size=(32, 32), classes=10)
    assert parameters(model) == 11_173_962
    assert model.body.layer1(model.body.relu(model.body.conv1(torch.zeros(1, 3, 32, 32)))).shape == (1, 64, 32, 32)


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (28, 28), (11, 8), (33, 65)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_cnn_takes_any_image(size, channels):
    model = build("cnn", channels=channels, image_size=size)
    assert model(torch.randn(2, channels, *size)).shape == (2, 4)


@pytest.mark.parametrize("name", ["mlp", "linear", "resnet18"])
@pytest.mark.parametrize("size", [(8, 8), (9, 14)])
def test_other_models_take_small_and_odd_images(name, size):
    assert build(name, channels=1, image_size=size)(torch.randn(2, 1, *size)).shape == (2, 4)


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (16, 16), (29, 31)])
def test_lenet_takes_its_sizes(size):
    assert build("lenet", image_size=size)(torch.randn(2, 3, *size)).shape == (2, 4)


@pytest.mark.parametrize(("name", "size"), [("lenet", (15, 28)), ("lenet", (8, 8)), ("cnn", (3, 8)), ("cnn", (8, 3))])
def test_too_small_an_image_names_model_and_size(name, size):
    with pytest.raises(UserError, match=rf"model.name = {name}: .*{size[0]} x {size[1]}"):
        build(name, image_size=size)


def test_the_models_named_instead_take_images_of_that_size():
    with pytest.raises(UserError, match=r"the data has 2 x 2; choose `mlp` or `linear`$"):
        build("cnn", image_size=(2, 2))
    with pytest.raises(UserError, match=r"the data has 8 x 8; choose `cnn`"):
        build("lenet", image_size=(8, 8))


@pytest.mark.parametrize(("name", "keys"), EVERY)
@pytest.mark.parametrize("projection", [None, 7])
def test_logits_are_the_classifier_of_the_features(name, keys, projection):
    model = build(name, **keys, projection=projection).eval()
    x = torch.randn(2, 3, 28, 28)
    features = model.features(x)
    assert features.shape == (2, projection or model.classifier.in_features)
    assert torch.equal(model(x), model.classifier(features))


@pytest.mark.parametrize("name", ["cnn", "mlp", "lenet", "resnet18"])
def test_features_are_activations(name):
    """After a ReLU (and a mean of such) nothing is negative, and something is positive."""
    features = build(name).eval().features(torch.randn(4, 3, 28, 28))
    assert features.min() >= 0
    assert features.max() > 0


def test_projection_is_linear_relu_linear():
    """Hidden 6 of the CNN: 6*6+6 = 42 and 6*7+7 = 49; the classifier sees 7 features."""
    head = build("cnn", hidden=6, projection=7).projection
    assert [type(m).__name__ for m in head] == ["Linear", "ReLU", "Linear"]
    assert parameters(head) == 91


@pytest.mark.parametrize(("name", "keys"), EVERY)
def test_models_survive_pickling_and_are_fixed_by_the_seed(name, keys):
    model = build(name, **keys).eval()
    copy = pickle.loads(pickle.dumps(model))
    again = build(name, **keys).eval()
    x = torch.randn(2, 3, 28, 28)
    assert torch.equal(model(x), copy(x))
    assert torch.equal(model(x), again(x))


def test_norm_chooses_the_layers():
    kinds = {norm: {type(m).__name__ for m in build("resnet18", norm=norm).modules()} for norm in ("group", "batch")}
    assert "GroupNorm" in kinds["group"]
    assert "BatchNorm2d" not in kinds["group"]
    assert "BatchNorm2d" in kinds["batch"]
    assert list(build("resnet18").buffers()) == []


def test_mlp_default_is_not_shared_state():
    """Building a model leaves the default of `hidden` as it was."""
    first, second = build("mlp"), build("mlp")
    assert parameters(first) == parameters(second) == 28 * 28 * 3 * 200 + 200 + 200 * 200 + 200 + 200 * 4 + 4
