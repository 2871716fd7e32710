"""Client-level differential privacy: how much noise a run adds, and what it may and may not claim to protect.

Who is protected: a client as a whole. Neighbouring runs differ in all samples of one client (replace-one); the number
of clients, and how many samples each has, are public and the same in both. Against whom: whoever sees the global models
(noise at the server), or also the client's own updates (noise at the client).

Noise at the server.  The noise and every weight must be the same in all cohorts, or the level of the noise itself
reveals the cohort, and drawing cohorts at random hides nothing. So a rule must give, before the run, the weight of each
registered client in every cohort (`constant_weights`), and the noise of all rounds is
    N(0, (z clip w_max)^2) on each coordinate,  w_max the largest weight over ALL registered clients,
z the `noise_multiplier`. Replacing one client, or giving its place in a cohort to another, changes the sum by at most
2 clip w_max: z / 2 in units of the sensitivity. Cohorts have a fixed size and are drawn without replacement, which
amplifies privacy (arXiv 1808.00087) as long as nobody learns who took part and clients keep nothing between rounds.
Where clients do keep something, cohorts count as known, and epsilon is that of the client that takes part most often.

Noise at the client.  N(0, (z clip)^2) is added to each update before it is sent: z / 2 again, for each of the rounds in
which the client takes part. What is computed from the sent updates and from sizes costs no more privacy, so a rule may
weigh by them as it likes. A rule may not read what clients report without noise (OUIs, steps, whether they clipped):
its weights, and with them the level of the noise in the published model, would tell of it. So it reads a table of
sizes alone, and one that declares or may have such needs is refused.
"""

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.config.schema import Update
from raysim.core.errors import RunError, UserError
from raysim.core.plain import PlainDict
from raysim.core.records import FloatArray, IntArray

if TYPE_CHECKING:
    import pandas as pd

    from raysim.config.protocols import AggregationRule, LocalAlgorithm

_REMEDY = (
    "use aggregation.name=uniform, or aggregation.name=fixed_denominator, which weighs by size with a denominator that "
    "no cohort changes"
)
_CLIENT_REMEDY = (
    "use a rule that reads sizes and the sent updates alone: fedavg, uniform, fixed_denominator, fedalign, krum, "
    "multi_krum, median or trimmed_mean"
)


def require_library() -> None:
    """Raise UserError, saying how to install it, where the package dp-accounting is missing."""
    if find_spec("dp_accounting") is None:
        raise UserError(
            "update.noise_multiplier: epsilon is worked out by the package dp-accounting, which is not installed; "
            "run `pip install 'raysim[privacy]'`, or set update.noise_multiplier=0"
        )


@dataclass(frozen=True)
class PrivacyMechanism:
    """The noise of a run, which is constant and known before round 1, and the epsilon that it gives.

    clients, per_round: how many are registered, and how many of them each round draws.
    largest_weight: w_max, over all registered clients; 1 where the clients themselves add the noise.
    secret_cohorts: whether epsilon relies on nobody learning who took part in which round.
    """

    options: Update
    clients: int
    per_round: int
    largest_weight: float
    secret_cohorts: bool

    @classmethod
    def of(
        cls, options: Update, rule: "AggregationRule", name: str, n_K: IntArray, per_round: int, *,
        keeps_state: bool, drops: bool,
    ) -> "PrivacyMechanism":
        """Build the mechanism of a run; raises UserError for a rule with which no guarantee can be given.

        rule, name: the aggregation rule and its name.  n_K: the size of every registered client that its weight is
        computed from.  keeps_state: whether clients keep anything between rounds.  drops: whether a client that fails
        is left out.
        """
        clients = len(n_K)
        weights_K = rule.constant_weights(n_K, per_round)
        if options.noise_at == "client":
            if weights_K is None and not reads_updates_alone(rule):
                raise UserError(f"update.noise_at = client: {_unnoised(rule, name)}; {_CLIENT_REMEDY}")
            if drops:
                raise UserError(
                    "resources.on_client_failure = drop: whether a client is left out because its training diverged "
                    "depends on its samples, and the noise that it adds to its update does not hide it; use "
                    "on_client_failure=raise"
                )
            return cls(options, clients, per_round, 1.0, secret_cohorts=False)
        if weights_K is None:
            raise UserError(f"update.noise_at = server: {_refusal(rule, name, clients, per_round)}; {_REMEDY}")
        if drops and rule.normalises:
            raise UserError(
                f"resources.on_client_failure = drop: aggregation.name = {name} divides by the sum over the clients "
                "that are left, so one that fails changes the weights of all others, and noise at the server no longer "
                "hides it; use on_client_failure=raise, or aggregation.name=fixed_denominator (cap=1 weighs all alike)"
            )
        return cls(options, clients, per_round, float(np.abs(weights_K).max()), per_round < clients and not keeps_state)

    @property
    def std(self) -> float:
        """Standard deviation of the noise on each coordinate: of the weighted sum, or of one client's update."""
        assert self.options.clip is not None  # `Update.problems` refuses noise without it
        return self.options.noise_multiplier * self.options.clip * self.largest_weight

    @property
    def hides_reports(self) -> bool:
        """Whether rules must not read what clients report besides their updates, which carry the clients' own noise."""
        return self.options.noise_at == "client"

    def noisy(self, update_P: FloatArray, w_K: FloatArray, generator: np.random.Generator) -> FloatArray:
        """Add the server's noise to the weighted sum, unless the clients have added theirs: P.

        update_P: the weighted sum.  w_K: the weights in it.  Raises RunError where a weight is larger than w_max.
        """
        if self.options.noise_at == "client":
            return update_P
        largest = float(np.abs(w_K).max(initial=0.0))
        if largest > self.largest_weight * (1 + 1e-9):
            raise RunError(
                f"update.noise_at = server: a client weighs {largest:g}, and the noise is made for at most "
                f"{self.largest_weight:g}; the aggregation rule's `constant_weights` and `weights` do not agree"
            )
        return update_P + generator.normal(0.0, self.std, len(update_P))

    def epsilon(self, rounds: int, participations: int) -> float:
        """Epsilon at `options.delta` after so many rounds, by Renyi differential privacy.

        participations: how often the client took part that did so most often.  Composed over the rounds (arXiv
        1702.07476, with sampling 1808.00087). Where cohorts are secret it is the smaller of two bounds: with sampling,
        and that of a client that takes part in every round, which is the smaller one where most clients do.
        """
        from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
        from dp_accounting.privacy_accountant import NeighboringRelation
        from dp_accounting.rdp import RdpAccountant

        noise: Any = GaussianDpEvent(self.options.noise_multiplier / 2)  # the package has no types

        def composed(event: Any, times: int) -> float:
            accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
            accountant.compose(event, times)
            return float(accountant.get_epsilon(self.options.delta))

        if not self.secret_cohorts:
            return composed(noise, participations)
        sampled = SampledWithoutReplacementDpEvent(self.clients, self.per_round, noise)
        return min(composed(sampled, rounds), composed(noise, rounds))

    def summary(
        self, metrics: "pd.DataFrame", *, oui: bool, generator: str | None = None, shared_budget: bool = False,
        scaled_by_data: bool = True,
    ) -> PlainDict:
        """Describe, for summary.json, what the run guarantees and what is outside the guarantee.

        metrics: one row per round, with `epsilon`.  oui: whether clients report OUIs.  generator: the name of what made
        the synthetic images; None without any.  shared_budget: whether a client's images depend on others' counts.
        scaled_by_data: whether inputs are scaled by statistics of the clients' pixels.
        """
        z = self.options.noise_multiplier
        at_server = self.options.noise_at == "server"
        where = "weighted sum of clipped updates, added by the server" if at_server else "clipped update of each client"
        drawn = f"{self.per_round} of {self.clients} clients a round, a fixed number, without replacement"
        return {
            "mechanism": f"Gaussian noise on the {where}",
            "noise_std": self.std,
            "noise_to_sensitivity": z / 2,
            "adjacency": "replace one client: all its samples, not how many; number and sizes of clients are public",
            "sampling": f"{drawn}; secret" if self.secret_cohorts else f"{drawn}; no amplification is claimed",
            "accountant": f"Renyi differential privacy, dp-accounting {version('dp-accounting')}",
            "delta": self.options.delta,
            "epsilon": float(metrics["epsilon"].iloc[-1]),
            "outside_guarantee": [
                *_outside(at_server, self.secret_cohorts, oui),
                *_outside_in_data(generator, shared_budget, scaled_by_data),
            ],
        }


def clients_keep_state(options: Update, algorithm: "LocalAlgorithm", buffers: str) -> bool:
    """Whether clients keep anything between rounds: a state of their training, a residual, or statistics."""
    from raysim.config.protocols import LocalAlgorithm
    from raysim.local.sgd import sgd

    trains = type(algorithm).finish not in (sgd.finish, LocalAlgorithm.finish)
    return trains or options.top_k is not None or buffers == "local"


def reads_updates_alone(rule: "AggregationRule") -> bool:
    """Whether a rule computes the combined update from sizes and the updates as they were sent, and nothing else.

    True for a class that declares no `needs`; false for a plain function, which does not say what it reads.
    """
    from raysim.config.protocols import FunctionRule

    return not rule.needs and not isinstance(rule, FunctionRule)


def _unnoised(rule: "AggregationRule", name: str) -> str:
    if rule.needs:
        return (
            f"aggregation.name = {name} weighs clients by {' and '.join(rule.needs)}, which they report without noise, "
            "and the published model tells those weights"
        )
    return (
        f"aggregation.name = {name} is a plain function, which does not declare what it reads, and clients also report "
        "values without noise; make it a class without `needs` if it reads sizes and updates alone"
    )


def _refusal(rule: "AggregationRule", name: str, clients: int, per_round: int) -> str:
    if rule.streams:
        return (
            f"aggregation.name = {name} weighs a client by its part of the cohort's samples, sizes differ and a round "
            f"draws {per_round} of {clients} clients, so weights and noise tell who took part"
        )
    return (
        f"aggregation.name = {name} weighs clients by what they computed, so one client also changes the weights of "
        "the others, by more than this noise hides"
        + ("; set update.noise_at=client" if reads_updates_alone(rule) else "")
    )


def _outside(at_server: bool, secret_cohorts: bool, oui: bool) -> list[str]:
    """The list, for people, of what is published or sent without noise."""
    return [
        "training losses, steps and times, of each client and their means",
        "norms of updates, and whether they were clipped",
        *(["OUIs of clients, their scores, and the weights made of them"] if oui else []),
        "numbers of samples of each client and class, real and synthetic (partition, quota, per-client rows)",
        "accuracies over clients, also after fine-tuning on their samples",
        "which clients failed or diverged",
        *(["who took part in which round (per-client rows): epsilon holds only while this is secret"]
          if secret_cohorts else ["who took part in which round (per-client rows)"]),
        *(["each client's update as the server receives it"] if at_server else []),
        "the seed: whoever knows it can work out the noise",
    ]


def _outside_in_data(generator: str | None, shared_budget: bool, scaled_by_data: bool) -> list[str]:
    """The list, for people, of what training reads that was computed from clients' samples without noise."""
    scaling = "the mean and standard deviation by which inputs are scaled, taken from the pixels of all clients"
    found = [scaling] if scaled_by_data else []
    if generator is None:
        return found
    if generator != "oracle":  # whose images no client owns
        found.append("synthetic images, whose generator was trained on clients' images or on unknown ones")
    found.append(
        "how many synthetic images a client gets of each class, worked out from clients' class counts"
        + ("; one client's counts also change the numbers of others" if shared_budget else "")
    )
    return found
