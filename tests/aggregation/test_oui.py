"""OUI: values by hand, the layer found in every spelling of an activation, and nothing changed by measuring."""

import hashlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from raysim.aggregation.oui import find_activation, hookable_layer, measure_oui, measure_oui_by_layer
from raysim.core.errors import UserError
from raysim.models import architectures


class Spelt(nn.Module):
    """Two inputs are the pre-activations of two units, whatever function `activation` is."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.activation(x * 1.0))


class Flags(nn.Module):
    """Dropout, BatchNorm and a sub-module whose flag differs from the rest."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 36, 2)
        self.norm.eval()

    def forward(self, x):
        x = functional.dropout(functional.relu(self.norm(self.conv(x))), 0.5)
        return self.head(self.drop(x).flatten(1))


# Unit 1 is positive for images 1 and 2 of 4, unit 2 for image 1 alone (0 is not positive).
HAND = torch.tensor([[1.0, 2.0], [3.0, 0.0], [-1.0, -2.0], [-0.5, 0.0]])

SPELLINGS = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "F.relu": functional.relu,
    "F.relu in place": lambda x: functional.relu(x, inplace=True),
    "F.relu_": functional.relu_,
    "torch.relu": torch.relu,
    "x.relu()": lambda x: x.relu(),
    "x.relu_()": lambda x: x.relu_(),
    "clamp": lambda x: x.clamp(min=0),
    "clamp_min": lambda x: torch.clamp_min(x, 0),
    "nn.ReLU6": nn.ReLU6(),
    "nn.GELU": nn.GELU(),
    "nn.GELU tanh": nn.GELU("tanh"),
    "F.gelu": functional.gelu,
    "nn.SiLU": nn.SiLU(),
    "nn.SiLU in place": nn.SiLU(inplace=True),
    "F.silu": functional.silu,
    "x sigmoid(x)": lambda x: x * torch.sigmoid(x),
    "nn.Mish": nn.Mish(),
    "nn.ELU": nn.ELU(),
    "nn.SELU in place": nn.SELU(inplace=True),
    "nn.LeakyReLU": nn.LeakyReLU(),
    "nn.PReLU": nn.PReLU(),
    "nn.Hardswish": nn.Hardswish(),
    "nn.Softplus": nn.Softplus(),
    "nn.Tanh": nn.Tanh(),
    "nn.RReLU": nn.RReLU(),
    "nn.Softsign": nn.Softsign(),
    "nn.Tanhshrink": nn.Tanhshrink(),
    "nn.LogSigmoid": nn.LogSigmoid(),
    "torch.maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "torch.maximum of 0": lambda x: torch.maximum(torch.tensor(0.0), x),
}


@pytest.mark.parametrize("activation", SPELLINGS.values(), ids=SPELLINGS)
def test_two_units_by_hand_in_every_spelling(activation):
    """B = 4, s = (2, 1), u = (2, 1), mean 1.5, over floor(4 / 2) = 2: 0.75."""
    assert measure_oui(Spelt(activation), HAND) == 0.75


class Deep(nn.Module):
    """A ReLU of 48 units, then a hidden layer of 16 with `after` behind it, then the classifier."""

    def __init__(self, after):
        super().__init__()
        self.early, self.late, self.head = nn.Linear(9, 48), nn.Linear(48, 16), nn.Linear(16, 3)
        self.after = after
        self.factor = nn.Parameter(torch.ones(1, 16))

    def forward(self, x):
        h = self.late(torch.relu(self.early(x.flatten(1))))
        return self.head(self.after(h) if isinstance(self.after, nn.Module) else self.after(self, h))


def images(count):
    return torch.randn(count, 1, 3, 3, generator=torch.Generator().manual_seed(0))


def kind(after):
    """The name of a module's class, without the values that its text holds or the address of a function."""
    return type(after).__name__


@pytest.mark.parametrize(
    "after", [nn.Softsign(), nn.Tanh(), nn.Hardshrink(), lambda _, h: torch.maximum(h, torch.tensor(0.0))], ids=kind
)
def test_the_activation_of_the_last_hidden_layer_is_measured_not_an_earlier_one(after):
    (site,) = find_activation(Deep(after), images(4))
    assert site.units == 16


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("abs", lambda _, h: functional.softsign(h)), ("abs", lambda _, h: (h + h.abs()) / 2),
        ("gt", lambda _, h: torch.where(h > 0, h, 0.0)), ("mul", lambda _, h: h * h), ("sin", lambda _, h: h.sin()),
        ("maximum", lambda _, h: torch.maximum(h, -h)), ("reciprocal|div", lambda _, h: 1 / h),
        ("gt", lambda _, h: h * (h > 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_activation_after_a_known_one_is_refused_with_the_layers_to_name(name, after):
    """It is not passed over for the ReLU before it, whose units are others."""
    with pytest.raises(UserError, match=rf"last hidden layer \(({name})\) is no activation.*aggregation\.layers.*late"):
        find_activation(Deep(after), images(4))
    assert measure_oui(Deep(after), images(4), ["late"]) > 0


@pytest.mark.parametrize(
    "after",
    [
        nn.Identity(), nn.LayerNorm(16), nn.RMSNorm(16), nn.Dropout(), lambda _, h: h + 1, lambda _, h: 2 * h,
        lambda _, h: h / 3, lambda self, h: h * self.factor, lambda self, h: h / self.factor, lambda _, h: h + h,
        lambda _, h: h - h.mean(1, keepdim=True),
    ],
    ids=kind,
)
def test_what_bends_nothing_after_the_last_hidden_layer_leaves_the_activation_before_it(after):
    """A bottleneck, a normalisation, a scale: the last activation is the ReLU of 48 units."""
    (site,) = find_activation(Deep(after), images(4))
    assert site.units == 48


def test_an_odd_probe_is_divided_by_the_floor_of_its_half():
    """B = 3, s = (2, 1): u = (1, 1), mean 1, over floor(3 / 2) = 1: 1. Division by B / 2 would give 0.667."""
    assert measure_oui(Spelt(nn.ReLU()), HAND[:3]) == 1.0


def test_oui_is_zero_where_no_unit_tells_images_apart():
    assert measure_oui(Spelt(nn.ReLU()), torch.tensor([[1.0, -1.0]] * 4)) == 0.0


@pytest.mark.parametrize("factor", [1e-3, 7.0, -1.0, -3.0])
@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_scaling_or_negating_pre_activations_leaves_oui_unchanged(name, factor):
    """s becomes s, or B - s where no pre-activation is 0; min(s, B - s) is the same."""
    model, x = build(name), torch.randn(32, 1, 12, 12)
    last = [module for module in model.body if isinstance(module, nn.Linear)][-1]
    before = measure_oui(model, x)
    with torch.no_grad():
        last.weight.mul_(factor)
        last.bias.mul_(factor)
    assert 0 < before < 1
    assert measure_oui(model, x) == before


def build(name, **keys):
    torch.manual_seed(3)
    return getattr(architectures, name)(1, (28, 28) if name == "lenet" else (12, 12), 5, **keys)


@pytest.mark.parametrize(
    ("name", "keys", "layer", "units"),
    [
        ("cnn", {}, "body.8", 128),
        ("mlp", {"hidden": [9, 7]}, "body.4", 7),
        ("lenet", {}, "body.10", 84),
        ("resnet18", {"norm": "group"}, "body.layer4.1.relu", 512 * 2 * 2),
        ("resnet18", {"norm": "batch"}, "body.layer4.1.relu", 512 * 2 * 2),
        ("cnn", {"projection": 16}, "projection.1", 128),
    ],
)
def test_the_last_hidden_activation_of_every_model_is_found(name, keys, layer, units):
    """ResNet on 12 x 12 images ends in 512 maps of 2 x 2, each element a unit."""
    size = 28 if name == "lenet" else 12
    (site,) = find_activation(build(name, **keys), torch.randn(1, 1, size, size))
    assert (site.layer, site.op, site.units) == (layer, "relu", units)


def test_cnn_oui_equals_counting_on_the_pre_activation_itself():
    model, x = build("cnn"), torch.randn(32, 1, 12, 12)
    with torch.no_grad():
        pre = model.body[:-1](x)
    s = (pre > 0).sum(0)
    assert measure_oui(model, x) == torch.minimum(s, 32 - s).double().mean().item() / 16


@pytest.mark.parametrize(
    ("name", "keys"),
    [("cnn", {}), ("mlp", {}), ("lenet", {}), ("resnet18", {"norm": "batch"}), ("cnn", {"projection": 16})],
)
def test_naming_the_layer_found_gives_the_same_oui(name, keys):
    """Also for the ReLU of ResNet, which runs twice in a block."""
    model, x = build(name, **keys), torch.randn(8, 1, *((28, 28) if name == "lenet" else (12, 12)))
    layer = hookable_layer(model, x)
    assert layer == find_activation(model, x)[0].layer
    assert measure_oui(model, x, [layer]) == measure_oui(model, x) > 0


def test_an_activation_that_is_no_module_or_runs_again_later_cannot_be_named():
    """The last run of the shared ReLU below comes after the classifier."""
    assert hookable_layer(Spelt(functional.relu), HAND) == ""
    relu = nn.ReLU()
    assert hookable_layer(nn.Sequential(nn.Linear(2, 3), relu, nn.Linear(3, 2), relu), HAND) == ""


def test_an_activation_after_the_classifier_is_not_hidden():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.Sigmoid())
    assert [site.layer for site in find_activation(model, HAND)] == ["1"]


def test_a_transformer_layer_shows_its_activation():
    """In evaluation mode torch would fuse the layer into one operation that hides it."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.Unflatten(1, (3, 4)), layer, nn.Flatten(), nn.Linear(12, 2))
    (site,) = find_activation(model, torch.randn(5, 12))
    assert (site.op, site.units) == ("gelu", 3 * 6)


def test_named_layers_are_outputs_of_modules_and_inputs_of_activations():
    """body.7 is the linear layer whose output body.8, a ReLU, receives: the same OUI by three names."""
    model, x = build("cnn"), torch.randn(16, 1, 12, 12)
    by_layer = measure_oui_by_layer(model, x, ["body.8", "body.7", "body.1"])
    assert list(by_layer) == ["body.8", "body.7", "body.1"]
    assert by_layer["body.8"] == by_layer["body.7"] == measure_oui(model, x)
    assert measure_oui(model, x, ["body.8", "body.1"]) == (by_layer["body.8"] + by_layer["body.1"]) / 2


@pytest.mark.parametrize("layers", [None, ["norm"], ["relu"]])
def test_pre_activations_are_read_before_an_in_place_activation_overwrites_them(layers):
    """Each unit is positive for 2 of 4 images: OUI 1. The threshold makes every other value 5, which would give 0."""
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(2))
    model.add_module("relu", nn.Threshold(0.0, 5.0, inplace=True))
    model.add_module("head", nn.Linear(2, 2))
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    assert measure_oui(model, x, layers) == 1.0
    assert x.min() == -1


@pytest.mark.parametrize("layer", ["body.88", "nonsense", ""])
def test_an_unknown_layer_lists_the_candidates(layer):
    with pytest.raises(UserError, match=r"aggregation\.layers: .*choose from .*body\.8") as caught:
        measure_oui(build("cnn"), torch.randn(4, 1, 12, 12), [layer])
    assert repr(layer) in str(caught.value)


def test_a_layer_that_does_not_run_is_refused():
    model = Flags()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(UserError, match="'spare' takes no part"):
        find_activation(model, torch.randn(2, 1, 8, 8), ["spare"])


@pytest.mark.parametrize("layers", [None, ["head"]])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_probe_of_fewer_than_two_images_is_refused(batch, layers):
    with pytest.raises(UserError, match=r"aggregation\.probe_size"):
        measure_oui(Spelt(nn.ReLU()), HAND[:batch], layers)


def test_a_model_without_hidden_activation_is_refused_with_the_layers_to_name():
    model = build("linear")
    with pytest.raises(UserError, match=r"no hidden activation.*classifier"):
        find_activation(model, torch.randn(1, 1, 12, 12))
    assert 0 <= measure_oui(model, torch.randn(8, 1, 12, 12), ["classifier"]) <= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layers", [None, ["activation"]])
def test_a_pre_activation_that_is_not_finite_is_an_error(value, layers):
    """ReLU would turn minus infinity into a harmless 0."""
    x = HAND.clone()
    x[1, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        measure_oui(Spelt(nn.ReLU()), x, layers)


def fingerprint(model):
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("layers", [None, ["norm"]])
def test_measuring_changes_nothing(layers):
    """Parameters, BatchNorm statistics, gradients, flags, hooks, the random state: also where dropout ignores eval."""
    model, x = Flags().train(), torch.randn(6, 1, 8, 8)
    model.norm.eval()
    model(x).sum().backward()
    flags = [module.training for module in model.modules()]
    gradients = [p.grad.clone() for p in model.parameters()]
    before, random = fingerprint(model), torch.get_rng_state()
    measure_oui(model, x, layers)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_flags_are_restored_after_a_failure():
    model = Spelt(nn.ReLU()).train()
    with pytest.raises(RuntimeError):
        measure_oui(model, torch.randn(4, 5))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_batch_norm_is_measured_with_its_running_statistics():
    """Running mean 10 makes every pre-activation negative, whatever the batch's own mean."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2)).train()
    model[0].running_mean.fill_(10.0)
    assert measure_oui(model, HAND) == 0.0


def test_the_first_measurement_does_not_load_torchs_compiler():
    """It takes 1.5 s, once in every worker."""
    code = (
        "import sys, torch\nfrom raysim.aggregation.oui import measure_oui\n"
        "m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))\n"
        "measure_oui(m, torch.randn(4, 2))\nsys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
