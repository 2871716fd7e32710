"""A server in plain Python around the real local loop, and the scalar problem that most derivations use.

f_0(x) = (x - 1)^2 / 2 and f_1(x) = (x + 3)^2 / 2, from x = 0: gradients x - 1 and x + 3.
"""

import numpy as np
import torch
from torch import nn

from raysim.core.records import ModelState, RoundTable
from raysim.local.contract import ClientData, Job
from raysim.local.loop import train_client
from raysim.models.flat_model import FlatModel, ImageScale

TARGETS = (1.0, -3.0)
GREY = ImageScale((0.5,), (0.25,))


class Scalar(nn.Module):
    """One parameter."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))


def quadratic(algorithm, **keys):
    """The algorithm with its loss replaced by that of the scalar problem."""

    class Quadratic(algorithm):
        def loss(self, job, x, y_B):
            return 0.5 * (job.model.module.x - TARGETS[job.client]).square().sum()

    return Quadratic(**keys)


def samples(n, classes=2, side=1, seed=0):
    """n grey images with labels."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 1, side, side), dtype=np.uint8)
    return ClientData(images, rng.integers(0, classes, n), n)


def train(algorithm, model, data, *, start=None, round_=1, client=0, vectors=None, state=None, scale=GREY, seed=0):
    """Train one client from `start` (or from where the model stands); (job, result)."""
    if start is not None:
        model.load(start)
    if vectors is None:
        vectors = {name: torch.zeros(len(model.params_P)) for name in algorithm.broadcast}
    n, lr = len(data.labels_N), algorithm.learning_rate(round_)
    job = Job(model, model.params_P.detach().clone(), lr, round_, client, n, vectors, state)
    return job, train_client(job, algorithm, data, scale, seed)


class Server:
    """Clients' states as float32 arrays, extra vectors summed over participants and divided by all clients."""

    def __init__(self, algorithm, rule, data, module=None, registered=None):
        self.algorithm, self.rule, self.data = algorithm, rule, data
        self.registered = registered or len(data)
        self.model = FlatModel(Scalar() if module is None else module)
        self.state = self.model.state()
        self.broadcast_vectors = {name: np.zeros(len(self.state.params_P)) for name in algorithm.broadcast}
        self.client_states = {}
        self.number = 0
        self.results = {}

    def round(self, clients=None):
        """One round; returns the global parameters as a list."""
        self.number += 1
        clients = range(len(self.data)) if clients is None else clients
        trained = {k: self._client(k) for k in clients}
        n_K = np.array([len(self.data[k].labels_N) for k in clients])
        steps_K = np.array([trained[k]["effective_steps"] for k in clients])
        table = RoundTable(self.number, np.array(clients), n_K, {"effective_steps": steps_K})
        w_K = self.rule.weights(table, None).w_K

        def total(name, weights):
            return sum(w * trained[k][name].astype(np.float64) for k, w in zip(clients, weights, strict=True))

        sums = {name: total(name, [1 / self.registered] * len(trained)) for name in self.algorithm.summed}
        self.broadcast_vectors, step_P = self.algorithm.server_update(self.broadcast_vectors, sums, total("delta", w_K))
        params_P = (self.state.params_P + step_P).astype(np.float32)
        buffers_F = np.asarray(total("buffers", n_K / n_K.sum()), dtype=np.float32)
        self.state = ModelState(params_P, buffers_F, np.max([trained[k]["counters"] for k in clients], axis=0))
        self.results = trained
        return params_P.tolist()

    def _client(self, k):
        vectors = {name: torch.from_numpy(v.astype(np.float32)) for name, v in self.broadcast_vectors.items()}
        state = self.client_states.get(k)
        state = None if state is None else {name: torch.from_numpy(v.copy()) for name, v in state.items()}
        job, result = train(
            self.algorithm, self.model, self.data[k], start=self.state, round_=self.number, client=k, vectors=vectors,
            state=state,
        )
        if result.state is not None:
            self.client_states[k] = {name: t.numpy() for name, t in result.state.items()}
        after = self.model.state()
        return {
            "y": after.params_P.tolist(),
            "after": after,
            "delta": after.params_P - job.start_P.numpy(),
            "buffers": after.buffers_F,
            "counters": after.counters,
            "effective_steps": self.algorithm.effective_steps(job),
            "loss": result.loss,
            "lr": job.lr,
            **{name: job.scratch[name].numpy().copy() for name in self.algorithm.summed},
        }
