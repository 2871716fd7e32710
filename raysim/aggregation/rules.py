"""Aggregation rules: from a round's per-client scalars to the weight of each client's update.

A rule is a dataclass with `needs` (the columns of the round table it reads), `streams` (whether n_K alone decides, so
that updates can be summed while clients still train) and `weights`. `robust` marks those that bound what a few clients
can do, as all with `aggregate` do. Three methods are optional: `check(participants)`
refuses a cohort it cannot work with, before the run; `state` and `load_state` carry what it remembers from earlier
rounds, as plain JSON values; `aggregate(table, updates)` gives the combined update of a rule that weighs coordinates
rather than clients. No rule ever sees one client's update: `Updates` answers with scalars and sums.
"""

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from raysim.aggregation.weighing import (
    Updates,
    alignment,
    check_krum,
    coordinate_median,
    coordinate_trimmed_mean,
    krum_scores,
    normalise,
    score,
)
from raysim.core.errors import DivergenceError, UserError
from raysim.core.records import FloatArray, RoundTable, Weights

__all__ = [
    "fedalign", "fedavg", "fednova", "fedoui", "fedoui_align", "krum", "median", "multi_krum", "trimmed_mean", "uniform"
]

Exponent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Rho = Annotated[Exponent, Field(description="exponent of the client's number of samples; 0: size does not count")]
Gamma = Annotated[Exponent, Field(description="exponent of the OUI score; 0 is fedavg")]
Eta = Annotated[Exponent, Field(description="exponent of the alignment; 0 switches it off")]
Eps = Annotated[float, Field(ge=0, le=1, description="added to every score, so that no client is silenced")]
Byzantine = Annotated[int, Field(ge=0, description="how many participants of a round may be arbitrary; needs 2 f + 3")]


@dataclass
class fedavg:
    """Weigh each client by its number of samples (McMahan et al., arXiv 1602.05629).

    w_k = n_k / sum of n over the clients of the round.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Weights of K clients; raises RunError where their total is 0."""
        return Weights(normalise(table, table.n_K.astype(np.float64)))


@dataclass
class uniform:
    """Weigh every client of the round alike: w_k = 1 / K."""

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = True

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Weights of K clients; raises RunError where there is none."""
        return Weights(normalise(table, np.ones(len(table.n_K))))


@dataclass
class fednova:
    """Average the clients' updates per local step, so that many steps do not buy influence (FedNova, arXiv 2007.07481).

    x <- x - tau_eff sum_k p_k (x - y_k) / ||a_k||_1,  so w_k = p_k tau_eff / ||a_k||_1,  with
    p_k = n_k / sum_j n_j,  tau_eff = sum_k p_k ||a_k||_1,  ||a_k||_1 the client's effective steps.
    w sums to 1 where all take equally many steps, which is fedavg, else to more, up to K where steps go by size.
    """

    needs: ClassVar[tuple[str, ...]] = ("effective_steps",)
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Weights of K clients, the effective steps as scores; raises RunError where there is no sample."""
        n_K, a_K = table.n_K.astype(np.float64), table.columns["effective_steps"]
        p_K = normalise(table, n_K)
        tau_eff = math.fsum(n_K * a_K) / math.fsum(n_K)
        w_K = p_K * (tau_eff / a_K)
        return Weights(w_K, a_K, {"tau_eff": tau_eff, "weight_sum": math.fsum(w_K)})


@dataclass
class fedoui:
    """Weigh clients by size and by how typical the activation structure of their model is (FedOUI, arXiv 2605.11571).

    o_k: the client's OUI.  Beta(a, b) is fitted to the round's OUIs, F is its CDF:
        s_k = 2 min(F(o_k), 1 - F(o_k));  w_k = n_k^rho (s_k + eps)^gamma / sum_j n_j^rho (s_j + eps)^gamma
    With `ema` each o_k is first smoothed over the rounds its client took part in, o <- ema o_before + (1 - ema) o; with
    `window` W the OUIs of the last W rounds enter the fit. With several `layers` the scores of the layers are averaged:
    the table then has a column `oui.LAYER` for each. `weights` is to be called once per round, in order.
    """

    rho: Rho = 1.0
    gamma: Gamma = 1.0
    eps: Eps = 1e-3
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
        """Weights of K clients; raises DivergenceError for an OUI that is not finite, RunError for a total of 0."""
        s_K, info = self._scores(table)
        return Weights(normalise(table, _size(table, self.rho) * (s_K + self.eps) ** self.gamma), s_K, info)

    def state(self) -> dict[str, Any]:
        """What the rule remembers of earlier rounds, as JSON values."""
        return copy.deepcopy({"means": self._means, "pools": self._pools})

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up where `state` left off."""
        self._means, self._pools = copy.deepcopy(state["means"]), copy.deepcopy(state["pools"])

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
class fedalign:
    """Weigh clients by size and by the cosine of their update with the size-weighted mean update (FedOUI's baseline).

    Not the client-side FedAlign of CVPR 2022.  Delta_bar = sum_k n_k Delta_k / sum_j n_j;
        a_k = max(0, cos(Delta_k, Delta_bar)), 0 for a zero vector;  w_k = n_k^rho (a_k + eps)^eta / sum_j (...)
    """

    eta: Eta = 1.0
    eps: Eps = 1e-3
    rho: Rho = 1.0

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """Weights of K clients, the alignments as scores; raises RunError where the total is 0."""
        a_K = alignment(table, updates)
        return Weights(normalise(table, _size(table, self.rho) * (a_K + self.eps) ** self.eta), a_K)


@dataclass
class fedoui_align(fedoui):
    """FedOUI times the alignment factor of fedalign (arXiv 2605.11571).

    w_k = n_k^rho (s_k + eps)^gamma (a_k + eps)^eta / sum_j (...), s_k as in fedoui, a_k as in fedalign.
    """

    eta: Eta = 1.0

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """Weights of K clients, the OUI scores as scores; raises as fedoui does."""
        s_K, info = self._scores(table)
        a_K = alignment(table, updates)
        raw_K = _size(table, self.rho) * (s_K + self.eps) ** self.gamma * (a_K + self.eps) ** self.eta
        return Weights(normalise(table, raw_K), s_K, info)


@dataclass
class krum:
    """Take the one update that is closest to its K - f - 2 nearest others (Krum, arXiv 1703.02757)."""

    byzantine: Byzantine = 1

    needs: ClassVar[tuple[str, ...]] = ()
    robust: ClassVar[bool] = True
    streams: ClassVar[bool] = False

    def check(self, participants: int) -> None:
        """Raises UserError unless K >= 2 f + 3, the condition of the paper's proposition 4.2."""
        check_krum(participants, self.byzantine)

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """Weight 1 for the chosen client (of equals the one with the lowest id); scores are minus the distances."""
        return _krum(table, updates, self.byzantine, keep=1)


@dataclass
class multi_krum(krum):
    """Average the m updates that Krum ranks best (multi-Krum, arXiv 1703.02757, section 5)."""

    keep: Annotated[int | None, Field(ge=1, description="updates averaged, m; null: K - f")] = None

    def check(self, participants: int) -> None:
        """Raises UserError unless K >= 2 f + 3 and m <= K."""
        super().check(participants)
        if self.keep is not None and self.keep > participants:
            raise UserError(f"aggregation.keep: {self.keep} updates of {participants} clients per round; lower it")

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """Weight 1 / m for each chosen client; scores are minus the distances."""
        self.check(len(table.n_K))
        return _krum(table, updates, self.byzantine, self.keep or len(table.n_K) - self.byzantine)


@dataclass
class median:
    """The median of the clients' updates in each coordinate (Yin et al., arXiv 1803.01498, option I)."""

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Equal weights: every client has the same say in `aggregate`, which gives the update."""
        return Weights(normalise(table, np.ones(len(table.n_K))))

    def aggregate(self, table: RoundTable, updates: Updates) -> FloatArray:  # noqa: ARG002
        """The combined update: P."""
        return updates.by_coordinate(coordinate_median)


@dataclass
class trimmed_mean:
    """The mean of each coordinate without its lowest and highest values (Yin et al., arXiv 1803.01498, option II).

    floor(trim K) values are dropped at each end; `info` says how many, which is none for a small cohort.
    """

    trim: Annotated[float, Field(ge=0, lt=0.5, description="fraction of the clients dropped at each end")] = 0.1

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Equal weights: every client has the same say in `aggregate`, which gives the update."""
        dropped = float(self._dropped(len(table.n_K)))
        return Weights(normalise(table, np.ones(len(table.n_K))), info={"dropped_per_end": dropped})

    def aggregate(self, table: RoundTable, updates: Updates) -> FloatArray:
        """The combined update: P."""
        return updates.by_coordinate(partial(coordinate_trimmed_mean, dropped=self._dropped(len(table.n_K))))

    def _dropped(self, participants: int) -> int:
        # 0.29 * 100 is 28.999999999999996, which must not lose a client.
        return min(math.floor(self.trim * participants + 1e-9), (participants - 1) // 2)


def _column(table: RoundTable, name: str) -> FloatArray:
    """A column of OUIs in [0, 1]."""
    if name not in table.columns:
        raise ValueError(f"the round table has no column {name!r}; it has {sorted(table.columns)}")
    for client, value in zip(table.client_K.tolist(), table.columns[name].tolist(), strict=True):
        if not 0 <= value <= 1:
            raise DivergenceError(client, table.round, f"{name} is {value}, not a number in [0, 1]")
    return table.columns[name]


def _size(table: RoundTable, rho: float) -> FloatArray:
    return np.power(table.n_K.astype(np.float64), rho)


def _krum(table: RoundTable, updates: Updates | None, byzantine: int, keep: int) -> Weights:
    check_krum(len(table.n_K), byzantine)
    if updates is None:
        raise ValueError("krum needs the clients' updates")
    score_K = krum_scores(updates.gram(), byzantine)
    chosen_K = np.zeros(len(score_K))
    chosen_K[np.argsort(score_K, kind="stable")[:keep]] = 1
    return Weights(normalise(table, chosen_K), -score_K)
