"""Exact, hence order-free, sums over clients.

An addend w * d is rounded once to a multiple of a fixed grid g = 2^-bits and held in float64 as a whole number of grid
units. Float64 adds whole numbers below 2^53 without rounding, so as long as no partial sum reaches 2^53 units, any
grouping and order of the addends gives the same bits.

No partial sum can. Values are refused unless |d| <= limit = 2^(50 - bits). Weights are divided by a power of two where
sum |w| > MAX_WEIGHT = 4 (`scale`; the total is multiplied by it again, both exactly). So a partial sum of K addends is
at most 4 * limit / g + K / 2 units (rounding moves each addend by half a unit at the most): 2^52 + K / 2 < 2^53 for
every K < 2^53. What the grid costs is that half unit: the error of a sum of K addends is at most scale * K g / 2.
Scaling by 2^bits is exact, and the product w * d is rounded once to float64 before it is rounded to the grid: a pure
function of (w, d).

Parameters: g = 2^-40, |d| <= 2^10; the error of a sum over 1,000 clients is below 5e-10, a hundredth of the spacing of
float32 numbers around 1. Floating-point buffers (running means and variances) may be large: g = 2^-24, |d| <= 2^26.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raysim.core.records import FloatArray
from raysim.engine.messages import PartialSum, SumWeights

PARAM_BITS = 40
BUFFER_BITS = 24
MAX_WEIGHT = 4.0
BLOCK = 1 << 17  # numbers that a CPU adds at a time: temporary memory for all of them would double that of a sum


def limit(bits: int) -> float:
    """The largest absolute value that may enter a sum on this grid."""
    return float(2.0 ** (50 - bits))


def within(values: Tensor, bits: int) -> bool:
    """Whether every value is finite and inside the range in which sums are exact."""
    return values.numel() == 0 or bool(values.abs().max() <= limit(bits))  # a comparison with nan is False


_REMEDY = "lower local.lr or server.lr, or set update.clip"


class Diverged(Exception):
    """A loss or an update is not finite, or outside the range in which sums are exact."""


def checked_norm(loss: float, update: dict[str, Tensor]) -> float:
    """The norm of a client's update; Diverged if anything is not finite or outside the range of exact sums."""
    if not np.isfinite(loss):
        raise Diverged(f"training diverged: the loss is {loss}; {_REMEDY}")
    norm = float(torch.linalg.vector_norm(update["delta"], dtype=torch.float64))
    for name, t in update.items():
        bits = BUFFER_BITS if name == "buffers" else PARAM_BITS
        if name == "counters" or (name == "delta" and norm <= limit(bits)):  # no value is larger than the norm
            continue
        if not within(t, bits):
            found = f"{name} has a value of {float(t.abs().max()):g} (allowed: {limit(bits):g})"
            raise Diverged(f"training diverged: {found}; {_REMEDY}")
    return norm


class ExactSum:
    """A running weighted sum of float32 vectors; `units` is the sum so far, in grid units, exact."""

    def __init__(self, size: int, bits: int, device: str = "cpu") -> None:
        self.bits = bits
        self.units = torch.zeros(size, dtype=torch.float64, device=device)
        self._block = BLOCK if device == "cpu" else max(1, size)
        self._scratch = self.units.new_empty(min(size, self._block))

    def add(self, values: Tensor, weight: float) -> None:
        """Add weight * values, rounded once to the grid; `values` must have passed `within`."""
        blocks = zip(torch.split(self.units, self._block), torch.split(values, self._block), strict=True)
        for units, block in blocks:
            scaled = self._scratch[: len(block)].copy_(block).mul_(weight * 2.0**self.bits)
            units.add_(scaled.round_())


class UpdateSums:
    """The running exact sums of one worker: of updates, float buffers and further vectors."""

    def __init__(self, like: dict[str, Tensor]) -> None:
        """like: any client's update, for the names and sizes of its vectors."""
        device = str(like["delta"].device)
        self.sums = {
            name: ExactSum(t.numel(), BUFFER_BITS if name == "buffers" else PARAM_BITS, device)
            for name, t in like.items()
            if name != "counters"
        }
        self.counters = like["counters"].clone()

    def add(self, update: dict[str, Tensor], weights: SumWeights) -> None:
        """Add a client's update with its weights; integer counters are not summed, the largest stays."""
        by_name = {"delta": weights.update, "buffers": weights.buffers}
        for name, running in self.sums.items():
            running.add(update[name], by_name.get(name, weights.vectors))
        torch.maximum(self.counters, update["counters"], out=self.counters)

    def result(self) -> PartialSum:
        """Return the sums so far as arrays in grid units, on the CPU."""
        arrays = {name: s.units.cpu().numpy() for name, s in self.sums.items()}
        return PartialSum(arrays.pop("delta"), arrays.pop("buffers"), self.counters.cpu().numpy(), arrays)


def add_sums(sums: Sequence[PartialSum]) -> PartialSum:
    """The sum of at least one partial sum, in grid units; their order does not matter."""
    return PartialSum(
        np.sum([s.params_P for s in sums], axis=0),
        np.sum([s.buffers_F for s in sums], axis=0),
        np.max([s.counters for s in sums], axis=0),
        {name: np.sum([s.summed_vectors[name] for s in sums], axis=0) for name in sums[0].summed_vectors},
    )


def from_units(units: FloatArray, bits: int) -> FloatArray:
    """A sum in grid units as ordinary numbers: units * 2^-bits, exactly."""
    return units * float(2.0**-bits)


def scale(w_K: FloatArray) -> float:
    """The power of two by which weights w_K must be divided for an exact sum: 1 for weights that sum to 1.

    Raises ValueError for weights that are not finite.
    """
    size = float(np.abs(w_K).sum())
    if not np.isfinite(size):
        raise ValueError(f"weights must be finite, not {w_K.tolist()}")
    return 1.0 if size <= MAX_WEIGHT else float(2.0 ** np.ceil(np.log2(size / MAX_WEIGHT)))
