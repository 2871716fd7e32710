"""How a pool hands out work to real workers."""

from typing import TYPE_CHECKING, Any

from raysim.config.schema import Resources
from raysim.engine.schedule import Item

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
    pool.pace["tiny"] = 1e-6
    done = list(pool.map([Item(i, 1.0, f"item {i}") for i in range(50)], submit, kind="tiny"))
    assert sorted(len(items) for _, items, _ in done) == [25, 25]
    assert len({worker for worker, _, _ in done}) == 2
