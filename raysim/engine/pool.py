"""The pool of workers: hands out work longest first, two calls in flight per worker, and replaces workers that die."""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from raysim.config.schema import Resources
from raysim.core.errors import RunError
from raysim.engine import schedule
from raysim.engine.calls import Call, Deal, Lost, Submit
from raysim.engine.failures import death, first_line, plain
from raysim.engine.liveness import check_ray
from raysim.engine.placement import Placement
from raysim.engine.schedule import Item
from raysim.engine.usage import Usage
from raysim.engine.worker import Worker

IN_FLIGHT = 2
LOOK_S = 1.0  # between looks at whether Ray itself is still there
ROOM_S = 5.0  # between looks at what the cluster has room for
LEAST_SHARE, LEAST_S = 1 / 8, 0.1  # of a worker's part, and seconds: no call should be less, each costs some ms
START_FAILURES = 10  # workers that may die one after another while none is up


@dataclass
class _Member:
    """One worker process; a replacement is a new member with a new id."""

    id: int
    actor: Any
    ready_ref: Any
    ready: bool = False
    calls: deque[Call] = field(default_factory=deque)
    address: str = ""  # of its node, and Ray's name of that node, once it is ready
    node: str = ""
    since: float = 0.0  # when the call at the head of `calls` began, or the start of the process


class Pool:
    """Ray actors that take calls; knows nothing of what the calls do."""

    def __init__(self, placement: Placement, resources: Resources) -> None:
        self.placement, self.resources = placement, resources
        self.members: dict[int, _Member] = {}
        self.lost, self.lost_s, self.usage = 0, 0.0, Usage()
        self.wanted = placement.workers
        self._room: Callable[[], int] | None = None
        self._say: Callable[[str], None] = lambda _: None
        self.here = ray.get_runtime_context().get_node_id()
        self._next_id, self._failed_starts, self._looked_at, self._measured_at = 0, 0, 0.0, 0.0
        self.pace: dict[str, float] = {}  # seconds per unit of cost, by kind of work
        self._configuration: tuple[Any, ...] | None = None
        gpu = placement.gpus_per_worker
        self._factory: Any = ray.remote(Worker).options(
            num_cpus=1 if gpu == 0 else 0, num_gpus=gpu, max_restarts=0, max_task_retries=0
        )
        for _ in range(placement.workers):
            self._start()

    def begin_run(
        self, resources: Resources, room: Callable[[], int] | None, say: Callable[[str], None]
    ) -> None:
        """Take a run's settings.  room: how many workers there should be, asked every ROOM_S; None: always as many."""
        self.resources, self._room, self._say = resources, room, say
        self.lost, self.lost_s, self.usage = 0, 0.0, Usage()

    def configure(self, *arguments: Any) -> None:
        """Send `Worker.configure(*arguments)` to every worker, and to each that joins later before anything else."""
        self._configuration = arguments
        self.pace.clear()
        for member in self.members.values():
            member.ready_ref = member.actor.configure.remote(*arguments)
            member.ready, member.since = False, time.monotonic()

    def _start(self) -> None:
        actor = self._factory.remote(self.placement.device, self.resources.threads_per_worker, sys.path)
        first = actor.where.remote() if self._configuration is None else actor.configure.remote(*self._configuration)
        self.members[self._next_id] = _Member(self._next_id, actor, first, since=time.monotonic())
        self._next_id += 1

    def map(
        self,
        items: Iterable[Item],
        submit: Submit,
        on_lost: Callable[[int], Sequence[Item]] = lambda _: (),
        largest: int | None = None,
        last: Submit | None = None,
        kind: str = "",
    ) -> Iterator[tuple[int, list[Item], Any]]:
        """Do all items, longest first; yields (worker id, items, answer) as calls end, in any order.

        Whenever a worker can take a call, what is left is dealt out anew (`engine.schedule`) and that worker gets the
        first half of its part, at most `largest` items. What a dead or overdue worker had is done again elsewhere,
        together with what `on_lost(worker id)` asks for: work that was done but whose fruit that worker still held.
        last: takes the place of `submit` in a call that a worker is not expected to get another one after.  kind: of
        the work, for which the time that a unit of cost takes is remembered from one call of `map` to the next.
        Raises RunError naming an item that failed max_retries + 1 times.
        """
        queue = sorted(items, key=lambda item: item.cost)
        deal = Deal(submit, last or submit, kind, largest, schedule.cost(queue) / max(1, len(self.members)))
        while queue or any(m.calls for m in self.members.values()):
            self._hand_out(queue, deal)
            for member, outcome in self._wait():
                if isinstance(outcome, Lost):
                    again = self._requeue(member, outcome.cause)
                    queue.extend([*again, *on_lost(member.id)])
                    queue.sort(key=lambda item: item.cost)
                    continue
                call, seconds = self._end_call(member)
                if kind:
                    self.pace[kind] = seconds / max(schedule.cost(call.items), 1e-9)
                self._hand_out(queue, deal)
                yield member.id, call.items, outcome

    def ask(self, questions: Mapping[int, Submit]) -> tuple[dict[int, Any], list[int]]:
        """One call to each of these workers, all at once: (answers by worker, workers that were lost)."""
        answers: dict[int, Any] = {}
        lost = [id_ for id_ in questions if id_ not in self.members]
        for id_, submit in questions.items():
            if id_ in self.members:
                member = self.members[id_]
                member.calls.append(Call(submit(member.actor, []), []))
                member.since = time.monotonic()
        while any(m.calls for m in self.members.values()):
            for member, outcome in self._wait():
                if isinstance(outcome, Lost):
                    lost.append(member.id)
                else:
                    self._end_call(member)
                    answers[member.id] = outcome
        return answers, lost

    def _end_call(self, member: _Member) -> tuple[Call, float]:
        """(the call that a worker has answered, the seconds it took)."""
        call, now = member.calls.popleft(), time.monotonic()
        seconds, member.since = now - member.since, now
        self.usage.worked(member.id, seconds)
        return call, seconds

    def call_any(self, submit: Submit, name: str) -> Any:
        """The answer of whichever worker is free first."""
        return next(answer for _, _, answer in list(self.map([Item(None, 1.0, name)], submit)))

    def node(self, worker: int) -> str:
        """Ray's name of a worker's node; empty for one that is no more."""
        return self.members[worker].node if worker in self.members else ""

    def worker_on(self, node: str) -> int | None:
        """A worker on this node that is up, if there is one."""
        return next((id_ for id_, m in self.members.items() if m.ready and self.node(id_) == node), None)

    def tell(self, submit: Callable[[Any], Any]) -> None:
        """Send every worker a call whose answer does not matter."""
        for member in self.members.values():
            submit(member.actor)

    def _hand_out(self, queue: list[Item], deal: Deal) -> None:
        now = time.monotonic()  # one for all: what was handed out a moment ago has not begun yet
        for depth in range(1, IN_FLIGHT + 1):
            for member in list(self.members.values()):
                if member.ready and queue and len(member.calls) < depth:
                    self._hand_to(member, queue, deal, now)

    def _hand_to(self, member: _Member, queue: list[Item], deal: Deal, now: float) -> None:
        """The first part of what falls to this worker when the queue is dealt out to all; nothing if nothing does."""
        pace = self.pace.get(deal.kind)
        part = queue[-1:] if deal.largest == 1 else schedule.parts(queue, self._loads(pace, now))[member.id]
        if not part and member.calls:
            return
        part = part or queue[-1:]  # an idle worker: those that are still to start may have got it all
        least = max(LEAST_SHARE * deal.share, LEAST_S / pace if pace else 0.0)
        chunk = schedule.first(part, least)[: deal.largest]
        taken = {id(item) for item in chunk}
        queue[:] = [item for item in queue if id(item) not in taken]
        if not member.calls:
            member.since = now
        submit = deal.last if len(chunk) == len(part) else deal.submit
        member.calls.append(Call(submit(member.actor, [i.payload for i in chunk]), chunk))

    def _loads(self, pace: float | None, now: float) -> dict[int, float]:
        """Cost of what each worker still has to do, less what it should have done of it by now."""
        loads = {}
        for m in self.members.values():
            costs = [schedule.cost(call.items) for call in m.calls]
            if costs and pace and m.ready:
                costs[0] = max(0.0, costs[0] - (now - m.since) / pace)
            loads[m.id] = sum(costs)
        return loads

    def _wait(self) -> list[tuple[_Member, Any]]:
        """Wait up to a second; (member, answer or Lost) for each call that has ended, dead members replaced."""
        now = time.monotonic()
        if now > self._looked_at + LOOK_S:
            check_ray()
            self._looked_at = now
        self._follow_the_cluster()
        busy = [m for m in self.members.values() if m.calls or not m.ready]
        waiting = {m.calls[0].ref if m.ready else m.ready_ref: m for m in busy}
        patience = min(LOOK_S, min(m.since + self._limit(m) for m in waiting.values()) - now)
        with self.usage.waiting():
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, patience))
        if done and len(waiting) > 1:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        events: list[tuple[_Member, Any]] = []
        joined = False
        for ref in done:
            member = waiting[ref]
            try:
                outcome = member.calls[0].outcome() if member.ready else ray.get(ref)
            except RayActorError as error:
                outcome = self._bury(member, death(error))
            except ObjectLostError as error:  # done, but the answer was lost with its node
                outcome = self._bury(member, f"its answer was lost ({first_line(error)})")
            except RayTaskError as error:
                raise plain(error, member.calls[0].items if member.calls else []) from None
            if not member.ready and not isinstance(outcome, Lost):
                member.address, member.node = outcome
                member.ready, self._failed_starts = True, 0
                joined = True
            elif member.calls or isinstance(outcome, Lost):
                events.append((member, outcome))
        now = time.monotonic()
        for ref, member in waiting.items():
            if ref not in done and now > member.since + self._limit(member):
                events.append((member, self._bury(member, f"it took longer than {self._limit(member):g} s")))
        if joined and self._room is not None:
            self._say(self.whereabouts())
        return events

    def whereabouts(self) -> str:
        """How many workers are up, and where."""
        nodes = Counter(m.address for m in self.members.values() if m.ready)
        where = ", ".join(f"{address}: {count}" for address, count in sorted(nodes.items()))
        return f"{sum(nodes.values())} of {self.wanted} workers are up ({where})"

    def _follow_the_cluster(self) -> None:
        """Start workers where nodes joined; take back those that wait for nodes that are gone."""
        now = time.monotonic()
        if self._room is None or now < self._measured_at + ROOM_S:
            return
        self._measured_at, self.wanted = now, self._room()
        while len(self.members) < self.wanted:
            self._start()
        waiting = [m for m in reversed(self.members.values()) if not m.ready and not m.calls]
        for member in waiting[: len(self.members) - self.wanted]:
            del self.members[member.id]
            ray.kill(member.actor)

    def _limit(self, member: _Member) -> float:
        if not member.ready:
            return self.resources.start_timeout_s
        return self.resources.task_timeout_s * max(1, len(member.calls[0].items))

    def _bury(self, member: _Member, cause: str) -> Lost:
        """Forget a worker, make sure that it is dead, and start another in its place."""
        check_ray()
        del self.members[member.id]
        ray.kill(member.actor)
        if member.ready:
            self.lost += 1
            self.lost_s += time.monotonic() - member.since
            self._say(f"a worker on {member.address} is lost, its work is done again: {cause}")
        else:
            self._failed_starts += 1
            if self._failed_starts > START_FAILURES and not any(m.ready for m in self.members.values()):
                raise RunError(f"{self._failed_starts} workers in a row did not start; the last: {cause}")
        if len(self.members) < self.wanted:
            self._start()
        return Lost(cause)

    def _requeue(self, member: _Member, cause: str) -> list[Item]:
        if member.calls:
            for item in member.calls[0].items:  # only these had begun
                item.attempts += 1
                if item.attempts > self.resources.max_retries:
                    raise RunError(f"{item.name} failed {item.attempts} times; the last time {cause}")
        return [item for call in member.calls for item in call.items]

    def close(self) -> None:
        """End all workers."""
        for member in self.members.values():
            ray.kill(member.actor)
        self.members.clear()
