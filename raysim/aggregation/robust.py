"""Robust rules: a few arbitrary clients can change the combined update only within bounds."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from raysim.aggregation.common import normalise
from raysim.config.protocols import AggregationRule, Updates
from raysim.core.errors import UserError
from raysim.core.records import FloatArray, RoundTable, Weights

__all__ = ["krum", "median", "multi_krum", "trimmed_mean"]

Byzantine = Annotated[int, Field(ge=0, description="how many participants of a round may be arbitrary; needs 2 f + 3")]


@dataclass
class krum(AggregationRule):
    """Take the one update that is closest to its K - f - 2 nearest others (Krum, arXiv 1703.02757)."""

    byzantine: Byzantine = 1

    needs: ClassVar[tuple[str, ...]] = ()
    robust: ClassVar[bool] = True
    streams: ClassVar[bool] = False

    def check(self, participants: int) -> None:
        """Raise UserError unless K >= 2 f + 3, the condition of the paper's proposition 4.2."""
        check_krum(participants, self.byzantine)

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """Give weight 1 to the chosen client (of equals the one with the lowest id); scores are minus the distances."""
        return _krum(table, updates, self.byzantine, keep=1)


@dataclass
class multi_krum(krum):
    """Average the m updates that Krum ranks best (multi-Krum, arXiv 1703.02757, section 5)."""

    keep: Annotated[int | None, Field(ge=1, description="updates averaged, m; null: K - f")] = None

    def check(self, participants: int) -> None:
        """Raise UserError unless K >= 2 f + 3 and m <= K."""
        super().check(participants)
        if self.keep is not None and self.keep > participants:
            raise UserError(f"aggregation.keep: {self.keep} updates of {participants} clients per round; lower it")

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:
        """Give weight 1 / m to each chosen client; scores are minus the distances."""
        self.check(len(table.n_K))
        return _krum(table, updates, self.byzantine, self.keep or len(table.n_K) - self.byzantine)


@dataclass
class median(AggregationRule):
    """The median of the clients' updates in each coordinate (Yin et al., arXiv 1803.01498, option I)."""

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Give all clients equal weights; `aggregate` computes the update."""
        return Weights(normalise(table, np.ones(len(table.n_K))))

    def aggregate(self, table: RoundTable, updates: Updates) -> FloatArray:  # noqa: ARG002
        """Compute the combined update: P."""
        return updates.by_coordinate(coordinate_median)


@dataclass
class trimmed_mean(AggregationRule):
    """The mean of each coordinate without its lowest and highest values (Yin et al., arXiv 1803.01498, option II).

    floor(trim K) values are dropped at each end; `info` says how many, which is none for a small cohort.
    """

    trim: Annotated[float, Field(ge=0, lt=0.5, description="fraction of the clients dropped at each end")] = 0.1

    needs: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False

    def weights(self, table: RoundTable, updates: Updates | None) -> Weights:  # noqa: ARG002
        """Give all clients equal weights; `aggregate` computes the update."""
        dropped = float(self._dropped(len(table.n_K)))
        return Weights(normalise(table, np.ones(len(table.n_K))), info={"dropped_per_end": dropped})

    def aggregate(self, table: RoundTable, updates: Updates) -> FloatArray:
        """Compute the combined update: P."""
        return updates.by_coordinate(partial(coordinate_trimmed_mean, dropped=self._dropped(len(table.n_K))))

    def _dropped(self, participants: int) -> int:
        # 0.29 * 100 is 28.999999999999996, which must not lose a client.
        return min(math.floor(self.trim * participants + 1e-9), (participants - 1) // 2)


def check_krum(participants: int, byzantine: int) -> None:
    """Raise UserError unless K >= 2 f + 3, where K is `participants` and f is `byzantine`."""
    if participants < 2 * byzantine + 3:
        raise UserError(
            f"aggregation.byzantine: {byzantine} needs at least {2 * byzantine + 3} clients per round, there are "
            f"{participants}; raise clients_per_round or lower byzantine to at most {max(0, (participants - 3) // 2)}"
        )


def krum_scores(gram_KK: FloatArray, byzantine: int) -> FloatArray:
    """Sum of each update's squared distances to its K - f - 2 nearest others (arXiv 1703.02757): K; less is better."""
    square_K = np.diagonal(gram_KK)
    distance_KK = np.maximum(0, square_K[:, None] + square_K[None, :] - 2 * gram_KK)
    np.fill_diagonal(distance_KK, np.inf)  # a client is not its own neighbour
    nearest: FloatArray = np.sort(distance_KK, axis=1)[:, : len(gram_KK) - byzantine - 2]
    score_K: FloatArray = nearest.sum(axis=1)
    return score_K


def coordinate_median(values_Kp: FloatArray) -> FloatArray:
    """The median over clients of each coordinate, K x p -> p."""
    middle_p: FloatArray = np.median(values_Kp, axis=0)
    return middle_p


def coordinate_trimmed_mean(values_Kp: FloatArray, dropped: int) -> FloatArray:
    """The mean over clients of each coordinate without its `dropped` lowest and highest values, K x p -> p."""
    kept = np.sort(values_Kp, axis=0)[dropped : len(values_Kp) - dropped]
    mean_p: FloatArray = kept.mean(axis=0)
    return mean_p


def _krum(table: RoundTable, updates: Updates | None, byzantine: int, keep: int) -> Weights:
    check_krum(len(table.n_K), byzantine)
    if updates is None:
        raise ValueError("krum needs the clients' updates")
    score_K = krum_scores(updates.gram(), byzantine)
    chosen_K = np.zeros(len(score_K))
    chosen_K[np.argsort(score_K, kind="stable")[:keep]] = 1
    return Weights(normalise(table, chosen_K), -score_K)
