"""Fine-tuned evaluation: which test images, what it changes, and that it is a function of its keys."""

import numpy as np
import torch

from raysim.config.schema import FineTuning
from raysim.core.records import Dataset
from raysim.evaluation.fine_tuning import fine_tune, fine_tuned_accuracy
from raysim.evaluation.fine_tuning import test_rows as rows_for
from raysim.local.contract import ClientData
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

LABELS = np.array([2, 0, 1, 0, 2, 0])
SCALE = ImageScale((0.5,), (0.25,))


def test_the_first_images_of_each_class_that_the_client_has():
    """Classes 0 and 2: rows 1, 3, 5 and 0, 4; at most two of each: 1, 3 and 0, 4."""
    counts_C = np.array([4, 0, 1])
    assert rows_for(LABELS, counts_C, None).tolist() == [0, 1, 3, 4, 5]
    assert rows_for(LABELS, counts_C, 2).tolist() == [0, 1, 3, 4]
    assert rows_for(LABELS, np.zeros(3), 2).tolist() == []


def dataset():
    images = np.zeros((6, 1, 4, 4), np.uint8)
    images[LABELS == 0] = 255
    return Dataset("tiny", images, LABELS, images, LABELS, ("a", "b", "c"), (0.5,), (0.25,))


def tuned(seed, options, images=None):
    torch.manual_seed(0)
    model = FlatModel(architectures.linear(1, (4, 4), 3))
    own = LABELS != 1
    data = ClientData((dataset().test_images if images is None else images)[own], LABELS[own], int(own.sum()))
    fine_tune(model, data, SCALE, options, seed, 1, 0, fixed_statistics=False)
    return model


def test_a_client_learns_its_own_classes_and_is_judged_on_those_alone():
    """White images are class 0, black ones class 2 for a client without class 1."""
    options = FineTuning(epochs=20, lr=0.1, batch_size=2, test_images=None)
    accuracy_C = fine_tuned_accuracy(tuned(0, options), dataset(), SCALE, np.array([3, 0, 2]), options)
    assert accuracy_C[[0, 2]].tolist() == [1.0, 1.0]
    assert np.isnan(accuracy_C[1])
    assert np.isnan(fine_tuned_accuracy(tuned(0, options), dataset(), SCALE, np.zeros(3), options)).all()


def test_tuning_is_a_function_of_its_keys():
    options = FineTuning(lr=0.1, batch_size=2, epochs=3)
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 4), dtype=np.uint8)
    one, two, other = (tuned(seed, options, images).params_P for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
