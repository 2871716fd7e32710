"""Several clients trained at once end with the bits of one after the other, whoever they are trained with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.local.batched import on_cpu
from raysim.local.batched.dense_stack import LEAST_PRODUCT
from raysim.local.batched.on_cpu import BatchedClient, CpuBatchTrainer
from raysim.local.contract import ClientData, Job, LocalResult
from raysim.local.fedprox import fedprox
from raysim.local.loop import train_client
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.flat_model import FlatModel, ImageScale

SCALE = ImageScale((0.5,), (0.25,))


@pytest.fixture(autouse=True)
def one_thread():
    """As in a worker: with several, clients are trained one after another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(hidden: list[int], pixels: int, classes: int) -> FlatModel:
    torch.manual_seed(0)
    if not hidden:
        return FlatModel(architectures.linear(1, (1, pixels), classes))
    return FlatModel(architectures.mlp(1, (1, pixels), classes, hidden=hidden))


def clients(sizes: list[int], pixels: int, classes: int) -> list[ClientData]:
    draw = np.random.default_rng(len(sizes))
    return [
        ClientData(draw.integers(0, 256, (n, 1, 1, pixels), np.uint8), draw.integers(0, classes, n), n) for n in sizes
    ]


def job(model: FlatModel, start: dict[str, torch.Tensor], k: int, data: ClientData) -> Job:
    return Job(model, start["params"], 0.07, 3, k, len(data.labels_N))


Outcome = tuple[LocalResult, torch.Tensor, int]


def one_by_one(model: FlatModel, local: sgd, datas: list[ClientData]) -> list[Outcome]:
    start, found = model.snapshot(), []
    for k, data in enumerate(datas):
        model.restore(start)
        mine = job(model, start, k, data)
        result = train_client(mine, local, data, SCALE, seed=1)
        found.append((result, model.params_P.detach().clone(), mine.steps))
    model.restore(start)
    return found


def at_once(batch: CpuBatchTrainer, model: FlatModel, datas: list[ClientData], group: list[int]) -> list[Outcome]:
    start = model.snapshot()
    members = [BatchedClient(job(model, start, k, datas[k]), datas[k]) for k in group]
    pairs = zip(members, batch.train(members, seed=1), strict=True)
    return [(result, params_P, member.job.steps) for member, (result, params_P) in pairs]


def same(a: Outcome, b: Outcome) -> bool:
    return (a[0].loss, a[0].steps, a[2]) == (b[0].loss, b[0].steps, b[2]) and torch.equal(a[1], b[1])


networks = st.tuples(
    st.lists(st.sampled_from([2, 5, 16, 33, 48, 64]), max_size=2),
    st.sampled_from([16, 64, 112, 784]),
    st.sampled_from([2, 3, 10, 16, 62]),
)
settings_of_sgd = st.builds(
    sgd,
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 9),
    batch_size=st.sampled_from([2, 3, 10, 16, 32]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.01]),
)


@settings(max_examples=60, deadline=None)
@given(networks, settings_of_sgd, st.lists(st.integers(1, 70), min_size=1, max_size=9), st.randoms())
def test_any_group_has_the_bits_of_one_client_after_the_other(network: Any, local: sgd, sizes: list[int], chance: Any):
    """Parameters, losses and steps, for any sizes, shapes and groupings; networks too small for it are left alone."""
    hidden, pixels, classes = network
    model, datas = made(hidden, pixels, classes), clients(sizes, pixels, classes)
    batch = CpuBatchTrainer.of(model, local, SCALE)
    shapes = [m.weight.numel() for m in model.module.modules() if isinstance(m, torch.nn.Linear)]
    if batch is None:
        assert local.batch_size * min(shapes) < LEAST_PRODUCT
        return
    expected = one_by_one(model, local, datas)
    order = list(range(len(sizes)))
    chance.shuffle(order)
    while order:
        count = chance.randint(1, len(order))
        group, order = order[:count], order[count:]
        for k, found in zip(group, at_once(batch, model, datas, group), strict=True):
            assert same(found, expected[k])


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_a_groups_size_changes_no_bit_of_a_network_as_it_is_used(count: int):
    """100 hidden units, twice, on 28 x 28 pixels, 50 samples each: all batches are full."""
    model, datas = made([100, 100], 784, 10), clients([50] * count, 784, 10)
    local = sgd(batch_size=10, epochs=2)
    batch = CpuBatchTrainer.of(model, local, SCALE)
    assert batch is not None
    together = at_once(batch, model, datas, list(range(count)))
    assert all(map(same, together, one_by_one(model, local, datas)))
    assert not torch.equal(together[0][1], together[1][1])


def test_batches_of_one_size_are_multiplied_together(monkeypatch: pytest.MonkeyPatch):
    """Three clients of 25 samples and one of 13, in batches of 10: four at once, three (and 3 alone), three of 5."""
    model, local = made([], 64, 10), sgd(batch_size=10)
    batch = CpuBatchTrainer.of(model, local, SCALE)
    assert batch is not None
    assert batch._stackable(5)
    datas = clients([25, 25, 25, 13], 64, 10)
    taken: list[tuple[int, int]] = []
    step = on_cpu.DenseStack.step

    def watched(self: Any, first: int, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append((len(x), x.shape[1]))
        return step(self, first, x, *rest)

    monkeypatch.setattr(on_cpu.DenseStack, "step", watched)
    at_once(batch, model, datas, [0, 1, 2, 3])
    assert taken == [(4, 10), (3, 10), (3, 5)]


def cnn() -> FlatModel:
    return FlatModel(architectures.cnn(1, (8, 8), 10))


@pytest.mark.parametrize(
    ("model", "local", "scale"),
    [
        (cnn, sgd(), SCALE),
        (lambda: made([], 64, 10), fedprox(mu=0.1), SCALE),
        (lambda: made([], 64, 10), sgd(clip=1.0), SCALE),
        (lambda: made([], 64, 10), sgd(), ImageScale((0.5,), (0.25,), flip=True)),
        (lambda: made([], 50, 10), sgd(), SCALE),
        (lambda: made([], 64, 10), sgd(batch_size=1), SCALE),
        (lambda: made([3], 64, 10), sgd(batch_size=4), SCALE),
        (lambda: made([200], 784, 10), sgd(), SCALE),
    ],
    ids=["cnn", "fedprox", "clip", "augmented", "unaligned rows", "batches of one", "tiny products", "large"],
)
def test_everything_else_is_trained_one_client_at_a_time(model: Callable[[], FlatModel], local: sgd, scale: ImageScale):
    assert CpuBatchTrainer.of(model(), local, scale) is None


def test_several_threads_train_one_client_at_a_time():
    assert CpuBatchTrainer.of(made([], 64, 10), sgd(), SCALE) is not None
    torch.set_num_threads(2)
    assert CpuBatchTrainer.of(made([], 64, 10), sgd(), SCALE) is None


def test_a_machine_that_computes_stacks_in_another_way_does_without(monkeypatch: pytest.MonkeyPatch):
    """One last bit of one product of a stack is enough."""
    product = torch.bmm

    def rounded(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        result = product(a, b, out=out)
        result[-1, -1, -1] = torch.nextafter(result[-1, -1, -1], torch.tensor(torch.inf))
        return result

    model = made([32], 64, 10)
    assert CpuBatchTrainer.of(model, sgd(), SCALE) is not None
    monkeypatch.setattr(torch, "bmm", rounded)
    assert CpuBatchTrainer.of(model, sgd(), SCALE) is None


def test_trying_a_machine_out_leaves_the_model_as_it_was():
    model = made([32], 64, 10)
    before = model.params_P.detach().clone()
    assert CpuBatchTrainer.of(model, sgd(), SCALE) is not None
    assert torch.equal(model.params_P, before)


def test_groups_hold_every_client_once_the_largest_first_and_fit_into_memory(monkeypatch: pytest.MonkeyPatch):
    """1,000 bytes an image and room for 100,000: that is two clients of 40 samples, too few, or three of 32."""
    batch = CpuBatchTrainer.of(made([], 64, 10), sgd(batch_size=8), SCALE)
    assert batch is not None
    monkeypatch.setattr(on_cpu, "MOST_IMAGE_BYTES", 100_000)
    assert batch.groups([20, 40, 10, 32, 30], 1000) == [[1], [3, 4, 0], [2]]
    monkeypatch.undo()
    assert [len(group) for group in batch.groups([9] * 34, 64)] == [16, 16, 1, 1]


def test_clients_of_few_batches_are_grouped_by_their_very_size():
    """Batches of 8: those of 16 and more have two full ones in common, those of 9 both of theirs, 5 and 3 nothing."""
    batch = CpuBatchTrainer.of(made([], 64, 10), sgd(batch_size=8), SCALE)
    assert batch is not None
    assert batch.groups([9, 30, 3, 9, 16, 5, 9, 17], 64) == [[1, 7, 4], [0, 3, 6], [5], [2]]
