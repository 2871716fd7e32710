"""A task decides loss, input and evaluation; nothing in the engine knows what a network is for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.records import ByteArray, ClientTask, Dataset, IntArray, Partition
from raysim.data.datasets import digits
from raysim.engine.client_runner import ClientRunner
from raysim.engine.messages import Plugin, WorkerSetup
from raysim.evaluation.task import CLASSIFICATION, Task
from raysim.generation.denoising import DENOISING, Denoiser, denoiser
from raysim.local.contract import Loss, cross_entropy
from raysim.models.architectures import mlp
from raysim.models.flat_model import FlatModel, ImageScale, build_model

UNET = {"widths": [8, 8], "label_dropout": 0.25}


def first(dataset: Dataset, n: int) -> Partition:
    """One client with the first n training images."""
    rows = np.arange(n)
    one = np.zeros(1, bool)
    return Partition(rows, np.array([0, n]), dataset.train_labels_N[:n], dataset.classes, one, one, np.zeros(1))


def trained(setup: WorkerSetup, n: int = 24) -> tuple[Any, Tensor, ClientRunner]:
    """(report, trained parameters, runner) of one client of n images in round 1."""
    dataset = digits()
    runner = ClientRunner(setup, dataset, first(dataset, n), "cpu")
    runner.start_from(1, runner.model.state())
    ((_, (report, update, _)),) = runner.train([ClientTask(0, n)], lambda clients: [True] * len(clients))
    return report, runner.start["params"] + update["delta"], runner


@dataclass(frozen=True)
class Brightness(Task):
    """Tell how bright an image is, by the first output of a network."""

    shown = ("error",)

    @property
    def loss(self) -> Loss:
        return squared_error

    def scale(self, dataset: Dataset, augment: Sequence[str]) -> ImageScale:
        return ImageScale((0.0,), (1.0,))

    def check(self, model: FlatModel, dataset: Dataset, name: str) -> None: ...

    def evaluate(
        self, model: FlatModel, images: ByteArray, labels_N: IntArray, classes: int, scale: ImageScale,
        which: Iterable[int],
    ) -> list[Any]:
        return []

    def metrics(self, results: Sequence[Any], split: str, counts_KC: IntArray) -> dict[str, float]:
        return {}


def squared_error(module: nn.Module, x: Tensor, y_B: Tensor) -> Tensor:
    return F.mse_loss(module(x)[:, 0], x.mean((1, 2, 3)))


@pytest.mark.parametrize("task", [CLASSIFICATION, Brightness()])
def test_a_client_trains_by_the_loss_and_the_input_of_the_task_even_where_a_faster_way_knows_cross_entropy(task: Task):
    """Three plain SGD steps on all 24 images of a network of linear layers, written out with autograd."""
    n, lr = 24, 0.5
    setup = WorkerSetup(
        0, Plugin("model", "mlp", {"hidden": [8]}), Plugin("local", "sgd", {"steps": 3, "batch_size": n, "lr": lr}),
        task=task,
    )
    report, params_P, runner = trained(setup, n)
    dataset = digits()
    module = build_model(lambda *shape: mlp(*shape, hidden=[8]), 1, (8, 8), 10, 0)
    images = torch.from_numpy(dataset.train_images[:n])
    x = task.scale(dataset, ())(images, False)
    losses = []
    for _ in range(3):
        module.zero_grad()
        loss = task.loss(module, x, torch.from_numpy(dataset.train_labels_N[:n]))
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p in module.parameters():
                p -= lr * p.grad
    assert torch.allclose(params_P, torch.cat([p.detach().flatten() for p in module.parameters()]), atol=1e-5)
    assert report.loss == pytest.approx(losses[-1], rel=1e-4)
    assert runner.setup.task.loss is (cross_entropy if task is CLASSIFICATION else squared_error)


def test_noise_and_dropped_labels_of_a_client_are_drawn_from_its_own_stream():
    """One step on all 24 images, written out: torch's global generator starts at the client's seed of the round."""
    n, lr = 24, 0.1
    setup = WorkerSetup(
        0, Plugin("model", "raysim.generation.denoising:denoiser", UNET),
        Plugin("local", "sgd", {"steps": 1, "batch_size": n, "lr": lr}), task=DENOISING,
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    report, params_P, _ = trained(setup, n)
    assert torch.equal(torch.get_rng_state(), before)
    dataset = digits()
    module = build_model(lambda *shape: denoiser(*shape, **UNET), 1, (8, 8), 10, 0)
    assert isinstance(module, Denoiser) and module.null_class == 10
    order = rng.stream(0, rng.BATCHES, 1, 0).permutation(n)
    clean = torch.from_numpy(dataset.train_images[order]).float() / 127.5 - 1
    labels_B = torch.from_numpy(dataset.train_labels_N[order])
    torch.manual_seed(rng.integer(0, rng.DROPOUT, 1, 0))
    labels_B[torch.rand(n) < 0.25] = 10
    offset = torch.rand(())
    t_B = ((torch.arange(n) + offset) * (1000 / n)).long()
    noise = torch.randn(clean.shape)
    abar = module.diffusion.scheduler.alphas_cumprod[t_B][:, None, None, None]
    noisy, v = abar**0.5 * clean + (1 - abar) ** 0.5 * noise, abar**0.5 * noise - (1 - abar) ** 0.5 * clean
    loss = F.mse_loss(module.unet(noisy, t_B, labels_B).sample, v)
    loss.backward()
    model = FlatModel(build_model(lambda *shape: denoiser(*shape, **UNET), 1, (8, 8), 10, 0))
    expected = model.named_views(params_P)
    for name, p in module.named_parameters():
        assert torch.allclose(expected[name], (p - lr * p.grad).detach(), atol=1e-5), name
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-4)


def test_the_denoising_error_is_that_of_fixed_noise_and_leaves_the_model_as_it_was():
    dataset = digits()
    model = FlatModel(build_model(lambda *shape: denoiser(*shape, **UNET), 1, (8, 8), 10, 0))
    scale = DENOISING.scale(replace(dataset, mean=(0.9,)), ())
    images, labels_N = dataset.test_images[:70], dataset.test_labels_N[:70]
    before = model.state().params_P
    whole = DENOISING.evaluate(model, images, labels_N, 10, scale, [1, 0])
    parts = [*DENOISING.evaluate(model, images, labels_N, 10, scale, [0]),
             *DENOISING.evaluate(model, images, labels_N, 10, scale, [1])]
    assert {r.chunk: r for r in whole} == {r.chunk: r for r in parts}
    assert [r.images for r in parts] == [50, 20]
    counts_KC = np.zeros((0, 10), np.int64)
    found = DENOISING.metrics(whole, "test", counts_KC)
    assert found == {"denoising_error": (parts[0].error_sum + parts[1].error_sum) / 70}
    assert list(DENOISING.metrics(whole, "validation", counts_KC)) == ["validation_denoising_error"]
    assert np.array_equal(model.state().params_P, before) and model.module.training


def test_each_task_refuses_the_network_of_the_other():
    dataset = digits()
    classifier = FlatModel(build_model(lambda *shape: mlp(*shape, hidden=[8]), 1, (8, 8), 10, 0))
    with pytest.raises(UserError, match="Classifier takes no noise off images"):
        DENOISING.check(classifier, dataset, "mlp")
    CLASSIFICATION.check(classifier, dataset, "mlp")
    wide = FlatModel(build_model(lambda *shape: mlp(*shape[:2], 11, hidden=[8]), 1, (8, 8), 10, 0))
    with pytest.raises(UserError, match=r"for 2 images it returns \(2, 11\), not \(2, 10\)"):
        CLASSIFICATION.check(wide, dataset, "wide")
