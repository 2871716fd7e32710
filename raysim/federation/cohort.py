"""Who takes part in a round."""

from raysim.core import rng


def cohort_size(clients_per_round: int | float, clients: int) -> int:
    """Participants of a round; a fraction is rounded, and stands for at least one client."""
    if isinstance(clients_per_round, int):
        return clients_per_round
    return max(1, round(clients_per_round * clients))


def cohort(seed: int, round_: int, clients: int, size: int) -> list[int]:
    """The participants of a round, ascending, drawn without replacement; a function of seed and round alone."""
    drawn = rng.stream(seed, rng.COHORT, round_).choice(clients, size, replace=False, shuffle=False)
    return sorted(int(k) for k in drawn)
