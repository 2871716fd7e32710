"""A running mean of the global model over the rounds, kept by the server beside its optimiser's state.

    ema_t = d_t ema_(t-1) + (1 - d_t) w_t,   d_t = min(decay, (1 + t) / (10 + t)),   ema_0 = w_0

It is kept as the difference g = w - ema, which starts at 0 and needs the step alone: g <- d_t (g + step).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from raysim.config.protocols import ServerOptimiser
from raysim.config.registry import resolve
from raysim.core.records import Float32Array, FloatArray

PLUGIN = f"{__name__}:running_mean"  # its name in a configuration
_GAP = "running_mean/gap"
_ROUNDS = "running_mean/rounds"


@dataclass
class running_mean(ServerOptimiser):
    """A server optimiser that also follows the running mean of the model; its steps are those of the optimiser `of`.

    decay: how much of the mean before a round stays; lower in the first rounds.
    """

    of: dict[str, Any]
    decay: Annotated[float, Field(ge=0, lt=1)]
    _inner: ServerOptimiser = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Build the optimiser that takes the steps."""
        keys = {key: value for key, value in self.of.items() if key != "name"}
        self._inner = resolve("server", self.of["name"])(**keys)

    def init(self, parameters: int) -> dict[str, FloatArray]:
        """The state before round 1, for this many parameters."""
        return {**self._inner.init(parameters), _GAP: np.zeros(parameters), _ROUNDS: np.zeros(1)}

    def step(self, state: dict[str, FloatArray], update_P: FloatArray) -> tuple[dict[str, FloatArray], FloatArray]:
        """The next state and the step to add to the global parameters."""
        inner = {name: values for name, values in state.items() if name not in (_GAP, _ROUNDS)}
        inner, step_P = self._inner.step(inner, update_P)
        rounds = state[_ROUNDS] + 1
        decay = min(self.decay, float((1 + rounds[0]) / (10 + rounds[0])))
        return {**inner, _GAP: decay * (state[_GAP] + step_P), _ROUNDS: rounds}, step_P


def mean_of(params_P: Float32Array, state: dict[str, FloatArray]) -> Float32Array:
    """The running mean of the global parameters, by the optimiser's state after the same round.

    Of an optimiser that follows none, the parameters themselves.
    """
    return (params_P - state[_GAP]).astype(np.float32) if _GAP in state else params_P
