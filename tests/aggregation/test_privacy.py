"""Epsilon of the noise that a run adds."""

import math
from importlib.util import find_spec

import pytest

from raysim.aggregation import privacy
from raysim.config.schema import Update
from raysim.core.errors import UserError

needs_library = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs the extra `privacy`")
OPTIONS = Update(clip=1.0, noise_multiplier=8.0)


def gaussian_bound(sigma: float, times: int, delta: float) -> float:
    """An upper bound: min over a of a T / (2 sigma^2) + ln(1 / delta) / (a - 1)  (Mironov, arXiv 1702.07476)."""
    orders = [1 + i / 100 for i in range(1, 10_000)]
    return min(a * times / (2 * sigma**2) + math.log(1 / delta) / (a - 1) for a in orders)


@needs_library
@pytest.mark.parametrize("times", [1, 10, 100])
def test_without_sampling_epsilon_is_that_of_composed_gaussians_of_half_the_multiplier(times):
    """Replacing one client moves the sum by up to 2 clip. The library converts more tightly than the simple bound."""
    epsilon = privacy.epsilon(OPTIONS, 10, 10, times)
    bound = gaussian_bound(4.0, times, OPTIONS.delta)
    assert 0.7 * bound < epsilon <= bound * 1.001


@needs_library
def test_epsilon_grows_with_rounds_and_falls_with_noise_and_with_sampling():
    once, often = privacy.epsilon(OPTIONS, 100, 5, 1), privacy.epsilon(OPTIONS, 100, 5, 50)
    assert 0 < once < often < privacy.epsilon(OPTIONS, 100, 100, 50)
    assert privacy.epsilon(Update(clip=1.0, noise_multiplier=16.0), 100, 5, 50) < often


@needs_library
def test_sampling_does_not_help_a_client_whose_own_updates_are_seen():
    local = Update(clip=1.0, noise_multiplier=8.0, noise_at="client")
    assert privacy.epsilon(local, 100, 5, 50) == privacy.epsilon(OPTIONS, 100, 100, 50)


def test_without_the_library_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(privacy, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'raysim\[privacy\]'"):
        privacy.require_library()
