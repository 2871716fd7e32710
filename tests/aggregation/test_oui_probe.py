"""Which images a trained client is probed on, and that looking for the layer once changes no value."""

import numpy as np
import pytest
import torch

from raysim.aggregation.oui import measure_oui, measure_oui_by_layer
from raysim.aggregation.oui_probe import Probe
from raysim.core.records import Dataset
from raysim.local.contract import ClientData
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

SCALE = ImageScale((0.5,), (0.25,))
RNG = np.random.default_rng(0)


def images(n):
    return RNG.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8)


TRAIN = images(60)
SPLIT = Dataset("tiny", TRAIN, np.zeros(60, np.int64), TRAIN, np.zeros(60, np.int64), ("a",), (0.5,), (0.25,))


def network(seed):
    torch.manual_seed(seed)
    return FlatModel(architectures.cnn(1, (8, 8), 3, width=4, hidden=16))


def probe(kind="client", size=16, layers=None, seed=0):
    return Probe({"probe": kind, "probe_size": size, "layers": layers}, seed)


def test_later_models_are_measured_as_the_first_one_is():
    """The first call looks for the layer; the others name it: the values are those of a search each time."""
    measurer, data = probe(), ClientData(images(40), np.zeros(40, np.int64), 40)
    for seed in range(3):
        model = network(seed)
        found = measurer.measure(model, SCALE, 5, data, SPLIT)
        expected = measure_oui(model.module, SCALE(torch.from_numpy(measurer._images(5, data, SPLIT)), True))
        assert found == {"oui": expected}
        assert 0 < expected < 1


def test_several_layers_are_reported_by_name_with_their_mean():
    model, data, layers = network(0), ClientData(images(40), np.zeros(40, np.int64), 40), ["body.8", "body.1"]
    measurer = probe(layers=layers)
    found = measurer.measure(model, SCALE, 0, data, SPLIT)
    by_layer = measure_oui_by_layer(
        model.module, SCALE(torch.from_numpy(measurer._images(0, data, SPLIT)), True), layers
    )
    assert found == {"oui": sum(by_layer.values()) / 2, **{f"oui.{k}": v for k, v in by_layer.items()}}


@pytest.mark.parametrize(("n", "n_real"), [(40, 20), (40, 5), (40, 0)])
def test_a_client_is_probed_on_its_own_real_images_fixed_for_it(n, n_real):
    """With fewer than 16, some come twice; without any, on its synthetic ones."""
    data, mine = ClientData(images(n), np.zeros(n, np.int64), n_real), probe()
    chosen = mine._images(3, data, SPLIT)
    assert np.array_equal(chosen, probe()._images(3, data, SPLIT))
    assert not np.array_equal(chosen, mine._images(4, data, SPLIT))
    allowed = {image.tobytes() for image in data.images[: n_real or n]}
    drawn = [image.tobytes() for image in chosen]
    assert set(drawn) <= allowed
    assert len(set(drawn)) == 16 or n_real == 5


def test_the_shared_probe_is_the_same_for_every_client():
    data, shared = ClientData(images(40), np.zeros(40, np.int64), 40), probe("shared")
    assert np.array_equal(shared._images(1, data, SPLIT), shared._images(2, data, SPLIT))
    allowed = {image.tobytes() for image in TRAIN}
    assert {image.tobytes() for image in shared._images(1, data, SPLIT)} <= allowed
