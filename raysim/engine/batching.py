"""Whether clients are trained several at once where that changes bits: timed by the workers before round 1, then kept.

On a CPU several clients are trained at once only with the same bits as one after another, and where that was measured
to be faster: there is nothing to choose. On a GPU the bits differ by rounding, and which way is faster depends on the
network, the GPU and how many workers share it.
"""

import math
from collections.abc import Sequence
from statistics import mean

from raysim.core.records import BatchingChoice
from raysim.engine.pool import Pool

CHANGES_BITS_ON = ("cuda",)  # the devices, as `Placement.device` names them
WORTH = 1.1  # one after another must take this many times as long: bits do not change for less
TIMED_S = 0.6  # seconds for each of the two ways
_NAME = "the choice of resources.client_batching"


def choose(
    pool: Pool, asked: str, sizes_K: Sequence[int], key: str, kept: BatchingChoice | None = None
) -> BatchingChoice | None:
    """How the clients of a run are trained; None where both ways have the same bits, so that workers may decide.

    asked: `resources.client_batching`.  sizes_K: samples of the clients of the first round.  key: what is trained, and
    how; runs on the same workers that have the same key have the same choice, so that a sweep compares like with like.
    kept: the choice of the run that is resumed, which holds.
    """
    if pool.placement.device not in CHANGES_BITS_ON:
        return None
    if kept is not None:
        return kept
    if asked == "off":
        return BatchingChoice(False, "resources.client_batching = off")
    if asked == "on":
        return _possible(pool)
    if key not in pool.batching:
        pool.batching[key] = _timed(pool, sizes_K)
    return pool.batching[key]


def without_effect(pool: Pool) -> str:
    """Why `resources.client_batching = on` has no effect on a CPU, for people; empty where it has one."""
    reasons = pool.ask_started(lambda actor: actor.why_alone.remote("dense"), _NAME)
    return next(filter(None, reasons), "")


def _possible(pool: Pool) -> BatchingChoice:
    """At once, unless a worker cannot do that."""
    reasons = pool.ask_started(lambda actor: actor.why_alone.remote("vmap"), _NAME)
    reason = next(filter(None, reasons), "")
    return BatchingChoice(not reason, reason or "resources.client_batching = on")


def _timed(pool: Pool, sizes_K: Sequence[int]) -> BatchingChoice:
    """The faster way, by what all workers time together: those that share a GPU slow each other down as in a round."""
    possible = _possible(pool)
    if not possible.at_once:
        return possible
    share = sorted([n for n in sizes_K if n] or [1], reverse=True)[:: max(1, len(pool.members))]
    alone_s = mean(pool.ask_started(lambda actor: actor.expected_s.remote(share, TIMED_S, False), _NAME))
    at_once_s = mean(pool.ask_started(lambda actor: actor.expected_s.remote(share, TIMED_S, True), _NAME))
    if not math.isfinite(at_once_s):
        return BatchingChoice(False, "a group of clients does not fit into the memory")
    why = f"{at_once_s:.2g} s at once, {alone_s:.2g} s one after another, as timed, a round and worker"
    return BatchingChoice(at_once_s * WORTH < alone_s, why, alone_s, at_once_s)
