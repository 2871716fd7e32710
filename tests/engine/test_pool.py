"""How a pool hands out work to real workers."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray

from raysim import Result
from raysim.config.schema import Resources
from raysim.engine import pool as pool_module
from raysim.engine import schedule
from raysim.engine.calls import Call
from raysim.engine.claims import Claims
from raysim.engine.placement import Placement
from raysim.engine.pool import Pool
from raysim.engine.schedule import Chunk, Item

if TYPE_CHECKING:
    from raysim.engine.session import Session


def test_short_work_is_handed_out_in_one_call_a_worker(session: "Session"):
    """50 items of a microsecond each, two workers: 25 and 25, though a millisecond passes between the two calls.

    Were the first worker thought to be done with its part by then, it would get some of what falls to the second.
    """

    def submit(actor: Any, _: list[Any]) -> Any:
        return actor.where.remote()

    pool = session.pool(Resources(workers=2))
    while not all(member.ready for member in pool.members.values()):
        pool.call_any(submit, "one")
    for worker in pool.members:
        pool.paces.measured("tiny", worker, 1e-6, 1.0)
    done = list(pool.map([Item(i, 1.0, f"item {i}") for i in range(50)], submit, kind="tiny"))
    assert sorted(len(items) for _, items, _ in done) == [25, 25]
    assert len({worker for worker, _, _ in done}) == 2


def waiting() -> type:
    """A local class, so that it travels to its process as it is."""

    class Waiting:
        """A worker whose item 0 waits for a file, at most 20 s."""

        def __init__(self, *_: Any) -> None:
            self.claims = Claims()

        def where(self) -> tuple[str, str]:
            return "here", "node"

        def work(self, file: str, items: list[int]) -> list[int | None]:
            answers: list[int | None] = []
            for item in items:
                (wanted,) = self.claims.begin(1, [item])
                for _ in range(2000 if item == 0 else 0):
                    if Path(file).exists():
                        break
                    time.sleep(0.01)
                answers.append(item if wanted else None)
            return answers

        @ray.method(concurrency_group="control")
        def give_back(self, items: list[int]) -> list[bool]:
            return self.claims.give_back(1, items)

    return Waiting


def test_an_idle_worker_gets_what_a_slow_one_has_not_begun(
    ray_here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Two workers, 16 items: the one that has item 0, which waits until all others are done, does no other after it."""
    monkeypatch.setattr(pool_module, "Worker", waiting())
    monkeypatch.setattr(pool_module, "LOOK_S", 0.1)
    file = tmp_path / "go on"
    pool = Pool(Placement(2, 0.0), Resources(workers=2))
    while not all(member.ready for member in pool.members.values()):
        pool.call_any(lambda actor, _: actor.where.remote(), "one")
    done: dict[int, int] = {}
    calls = pool.map(
        [Item(i, 2.0 if i == 0 else 1.0, f"item {i}") for i in range(16)],
        lambda actor, items: actor.work.remote(str(file), items),  # type: ignore[attr-defined]
        kind="wait",
        take_back=lambda actor, items: actor.give_back.remote(items),
    )
    for worker, items, answers in calls:
        for item, answer in zip(items, answers, strict=True):
            if answer is not None:
                assert answer == item.payload and answer not in done
                done[answer] = worker
        if len(done) == 15:
            file.touch()
    pool.close()
    assert sorted(done) == list(range(16))
    assert [item for item in done if done[item] == done[0]] == [0]


@pytest.mark.parametrize("rule", ["fedavg", "fedoui"])
def test_work_that_is_taken_back_is_done_once_and_to_the_same_bits(
    run: Callable[..., Result], small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str
):
    """One of three workers takes 0.2 s longer for each client; the others ask for what it has not begun."""
    small |= {
        "partition": {"name": "dirichlet", "clients": 24, "alpha": 0.5, "min_samples": 2}, "clients_per_round": 24,
        "aggregation": {"name": rule},
        "local": {**small["local"], "name": "tiny_algorithms:slow_in_one_process", "folder": str(tmp_path)},
    }
    small["resources"] = {"workers": 3, "client_batching": "off"}
    calm = run({**small, "resources": {"workers": 1}, "local": {**small["local"], "seconds": 0.0}})
    (tmp_path / "slow").unlink()
    monkeypatch.setattr(schedule, "WORTH_S", -1e9)
    given_back: list[Any] = []
    take_back = Chunk.take_back

    def watched(self: Chunk, items: Any) -> list[Item]:
        found = take_back(self, items)
        given_back.extend(found)
        return found

    monkeypatch.setattr(Chunk, "take_back", watched)
    disturbed = run(small)
    assert given_back
    assert disturbed.summary["model_sha256"] == calm.summary["model_sha256"]
    assert disturbed.metrics["accuracy"].tolist() == calm.metrics["accuracy"].tolist()
    assert disturbed.metrics["participants"][1:].tolist() == [24, 24, 24]


def test_the_time_limit_is_for_each_item_of_the_call_that_runs(session: "Session"):
    """6 s for each: 18 for a call of three, 12 once one of them is given back; the call behind it counts later."""
    pool = session.pool(Resources(workers=2, task_timeout_s=6.0))
    member = next(iter(pool.members.values()))
    member.ready = True
    items = [Item(i, 1.0, f"item {i}") for i in range(3)]
    member.chunks = deque([Call(items), Call([Item(3, 1.0, "item 3")])])
    assert pool._limit(member) == 18.0
    member.chunks[0].take_back(items[:1])
    assert pool._limit(member) == 12.0
    member.chunks = deque([Call([])])
    assert pool._limit(member) == 6.0
    member.chunks.clear()
