"""A run's server on its own Ray, for benchmarks that measure round by round; start-up and files are left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from raysim.config.schema import Config
from raysim.federation.evaluator import Evaluator
from raysim.federation.server import RoundResult, Server
from raysim.federation.state import ServerState
from raysim.federation.training import timed_round


@dataclass
class Rounds:
    """A server, and rounds of it that are evaluated and timed as in `raysim.run`."""

    server: Server
    evaluator: Evaluator

    def next(self, state: ServerState) -> RoundResult:
        """One round."""
        return timed_round(self.server, self.evaluator, state)


@contextmanager
def opened(config: Config, kind: type[Server] = Server) -> Iterator[tuple[Rounds, ServerState, Any]]:
    """(its rounds, the state before round 1, the initial model) of a configuration without synthetic images.

    The server's workers have torch loaded and the data at hand.  kind: a class with participants of its own.
    """
    from raysim.core.records import Synthetic
    from raysim.engine.object_store import put, put_shared
    from raysim.engine.session import Session
    from raysim.lifecycle.build import build_components, worker_setup
    from raysim.lifecycle.prepare import prepare

    prepared = prepare(config)
    parts = build_components(config, prepared)
    with Session(config.resources) as session:
        pool = session.pool(config.resources)
        split_ref, dataset = put_shared(prepared.dataset)
        prepared = replace(prepared, dataset=dataset)  # as in `raysim.run`: the driver keeps no copy of its own
        pool.configure(worker_setup(config, parts.rule), split_ref, put(prepared.partition))
        synthetic = Synthetic(prepared.quota_KC)
        server = kind(config, pool, prepared.partition, synthetic, parts.algorithm, parts.rule, parts.optimiser)
        evaluator = Evaluator.of(config, pool, prepared.partition, prepared.dataset)
        yield Rounds(server, evaluator), server.initial(parts.model.state()), parts.model


def round_seconds(row: dict[str, float]) -> float:
    """Seconds from the cohort to the next global model, without evaluation."""
    return row["seconds_train"] + row["seconds_aggregate"]
