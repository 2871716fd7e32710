"""Server optimisers: from the aggregated client update to the step of the global parameters.

Each is a pure function of (state, update_P): the state is a dict of float64 arrays, checkpointed as it is. The update
points from the old global model TOWARDS the clients, Delta = sum_k w_k Delta_k, and the step is added to the global
model (Reddi et al., "Adaptive Federated Optimization", arXiv 2003.00295, algorithm 2). The paper starts v at tau^2 or
more; `v_start` does so where it is set, its default of 0 being what most code does.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from raysim.core.records import FloatArray

__all__ = ["adagrad", "adam", "sgd", "yogi"]

State = dict[str, FloatArray]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="server learning rate")]
Decay1 = Annotated[float, Field(ge=0, lt=1, description="decay of the mean update m")]
Decay2 = Annotated[float, Field(ge=0, lt=1, description="decay of the mean squared update v")]
Start = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="v before round 1; the paper asks for tau^2 or more")
]
Tau = Annotated[float, Field(gt=0, allow_inf_nan=False, description="added to sqrt(v): the degree of adaptivity")]


@dataclass
class sgd:
    """Add the update times the learning rate; with momentum this is FedAvgM (arXiv 1909.06335).

    m <- momentum m + Delta;  step = lr m.  lr 1 and momentum 0 take the clients' mean itself, bit for bit.
    """

    lr: Rate = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="decay of the running sum of updates; 0: none")] = 0.0

    def init(self, parameters: int) -> State:
        """The state before round 1, for this many parameters."""
        return {"m": np.zeros(parameters)} if self.momentum else {}

    def step(self, state: State, update_P: FloatArray) -> tuple[State, FloatArray]:
        """The next state and the step to add to the global parameters."""
        if not self.momentum:
            return {}, self.lr * update_P
        m = self.momentum * state["m"] + update_P
        return {"m": m}, self.lr * m


@dataclass
class adagrad:
    """FedAdagrad: a step per parameter that shrinks with the sum of its squared updates (arXiv 2003.00295).

    m <- b1 m + (1 - b1) Delta;  v <- v + Delta^2;  step = lr m / (sqrt(v) + tau).  b1 is 0 in the paper's experiments.
    """

    lr: Rate = 0.1
    b1: Decay1 = 0.0
    tau: Tau = 1e-3
    v_start: Start = 0.0

    def init(self, parameters: int) -> State:
        """The state before round 1, for this many parameters: m = 0, v = v_start."""
        return _moments(parameters, self.v_start)

    def step(self, state: State, update_P: FloatArray) -> tuple[State, FloatArray]:
        """The next state and the step to add to the global parameters."""
        m = self.b1 * state["m"] + (1 - self.b1) * update_P
        v = state["v"] + np.square(update_P)
        return {"m": m, "v": v}, self.lr * m / (np.sqrt(v) + self.tau)


@dataclass
class adam:
    """FedAdam: the mean update over the root of the mean squared update, no bias correction (arXiv 2003.00295).

    m <- b1 m + (1 - b1) Delta;  v <- b2 v + (1 - b2) Delta^2;  step = lr m / (sqrt(v) + tau).
    """

    lr: Rate = 0.1
    b1: Decay1 = 0.9
    b2: Decay2 = 0.99
    tau: Tau = 1e-3
    v_start: Start = 0.0

    def init(self, parameters: int) -> State:
        """The state before round 1, for this many parameters: m = 0, v = v_start."""
        return _moments(parameters, self.v_start)

    def step(self, state: State, update_P: FloatArray) -> tuple[State, FloatArray]:
        """The next state and the step to add to the global parameters."""
        m = self.b1 * state["m"] + (1 - self.b1) * update_P
        v = self.b2 * state["v"] + (1 - self.b2) * np.square(update_P)
        return {"m": m, "v": v}, self.lr * m / (np.sqrt(v) + self.tau)


@dataclass
class yogi:
    """FedYogi: as adam, but v moves towards the squared update by at most (1 - b2) Delta^2 (arXiv 2003.00295).

    m <- b1 m + (1 - b1) Delta;  v <- v - (1 - b2) Delta^2 sign(v - Delta^2);  step = lr m / (sqrt(v) + tau).
    """

    lr: Rate = 0.1
    b1: Decay1 = 0.9
    b2: Decay2 = 0.99
    tau: Tau = 1e-3
    v_start: Start = 0.0

    def init(self, parameters: int) -> State:
        """The state before round 1, for this many parameters: m = 0, v = v_start."""
        return _moments(parameters, self.v_start)

    def step(self, state: State, update_P: FloatArray) -> tuple[State, FloatArray]:
        """The next state and the step to add to the global parameters."""
        m = self.b1 * state["m"] + (1 - self.b1) * update_P
        square_P = np.square(update_P)
        v = state["v"] - (1 - self.b2) * square_P * np.sign(state["v"] - square_P)
        return {"m": m, "v": v}, self.lr * m / (np.sqrt(v) + self.tau)


def _moments(parameters: int, v_start: float) -> State:
    return {"m": np.zeros(parameters), "v": np.full(parameters, v_start)}
