"""Aggregation rules of the second simulator, from the papers' equations."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.integrate import quad
from scipy.special import digamma, polygamma

Array = np.ndarray


@dataclass
class Memory:
    """What FedOUI keeps from round to round: each client's smoothed OUIs, the OUIs of earlier rounds (by layer)."""

    means: dict[int, list[float]] = field(default_factory=dict)
    pools: list[list[list[float]]] = field(default_factory=list)


def combine(
    rule: dict[str, Any], cohort: list[int], n: Array, all_n: Array, deltas: Array, a_norms: Array,
    ouis: list[list[float]] | None, memory: Memory,
) -> tuple[Array, Array | None, Array]:
    """(weights, scores or None, combined update): K, K, P.  all_n: sizes of all registered clients."""
    name, count = rule["name"], len(n)
    wide = deltas.astype(np.float64)
    if name in ("median", "trimmed_mean"):
        ordered = np.sort(wide, axis=0)
        if name == "median":
            update = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        else:
            cut = math.floor(rule["trim"] * count + 1e-9)
            update = sum(ordered[cut : count - cut]) / (count - 2 * cut)
        return np.full(count, 1 / count), None, update
    weights, scores = _weights(rule, cohort, n, all_n, wide, a_norms, ouis, memory)
    return weights, scores, sum(w * d for w, d in zip(weights, wide, strict=True))


def _weights(
    rule: dict[str, Any], cohort: list[int], n: Array, all_n: Array, deltas: Array, a_norms: Array,
    ouis: list[list[float]] | None, memory: Memory,
) -> tuple[Array, Array | None]:
    name, count = rule["name"], len(n)
    p = n / n.sum()
    if name == "fedavg":
        return p, None
    if name == "uniform":
        return np.full(count, 1 / count), None
    if name == "fixed_denominator":  # w_k = min(n_k, cap) / (q sum_j min(n_j, cap)), j over all registered clients
        cap = rule.get("cap") or np.inf
        return np.minimum(n, cap) / (count / len(all_n) * np.minimum(all_n, cap).sum()), None
    if name == "fednova":  # x <- x - tau_eff sum p_k (x - y_k) / ||a_k||_1
        return p / a_norms * (p * a_norms).sum(), a_norms
    if name in ("krum", "multi_krum"):
        byzantine = rule.get("byzantine", 1)
        kept = 1 if name == "krum" else rule.get("keep") or count - byzantine
        distances = ((deltas[:, None] - deltas[None]) ** 2).sum(axis=2)
        scores = np.array([np.sort(np.delete(distances[k], k))[: count - byzantine - 2].sum() for k in range(count)])
        chosen = np.argsort(scores, kind="stable")[:kept]
        return np.isin(np.arange(count), chosen) / kept, -scores
    raw = n ** rule.get("rho", 1.0)
    eps = rule.get("eps", 1e-3)
    scores = None
    if name in ("fedoui", "fedoui_align"):
        assert ouis is not None
        scores = oui_scores(rule, cohort, ouis, memory)
        raw = raw * (scores + eps) ** rule.get("gamma", 1.0)
    if name in ("fedalign", "fedoui_align"):
        mean = sum(p_k * d for p_k, d in zip(p, deltas, strict=True))
        a = np.array([max(0.0, _cosine(d, mean)) for d in deltas])
        scores = a if scores is None else scores
        raw = raw * (a + eps) ** rule.get("eta", 1.0)
    return raw / raw.sum(), scores


def _cosine(a: Array, b: Array) -> float:
    size = math.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / size) if size > 0 else 0.0


def oui_scores(rule: dict[str, Any], cohort: list[int], ouis: list[list[float]], memory: Memory) -> Array:
    """s_k = 2 min(F(o_k), 1 - F(o_k)), the mean over layers."""
    ema = rule.get("ema")
    smooth = [list(own) for own in ouis]
    if ema is not None:
        for own, client in zip(smooth, cohort, strict=True):
            before = memory.means.get(client, own)
            own[:] = [ema * b + (1 - ema) * o for b, o in zip(before, own, strict=True)]
            memory.means[client] = list(own)
    by_layer = np.array(smooth).T.tolist()
    memory.pools = [*memory.pools, by_layer][-rule.get("window", 1) :]
    scores = []
    for layer, own in enumerate(by_layer):
        pool = [value for earlier in memory.pools for value in earlier[layer]]
        scores.append(_scores_of_layer(np.array(own), np.array(pool), rule.get("fit", "moments")))
    return np.mean(scores, axis=0)


def _scores_of_layer(o: Array, pool: Array, fit: str) -> Array:
    if len(o) == 1:
        return np.ones(1)
    x = np.clip(pool, 1e-3, 1 - 1e-3)
    if np.ptp(x) > 1e-9:
        ab = moments(x) if fit == "moments" else None
        ab = ab or likelihood(x)
        cdf = np.array([beta_cdf(float(v), *ab) for v in np.clip(o, 1e-4, 1 - 1e-4)])
    else:  # no Beta fits equal values: average rank / (K + 1)
        less, equal = (o[None] < o[:, None]).sum(axis=1), (o[None] == o[:, None]).sum(axis=1)
        cdf = (less + (equal + 1) / 2) / (len(o) + 1)
    return 2 * np.minimum(cdf, 1 - cdf)


def moments(x: Array) -> tuple[float, float] | None:
    """c = m (1 - m) / v - 1, a = m c, b = (1 - m) c; None where c is not positive."""
    m = float(x.sum()) / len(x)
    v = float(((x - m) ** 2).sum()) / (len(x) - 1)
    c = m * (1 - m) / v - 1
    return (m * c, (1 - m) * c) if c > 0 else None


def likelihood(x: Array) -> tuple[float, float]:
    """Newton's method on digamma(a) - digamma(a + b) = mean ln x, digamma(b) - digamma(a + b) = mean ln (1 - x)."""
    wanted = np.array([np.log(x).mean(), np.log1p(-x).mean()])
    theta = np.array(moments(x) or (1.0, 1.0))
    for _ in range(200):
        a, b = theta
        error = digamma(theta) - digamma(a + b) - wanted
        slope = np.diag(polygamma(1, theta)) - polygamma(1, a + b)
        step = np.linalg.solve(slope, error)
        while (theta - step <= 0).any():
            step = step / 2
        theta = theta - step
        if np.abs(step).max() < 1e-12 * theta.max():
            break
    return float(theta[0]), float(theta[1])


def beta_cdf(x: float, a: float, b: float) -> float:
    """integral_0^x t^(a - 1) (1 - t)^(b - 1) dt / B(a, b), by quadrature of the smaller side."""
    if x > a / (a + b):
        return 1 - beta_cdf(1 - x, b, a)
    log_b = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    if a < 1:  # with u = t^a, which has no pole at 0
        area, _ = quad(lambda u: (1 - u ** (1 / a)) ** (b - 1), 0, x**a, epsabs=1e-13, epsrel=1e-11, limit=200)
        return area / a * math.exp(-log_b)
    spread = math.sqrt(a * b / (a + b + 1)) / (a + b)

    def density(t: float) -> float:
        return math.exp((a - 1) * math.log(t) + (b - 1) * math.log1p(-t) - log_b) if t > 0 else 0.0

    area, _ = quad(density, max(0.0, x - 40 * spread), x, epsabs=1e-13, epsrel=1e-11, limit=200)
    return area
