"""Turns the update that a client has computed into the one that it sends: sparse, rounded, clipped, noisy.

    v = Delta + e;  s = top_k(v);  e <- v - s;  q = round(s);  sent = q min(1, clip / ||q||) + noise

e is the residual that the client keeps: what it did not send so far (error feedback, arXiv 1809.07599). Rounding is
unbiased and needs no residual. Clipping comes after both, so that `clip` bounds what is sent; what it removes is not
kept.
"""

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Update, kept
from raysim.core import rng

RESIDUAL = "update_residual"  # name of the residual in a client's state, besides the entries of its algorithm


def send(
    delta_P: Tensor, residual_P: Tensor | None, options: Update, seed: int, round_: int, client: int
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Compress a client's update; randomness is keyed by round and client.

    delta_P: the update, shape P.  residual_P: what the client did not send so far; None before the first time, and
    always unless `top_k` is set.  Returns (the update as sent, the next residual, metrics such as `clipped`: 1 or 0).
    """
    sent_P = delta_P
    left_P = None
    seen: dict[str, float] = {}
    if options.top_k is not None:
        v_P = delta_P if residual_P is None else delta_P + residual_P
        sent_P = largest(v_P, kept(options.top_k, len(v_P)))
        left_P = v_P - sent_P
    if options.quantise is not None:
        u_P = rng.stream(seed, rng.ROUNDING, round_, client).random(len(sent_P), dtype=np.float32)
        sent_P = stochastic_round(sent_P, options.quantise, torch.from_numpy(u_P).to(sent_P.device))
    if options.clip is not None:
        sent_P, seen["clipped"] = clipped(sent_P, options.clip)
        if options.private and options.noise_at == "client":
            std = options.noise_multiplier * options.clip
            noise_P = rng.stream(seed, rng.NOISE, round_, client).normal(0.0, std, len(sent_P)).astype(np.float32)
            sent_P = sent_P + torch.from_numpy(noise_P).to(sent_P.device)
    return sent_P, left_P, seen


def largest(v_P: Tensor, count: int) -> Tensor:
    """v_P with all but its `count` largest absolute values set to 0; of equal ones the first are kept."""
    if count >= len(v_P):
        return v_P
    size_P = v_P.abs()
    least = torch.topk(size_P, count, sorted=True).values[-1]
    keep_P = size_P > least
    ties = torch.nonzero(size_P == least).flatten()
    keep_P[ties[: count - int(keep_P.sum())]] = True
    return torch.where(keep_P, v_P, torch.zeros_like(v_P))


def stochastic_round(v_P: Tensor, bits: int, u_P: Tensor) -> Tensor:
    """Round v_P to 2^bits - 1 evenly spaced levels from -max|v| to max|v|, up or down at random: the expectation is v.

    With m = 2^(bits - 1) - 1 and x = v m / max|v|:  floor(x + u) max|v| / m,  u uniform in [0, 1)  (QSGD, arXiv
    1610.02132, with the largest value as its norm).  u_P: the random numbers, one per coordinate.  Zeros stay zero.
    """
    largest_value = v_P.abs().max()
    m = 2 ** (bits - 1) - 1
    if not largest_value > 0:
        return v_P
    x_P = (v_P.to(torch.float64) * m / largest_value.to(torch.float64)).clamp_(-m, m)
    level_P = torch.floor(x_P + u_P.to(torch.float64)).clamp_(-m, m)
    rounded_P: Tensor = (level_P * (largest_value.to(torch.float64) / m)).to(v_P.dtype)
    return rounded_P


def clipped(v_P: Tensor, clip: float) -> tuple[Tensor, float]:
    """Scale v_P down to the Euclidean norm `clip` if it is longer; returns (the result, 1 if it was longer, else 0)."""
    norm = float(v_P.to(torch.float64).norm())
    return (v_P, 0.0) if norm <= clip else (v_P * (clip / norm), 1.0)
