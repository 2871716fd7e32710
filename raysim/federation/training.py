"""Phase 2, the loop: round after round, timed from outside the algorithm, with an ordered list of what comes after."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from raysim.federation.evaluator import Evaluator
from raysim.federation.server import RoundResult, Server
from raysim.federation.state import ServerState

AfterRound = Callable[[RoundResult], None]
"""Called with each finished round, evaluated and timed, in the order of the list."""


def train_rounds(
    server: Server,
    evaluator: Evaluator,
    state: ServerState,
    rounds: int,
    after_round: Sequence[AfterRound] = (),
    before_round: Callable[[ServerState], ServerState] = lambda state: state,
) -> ServerState:
    """All rounds that are left until `rounds` are done; returns the last state.

    before_round: gives the state from which the next round begins, such as one with more images.

    An exception, such as an interrupt, leaves the rounds before it as `after_round` has seen them.
    """
    while state.round < rounds:
        result = timed_round(server, evaluator, before_round(state))
        state = result.state
        for step in after_round:
            step(result)
    return state


def initial_result(server: Server, evaluator: Evaluator, state: ServerState) -> RoundResult:
    """Round 0: what the initial model is worth on the test split, before any client has trained."""
    began = time.monotonic()
    measured = evaluator.evaluate(server.reference(state.model))
    return RoundResult(state, {"round": 0, **measured, "seconds_evaluate": time.monotonic() - began}, {})


def timed_round(server: Server, evaluator: Evaluator, state: ServerState) -> RoundResult:
    """One round, its evaluation where it is due, and the seconds of its phases among its metrics."""
    usage = server.pool.usage
    began, waited_s = time.monotonic(), usage.waited_s
    usage.begin_round()
    trained = server.train(state)
    trained_at, waited_s = time.monotonic(), usage.waited_s - waited_s
    result = server.aggregate(state, trained)
    aggregated_at = time.monotonic()
    measured = evaluator.due(
        result.state.round,
        lambda: server.reference(result.state.model),
        lambda k: server.task(k, result.state.client_states),
    )
    ended = time.monotonic()
    times = {
        "seconds_train": trained_at - began,
        "seconds_aggregate": aggregated_at - trained_at,
        "seconds_dispatch": trained_at - began - waited_s,
        "seconds_evaluate": ended - aggregated_at,
        "seconds_idle": usage.end_round(server.pool.members, ended - began),
    }
    return replace(result, metrics=result.metrics | measured | times)
