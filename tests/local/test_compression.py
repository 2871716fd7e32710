"""What a client sends instead of its update: its largest values, rounded, clipped, noisy."""

import numpy as np
import pytest
import torch

from raysim.config.schema import Update, kept
from raysim.core.errors import ConfigError
from raysim.local.compression import clipped, largest, send, stochastic_round

CONFIG = {"rounds": 1, "data": {"name": "digits"}}


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_the_largest_absolute_values_are_kept_and_of_equal_ones_the_first():
    """|v| = 1, 3, 2, 2, 2: the two largest are 3 and the first 2."""
    assert largest(vector(1, -3, 2, -2, 2), 2).tolist() == [0, -3, 2, 0, 0]
    assert largest(vector(0, 0, 0), 1).tolist() == [0, 0, 0]
    assert largest(vector(1, 2), 5).tolist() == [1, 2]


def test_three_bits_are_seven_levels_and_the_draw_decides_up_or_down():
    """m = 3, max 6: levels -6, -4, ... 6; 5 is level 2.5, so 4 for draws below 0.5, else 6; -5 is -2.5: -6, else -4."""
    v = vector(6, 5, 5, -5, -5, 0, 4)
    assert stochastic_round(v, 3, vector(0.9, 0.4, 0.6, 0.4, 0.6, 0.99, 0.99)).tolist() == [6, 4, 6, -6, -4, 0, 4]
    assert stochastic_round(vector(0, 0), 4, vector(0.5, 0.5)).tolist() == [0, 0]


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_rounding_is_right_on_average(bits):
    """A draw is at most one level, 2 / (2^bits - 2), off; the mean of 4,000 within 4 standard errors of half that."""
    v = torch.linspace(-1, 1, 9).repeat(4000)
    u = torch.from_numpy(np.random.default_rng(0).random(len(v), dtype=np.float32))
    mean = stochastic_round(v, bits, u).reshape(4000, 9).mean(0)
    step = 2 / (2**bits - 2)
    np.testing.assert_allclose(mean, torch.linspace(-1, 1, 9), atol=4 * step / 2 / np.sqrt(4000) + 1e-7)
    assert len(stochastic_round(v, bits, u).unique()) <= 2**bits - 1


def test_a_long_update_is_scaled_down_to_the_clipping_norm_and_a_short_one_left_alone():
    """|(3, 4)| = 5: clipped to 1 it is (0.6, 0.8)."""
    v, was = clipped(vector(3, 4), 1.0)
    np.testing.assert_allclose(v, [0.6, 0.8], rtol=1e-6)
    assert was == 1
    v, was = clipped(vector(3, 4), 5.0)
    assert (v.tolist(), was) == ([3, 4], 0)


def test_what_is_not_sent_is_remembered_and_sent_later():
    """Half of 2 coordinates is 1.  (1, 3): send 3, remember 1.  (1, 0.5): 1 + 1 = 2 wins, remember 0.5."""
    options = Update(top_k=0.5)
    sent, memory, _ = send(vector(1, 3), None, options, 0, 1, 0)
    assert (sent.tolist(), memory.tolist()) == ([0, 3], [1, 0])
    sent, memory, _ = send(vector(1, 0.5), memory, options, 0, 2, 0)
    assert (sent.tolist(), memory.tolist()) == ([2, 0], [0, 0.5])


def test_noise_of_a_client_has_the_configured_size_and_is_keyed_by_round_and_client():
    """sigma = 2 * 0.5 = 1 on 40,000 zeros: standard deviation 1 within 2 %, mean 0 within 0.02."""
    options = Update(clip=0.5, noise_multiplier=2.0, noise_at="client")
    zero = torch.zeros(40_000)
    noise, again, other_round, other_client = (
        send(zero, None, options, 0, r, k)[0] for r, k in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert float(noise.std()) == pytest.approx(1, rel=0.02)
    assert abs(float(noise.mean())) < 0.02
    assert torch.equal(noise, again)
    assert not torch.equal(noise, other_round)
    assert not torch.equal(noise, other_client)


def test_noise_at_the_server_is_none_of_the_clients_business():
    sent, memory, seen = send(vector(3, 4), None, Update(clip=10.0, noise_multiplier=2.0), 0, 1, 0)
    assert (sent.tolist(), memory, seen) == ([3, 4], None, {"clipped": 0.0})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4000),  # 1,000 float32
        ({"quantise": 8}, 1004),  # 1,000 bytes and a scale
        ({"quantise": 3}, 379),  # 3,000 bits and a scale
        ({"top_k": 0.01}, 80),  # 10 values and 10 indices
        ({"top_k": 0.01, "quantise": 4}, 49),  # 5 bytes, a scale, 10 indices
        ({"top_k": 1e-9}, 8),  # at least one
    ],
)
def test_bytes_of_an_update_of_a_thousand_parameters(options, expected):
    assert Update(**options).bytes_up(1000) == expected


def test_a_fraction_is_rounded_to_whole_coordinates():
    assert [kept(f, 10) for f in (None, 0.01, 0.25, 0.26, 1.0)] == [10, 1, 2, 3, 10]


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"noise_multiplier": 1.0}, "update.noise_multiplier = 1: .* set update.clip"),
        ({"noise_multiplier": 1.0, "clip": 1.0, "noise_at": "client", "top_k": 0.1}, "noise_at = client: .*top_k"),
        ({"clip": 0.0}, "update.clip = 0.0"),
        ({"quantise": 1}, "update.quantise = 1"),
        ({"top_k": 1.5}, "update.top_k = 1.5"),
        ({"clipping": 1.0}, "update.clipping = 1.0: no such key.*did you mean 'clip'"),
        ({"noise_at": "cloud"}, "update.noise_at = cloud"),
    ],
)
def test_bad_options_are_refused_with_key_and_remedy(update, message):
    from raysim.config.load import load_config

    with pytest.raises(ConfigError, match=message):
        load_config({**CONFIG, "update": update})
