"""The pool of workers: sends them the work that `engine.schedule` plans, and replaces workers that die."""

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from raysim.config.schema import Resources
from raysim.core.errors import RunError
from raysim.core.records import BatchingChoice, Dataset
from raysim.engine.calls import Call, Lost, MapCalls, Question, Ref, Submit, TakeBack, WorkerActor, not_done
from raysim.engine.failures import death, first_line, plain
from raysim.engine.liveness import check_ray
from raysim.engine.placement import Placement
from raysim.engine.ray_private import has_process
from raysim.engine.schedule import Item, Paces, Plan, WorkerLoad
from raysim.engine.starting import Starting, load_here
from raysim.engine.usage import Usage
from raysim.engine.worker import Worker

__all__ = ["Item", "Pool"]

LOOK_S = 1.0  # seconds between checks whether Ray itself is still alive
ROOM_S = 5.0  # seconds between checks how many workers the cluster has room for
START_FAILURES = 10  # workers that may die one after another while none has started


@dataclass(kw_only=True)
class _Member(WorkerLoad[Call]):
    """One worker process; a replacement is a new member with a new id.

    address: of its node, once it is ready.  node: Ray's name of that node.
    """

    actor: WorkerActor
    ready_ref: Ref
    address: str = ""
    node: str = ""


@dataclass(frozen=True)
class _Request:
    """A worker was asked to give items back.  ref: the reference to its answer."""

    member: _Member
    items: list[Item]
    ref: Ref


class Pool:
    """The workers of a session, as Ray actors that take calls; knows nothing of what the calls do.

    batching: what runs have found out with these workers (`engine.batching`), by what they train.
    shared: the data set that the newest run put into the object store, its reference, and its arrays as they are there.
    """

    def __init__(self, placement: Placement, resources: Resources) -> None:
        self.placement = placement
        self.resources = resources
        self.members: dict[int, _Member] = {}
        self.usage = Usage()
        self.paces = Paces()
        self.batching: dict[str, BatchingChoice] = {}
        self.shared: tuple[weakref.ref[Dataset], Ref, Dataset] | None = None
        self.lost = 0
        self.lost_s = 0.0
        self.wanted = placement.workers
        self.here: str = ray.get_runtime_context().get_node_id()
        self._room: Callable[[], int] | None = None
        self._say: Callable[[str], None] = lambda _: None
        self._next_id = 0
        self._failed_starts = 0
        self._starting = Starting(resources, self._say, time.monotonic())
        self._looked_at = 0.0
        self._measured_at = 0.0
        self._request: _Request | None = None
        self._configuration: tuple[object, ...] | None = None
        gpu = placement.gpus_per_worker
        options: dict[str, Any] = {
            "num_cpus": resources.threads_per_worker, "num_gpus": gpu, "max_restarts": 0, "max_task_retries": 0,
            "concurrency_groups": {"control": 1},  # answers `give_back` while a call trains
        }
        self._factory: Any = ray.remote(**options)(Worker)  # Ray has no public type for it
        for _ in range(placement.workers):
            self._start()

    def begin_run(
        self, resources: Resources, room: Callable[[], int] | None, say: Callable[[str], None]
    ) -> None:
        """Use the settings of a new run.

        room: returns how many workers there should be, called every ROOM_S; None: their number stays.  say: told of
        workers that start and that are lost.
        """
        self.resources = resources
        self.lost = 0
        self.lost_s = 0.0
        self.usage = Usage()
        self._room = room
        self._say = say
        self._starting = Starting(resources, say, time.monotonic())

    def configure(self, *arguments: object) -> None:
        """Send `Worker.configure(*arguments)` to every worker, and to each that joins later before anything else."""
        self._configuration = arguments
        self.paces.clear()
        for member in self.members.values():
            member.ready_ref = member.actor.configure.remote(*arguments)
            member.ready = False
            member.since = time.monotonic()

    def _start(self) -> None:
        actor = self._factory.remote(self.placement.device, self.resources.threads_per_worker, sys.path)
        first = actor.where.remote() if self._configuration is None else actor.configure.remote(*self._configuration)
        self.members[self._next_id] = _Member(
            id=self._next_id, actor=actor, ready_ref=first, since=time.monotonic()
        )
        self._next_id += 1

    def map(
        self,
        items: Iterable[Item],
        submit: Submit,
        on_lost: Callable[[int], Sequence[Item]] = lambda _: (),
        largest: int | None = None,
        last: Submit | None = None,
        kind: str = "",
        take_back: TakeBack | None = None,
    ) -> Iterator[tuple[int, list[Item], Any]]:
        """Do all items, longest first; yields (worker id, items, answer) as calls end, in any order.

        What each worker gets, and when, is planned by `engine.schedule.Plan`. The items of a dead or overdue worker are
        done again by others, together with `on_lost(worker id)`: items that it had done, and whose results are lost
        with it.
        submit: sends one call.  largest: how many items one call may have.  last: replaces `submit` in the call that is
        expected to be the worker's last.  kind: names the work; each worker's pace at it is remembered from one `map`
        to the next.  take_back: where it is given, an answer is a list (or a tuple that begins with one) in which None
        stands for an item that the worker gave back; another worker does it.
        Raises RunError naming an item that failed max_retries + 1 times.
        """
        calls = MapCalls(submit, last or submit, take_back)
        plan = Plan(items, kind, self.paces, len(self.members), largest)
        self._request = None  # one of an earlier `map` is of no use any more
        while plan.queue or any(m.chunks for m in self.members.values()):
            self._hand_out(plan, calls)
            for member, outcome in self._wait(plan):
                if isinstance(outcome, Lost):
                    again = self._requeue(member, outcome.cause)
                    plan.add([*again, *on_lost(member.id)])
                    self.paces.forget(member.id)
                    continue
                call, seconds = self._end_call(member)
                if take_back is not None:
                    plan.add(call.take_back(not_done(outcome, call.items)))
                plan.answered(member.id, seconds, call.left())
                self._hand_out(plan, calls)
                yield member.id, call.items, outcome
        plan.ended(self.members)

    def ask(self, questions: Mapping[int, Question]) -> tuple[dict[int, Any], list[int]]:
        """Call each of these workers once, all at the same time; returns (answers by worker, workers lost)."""
        answers: dict[int, Any] = {}
        lost = [id_ for id_ in questions if id_ not in self.members]
        for id_, question in questions.items():
            if id_ in self.members:
                member = self.members[id_]
                member.chunks.append(Call([], refs=question(member.actor)))
                member.since = time.monotonic()
        while any(m.chunks for m in self.members.values()):
            for member, outcome in self._wait():
                if isinstance(outcome, Lost):
                    lost.append(member.id)
                else:
                    self._end_call(member)
                    answers[member.id] = outcome
        return answers, lost

    def _end_call(self, member: _Member) -> tuple[Call, float]:
        """(the call that a worker has answered, the seconds it took)."""
        call = member.chunks.popleft()
        now = time.monotonic()
        seconds = now - member.since
        member.since = now
        self.usage.worked(member.id, seconds)
        return call, seconds

    def ask_started(self, question: Question, name: str) -> list[Any]:
        """Ask every worker that has started, all at the same time, or the first that will; returns their answers."""
        answers, _ = self.ask({id_: question for id_, member in self.members.items() if member.ready})
        return list(answers.values()) or [self.call_any(lambda actor, _: question(actor), name)]

    def is_idle(self) -> bool:
        """Whether all workers have started and none has a call to answer."""
        return all(m.ready and not m.chunks for m in self.members.values())

    def call_any(self, submit: Submit, name: str) -> Any:
        """Send a call to the worker that is free first; returns its answer.  name: of the work, for messages."""
        return next(answer for _, _, answer in list(self.map([Item(None, 1.0, name)], submit)))

    def node(self, worker: int) -> str:
        """Ray's name of a worker's node; empty for a worker that has died."""
        return self.members[worker].node if worker in self.members else ""

    def worker_on(self, node: str) -> int | None:
        """The id of a worker on this node that has started, or None."""
        return next((id_ for id_, m in self.members.items() if m.ready and self.node(id_) == node), None)

    def tell(self, submit: Question) -> None:
        """Send every worker a call whose answer is not used."""
        for member in self.members.values():
            submit(member.actor)

    def _hand_out(self, plan: Plan, calls: MapCalls) -> None:
        """Send out what the plan says; where nothing is left to send, ask a worker to give some of its work back."""
        now = time.monotonic()  # one time for all: calls that were sent a moment ago have not begun yet
        for id_, chunk, is_last in plan.hand_out(self.members, now):
            member = self.members[id_]
            if not member.chunks:
                member.since = now
            submit = calls.last if is_last else calls.submit
            member.chunks.append(Call(chunk, refs=submit(member.actor, [item.payload for item in chunk])))
        if calls.take_back is not None and self._request is None:
            wanted = plan.to_take_back(self.members, now)
            if wanted is not None:
                id_, items = wanted
                member = self.members[id_]
                ref = calls.take_back(member.actor, [item.payload for item in items])
                self._request = _Request(member, items, ref)

    def _take_back(self, plan: Plan) -> None:
        """Put what a worker gave back into the queue.

        Calls that it has answered meanwhile, or that were lost with it, are no longer among its chunks: their items
        were dealt with at that time.
        """
        request = self._request
        if request is None:
            return
        self._request = None
        try:
            is_given_back = ray.get(request.ref)
        except (RayActorError, ObjectLostError):
            return
        given_back = {id(item) for item, is_free in zip(request.items, is_given_back, strict=True) if is_free}
        for call in request.member.chunks if request.member.id in self.members else ():
            plan.add(call.take_back(item for item in call.items if id(item) in given_back))

    def _wait(self, plan: Plan | None = None) -> list[tuple[_Member, Any]]:
        """Wait up to a second, and replace dead members; returns (member, answer or Lost) for each call that has ended.

        plan: gets the items that workers give back.
        """
        now = time.monotonic()
        if now > self._looked_at + LOOK_S:
            check_ray()
            self._looked_at = now
        self._follow_the_cluster()
        busy = [m for m in self.members.values() if m.chunks or not m.ready]
        waiting = {m.chunks[0].ref if m.ready else m.ready_ref: m for m in busy}
        request = [] if self._request is None or plan is None else [self._request.ref]
        patience = min(LOOK_S, min(m.since + self._limit(m) for m in waiting.values()) - now)
        with self.usage.waiting():
            done, _ = ray.wait([*waiting, *request], num_returns=1, timeout=max(0.0, patience))
        if done and len(waiting) + len(request) > 1:
            done, _ = ray.wait([*waiting, *request], num_returns=len(waiting) + len(request), timeout=0)
        if plan is not None and request and request[0] in done:
            self._take_back(plan)
            done = [ref for ref in done if ref in waiting]
        events: list[tuple[_Member, Any]] = []
        joined = False
        for ref in done:
            member = waiting[ref]
            try:
                outcome = member.chunks[0].outcome() if member.ready else ray.get(ref)
            except (RayActorError, OutOfMemoryError) as error:
                outcome = self._replace(member, death(error))
            except ObjectLostError as error:  # done, but the answer was lost with its node
                outcome = self._replace(member, f"its answer was lost ({first_line(error)})")
            except RayTaskError as error:
                raise plain(error, member.chunks[0].items if member.chunks else []) from None
            if not member.ready and not isinstance(outcome, Lost):
                member.address, member.node = outcome
                member.ready = True
                self._failed_starts = 0
                joined = True
            elif member.chunks or isinstance(outcome, Lost):
                events.append((member, outcome))
        now = time.monotonic()
        for ref, member in waiting.items():
            is_late = ref not in done and now > member.since + self._limit(member)
            if is_late and (member.ready or not self._may_still_start(member, now)):
                events.append((member, self._replace(member, f"it took longer than {self._limit(member):g} s")))
        if joined and self._room is not None:
            self._say(self.whereabouts())
        return events

    def whereabouts(self) -> str:
        """A message that says how many workers have started on each node."""
        nodes = Counter(m.address for m in self.members.values() if m.ready)
        where = ", ".join(f"{address}: {count}" for address, count in sorted(nodes.items()))
        return f"{sum(nodes.values())} of {self.wanted} workers are up ({where})"

    def _follow_the_cluster(self) -> None:
        """Start workers where nodes have joined; end those that wait for nodes that have left."""
        now = time.monotonic()
        if self._room is None or now < self._measured_at + ROOM_S:
            return
        self._measured_at = now
        self.wanted = self._room()
        while len(self.members) < self.wanted:
            self._start()
        waiting = [m for m in reversed(self.members.values()) if not m.ready and not m.chunks]
        for member in waiting[: len(self.members) - self.wanted]:
            del self.members[member.id]
            _kill(member.actor)
        self._look_for_machines(now)

    def _look_for_machines(self, now: float) -> None:
        """RunError if for too long no worker has had a machine; until then it is said what is waited for."""
        if self.members and not any(m.ready or _has_process(m.actor) for m in self.members.values()):
            self._starting.without_machine(len(self.members), now)
        else:
            self._starting.placed(now)

    def _may_still_start(self, member: _Member, now: float) -> bool:
        """Whether a worker that has not started in time is waited for; RunError if that was in vain."""
        if self._room is not None and not _has_process(member.actor):
            member.since = now  # its time begins when a machine has room for it
            return True
        if self._starting.grow(load_here() if self._room is None else ""):
            return True
        if any(m.ready for m in self.members.values()):
            return False
        raise RunError(
            f"no worker has started within {self._starting.limit_s:g} s (resources.start_timeout_s, and more)"
            f"{load_here() if self._room is None else ''}; raise resources.start_timeout_s, or set fewer "
            "resources.workers"
        )

    def _limit(self, member: _Member) -> float:
        """Seconds after which a worker is given up: task_timeout_s for each item of its call, not counting the next."""
        if not member.ready:
            return self._starting.limit_s
        return self.resources.task_timeout_s * max(1, len(member.chunks[0].left()))

    def _replace(self, member: _Member, cause: str) -> Lost:
        """Forget a worker, make sure that it is dead, and start another in its place."""
        check_ray()
        del self.members[member.id]
        _kill(member.actor)
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
        """The items that a lost worker still had to do, to be done again; only those of its first call had begun."""
        if member.chunks:
            for item in member.chunks[0].left():
                item.attempts += 1
                if item.attempts > self.resources.max_retries:
                    raise RunError(f"{item.name} failed {item.attempts} times; the last time {cause}")
        return [item for call in member.chunks for item in call.left()]

    def close(self) -> None:
        """End all workers."""
        for member in self.members.values():
            _kill(member.actor)
        self.members.clear()


def _has_process(actor: WorkerActor) -> bool:
    """Whether a worker that has not started has got a process, and so a machine."""
    handle: Any = actor
    return has_process(handle._actor_id.hex())


def _kill(actor: WorkerActor) -> None:
    """End a worker's process at once."""
    handle: Any = actor  # `WorkerActor` describes the methods of Ray's handle, not its type
    ray.kill(handle)
