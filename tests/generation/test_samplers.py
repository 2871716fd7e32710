"""Every sampler visits the timesteps it says it does and ends on an image."""

import re

import pytest
import torch
from toy_weights import make_dataset, make_folder

from raysim.core.errors import UserError
from raysim.generation.samplers import Sampler

SAMPLERS = ["ddim", "ddpm", "dpmsolver++", "unipc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights that predict the noise, over 1000 timesteps of a cosine schedule, with trailing spacing."""
    return make_folder(tmp_path_factory.mktemp("weights"), make_dataset(), "epsilon")


@pytest.mark.parametrize("steps", [1, 7, 30, 61, 600, 1000])
def test_every_ddim_step_lands_on_the_next_timestep(folder, steps):
    """All images equal c: noise is known, so x at timestep t must stay sqrt(abar_t) c + sqrt(1 - abar_t) noise."""
    sampler = Sampler(folder, "ddim", steps, "auto")
    abar = sampler.scheduler.alphas_cumprod.double()
    clean, noise = torch.tensor([0.4, 1.3], dtype=torch.float64)
    sampler.scheduler.alphas_cumprod = abar
    x = abar[999] ** 0.5 * clean + (1 - abar[999]) ** 0.5 * noise
    assert sampler.timesteps[0] == 999 and len(sampler.timesteps) == steps
    for i in range(steps):
        x = sampler.step(i, noise, x, [])
        if i + 1 < steps:
            a = abar[sampler.timesteps[i + 1]]
            assert torch.isclose(x, a**0.5 * clean + (1 - a) ** 0.5 * noise, atol=1e-5)
    assert torch.isclose(x, clean, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 5, 61, 250])
def test_every_sampler_ends_on_the_only_image_there_is_or_refuses_the_step_count(folder, sampler, steps):
    """The exact predictor of a data set that is one image c leads every sampler to c."""
    try:
        schedule = Sampler(folder, sampler, steps, "auto")
    except UserError as error:
        assert (sampler, steps) == ("unipc", 61) and "use 60 or 62 steps, or another generator.spacing" in str(error)
        return
    clean = torch.tensor([0.4, -0.9]).reshape(2, 1, 1, 1)
    generators = [torch.Generator().manual_seed(i) for i in (1, 2)]
    x = torch.stack([torch.randn(1, 1, 1, generator=g) for g in generators])
    schedule.start()
    abar = schedule.scheduler.alphas_cumprod
    for i, t in enumerate(schedule.timesteps):
        x = schedule.step(i, (x - abar[t] ** 0.5 * clean) / (1 - abar[t]) ** 0.5, x, generators)
    assert torch.allclose(x, clean, atol=0.02)


def test_linspace_spacing_is_refused_where_it_steps_to_the_wrong_time(folder):
    for sampler in ("ddim", "ddpm"):
        with pytest.raises(UserError, match=r"generator.spacing = 'linspace'.*trailing"):
            Sampler(folder, sampler, 10, "linspace")
    assert Sampler(folder, "dpmsolver++", 10, "linspace").timesteps[0] > 900


def test_first_timesteps_of_50_ddim_steps_are_980_leading_and_999_trailing(folder):
    assert Sampler(folder, "ddim", 50, "leading").timesteps[0] == 980
    assert Sampler(folder, "ddim", 50, "trailing").timesteps[0] == 999


def test_leading_spacing_that_would_skip_the_noisiest_part_is_refused(folder):
    """1000 // 600 is 1: the timesteps would be 599 to 0."""
    with pytest.raises(UserError, match=r"steps = 600 .* timestep 599 of 1000"):
        Sampler(folder, "ddim", 600, "leading")


def test_more_steps_than_trained_timesteps_are_refused(folder):
    with pytest.raises(UserError, match=r"generator.steps = 1001: .* 1000"):
        Sampler(folder, "ddim", 1001, "auto")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("steps", [1, 2, 20, 61, 110, 223, 249, 250, 300, 500, 888, 995, 996, 997, 999, 1000])
def test_exactly_so_many_steps_are_made_or_a_number_that_works_is_named(folder, sampler, spacing, steps):
    try:
        schedule = Sampler(folder, sampler, steps, spacing)
    except UserError as error:
        named = re.search(r"; use (\d+)", str(error))
        assert (named is not None) != ("wrong timesteps" in str(error))
        if named:
            assert len(Sampler(folder, sampler, int(named[1]), spacing).timesteps) == int(named[1])
        return
    schedule.start()
    assert len(schedule.timesteps) == steps == len(set(schedule.timesteps)) and schedule.timesteps[-1] >= 0
    if sampler != "ddim":  # it steps without the scheduler
        assert schedule.scheduler.timesteps.tolist() == schedule.timesteps


def test_dpmsolver_makes_up_to_as_many_steps_as_lie_where_it_starts(folder):
    """lambda at timestep t of the cosine schedule is below -5.1 for the last 4 of 1,000 timesteps: 996 are left."""
    for steps in (250, 500, 996):
        timesteps = Sampler(folder, "dpmsolver++", steps, "trailing").timesteps
        assert (timesteps[0], timesteps[-1] < 1000 / steps, len(timesteps)) == (995, True, steps)
    with pytest.raises(UserError, match="repeats one of the 1000 timesteps; use 996 steps"):
        Sampler(folder, "dpmsolver++", 1000, "trailing")


def test_leading_spacing_names_the_nearest_number_of_steps_that_works(folder):
    """Of n + 1 equal strides over 996 (1,000) timesteps, each of at least one: at most 995 (999) steps."""
    for sampler, most in (("dpmsolver++", 995), ("unipc", 999)):
        with pytest.raises(UserError, match=rf"steps = 1000 with .* and leading spacing .*; use {most} steps, or"):
            Sampler(folder, sampler, 1000, "leading")
