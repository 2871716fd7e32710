"""Plain local SGD: two rounds by hand, PyTorch's optimiser as the reference, learning rates, effective steps."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from two_clients import Scalar, Server, quadratic, samples, train

from raysim.aggregation.mean import fedavg, uniform
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.local.fedprox import fedprox
from raysim.local.loop import batches
from raysim.local.lr_schedule import Schedule
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel

SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.01},
    {"clip": 0.5},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "clip": 1.0},
]


def close(expected):
    return pytest.approx(expected, rel=1e-6, abs=1e-7)


def small_cnn():
    torch.manual_seed(0)
    return architectures.cnn(1, (8, 8), 3, width=4, hidden=8)


def test_two_rounds_of_fedavg_by_hand():
    """lr 0.1, 2 steps: distance to the target shrinks by 0.81. Clients of 1 and 3 samples weigh 1/4 and 3/4.

    Round 1 from 0: 1 - 0.81 = 0.19 and -3 + 3 * 0.81 = -0.57; mean 0.25 * 0.19 - 0.75 * 0.57 = -0.38.
    Round 2 from -0.38: 1 - 1.38 * 0.81 = -0.1178 and -3 + 2.62 * 0.81 = -0.8778; mean -0.02945 - 0.65835 = -0.6878.
    """
    server = Server(quadratic(sgd, lr=0.1, steps=2), fedavg(), [samples(1), samples(3)])
    assert server.round() == close([-0.38])
    assert [server.results[k]["y"][0] for k in (0, 1)] == close([0.19, -0.57])
    assert server.round() == close([-0.6878])


def reference(module, data, make, epochs, batch_size, clip):
    """The same training as a bare PyTorch loop."""
    module.train()
    optimiser = make(module.parameters())
    order = rng.stream(0, rng.BATCHES, 1, 0)
    x = (torch.from_numpy(data.images).float() - 127.5) / 63.75
    y = torch.from_numpy(data.labels_N)
    for rows, _ in batches(len(y), batch_size, epochs, None, order, norm=False):
        optimiser.zero_grad()
        cross_entropy(module(x[rows]), y[rows]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()


def flat(model):
    """Parameters in the ordinary order of elements, whatever the layout of the flat tensor."""
    return torch.cat([p.detach().flatten() for p in model.module.parameters()]).numpy()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("keys", SETTINGS, ids=str)
def test_the_loop_is_pytorchs_sgd(keys, channels_last):
    """Two epochs of 50 images in batches of 16. The layout changes the order of sums inside a convolution, not more."""
    data, module = samples(50, classes=3, side=8), small_cnn()
    plain = {k: v for k, v in keys.items() if k != "clip"}
    expected = reference(
        copy.deepcopy(module), data, lambda p: torch.optim.SGD(p, lr=0.1, **plain), 2, 16, keys.get("clip")
    )
    model = FlatModel(module, channels_last=channels_last)
    before = flat(model)
    train(sgd(lr=0.1, epochs=2, batch_size=16, **keys), model, data)
    np.testing.assert_allclose(flat(model), expected, rtol=0, atol=2e-6)
    assert np.abs(expected - before).max() > 0.01


def test_plain_steps_in_the_ordinary_layout_are_pytorchs_bit_for_bit():
    """Without clipping (whose norm is a sum in another order) and channels_last, the operations are the same ones."""
    for keys in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.01}):
        data, module = samples(50, classes=3, side=8), small_cnn()
        make = lambda p: torch.optim.SGD(p, lr=0.1, **keys)  # noqa: B023, E731
        expected = reference(copy.deepcopy(module), data, make, 1, 16, None)
        model = FlatModel(module, channels_last=False)
        train(sgd(lr=0.1, batch_size=16, **keys), model, data)
        np.testing.assert_array_equal(flat(model), expected)


@pytest.mark.parametrize(
    ("keys", "tau", "expected"),
    [
        ({}, 7, 7.0),
        ({"momentum": 0.9}, 1, 1.0),
        ({"momentum": 0.9}, 2, 2.9),
        ({"momentum": 0.9}, 3, 5.61),
        ({"momentum": 0.9, "nesterov": True}, 2, 4.61),
    ],
)
def test_effective_steps_by_hand(keys, tau, expected):
    """Velocities under unit gradients and momentum 0.9: 1, 1.9, 2.71; their sums 1, 2.9, 5.61.

    Nesterov's step t adds 1 + 0.9 v_t = v_{t+1}: 1.9 + 2.71 = 4.61.
    """
    job, _ = train(quadratic(sgd, steps=tau, **keys), FlatModel(Scalar()), samples(2))
    assert sgd(**keys).effective_steps(job) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_effective_steps_are_how_far_unit_gradients_go(mu, weight_decay, momentum, nesterov):
    """f(x) = x has gradient 1 everywhere, so 5 real steps of lr 0.1 move x by -0.1 ||a||_1."""

    class Linear(fedprox):
        def loss(self, job, x, y_B):
            return job.model.module.x.sum()

    algorithm = Linear(mu=mu, weight_decay=weight_decay, lr=0.1, steps=5, momentum=momentum, nesterov=nesterov)
    job, _ = train(algorithm, FlatModel(Scalar()), samples(2))
    assert -job.model.params_P.item() == pytest.approx(0.1 * algorithm.effective_steps(job), rel=1e-5)


# Learning rates


def test_decay_is_per_round_and_the_same_for_every_client():
    """lr 0.1, decay 0.9: 0.1, 0.09, 0.081, ... in rounds 1, 2, 3, for both clients, which share a model."""
    server = Server(quadratic(sgd, lr=0.1, lr_decay=0.9), uniform(), [samples(2)] * 2)
    for round_ in range(1, 5):
        server.round([0, 1])
        assert {result["lr"] for result in server.results.values()} == {0.1 * 0.9 ** (round_ - 1)}


def test_a_step_uses_the_rate_of_its_round():
    """Round 3 at lr 0.1 * 0.9^2 = 0.081, from 0 towards 1: one step to 0.081."""
    job, _ = train(quadratic(sgd, lr=0.1, lr_decay=0.9, steps=1), FlatModel(Scalar()), samples(2), round_=3)
    assert job.model.params_P.item() == close(0.081)


def test_nothing_of_one_client_reaches_the_next():
    """With momentum, a client trained after seven others gets the bits of the same client trained alone."""
    algorithm, data = sgd(lr=0.1, momentum=0.9, batch_size=8), [samples(20, 3, 8, seed=k) for k in range(8)]
    model = FlatModel(small_cnn())
    start = model.state()
    for k in range(8):
        train(algorithm, model, data[k], start=start, client=k)
    alone = FlatModel(small_cnn())
    train(algorithm, alone, data[7], client=7)
    np.testing.assert_array_equal(model.state().params_P, alone.state().params_P)


def rates(numbers, **keys):
    algorithm = sgd(lr=1.0, schedule=Schedule(**keys))
    return [algorithm.learning_rate(r) for r in numbers]


def test_constant_is_the_default_bit_for_bit():
    assert [sgd(lr=0.3).learning_rate(r) for r in (1, 2, 1000)] == [0.3] * 3


def test_step_schedule_by_hand():
    """Every 2 rounds by 0.5: rounds 1, 2 at 1; 3, 4 at 0.5; 5 at 0.25."""
    assert rates(range(1, 6), kind="step", every=2, factor=0.5) == [1, 1, 0.5, 0.5, 0.25]


def test_cosine_schedule_by_hand():
    """4 rounds: (1 + cos(0, pi/4, pi/2, 3 pi/4)) / 2 = 1, 0.853553, 0.5, 0.146447; later rounds keep the last."""
    expected = [1, 0.853553, 0.5, 0.146447, 0.146447]
    assert rates([1, 2, 3, 4, 40], kind="cosine", rounds=4) == pytest.approx(expected, abs=1e-6)


def test_cosine_floor_by_hand():
    """floor 0.2, round 3 of 4: 0.2 + 0.8 * 0.5 = 0.6."""
    assert rates([1, 3], kind="cosine", rounds=4, floor=0.2) == pytest.approx([1, 0.6])


def test_warm_up_ends_at_the_full_rate_and_shifts_what_follows():
    """Warm-up of 4: 1/4, 2/4, 3/4, 1. A cosine to round 7 then spans T = 4 from round 4 on: round 6 is its middle."""
    assert rates(range(1, 6), warmup=4) == [0.25, 0.5, 0.75, 1, 1]
    assert rates([3, 4, 6], kind="cosine", warmup=4, rounds=7) == pytest.approx([0.75, 1, 0.5])


def test_schedule_and_decay_multiply():
    """Round 3: 0.5 * 0.9^2 * 0.5 = 0.2025."""
    algorithm = sgd(lr=0.5, lr_decay=0.9, schedule=Schedule(kind="step", every=2, factor=0.5))
    assert algorithm.learning_rate(3) == pytest.approx(0.2025)


@given(
    st.sampled_from(["constant", "step", "cosine"]), st.integers(0, 20), st.integers(1, 30), st.integers(20, 60),
    st.floats(0, 1),
)
def test_every_rate_is_positive_and_never_above_the_full_one(kind, warmup, every, rounds, floor):
    """And never rises after the warm-up, nor falls during it."""
    schedule = Schedule(kind=kind, warmup=warmup, every=every, rounds=rounds, floor=floor)
    schedule.check()
    scale = [schedule.scale(r) for r in range(1, 80)]
    first = max(1, warmup)
    assert all(0 < s <= 1 for s in scale)
    assert scale[first - 1] == 1
    assert scale[:first] == sorted(scale[:first])
    assert scale[first - 1 :] == sorted(scale[first - 1 :], reverse=True)


@pytest.mark.parametrize("keys", [{}, {"rounds": 3, "warmup": 5}])
def test_a_cosine_without_its_rounds_is_refused(keys):
    with pytest.raises(UserError, match=r"local\.schedule\.rounds = (null|3).*usually the `rounds` of the run"):
        sgd(schedule=Schedule(kind="cosine", **keys))


def test_reported_loss_is_the_mean_over_the_last_epoch_each_batch_before_its_step():
    """lr 0.1, 2 epochs of 1 step, from 0 to the target 1: losses 0.5, then 0.9^2 / 2 = 0.405."""
    _, result = train(quadratic(sgd, lr=0.1, epochs=2), FlatModel(Scalar()), samples(3))
    assert result.loss == close(0.405)
    assert result.steps == 2


def test_the_built_in_loss_is_the_mean_cross_entropy():
    """A linear model of zeros over 4 classes: ln 4 for every sample."""
    module = architectures.linear(1, (8, 8), 4)
    torch.nn.init.zeros_(module.classifier.weight)
    torch.nn.init.zeros_(module.classifier.bias)
    _, result = train(sgd(lr=1e-30), FlatModel(module), samples(10, 4, 8))
    assert result.loss == close(math.log(4))
