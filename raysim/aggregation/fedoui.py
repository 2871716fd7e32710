"""FedOUI and gradient alignment: weights computed from the clients' models and updates (arXiv 2605.11571)."""

import copy
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from raysim.aggregation.common import Eps, Exponent, Rho, normalise, size_factor
from raysim.config.markers import OnlyWith
from raysim.config.protocols import AggregationRule, Updates
from raysim.core.errors import DivergenceError
from raysim.core.plain import PlainDict
from raysim.core.records import FloatArray, RoundTable, Weights

__all__ = ["fedalign", "fedoui", "fedoui_align"]

Gamma = Annotated[Exponent, Field(description="exponent of the OUI score; 0 is fedavg")]
Eta = Annotated[Exponent, Field(description="exponent of the alignment; 0 switches it off")]

CLIP_FIT = 1e-3  # a Beta fit diverges on values of exactly 0 or 1
CLIP_CDF = 1e-4
CANCELLED = 2.0**-23  # a mean update whose length relative to its addends is below this may be rounding error alone
RESOLUTION = 1e-9  # OUIs closer than this are equal: the Beta CDF is not precise enough to order them


@dataclass
class fedoui(AggregationRule):
    """Weight clients by size and by how typical the activation structure of their model is (FedOUI, arXiv 2605.11571).

    o_k: the client's OUI.  Beta(a, b) is fitted to the round's OUIs, F is its CDF:
        s_k = 2 min(F(o_k), 1 - F(o_k));  w_k = n_k^rho (s_k + eps)^gamma / sum_j n_j^rho (s_j + eps)^gamma
    With `ema` each o_k is first smoothed over the rounds its client took part in, o <- ema o_before + (1 - ema) o; with
    `window` W the OUIs of the last W rounds enter the fit. With several `layers` the scores of the layers are averaged:
    the table then has a column `oui.LAYER` for each. `weights` is to be called once per round, in order.
    """

    rho: Rho = 1.0
    gamma: Gamma = 1.0
    eps: Annotated[Eps, OnlyWith("gamma")] = 1e-3
    fit: Annotated[Literal["moments", "mle"], Field(description="how the Beta distribution is fitted")] = "moments"
    probe: Annotated[Literal["client", "shared"], Field(description="images that OUI is measured on")] = "client"
    probe_size: Annotated[int, Field(ge=2, le=65536, description="images in the probe batch")] = 32
    layers: Annotated[
        list[str] | None, Field(min_length=1, description="module names to measure; null: the last hidden activation")
    ] = None
    window: Annotated[int, Field(ge=1, description="rounds whose OUIs enter the fit")] = 1
    ema: Annotated[float | None, Field(gt=0, lt=1, description="weight of a client's earlier OUIs; null: none")] = None

    needs: ClassVar[tuple[str, ...]] = ("oui",)
    streams: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._means: dict[str, dict[str, float]] = {}
        self._pools: dict[str, list[list[float]]] = {}

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """The weights of K clients; raises DivergenceError for an OUI that is not finite, RunError for a total of 0."""
        s_K, info = self._scores(table)
        return Weights(normalise(table, size_factor(table, self.rho) * (s_K + self.eps) ** self.gamma), s_K, info)

    def needs_samples(self) -> bool:
        """Whether size counts: n_k^0 is 1 for an empty client, too."""
        return self.rho > 0

    def state(self) -> PlainDict:
        """The values that the rule keeps from earlier rounds, for JSON."""
        return copy.deepcopy({"means": self._means, "pools": self._pools})

    def load_state(self, state: PlainDict) -> None:
        """Continue from the values that `state` returned."""
        self._means = copy.deepcopy(state["means"])
        self._pools = copy.deepcopy(state["pools"])

    def _scores(self, table: RoundTable) -> tuple[FloatArray, dict[str, float | str]]:
        several = self.layers is not None and len(self.layers) > 1
        columns = [f"oui.{layer}" for layer in self.layers or []] if several else ["oui"]
        scores, info = [], {}
        for column in columns:
            o_K = self._smooth(column, table, _column(table, column))
            pool = [*self._pools.get(column, []), o_K.tolist()][-self.window :]
            self._pools[column] = pool if self.window > 1 else []
            s_K, fit = score(o_K, np.concatenate(pool), self.fit)
            scores.append(s_K)
            info.update({name + column.removeprefix("oui"): value for name, value in fit.items()})
        return np.mean(scores, axis=0), info

    def _smooth(self, column: str, table: RoundTable, o_K: FloatArray) -> FloatArray:
        if self.ema is None:
            return o_K
        mean = self._means.setdefault(column, {})
        for client, o in zip(table.client_K.tolist(), o_K.tolist(), strict=True):
            before = mean.get(str(client), o)
            mean[str(client)] = o if before == o else self.ema * before + (1 - self.ema) * o
        return np.array([mean[str(client)] for client in table.client_K.tolist()])


@dataclass
class fedalign(AggregationRule):
    """Weight clients by size and by the cosine of their update with the size-weighted mean update (FedOUI's baseline).

    This is not the client-side FedAlign of CVPR 2022.  Delta_bar = sum_k n_k Delta_k / sum_j n_j;
        a_k = max(0, cos(Delta_k, Delta_bar)), 0 for a zero vector;  w_k = n_k^rho (a_k + eps)^eta / sum_j (...)
    """

    eta: Eta = 1.0
    eps: Annotated[Eps, OnlyWith("eta")] = 1e-3
    rho: Rho = 1.0

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """The weights of K clients, with the alignments as scores; raises RunError where the total is 0."""
        a_K = alignment(table, updates)
        return Weights(normalise(table, size_factor(table, self.rho) * (a_K + self.eps) ** self.eta), a_K)

    def needs_samples(self) -> bool:
        """True, because the mean update with which alignment is measured is weighted by size."""
        return True


@dataclass
class fedoui_align(fedoui):
    """FedOUI times the alignment factor of fedalign (arXiv 2605.11571).

    w_k = n_k^rho (s_k + eps)^gamma (a_k + eps)^eta / sum_j (...), s_k as in fedoui, a_k as in fedalign.
    """

    eps: Annotated[Eps, OnlyWith("gamma"), OnlyWith("eta")] = 1e-3
    eta: Eta = 1.0

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """The weights of K clients, with the OUI scores as scores; raises the errors of fedoui."""
        s_K, info = self._scores(table)
        a_K = alignment(table, updates)
        raw_K = size_factor(table, self.rho) * (s_K + self.eps) ** self.gamma * (a_K + self.eps) ** self.eta
        return Weights(normalise(table, raw_K), s_K, info)

    def needs_samples(self) -> bool:
        """True, because the mean update with which alignment is measured is weighted by size."""
        return True


def alignment(table: RoundTable, updates: Updates | None) -> FloatArray:
    """a_k = max(0, cos(Delta_k, Delta_bar)) with the size-weighted mean update: K; 0 where either vector is zero.

    Where updates cancel, the mean consists of rounding errors, whose direction has no meaning. Rounding each update to
    float32 changes the mean by at most 2^-24 sum_k p_k ||Delta_k||; a mean of less than twice that counts as zero.
    """
    if updates is None:
        raise ValueError("alignment needs the clients' updates")
    p_K = normalise(table, table.n_K.astype(np.float64))
    mean_P = updates.weighted_sum(p_K)
    norm_K = updates.norms()
    a_K = np.zeros(len(p_K))
    length = math.sqrt(np.square(mean_P).sum())  # no BLAS: its bits depend on the thread count
    if length <= CANCELLED * math.fsum(p_K * norm_K):
        return a_K
    scale_K = norm_K * length
    np.divide(updates.dot(mean_P), scale_K, out=a_K, where=scale_K > 0)
    return np.clip(a_K, 0, 1)


def score(o_K: FloatArray, pool: FloatArray, fit: str) -> tuple[FloatArray, dict[str, float | str]]:
    """How typical each OUI is of the pool: (s_K in [0, 1], 1 at the median; the mode and parameters of the fit).

    o_K: the OUIs of this round.  pool: the OUIs that the fit uses.  The mode is the first of these that works: `fit`
    (moments or mle), mle, ranks; a single participant has score 1.
    """
    if len(o_K) == 1:
        return np.ones(1), {"fit_mode": "single"}
    x = np.sort(np.clip(pool, CLIP_FIT, 1 - CLIP_FIT))  # sorted: the order of clients must not reach the sums
    for mode in dict.fromkeys([fit, "mle"]):
        ab = _FITS[mode](x) if x[-1] - x[0] > RESOLUTION else None
        s_K = _two_sided(o_K, *ab) if ab else None
        if ab and s_K is not None and np.isfinite(s_K).all():
            return s_K, {"fit_mode": mode, "fit_a": ab[0], "fit_b": ab[1]}
    rounded_K = np.round(o_K / RESOLUTION)
    ordered_K = np.sort(rounded_K)
    left_K = np.searchsorted(ordered_K, rounded_K)
    right_K = np.searchsorted(ordered_K, rounded_K, side="right")
    p_K = (left_K + right_K + 1) / 2 / (len(o_K) + 1)  # average rank / (K + 1)
    return 2 * np.minimum(p_K, 1 - p_K), {"fit_mode": "ranks"}


def _moments(x: FloatArray) -> tuple[float, float] | None:
    """Beta(a, b) with the mean and the variance (ddof 1) of x; None where no such Beta exists."""
    m = float(x.mean())
    v = float(x.var(ddof=1))
    c = m * (1 - m) / v - 1
    return (m * c, (1 - m) * c) if c > 0 else None


def _mle(x: FloatArray) -> tuple[float, float] | None:
    """Beta(a, b) of largest likelihood on [0, 1]; None where the solver fails."""
    from scipy import stats

    try:
        with np.errstate(all="ignore"):
            a, b, _, _ = stats.beta.fit(x, floc=0, fscale=1)
    except (stats.FitError, ValueError, ArithmeticError):
        return None
    return (float(a), float(b)) if math.isfinite(a) and math.isfinite(b) and min(a, b) > 0 else None


_FITS = {"moments": _moments, "mle": _mle}


def _two_sided(o_K: FloatArray, a: float, b: float) -> FloatArray:
    from scipy.special import betainc

    F_K = betainc(a, b, np.clip(o_K, CLIP_CDF, 1 - CLIP_CDF))
    s_K: FloatArray = 2 * np.minimum(F_K, 1 - F_K)
    return s_K


def _column(table: RoundTable, name: str) -> FloatArray:
    """A column of OUIs in [0, 1]."""
    if name not in table.columns:
        raise ValueError(f"the round table has no column {name!r}; it has {sorted(table.columns)}")
    for client, value in zip(table.client_K.tolist(), table.columns[name].tolist(), strict=True):
        if not 0 <= value <= 1:
            raise DivergenceError(client, table.round, f"{name} is {value}, not a number in [0, 1]")
    return table.columns[name]
