"""The samplers of a diffusion model by name, built from a weights folder's scheduler_config.json.

DDPM, DPM-Solver++ and UniPC are diffusers' own schedulers. DDIM is written out here, because diffusers' steps to
`timestep - T // steps`, which is the next timestep of its own list only where `steps` divides T. Where it does, the two
agree (with `use_clipped_model_output`).
"""

import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raysim.core.errors import UserError
from raysim.core.plain import PlainDict, PlainMapping
from raysim.generation.weights_folder import SCHEDULER, read_json

# A cosine schedule leaves almost no signal at the last timesteps, where DPM-Solver++'s expansion in the logarithm of
# the signal-to-noise ratio breaks down: it starts where half that logarithm is -5.1, as diffusers advises.
LAMBDA_MIN = -5.1


class Sampler:
    """One sampling schedule: `timesteps`, from noise to image, and the step from each to the next.

    name: ddim, ddpm, dpmsolver++ or unipc.  spacing: leading, trailing, linspace, or auto for the folder's own.
    Raises UserError if `steps` or `spacing` do not suit the schedule that the weights were trained on.
    """

    def __init__(self, folder: Path, name: str, steps: int, spacing: str) -> None:
        config = read_json(folder / SCHEDULER)
        own = str(config.get("timestep_spacing", "leading"))
        config["timestep_spacing"] = self.spacing = own if spacing == "auto" else spacing
        self.name = name
        self.steps = steps
        self.scheduler = _scheduler(folder, name, config)
        self.trained: int = self.scheduler.config.num_train_timesteps
        if steps > self.trained:
            raise UserError(
                f"generator.steps = {steps}: {folder} was trained on {self.trained} timesteps; use at most that"
            )
        if name in ("ddim", "ddpm") and self.spacing == "linspace":
            raise UserError(
                f"generator.spacing = 'linspace': {name} would step to the wrong timesteps; use 'trailing' or 'leading'"
            )
        self.timesteps = self._timesteps(steps)
        self._check_timesteps()

    def describe(self) -> PlainDict:
        """Everything about the schedule that changes pixels, for a fingerprint."""
        return {"name": self.name, "timesteps": self.timesteps, "config": public_keys(self.scheduler.config)}

    def start(self) -> None:
        """Prepare for a new batch: forget what the scheduler keeps of the batch before."""
        if self.name == "ddpm" or (self.name == "dpmsolver++" and self.spacing == "trailing"):
            self.scheduler.set_timesteps(timesteps=self.timesteps)
        elif self.name != "ddim":
            self.scheduler.set_timesteps(self.steps)

    def step(self, index: int, predicted: Tensor, x: Tensor, generators: list[torch.Generator]) -> Tensor:
        """The images after step `index`; only ddpm draws noise, from each image's own generator."""
        t = self.timesteps[index]
        if self.name == "ddim":
            previous = self.timesteps[index + 1] if index + 1 < len(self.timesteps) else -1
            return self._ddim_step(t, previous, predicted, x)
        own = {"generator": generators} if self.name == "ddpm" else {}
        result: Tensor = self.scheduler.step(predicted, t, x, return_dict=False, **own)[0]
        return result

    def _ddim_step(self, t: int, previous: int, predicted: Tensor, x: Tensor) -> Tensor:
        """Formula (12) of DDIM (arXiv 2010.02502) without noise, from timestep t to `previous` (-1: the image)."""
        config = self.scheduler.config
        abar = self.scheduler.alphas_cumprod
        abar_t = abar[t]
        abar_p = abar[previous] if previous >= 0 else torch.ones(())
        if config.prediction_type == "epsilon":
            image = (x - (1 - abar_t) ** 0.5 * predicted) / abar_t**0.5
        else:
            image = abar_t**0.5 * x - (1 - abar_t) ** 0.5 * predicted
        if config.clip_sample:
            image = image.clamp(-config.clip_sample_range, config.clip_sample_range)
        # The noise that belongs to the clamped image: with the network's own noise x would leave the schedule, and with
        # guidance and many steps the images would be spoilt.
        noise = (x - abar_t**0.5 * image) / (1 - abar_t) ** 0.5
        stepped: Tensor = abar_p**0.5 * image + (1 - abar_p) ** 0.5 * noise
        return stepped

    def _timesteps(self, steps: int) -> list[int]:
        """Timesteps from noise to image, `steps` of them unless the schedule cannot have so many."""
        if self.name == "dpmsolver++" and self.spacing == "trailing":
            return self._clipped_trailing(steps)
        if self.name in ("dpmsolver++", "unipc"):
            self.scheduler.set_timesteps(steps)
            return [int(t) for t in self.scheduler.timesteps]
        if self.spacing == "leading":
            return [k * (self.trained // steps) for k in reversed(range(steps))]
        # In whole numbers: counting down in floating point ends, for some step counts, at timestep -1.
        return [round(self.trained - k * self.trained / steps) - 1 for k in range(steps)]

    def _clipped_trailing(self, steps: int) -> list[int]:
        """diffusers' own timesteps where they are as many as asked for, else `steps` evenly over the same range.

        diffusers counts down from the timestep of LAMBDA_MIN in strides that are meant for the whole range, so that
        with many steps the last ones would be below 0.
        """
        self.scheduler.set_timesteps(steps)
        own = [int(t) for t in self.scheduler.timesteps]
        if len(own) == steps and own[-1] >= 0:
            return own
        last = own[0] + 1
        return [round(last - k * last / steps) - 1 for k in range(steps)]

    def _check_timesteps(self) -> None:
        problem = self._problem(self.steps, self.timesteps)
        if problem:
            fewer = next((n for n in range(self.steps - 1, 0, -1) if not self._problem(n, self._timesteps(n))), None)
            more = range(self.steps + 1, min(self.steps + 50, self.trained) + 1)
            above = next((n for n in more if not self._problem(n, self._timesteps(n))), None)
            found = " or ".join(str(n) for n in (fewer, above) if n is not None)
            where = f"generator.steps = {self.steps} with {self.name} and {self.spacing} spacing"
            other = "another generator.spacing" if self.spacing == "trailing" else "generator.spacing: trailing"
            raise UserError(f"{where} {problem}; use {found} steps, or {other}" if found else f"{where} {problem}")

    def _problem(self, steps: int, timesteps: list[int]) -> str:
        """What is wrong with a schedule, for a message; empty if nothing is."""
        if len(timesteps) != steps:
            return f"would make {len(timesteps)} steps"
        if timesteps[-1] < 0 or any(later >= t for t, later in pairwise(timesteps)):
            return f"repeats one of the {self.trained} timesteps"
        if timesteps[0] < 0.9 * self.trained - self.trained / steps:
            return (
                f"would start from pure noise at timestep {timesteps[0]} of {self.trained}, which expects an image "
                "that shows through"
            )
        return ""


def public_keys(config: PlainMapping) -> PlainDict:
    """The keys of a diffusers configuration without diffusers' private ones, one of which changes its order."""
    return {key: value for key, value in dict(config).items() if not key.startswith("_")}


def _scheduler(folder: Path, name: str, config: PlainMapping) -> Any:  # diffusers has no types
    import diffusers

    if config.get("prediction_type", "epsilon") not in ("epsilon", "v_prediction") or config.get("thresholding"):
        raise UserError(
            f"generator.weights: {folder / SCHEDULER} asks for prediction_type {config.get('prediction_type')!r}, "
            f"thresholding {config.get('thresholding', False)}; supported: epsilon or v_prediction without thresholding"
        )
    try:
        if name == "dpmsolver++":
            return diffusers.DPMSolverMultistepScheduler.from_config(
                config, algorithm_type="dpmsolver++", lambda_min_clipped=LAMBDA_MIN
            )
        if name == "unipc":
            return diffusers.UniPCMultistepScheduler.from_config(config)
        # Not by `from_config`, which imports all compatible schedulers, and scipy.stats with them.
        known = inspect.signature(diffusers.DDPMScheduler.__init__).parameters
        return diffusers.DDPMScheduler(**{key: value for key, value in config.items() if key in known})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"generator.weights: {folder / SCHEDULER} is not a usable schedule: {error}") from None
