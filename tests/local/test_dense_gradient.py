"""The gradient of fully connected networks, written out, is autograd's, bit for bit."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raysim.local.contract import ClientData, Job
from raysim.local.dense_gradient import DenseGradient
from raysim.local.loop import train_client
from raysim.local.moon import moon
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

NETWORKS = {
    "linear": lambda: architectures.linear(3, (8, 8), 5),
    "mlp": lambda: architectures.mlp(3, (8, 8), 5, hidden=[20, 7]),
    "mlp with a projection head": lambda: architectures.mlp(3, (8, 8), 5, hidden=[20], projection=6),
}


def made(name: str) -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(NETWORKS[name]())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch", [1, 10])
def test_it_is_autograds_gradient_whatever_was_there_before(name: str, batch: int):
    model, reference = made(name), made(name)
    x, y_B = torch.randn(batch, 3, 8, 8), torch.arange(batch) % 5
    model.grad_P.fill_(7)
    gradient = DenseGradient.of(model.module.chain())
    assert gradient is not None
    loss = gradient(x, y_B)
    expected = cross_entropy(reference.module(x), y_B)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(model.grad_P, reference.grad_P)
    assert not loss.requires_grad


def test_by_hand():
    """One pixel h = 2, W = (1, 0), b = 0, label 1: p = (e^2, 1) / (e^2 + 1) = (0.880797, 0.119203), g = p - (0, 1).

    Loss -log 0.119203 = 2.126928; dL/db = g = (0.880797, -0.880797); dL/dW = 2 g.
    """
    model = FlatModel(architectures.linear(1, (1, 1), 2))
    model.params_P.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    loss = DenseGradient.of(model.module.chain())(torch.full((1, 1, 1, 1), 2.0), torch.tensor([1]))
    assert float(loss) == pytest.approx(2.126928, abs=1e-6)
    assert model.grad_P.tolist() == pytest.approx([1.761594, -1.761594, 0.880797, -0.880797], abs=1e-6)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Flatten(), nn.Linear(4, 2), nn.ReLU()],
        [nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)],
        [nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2)],
        [nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)],
        [nn.Linear(4, 2).requires_grad_(False)],
        [],
    ],
)
def test_other_networks_are_left_to_autograd(layers: list[nn.Module]):
    FlatModel(nn.Sequential(*layers))
    assert DenseGradient.of(layers) is None


def test_a_layer_that_somebody_watches_is_left_to_autograd():
    model = made("linear")
    model.module.classifier.register_forward_hook(lambda *_: None)
    assert DenseGradient.of(model.module.chain()) is None


class general(sgd):
    """Plain cross-entropy by a method of its own, so that autograd does the work."""

    def loss(self, job, x, y_B):
        return cross_entropy(job.model.module(x), y_B)


@pytest.mark.parametrize("name", NETWORKS)
def test_training_with_it_is_training_with_autograd(name: str):
    """Three epochs in batches of 8, one of them of 5 samples, with momentum: the same model to the bit."""
    draw = np.random.default_rng(0)
    data = ClientData(draw.integers(0, 256, (29, 3, 8, 8), dtype=np.uint8), draw.integers(0, 5, 29), 29)
    ends = []
    for algorithm in (sgd, general, moon):
        model = made(name)
        local = algorithm(epochs=3, batch_size=8, lr=0.1, momentum=0.5)
        job = Job(model, model.params_P.clone(), 0.1, 1, 0, 29)
        result = train_client(job, local, data, ImageScale((0.5,) * 3, (0.25,) * 3), seed=0)
        ends.append((model.params_P.clone(), result.loss))
    for params_P, _ in ends[1:]:
        assert torch.equal(params_P, ends[0][0])
    assert ends[1][1] == ends[0][1]


@pytest.mark.parametrize("name", NETWORKS)
def test_it_finds_that_it_agrees_with_autograd_and_leaves_parameters_and_random_state(name: str):
    model = made(name)
    before, state = model.params_P.clone(), torch.get_rng_state()
    gradient = DenseGradient.of(model.module.chain())
    assert gradient is not None
    assert gradient.agrees(10)
    assert torch.equal(model.params_P, before)
    assert torch.equal(torch.get_rng_state(), state)


class Lacks:
    """torch.ops.aten without one of the operators."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str):
        if name == self.name:
            raise AttributeError(name)
        return getattr(torch.ops.aten, name)


class Differs(Lacks):
    """torch.ops.aten with an operator whose last bits are others."""

    def __getattr__(self, name: str):
        operator = getattr(torch.ops.aten, name)
        return (lambda *args: operator(*args) * (1 + 2e-7)) if name == self.name else operator


@pytest.mark.parametrize("kind", [Lacks, Differs])
@pytest.mark.parametrize("operator", ["_log_softmax_backward_data", "threshold_backward", "nll_loss_backward"])
def test_where_torch_differs_it_steps_aside_and_training_has_autograds_bits(kind, operator, monkeypatch):
    """The operators are not public, so another version of torch may lack or change them."""
    from raysim.local import dense_gradient

    data = ClientData(np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8), np.arange(40) % 5, 40)

    def trained() -> torch.Tensor:
        model, algorithm = made("mlp"), sgd(lr=0.1, batch_size=8)
        job = Job(model, model.params_P.detach().clone(), 0.1, 1, 0, 40)
        train_client(job, algorithm, data, ImageScale((0.5,) * 3, (0.25,) * 3), 0)
        return model.params_P.detach().clone()

    expected = trained()
    monkeypatch.setattr(dense_gradient, "_aten", kind(operator))
    gradient = DenseGradient.of(made("mlp").module.chain())
    assert gradient is not None
    assert not gradient.agrees(8)
    assert torch.equal(trained(), expected)
