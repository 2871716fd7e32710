"""What a worker's clients answer, trained one after the other or several at once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysim import Result
from raysim.config.schema import Update
from raysim.core.errors import DivergenceError
from raysim.core.records import ClientReport, ClientTask, Dataset, ModelState, Partition
from raysim.engine.client_runner import ClientRunner
from raysim.engine.messages import Failure, Plugin, WorkerSetup
from raysim.engine.rounds import Round
from raysim.local.batched.on_gpu import VmapTrainer

Run = Callable[..., Result]
LINEAR: tuple[str, dict[str, Any]] = ("linear", {})


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a worker: with several, clients are trained one after another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def training(
    lr: float = 0.1, wrong_label_of: int | None = None, model: tuple[str, dict[str, Any]] = LINEAR, **setup: Any
) -> ClientRunner:
    """Six clients of ten to fifteen samples of 8 x 8 pixels."""
    draw = np.random.default_rng(0)
    sizes = np.arange(10, 16)
    offsets_K1 = np.concatenate([[0], np.cumsum(sizes)])
    images, labels_N = draw.integers(0, 256, (sizes.sum(), 1, 8, 8), np.uint8), draw.integers(0, 10, sizes.sum())
    if wrong_label_of is not None:
        labels_N[offsets_K1[wrong_label_of]] = 99
    dataset = Dataset("test", images, labels_N, images, labels_N, tuple("0123456789"), (0.5,), (0.25,))
    nobody_K = np.zeros(6, dtype=bool)
    partition = Partition(np.arange(len(labels_N)), offsets_K1, labels_N, 10, nobody_K, nobody_K, np.zeros(6))
    plugins = Plugin("model", *model), Plugin("local", "sgd", {"lr": lr, "batch_size": 8})
    return ClientRunner(WorkerSetup(0, *plugins, **setup), dataset, partition, "cpu")


def answers(local: ClientRunner) -> dict[int, Any]:
    """What each client answers; of a report, what does not depend on the clock, and its update."""
    state = local.model.state()
    local.start_from(1, ModelState(state.params_P, state.buffers_F, state.counters))
    found: dict[int, Any] = {}
    for i, trained in local.train([ClientTask(k, 10 + k) for k in range(6)], lambda clients: [True] * len(clients)):
        if isinstance(trained, Failure):
            found[i] = trained
        else:
            report, update, kept = trained
            assert isinstance(report, ClientReport)
            assert report.seconds > 0
            kept = {name: array.tobytes() for name, array in (kept or {}).items()}
            found[i] = (report.client, report.steps, report.loss, report.delta_norm, report.metrics, kept,
                        update["delta"].numpy().tobytes())
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"update": Update(top_k=0.1)},
        {"update": Update(clip=0.01, quantise=4)},
        {"model": ("mlp", {"hidden": [32]}), "measure": {"oui": {"probe": "client", "probe_size": 8, "layers": None}}},
    ],
    ids=["plain", "with a residual", "clipped and quantised", "with OUI"],
)
def test_a_worker_answers_the_same_with_and_without_batching(setup: dict[str, Any]):
    with_it, without = training(**setup), training(**setup, batch_trainer=None)
    assert with_it.batch is not None
    assert without.batch is None
    assert answers(with_it) == answers(without)


@pytest.mark.usefixtures("one_thread")
def test_a_client_that_fails_in_a_group_is_named_alone_and_harms_nobody():
    """Client 2 has a label that is no class: the others answer as if it were not there."""
    healthy, found = answers(training()), answers(training(wrong_label_of=2))
    assert isinstance(found[2], Failure)
    assert found[2].client == 2
    assert not found[2].diverged
    assert all(found[k] == healthy[k] for k in range(6) if k != 2)


def test_a_client_whose_algorithm_leaves_python_fails_and_the_end_of_a_worker_by_ray_passes(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else its worker would die, be replaced, and do it again, and no message would name the plug-in."""
    scope: dict[str, Any] = {"__name__": "tiny_algorithms"}
    exec("def leave(*_): raise SystemExit(3)", scope)
    runner = training(batch_trainer=None)
    monkeypatch.setattr(runner.algorithm, "start", scope["leave"])
    found = answers(runner)
    assert all(isinstance(failure, Failure) and failure.cause == "SystemExit: 3" for failure in found.values())
    scope["__name__"] = "ray._private.worker"
    with pytest.raises(SystemExit):
        answers(runner)


@pytest.mark.usefixtures("one_thread")
def test_clients_that_diverge_in_a_group_are_each_found_out():
    found = answers(training(lr=1e30))
    assert sorted(failure.client for failure in found.values()) == list(range(6))
    assert all(isinstance(f, Failure) and f.diverged and "training diverged" in f.cause for f in found.values())


CNN: tuple[str, dict[str, Any]] = ("cnn", {"width": 4, "hidden": 8})


def stacking(**changes: Any) -> ClientRunner:
    """Clients are trained several at once as on a GPU, here, too."""
    return training(model=CNN, batch_trainer="vmap", **changes)


@pytest.mark.parametrize("bf16", [False, True])
def test_stacked_clients_answer_the_same_whoever_they_are_dealt_out_with(bf16: bool):
    together, local = answers(stacking(bf16=bf16)), stacking(bf16=bf16)
    assert isinstance(local.batch, VmapTrainer)
    local.batch.groups = lambda sizes, _: [[i] for i in reversed(range(len(sizes)))]  # type: ignore[method-assign]
    assert answers(local) == together


def test_stacked_clients_answer_what_each_answers_alone_but_for_rounding():
    stacked, alone = answers(stacking()), answers(training(model=CNN, batch_trainer=None))
    for k in range(6):
        assert stacked[k][:2] == alone[k][:2]
        assert stacked[k][2:4] == pytest.approx(alone[k][2:4], rel=1e-5)


def test_a_client_that_fails_in_a_stack_is_named_alone_and_harms_nobody():
    healthy, found = answers(stacking()), answers(stacking(wrong_label_of=2))
    assert isinstance(found[2], Failure) and found[2].client == 2
    assert all(found[k] == healthy[k] for k in range(6) if k != 2)


def test_what_keeps_clients_from_being_trained_at_once_is_said():
    assert training(model=CNN).why_alone("vmap") == training().why_alone("vmap") == ""
    assert training(model=CNN).why_alone("dense").startswith("on a CPU only small networks of linear layers")
    assert "running statistics" in training(model=("resnet18", {"norm": "batch"})).why_alone("vmap")
    assert "augmented" in training(model=CNN, augment=("flip",)).why_alone("vmap")


def test_the_time_that_is_expected_is_that_of_the_steps_of_each_client_or_of_each_group(
    monkeypatch: pytest.MonkeyPatch,
):
    """Batches of 8: clients of 40, 24, 8 and 8 samples take 5, 3, 1 and 1 steps.

    Alone at 2 s a step: 20 s. At once at 3 s a step of a group: with 3 s * 10 / 32 / 80 a sample, a call has half of
    what is left, the client of 40, and then that of 24, and the rest, which is less than an eighth of all each: groups
    of 5, 3 and 1 steps, 27 s.
    """
    timed: list[tuple[int, bool]] = []

    def step_s(_: Any, n: int, *__: Any, at_once: bool) -> float:
        timed.append((n, at_once))
        return 3.0 if at_once else 2.0

    monkeypatch.setattr("raysim.engine.client_runner.step_s", step_s)
    runner = training(model=CNN)
    assert runner.expected_s([8, 40, 8, 24], 0.1, at_once=False) == 20.0
    assert runner.expected_s([8, 40, 8, 24], 0.1, at_once=True) == 27.0
    assert timed == [(24, False), (24, True)]


def test_a_group_that_does_not_fit_into_the_memory_is_never_expected_to_end(monkeypatch: pytest.MonkeyPatch):
    def step_s(*_: Any, **__: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("raysim.engine.client_runner.step_s", step_s)
    assert training(model=CNN).expected_s([10], 0.1, at_once=True) == float("inf")
    with pytest.raises(torch.OutOfMemoryError):
        training(model=CNN).expected_s([10], 0.1, at_once=False)


@pytest.fixture
def many(small: dict[str, Any]) -> dict[str, Any]:
    """A linear model on 20 of 24 clients a round, of 2 samples and more."""
    small["partition"] = {"name": "dirichlet", "clients": 24, "alpha": 0.5, "min_samples": 2}
    small["local"] = {"name": "sgd", "epochs": 2, "batch_size": 8, "lr": 0.1, "momentum": 0.5}
    return {**small, "clients_per_round": 20, "model": {"name": "linear"}}


def outcome(result: Result) -> tuple[Any, ...]:
    rows = [result.metrics[name][1:].tolist() for name in ("train_loss", "accuracy", "update_norm_mean")]
    return result.summary["model_sha256"], *rows


def test_neither_batching_nor_the_number_of_workers_changes_a_bit(run: Run, many: dict[str, Any]):
    alone = outcome(run({**many, "resources": {"workers": 2, "client_batching": "off"}}))
    for workers in (2, 1, 4):
        assert outcome(run({**many, "resources": {"workers": workers}})) == alone


def test_a_worker_killed_while_it_trains_groups_changes_nothing(
    run: Run, many: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Killed from outside when round 2's first answer comes: what it had is done again in other groups."""
    import ray

    many |= {"aggregation": {"name": "fedoui"}, "model": {"name": "mlp", "hidden": [32]}}
    calm = outcome(run(many))
    killed: list[int] = []
    take = Round._take

    def kill_then_take(self: Round, worker: int, *rest: Any) -> None:
        if self.number == 2 and not killed:
            killed.append(worker)
            ray.kill(self.pool.members[worker].actor)
        take(self, worker, *rest)

    monkeypatch.setattr(Round, "_take", kill_then_take)
    disturbed = run(many)
    assert killed
    assert outcome(disturbed) == calm


def test_resumed_is_uninterrupted(run: Run, many: dict[str, Any], tmp_path: Path):
    whole = outcome(run(many))
    many["output"] = {**many["output"], "dir": str(tmp_path / "parts")}
    run({**many, "rounds": 1})
    assert outcome(run({**many, "resources": {"workers": 1}}, resume=True)) == whole


def test_a_client_that_diverges_in_a_group_is_named_or_left_out(run: Run, many: dict[str, Any]):
    many |= {"local": {"name": "sgd", "lr": 1e6, "batch_size": 8}, "resources": {"workers": 1}}
    with pytest.raises(DivergenceError, match=r"client \d+ failed in round 1: training diverged"):
        run(many)
