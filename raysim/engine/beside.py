"""A process beside the driver, on its node: what it holds is not in the driver's memory, but belongs to the driver."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.core.errors import RunError, described
from raysim.engine.calls import Ref
from raysim.engine.failures import first_line, with_remedy
from raysim.engine.object_store import put

if TYPE_CHECKING:
    from raysim.engine.pool import Pool

Answer = TypeVar("Answer")


class Beside:
    """Calls functions beside the driver; or in the driver itself, where too little is held to start a process for.

    What a function puts into the object store lies on the driver's node and is owned by the driver, so that it is there
    as long as the driver is, whichever worker or other node is lost.
    """

    def __init__(self, pool: "Pool", own_process: bool) -> None:
        self.own_process = own_process
        self.resources = pool.resources
        where = NodeAffinitySchedulingStrategy(pool.here, soft=False)
        # no retry by Ray itself, which would keep what a call was given for as long as its value
        self._remote: Any = ray.remote(_call).options(
            num_cpus=0, num_returns=2, max_retries=0, scheduling_strategy=where
        )

    def call(
        self, function: Callable[..., tuple[Answer, object]], *arguments: object, items: int = 1
    ) -> tuple[Answer, Ref]:
        """(the answer of a function, a reference to its value); a function whose process dies is called again.

        function: returns (answer, value for the object store); calling it twice does no harm.
        items: how many times resources.task_timeout_s it may take.  Raises RunError where it fails or takes longer.
        """
        if not self.own_process:
            answer, value = function(*arguments)
            return answer, put(value)
        cause = ""
        for _ in range(self.resources.max_retries + 1):
            refs = self._remote.remote(function, *arguments)
            try:
                return ray.get(refs[0], timeout=items * self.resources.task_timeout_s), refs[1]
            except (WorkerCrashedError, OutOfMemoryError) as error:
                cause = with_remedy(first_line(error))
            except GetTimeoutError:
                ray.cancel(refs[0], force=True)
                cause = f"it took longer than {items * self.resources.task_timeout_s:g} s (resources.task_timeout_s)"
            except RayTaskError as error:
                raise RunError(f"the driver's images: {with_remedy(described(error.cause))}") from None
        raise RunError(f"the process that keeps the driver's images failed; the last time {cause}")


def _call(function: Callable[..., tuple[Answer, object]], *arguments: object) -> tuple[Answer, object]:
    return function(*arguments)
