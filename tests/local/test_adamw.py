"""Local AdamW: two rounds by hand, PyTorch's optimiser as the reference."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from two_clients import Scalar, Server, quadratic, samples, train

from raysim.aggregation.mean import uniform
from raysim.core import rng
from raysim.local.adamw import adamw
from raysim.local.loop import batches
from raysim.models import architectures
from raysim.models.flat_model import FlatModel


def two_steps(x, target, lr=0.1):
    """Adam's first two steps in closed form: the first is lr sign(g)."""
    g = x - target
    y = x - lr * math.copysign(1, g)
    h = y - target
    m, v = (0.09 * g + 0.1 * h) / 0.19, (0.000999 * g**2 + 0.001 * h**2) / 0.001999
    return y - lr * m / math.sqrt(v)


def test_two_rounds_by_hand():
    """lr 0.1, 2 steps, no decay. m_1 / (1 - b1) = g, v_1 / (1 - b2) = g^2, so the first step is 0.1 sign(g).

    Client 0 from 0: g = -1: 0.1; g = -0.9: m = (-0.09 - 0.09) / 0.19 = -0.947368, v = (0.000999 + 0.00081) / 0.001999
    = 0.904952; 0.1 + 0.1 * 0.947368 / 0.951290 = 0.199588. Client 1 from 0: g = 3: -0.1; g = 2.9: m = 0.56 / 0.19,
    v = (0.008991 + 0.00841) / 0.001999; -0.1 - 0.1 * 2.947368 / 2.950393 = -0.199897. Mean -0.000155.
    Round 2 starts with fresh moments, hence again with a step of 0.1.
    """
    server = Server(quadratic(adamw, lr=0.1, steps=2, weight_decay=0.0), uniform(), [samples(2)] * 2)
    first = server.round()
    assert [server.results[k]["y"][0] for k in (0, 1)] == pytest.approx([0.199588, -0.199897], abs=1e-6)
    assert first == pytest.approx([-0.000155], abs=1e-6)
    expected = [two_steps(first[0], 1.0), two_steps(first[0], -3.0)]
    assert server.round() == pytest.approx([sum(expected) / 2], abs=1e-6)
    assert [server.results[k]["y"][0] for k in (0, 1)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_loop_is_pytorchs_adamw(clip):
    """Two epochs of 50 images in batches of 16, against a bare loop over separate tensors."""
    torch.manual_seed(0)
    module, data = architectures.cnn(1, (8, 8), 3, width=4, hidden=8), samples(50, 3, 8)
    bare = copy.deepcopy(module)
    optimiser = torch.optim.AdamW(bare.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    x, y = (torch.from_numpy(data.images).float() - 127.5) / 63.75, torch.from_numpy(data.labels_N)
    for rows, _ in batches(50, 16, 2, None, rng.stream(0, rng.BATCHES, 1, 0), norm=False):
        optimiser.zero_grad()
        cross_entropy(bare(x[rows]), y[rows]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(bare.parameters(), clip)
        optimiser.step()
    keys = {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1, "clip": clip}
    train(adamw(epochs=2, batch_size=16, **keys), FlatModel(module), data)
    for ours, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=0, atol=2e-6)


def test_effective_steps_are_the_steps_and_momentum_is_no_key():
    algorithm = quadratic(adamw, steps=3)
    job, _ = train(algorithm, FlatModel(Scalar()), samples(2))
    assert algorithm.effective_steps(job) == 3
    with pytest.raises(TypeError, match="momentum"):
        adamw(momentum=0.9)


def test_the_model_is_left_as_it_was_found():
    """The flat parameters carry no gradient of their own afterwards, so that the next client's algorithm may be any."""
    model = FlatModel(Scalar())
    train(quadratic(adamw, steps=3), model, samples(2))
    assert model.params_P.grad is None
    assert not model.params_P.requires_grad
