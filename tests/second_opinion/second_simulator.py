"""A second simulator of federated learning, one client after the other, from the papers' equations and nothing else.

It shares with raysim what a run is given: images, who owns which, initial parameters, and the keyed random streams from
which cohorts, orders of batches and probe images are drawn. Networks, losses, normalisation, local training, OUI,
aggregation rules and server optimisers are its own. `dtype` is float64; float32 shows what rounding alone can do.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from second_networks import Network, cross_entropy
from second_rules import Memory, combine
from torch import Tensor

from raysim.core import rng

Vectors = dict[str, Tensor]


@dataclass(frozen=True)
class World:
    """What a run is given.  clients: rows of `train_images` that each owns.  start: initial parameters and buffers."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    clients: list[list[int]]
    start: dict[str, np.ndarray]
    trainable: list[str]
    quota: np.ndarray | None = None


@dataclass
class Outcome:
    """What comes out.  state: parameters and buffers by name.  rounds, clients: rows of metrics."""

    state: dict[str, np.ndarray]
    rounds: list[dict[str, float]] = field(default_factory=list)
    clients: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Trained:
    """One client after its local training."""

    client: int
    n_real: int
    n: int
    params: Vectors
    buffers: Vectors
    steps: int
    a_norm: float
    loss: float
    change: Vectors | None = None  # SCAFFOLD's change of the client's variate


def synthetic_image(label: int, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """The image that the tests' own generator makes: a stripe at the label's row, noise from the seed elsewhere."""
    image = np.random.default_rng(seed).integers(0, 90, shape, dtype=np.uint8)
    image[:, label % shape[1], :] = 250
    return image


class Simulator:
    """One run of a configuration, given as the mapping that raysim gets."""

    def __init__(self, config: dict[str, Any], world: World, dtype: torch.dtype = torch.float64) -> None:
        self.world, self.dtype = world, dtype
        self.seed, self.rounds = config.get("seed", 0), config["rounds"]
        self.local, self.rule, self.server = config["local"], config["aggregation"], config["server"]
        self.per_round = config["clients_per_round"]
        self.network = Network(config["model"])
        self.params = {k: self._tensor(world.start[k]) for k in world.trainable}
        self.buffers = {
            k: self._tensor(v) if v.dtype.kind == "f" else torch.from_numpy(v.copy())
            for k, v in world.start.items() if k not in self.params
        }
        self.state: dict[int, dict[str, Vectors]] = {}  # each client's, by name
        self.c, self.h = self._zeros(), self._zeros()  # SCAFFOLD's and FedDyn's vectors at the server
        self.m, self.v = self._zeros(), self._zeros()  # moments of the server optimiser
        self.memory = Memory()
        pixels = world.train_images.astype(np.float64) / 255
        self.mean = pixels.mean(axis=(0, 2, 3), keepdims=True)
        self.std = np.sqrt(((pixels - self.mean) ** 2).mean(axis=(0, 2, 3), keepdims=True))
        self.data = [self._client_data(k) for k in range(len(world.clients))]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.dtype)

    def _zeros(self) -> Vectors:
        return {k: torch.zeros_like(v) for k, v in self.params.items()}

    def _client_data(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self.world.train_images[self.world.clients[k]], self.world.train_labels[self.world.clients[k]]
        if self.world.quota is None or not self.world.quota[k].any():
            return images, labels
        made, names = [], []
        for c, count in enumerate(self.world.quota[k]):
            for i in range(count):
                made.append(synthetic_image(c, rng.integer(self.seed, rng.SYNTHETIC, k, c, i), images.shape[1:]))
                names.append(c)
        return np.concatenate([images, np.array(made)]), np.concatenate([labels, np.array(names)])

    def _input(self, images: np.ndarray) -> Tensor:
        return self._tensor((images / 255 - self.mean) / self.std)

    # --- the run

    def run(self) -> Outcome:
        outcome = Outcome({})
        for number in range(1, self.rounds + 1):
            row, clients = self._round(number)
            outcome.rounds.append(row | self._evaluate())
            outcome.clients += clients
        outcome.state = {k: v.numpy() for k, v in {**self.params, **self.buffers}.items()}
        return outcome

    def _round(self, number: int) -> tuple[dict[str, float], list[dict[str, float]]]:
        registered = len(self.world.clients)
        drawn = rng.stream(self.seed, rng.COHORT, number)
        cohort = sorted(drawn.choice(registered, self.per_round, replace=False, shuffle=False).tolist())
        trained = [self._train(number, k) for k in cohort]
        deltas = np.stack([flat(minus(t.params, self.params)) for t in trained])
        n = np.array([t.n if self.rule.get("weight_by") == "total" else t.n_real for t in trained], dtype=np.float64)
        ouis = [self._ouis(t) for t in trained] if self.rule["name"].startswith("fedoui") else None
        a_norms = np.array([t.a_norm for t in trained])
        weights, scores, update = combine(self.rule, cohort, n, self._sizes(), deltas, a_norms, ouis, self.memory)
        step = self._server_step(trained, update, registered)
        self._next_buffers(trained, n)
        self.params = {k: v + step[k] for k, v in self.params.items()}
        total = np.array([t.n for t in trained])
        row = {
            "train_loss": float((total * [t.loss for t in trained]).sum() / total.sum()),
            "samples": float(total.sum()), "steps": float(sum(t.steps for t in trained)),
            "weight_max": float(weights.max()),
            "update_norm_mean": float(np.mean([math.sqrt((d.astype(np.float64) ** 2).sum()) for d in deltas])),
        }
        clients = []
        for i, t in enumerate(trained):
            norm = math.sqrt((deltas[i].astype(np.float64) ** 2).sum())
            clients.append({"round": number, "client": t.client, "loss": t.loss, "steps": t.steps,
                            "update_norm": norm, "weight": float(weights[i])})
            if ouis is not None:
                clients[-1]["oui"] = float(np.mean(ouis[i]))
            if scores is not None:
                clients[-1]["score"] = float(scores[i])
        return row, clients

    def _sizes(self) -> np.ndarray:
        """n_k of all registered clients."""
        total = self.rule.get("weight_by") == "total"
        return np.array([len(d[1]) if total else len(c) for d, c in zip(self.data, self.world.clients, strict=True)])

    def _next_buffers(self, trained: list[Trained], n: np.ndarray) -> None:
        """Means of BatchNorm statistics by n_k, the largest counter."""
        if self.rule.get("buffers") == "global":
            return
        for name, before in self.buffers.items():
            if before.is_floating_point():
                self.buffers[name] = sum(t.buffers[name] * (n_k / n.sum()) for t, n_k in zip(trained, n, strict=True))
            else:
                self.buffers[name] = torch.stack([t.buffers[name] for t in trained]).max()

    # --- local training

    def learning_rate(self, number: int) -> float:
        """lr * lr_decay^(t - 1) * warm-up * (1 | factor^floor(after / every) | half a cosine down to `floor`)."""
        rate = self.local["lr"] * self.local.get("lr_decay", 1.0) ** (number - 1)
        plan = self.local.get("schedule", {})
        warmup = max(1, plan.get("warmup", 0))
        after = max(0, number - warmup)
        rate *= min(1.0, number / warmup)
        if plan.get("kind") == "step":
            rate *= plan["factor"] ** (after // plan["every"])
        if plan.get("kind") == "cosine":
            span = plan["rounds"] - warmup + 1
            low, at = plan.get("floor", 0.0), min(after, span - 1) / span
            rate *= low + (1 - low) * 0.5 * (1 + math.cos(math.pi * at))
        return rate

    def _batches(self, number: int, client: int, n: int) -> list[list[np.ndarray]]:
        """Rows of each batch, epoch by epoch; with BatchNorm no batch of one sample."""
        draw = rng.stream(self.seed, rng.BATCHES, number, client)
        size, steps = self.local["batch_size"], self.local.get("steps")
        epochs: list[list[np.ndarray]] = []
        taken = 0
        while (len(epochs) < self.local.get("epochs", 1)) if steps is None else (taken < steps):
            order = draw.permutation(n)
            parts = [order[i : i + size] for i in range(0, n, size)]
            if self.network.batch_norm and len(parts[-1]) == 1:
                last = parts.pop()
                parts = [*parts[:-1], np.concatenate([parts[-1], last])] if parts else [np.concatenate([last, last])]
            parts = parts if steps is None else parts[: steps - taken]
            taken += len(parts)
            epochs.append(parts)
        return epochs

    def _train(self, number: int, client: int) -> Trained:
        images, labels = self.data[client]
        name, keys, lr = self.local["name"], self.local, self.learning_rate(number)
        y = {k: v.clone() for k, v in self.params.items()}
        kept = self.state.setdefault(client, {})
        own = kept.get("buffers") if self.rule.get("buffers") == "local" else None
        buffers = {k: v.clone() for k, v in (own or self.buffers).items()}
        at_start = {k: v.clone() for k, v in buffers.items()}
        c_k, g_k = kept.get("c", self._zeros()), kept.get("g", self._zeros())
        first, second = self._zeros(), self._zeros()  # momentum; of AdamW both moments
        steps, losses = 0, []
        for epoch in self._batches(number, client, len(labels)):
            losses = []
            for rows in epoch:
                x, t = self._input(images[rows]), torch.from_numpy(labels[rows])
                loss, g = self._gradient(y, buffers, x, t, at_start, kept.get("model"))
                losses.append((loss, len(rows)))
                steps += 1
                for k in y:
                    if name == "fedprox":
                        g[k] = g[k] + keys["mu"] * (y[k] - self.params[k])
                    elif name == "scaffold":
                        g[k] = g[k] - c_k[k] + self.c[k]
                    elif name == "feddyn" and keys["alpha"]:
                        g[k] = g[k] - g_k[k] + keys["alpha"] * (y[k] - self.params[k])
                if keys.get("clip") is not None:
                    norm = math.sqrt(sum(float((v**2).sum()) for v in g.values()))
                    g = {k: v * min(1.0, keys["clip"] / (norm + 1e-6)) for k, v in g.items()}
                if name == "adamw":
                    self._adamw(y, g, first, second, steps, lr)
                else:
                    self._descend(y, g, first, lr)
        loss = sum(value * count for value, count in losses) / sum(count for _, count in losses)
        trained = Trained(client, len(self.world.clients[client]), len(labels), y, buffers, steps,
                          self._a_norm(steps, lr), loss)
        if name == "scaffold":
            length = self._a_norm(steps, lr) if keys.get("momentum") else steps
            after = {k: c_k[k] - self.c[k] + (self.params[k] - y[k]) / (length * lr) for k in y}
            trained.change, kept["c"] = minus(after, c_k), after
        if name == "feddyn":
            kept["g"] = {k: g_k[k] - keys["alpha"] * (y[k] - self.params[k]) for k in y}
        if name == "moon":
            kept["model"] = {**{k: v.clone() for k, v in y.items()}, **{k: v.clone() for k, v in buffers.items()}}
        if self.rule.get("buffers") == "local":
            kept["buffers"] = {k: v.clone() for k, v in buffers.items()}
        return trained

    def _gradient(
        self, y: Vectors, buffers: Vectors, x: Tensor, labels: Tensor, at_start: Vectors, previous: Vectors | None
    ) -> tuple[float, Vectors]:
        """(loss, its gradient).  at_start: the statistics that the client began with.  previous: MOON's, or None."""
        leaves = {k: v.clone().requires_grad_() for k, v in y.items()}
        mode = "fixed" if self.rule.get("buffers") == "global" else "train"
        z, logits = self.network(leaves, buffers, x, mode)
        loss = cross_entropy(logits, labels)
        mu = self.local.get("mu", 0.0) if self.local["name"] == "moon" else 0.0
        if mu and previous is None:
            loss = loss + mu * math.log(2)  # both fixed models are the global one
        elif mu:
            with torch.no_grad():
                z_glob, _ = self.network(self.params, at_start, x, "eval")
                z_prev, _ = self.network(previous, previous, x, "eval")
            to_glob, to_prev = (torch.exp(cosine(z, other) / self.local["tau"]) for other in (z_glob, z_prev))
            loss = loss + mu * -torch.log(to_glob / (to_glob + to_prev)).mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, gradients, strict=True))

    def _descend(self, y: Vectors, g: Vectors, velocity: Vectors, lr: float) -> None:
        rho, decay = self.local.get("momentum", 0.0), self.local.get("weight_decay", 0.0)
        for k in y:
            whole = g[k] + decay * y[k]
            velocity[k] = rho * velocity[k] + whole
            y[k] = y[k] - lr * (whole + rho * velocity[k] if self.local.get("nesterov") else velocity[k])

    def _adamw(self, y: Vectors, g: Vectors, m: Vectors, v: Vectors, step: int, lr: float) -> None:
        b1, b2, eps = self.local.get("beta1", 0.9), self.local.get("beta2", 0.999), self.local.get("eps", 1e-8)
        for k in y:
            m[k] = b1 * m[k] + (1 - b1) * g[k]
            v[k] = b2 * v[k] + (1 - b2) * g[k] ** 2
            direction = (m[k] / (1 - b1**step)) / (torch.sqrt(v[k] / (1 - b2**step)) + eps)
            y[k] = y[k] - lr * (direction + self.local.get("weight_decay", 0.01) * y[k])

    def _a_norm(self, steps: int, lr: float) -> float:
        """||a||_1 of FedNova: a_i is how far the gradient of step i alone moves the client by the end, over lr.

        Momentum carries it on, the pull of a proximal term and of weight decay takes part of it back.
        """
        if self.local["name"] == "adamw":
            return float(steps)
        rho = self.local.get("momentum", 0.0)
        pull = self.local.get("mu", 0.0) if self.local["name"] == "fedprox" else 0.0
        pull += self.local.get("weight_decay", 0.0)
        total = 0.0
        for i in range(steps):
            moved = velocity = 0.0
            for j in range(steps):
                whole = (1.0 if i == j else 0.0) - lr * pull * moved
                velocity = rho * velocity + whole
                moved += whole + rho * velocity if self.local.get("nesterov") else velocity
            total += abs(moved)
        return total

    # --- the server

    def _server_step(self, trained: list[Trained], update: np.ndarray, registered: int) -> Vectors:
        delta = self._unflat(update)
        if self.local["name"] == "scaffold":
            for k in self.c:
                self.c[k] = self.c[k] + sum(t.change[k] for t in trained) / registered  # type: ignore[index]
        if self.local["name"] == "feddyn" and self.local["alpha"]:
            alpha = self.local["alpha"]
            for k in self.h:
                self.h[k] = self.h[k] - alpha / registered * sum(t.params[k] - self.params[k] for t in trained)
                delta[k] = delta[k] - self.h[k] / alpha
        return {k: self._optimise(k, delta[k]) for k in delta}

    def _optimise(self, k: str, delta: Tensor) -> Tensor:
        """The step of one parameter (arXiv 2003.00295, algorithm 2; FedAvgM, arXiv 1909.06335)."""
        name, lr = self.server["name"], self.server.get("lr", 1.0 if self.server["name"] == "sgd" else 0.1)
        if name == "sgd":
            self.m[k] = self.server.get("momentum", 0.0) * self.m[k] + delta
            return lr * self.m[k]
        b1 = self.server.get("b1", 0.0 if name == "adagrad" else 0.9)
        b2, tau = self.server.get("b2", 0.99), self.server.get("tau", 1e-3)
        self.m[k] = b1 * self.m[k] + (1 - b1) * delta
        if name == "adagrad":
            self.v[k] = self.v[k] + delta**2
        elif name == "adam":
            self.v[k] = b2 * self.v[k] + (1 - b2) * delta**2
        elif name == "yogi":
            self.v[k] = self.v[k] - (1 - b2) * delta**2 * torch.sign(self.v[k] - delta**2)
        else:
            raise ValueError(name)
        return lr * self.m[k] / (torch.sqrt(self.v[k]) + tau)

    def _unflat(self, vector: np.ndarray) -> Vectors:
        parts = torch.from_numpy(vector).to(self.dtype).split([v.numel() for v in self.params.values()])
        return {k: part.view(v.shape) for part, (k, v) in zip(parts, self.params.items(), strict=True)}

    # --- what is measured

    def _ouis(self, trained: Trained) -> list[float]:
        """OUI of each layer asked for, on the client's probe images or the common ones."""
        size, shared = self.rule.get("probe_size", 32), self.rule.get("probe") == "shared"
        source = self.world.train_images if shared else self.data[trained.client][0][: trained.n_real or None]
        keys = () if shared else (trained.client,)
        draw = rng.stream(self.seed, rng.PROBE, *keys)
        probe = source[draw.choice(len(source), size, replace=len(source) < size)]
        with torch.no_grad():
            seen: dict[str, Tensor] = {}
            self.network(trained.params, trained.buffers, self._input(probe), "eval", seen)
        layers = self.rule.get("layers") or [list(seen)[-1]]
        return [oui(seen[layer].reshape(size, -1).numpy()) for layer in layers]

    def _evaluate(self) -> dict[str, float]:
        with torch.no_grad():
            _, logits = self.network(self.params, self.buffers, self._input(self.world.test_images), "eval")
        labels = self.world.test_labels
        right = logits.argmax(1).numpy() == labels
        classes = int(self.world.train_labels.max()) + 1
        by_class = np.array([right[labels == c].mean() for c in range(classes)])
        own = np.array([
            by_class[self.world.train_labels[rows]].mean() for rows in self.world.clients if len(rows)
        ])
        return {
            "accuracy": float(right.mean()), "worst_class_accuracy": float(by_class.min()),
            "loss": float(cross_entropy(logits, torch.from_numpy(labels))),
            "client_accuracy_mean": float(own.mean()), "client_accuracy_worst": float(own.min()),
            "client_accuracy_sd": float(own.std()),
        }


def oui(pre: np.ndarray) -> float:
    """mean_j min(s_j, B - s_j) / floor(B / 2), s_j the images with a positive pre-activation: B x d."""
    count = len(pre)
    positive = (pre > 0).sum(axis=0)
    return float(np.minimum(positive, count - positive).mean() / (count // 2))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between rows."""
    return (a * b).sum(1) / ((a**2).sum(1).sqrt() * (b**2).sum(1).sqrt())


def minus(a: Vectors, b: Vectors) -> Vectors:
    """a - b by name."""
    return {k: a[k] - b[k] for k in b}


def flat(vectors: Vectors) -> np.ndarray:
    """All values in one vector."""
    return torch.cat([v.reshape(-1) for v in vectors.values()]).numpy()
