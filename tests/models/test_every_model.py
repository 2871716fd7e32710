"""Claims about every model that `raysim list model` shows, with each named choice at the ends of its keys."""

from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.config.registry import available, parameters, resolve
from raysim.core.errors import UserError
from raysim.models.flat_model import FlatModel, build_model

SMALLEST = {"lenet": 16}  # pixels, where a model cannot take 8 x 8
few = settings(max_examples=3, deadline=None)


def variants():
    """Each model with its defaults; with each key that has named choices at its first and last; with a head."""
    for name in sorted(available("model")):
        yield name, {}
        for key, field in parameters(resolve("model", name)).model_fields.items():
            if get_origin(field.annotation) is Literal:
                choices = get_args(field.annotation)
                ends = [value for value in (choices[0], choices[-1]) if value != field.default]
                yield from ((name, {key: value}) for value in ends if isinstance(value, str))
            if key == "projection":
                yield name, {key: 5}


every = pytest.mark.parametrize(("name", "keys"), list(variants()))


def build(name, keys, channels=1, size=None, classes=3, seed=0):
    side = SMALLEST.get(name, 8)
    make = resolve("model", name)
    return build_model(lambda *given_: make(*given_, **keys), channels, size or (side, side), classes, seed)


def batch(name, count, channels=1, size=None, seed=0):
    side = SMALLEST.get(name, 8)
    return torch.randn(count, channels, *(size or (side, side)), generator=torch.Generator().manual_seed(seed))


def bits(module):
    return {key: value.numpy().tobytes() for key, value in module.state_dict().items()}


@every
@few
@given(
    channels=st.sampled_from([1, 2, 3]), height=st.integers(1, 24), width=st.integers(1, 24), classes=st.integers(1, 11)
)
def test_every_image_gets_a_finite_logit_for_each_class_or_the_size_is_refused(
    name, keys, channels, height, width, classes
):
    try:
        model = build(name, keys, channels, (height, width), classes)
    except UserError as error:
        assert f"model.name = {name}" in str(error) and f"{height} x {width}" in str(error)
        assert min(height, width) < SMALLEST.get(name, 8)
        return
    with torch.no_grad():
        logits = model.eval()(batch(name, 2, channels, (height, width)))
    assert logits.shape == (2, classes) and logits.dtype == torch.float32 and torch.isfinite(logits).all()


@every
def test_the_seed_alone_decides_the_initial_parameters(name, keys):
    """Whatever torch's generator did before, and it is left as it was."""
    torch.manual_seed(1)
    one = bits(build(name, keys))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again, other = bits(build(name, keys)), bits(build(name, keys, seed=7))
    assert torch.equal(torch.get_rng_state(), before)
    assert one == again and one != other


@every
def test_the_loss_of_a_batch_reaches_every_parameter(name, keys):
    model = build(name, keys).train()
    loss = torch.nn.functional.cross_entropy(model(batch(name, 6)), torch.arange(6) % 3)
    loss.backward()
    unreached = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert unreached == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@every
def test_as_one_vector_it_is_the_same_network(name, keys):
    """Out as flat arrays, other values in, the first ones in again: parameters, buffers and logits to the bit."""
    model = FlatModel(build(name, keys))
    x, before = batch(name, 3), bits(model.module)
    with torch.no_grad():
        logits = model.module.eval()(x)
        state = model.state()
        assert len(state.params_P) == sum(p.numel() for p in model.module.parameters())
        model.params_P.add_(1.0)
        model.buffers_F.add_(1.0)
        assert not torch.equal(model.module(x), logits)
        model.load(state)
        assert torch.equal(model.module(x), logits)
    assert bits(model.module) == before


@every
def test_evaluating_changes_nothing_and_draws_nothing(name, keys):
    model, x = build(name, keys).eval(), batch(name, 4)
    before, drawn = bits(model), torch.get_rng_state()
    with torch.no_grad():
        one, again = model(x), model(x)
    assert torch.equal(one, again)
    assert bits(model) == before and torch.equal(torch.get_rng_state(), drawn)


@every
def test_an_image_alone_has_the_logits_that_it_has_among_others(name, keys):
    """In evaluation, also with running statistics that are not the initial ones; up to the rounding of float32."""
    model, x = build(name, keys), batch(name, 5)
    with torch.no_grad():
        model.train()(x)
        model.eval()
        together = model(x).numpy()
        alone = np.concatenate([model(x[i : i + 1]).numpy() for i in range(5)])
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)


@every
def test_the_classifier_of_the_features_gives_the_logits(name, keys):
    """What MOON and the projection head rely on."""
    model, x = build(name, keys).eval(), batch(name, 2)
    with torch.no_grad():
        features = model.features(x)
        assert features.dim() == 2
        assert torch.equal(model.classifier(features), model(x))
