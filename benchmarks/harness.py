"""A run's server on its own Ray, for benchmarks that measure round by round; start-up and files are left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysim.config.schema import Config
from raysim.federation.server import Server, ServerState


@contextmanager
def opened(config: Config, kind: type[Server] = Server) -> Iterator[tuple[Server, ServerState, Any]]:
    """(server, the state before round 1, the initial model) of a configuration without synthetic images.

    The server's workers have torch loaded and the data at hand.  kind: a class with participants of its own.
    """
    from raysim.core.records import Synthetic
    from raysim.engine.object_store import put, share
    from raysim.engine.session import Session
    from raysim.federation.evaluator import Evaluator
    from raysim.lifecycle.build import build_parts, worker_setup
    from raysim.lifecycle.prepare import prepare

    prepared = prepare(config)
    parts = build_parts(config, prepared)
    with Session(config.resources) as session:
        pool = session.pool(config.resources)
        split_ref, dataset = share(prepared.dataset)
        prepared = replace(prepared, dataset=dataset)  # as in `raysim.run`: the driver keeps no copy of its own
        pool.configure(worker_setup(config, parts.rule), split_ref, put(prepared.partition))
        server = kind(
            config, pool, prepared.partition, Synthetic(prepared.quota_KC, {}, ""), parts.algorithm, parts.rule,
            parts.optimiser, Evaluator.of(config, pool, prepared.partition, prepared.dataset),
        )
        yield server, server.initial(parts.model.state()), parts.model


def round_seconds(row: dict[str, float]) -> float:
    """Seconds from the cohort to the next global model, without evaluation."""
    return row["seconds_train"] + row["seconds_aggregate"]
