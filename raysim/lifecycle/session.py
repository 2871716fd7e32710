"""`raysim.session`: Ray, its workers and MLflow's process, kept from one run to the next."""

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Self

from raysim.core.errors import UserError
from raysim.core.plain import Plain, PlainDict
from raysim.core.signals import stoppable
from raysim.tracking.process import MlflowProcess
from raysim.ui.notebook import quieten

if TYPE_CHECKING:
    from raysim.engine.session import Session

_OPEN: list["KeptSession"] = []


def open_session() -> "KeptSession | None":
    """The session that is open in this process, in which runs take place; None without one."""
    return _OPEN[-1] if _OPEN else None


def session(**resources: Plain) -> "KeptSession":
    """Keep Ray and its workers for every `raysim.run` and `raysim.sweep` inside `with raysim.session(): ...`.

    The second run then begins at once, where Ray and MLflow take seconds to start.  resources: keys of the section
    `resources`, such as workers=4, which hold for every run whose own configuration does not set them.
    In a notebook, where a `with` cannot go over several cells, `kept = raysim.session().open()` and `kept.close()` do
    the same.
    Raises ConfigError for keys that cannot work, and when it is opened UserError for a cluster that does not answer and
    where a session is open already.
    """
    return KeptSession(resources)


class KeptSession:
    """An open session, as `raysim.session` makes it; a context manager.

    ray: its connection to Ray; None while it is not open.  given: the keys of `resources` that were given, checked.
    """

    def __init__(self, resources: PlainDict) -> None:
        from raysim.config.load import load_config

        plain = {"data": {"name": "digits"}, "rounds": 1, "resources": resources}
        self._resources = load_config(plain, ()).resources
        self.given: PlainDict = {key: getattr(self._resources, key) for key in resources}
        self._stack = contextlib.ExitStack()
        self._mlflow: MlflowProcess | None = None
        self.ray: Session | None = None

    @stoppable
    def open(self) -> Self:
        """Start Ray, or join the cluster."""
        if _OPEN:
            raise UserError("a session is open in this process already; close it first, or run inside it")
        quieten()
        from raysim.engine.session import Session

        self.ray = self._stack.enter_context(Session(self._resources))
        _OPEN.append(self)
        return self

    def close(self) -> None:
        """End the workers, Ray and MLflow's process; may be called twice."""
        if self in _OPEN:
            _OPEN.remove(self)
        self.ray = self._mlflow = None
        self._stack.close()

    def mlflow(self) -> MlflowProcess:
        """The process that writes to MLflow, started when it is first needed, or has died."""
        if self._mlflow is None or not self._mlflow.alive:
            self._mlflow = self._stack.enter_context(MlflowProcess())
        return self._mlflow

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
