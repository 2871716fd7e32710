"""Several clients of any network trained at once, as on a GPU, end where each ends alone, but for rounding."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysim.local.batched.on_gpu import VmapTrainer
from raysim.local.batched.schedule import BatchedClient
from raysim.local.contract import ClientData, Job, LocalResult
from raysim.local.fedprox import fedprox
from raysim.local.loop import train_client
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

SCALE, SHAPE = ImageScale((0.5,) * 3, (0.25,) * 3), (3, 8, 8)
SIZES = [25, 1, 40, 13, 8, 20]


def network(name: str = "cnn", **keys: Any) -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(getattr(architectures, name)(SHAPE[0], SHAPE[1:], 5, **keys))


def clients(model: FlatModel, sizes: list[int]) -> list[BatchedClient]:
    draw, start_P = np.random.default_rng(1), model.params_P.detach().clone()
    datas = [ClientData(draw.integers(0, 256, (n, *SHAPE), np.uint8), draw.integers(0, 5, n), n) for n in sizes]
    return [BatchedClient(Job(model, start_P, 0.05, 3, k, len(d.labels_N)), d) for k, d in enumerate(datas)]


Outcome = tuple[LocalResult, torch.Tensor]


def alone(model: FlatModel, local: sgd, members: list[BatchedClient], bf16: bool = False) -> list[Outcome]:
    found = []
    for member in copy.deepcopy(members):
        job = Job(model, member.job.start_P, member.job.lr, member.job.round, member.job.client, member.job.n)
        model.restore({"params": job.start_P})
        result = train_client(job, local, member.data, SCALE, seed=1, bf16=bf16)
        found.append((result, model.params_P.detach().clone()))
    model.restore({"params": members[0].job.start_P})
    return found


@pytest.mark.parametrize(
    "local",
    [
        sgd(batch_size=8),
        sgd(batch_size=8, epochs=3, momentum=0.9, weight_decay=0.01),
        sgd(batch_size=8, steps=7, momentum=0.9, nesterov=True),
        sgd(batch_size=64, epochs=2, clip=0.5),
    ],
)
def test_clients_of_unequal_sizes_end_where_they_end_alone(local: sgd):
    model = network(width=4, hidden=16)
    members = clients(model, SIZES)
    batch = VmapTrainer(model, local, SCALE, False, len(SIZES))
    start_P = model.params_P.detach().clone()
    for (result, params_P), (expected, expected_P), member in zip(
        batch.train(members, 1), alone(model, local, members), members, strict=True
    ):
        assert result.steps == expected.steps == member.job.steps
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        torch.testing.assert_close(params_P - start_P, expected_P - start_P, rtol=1e-4, atol=1e-6)
        assert not torch.equal(params_P, start_P)


def normalised() -> FlatModel:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    return FlatModel(body)


@pytest.mark.parametrize("model", [network("mlp", hidden=[9]), network("linear"), normalised()])
def test_any_network_without_running_statistics_takes_part(model: FlatModel):
    local = sgd(batch_size=4)
    members = clients(model, [9, 6])
    batch = VmapTrainer(model, local, SCALE, False, 2)
    for (result, params_P), (expected, expected_P) in zip(
        batch.train(members, 1), alone(model, local, members), strict=True
    ):
        assert result.loss == pytest.approx(expected.loss, rel=1e-4)
        torch.testing.assert_close(params_P, expected_P, rtol=1e-3, atol=1e-5)


def test_in_bf16_the_loss_is_that_of_autocast():
    model, local = network(width=4, hidden=16), sgd(batch_size=8)
    members = clients(model, SIZES)
    batch = VmapTrainer(model, local, SCALE, True, len(SIZES))
    found, expected = batch.train(members, 1), alone(model, local, members, bf16=True)
    assert [r.loss for r, _ in found] == pytest.approx([r.loss for r, _ in expected], rel=0.02)


def test_a_clients_bits_do_not_depend_on_the_others():
    """Alone, in another order, and beside one whose images are others."""
    model, local = network(width=4, hidden=16), sgd(batch_size=8, epochs=2)
    batch = VmapTrainer.of(model, local, SCALE, False, SHAPE)
    assert batch is not None
    members = clients(model, SIZES)
    expected = batch.train(members, 1)
    members[2].data.images[:] = 0
    other = BatchedClient(Job(model, members[2].job.start_P, 0.05, 3, 2, 40), members[2].data)
    shuffled = [members[5], other, members[0]]
    for (result, params_P), k in zip(batch.train(shuffled, 1), (5, 2, 0), strict=True):
        if k != 2:
            assert result.loss == expected[k][0].loss
            assert torch.equal(params_P, expected[k][1])
    for k, member in enumerate(members):
        if k != 2:
            ((result, params_P),) = batch.train([member], 1)
            assert torch.equal(params_P, expected[k][1])


def test_groups_hold_every_client_once_and_no_more_than_fit():
    batch = VmapTrainer(network(), sgd(), SCALE, False, 4)
    groups = batch.groups([5, 100, 7, 7, 3, 50], image_bytes=192)
    assert sorted(i for group in groups for i in group) == list(range(6))
    assert groups[0] == [1, 5, 2, 3]
    assert all(len(g) == 1 for g in batch.groups([10**6] * 3, image_bytes=3072))


class Coin(nn.Module):
    """Behaves as no function of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1) * torch.rand(1, device=x.device))


@pytest.mark.parametrize(
    ("model", "local", "scale"),
    [
        (network("resnet18", norm="batch"), sgd(), SCALE),
        (FlatModel(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 5))), sgd(), SCALE),
        (FlatModel(Coin()), sgd(), SCALE),
        (network(), fedprox(), SCALE),
        (network(), sgd(batch_size=1000), SCALE),
        (network(), sgd(), ImageScale(SCALE.mean, SCALE.std, flip=True)),
    ],
)
def test_what_it_cannot_do_is_left_to_one_client_after_another(model: FlatModel, local: Any, scale: ImageScale):
    assert VmapTrainer.of(model, local, scale, False, SHAPE) is None
