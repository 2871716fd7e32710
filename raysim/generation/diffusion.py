"""The noise of a diffusion model, and what a network learns of it: shared by central and federated training."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from diffusers import DDPMScheduler
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Noisy:
    """Images with noise, B x channels x height x width.  target: what the network should predict, same shape."""

    images: Tensor
    timesteps_B: Tensor
    target: Tensor


@dataclass(frozen=True)
class Diffusion:
    """How noise grows with the timestep, and what the network predicts.

    prediction: the noise, or v = sqrt(abar) noise - sqrt(1 - abar) image (arXiv 2202.00512).  schedule: cosine (arXiv
    2102.09672) or linear (arXiv 2006.11239).  timesteps: how many there are.
    """

    prediction: Literal["epsilon", "v"] = "v"
    schedule: Literal["cosine", "linear"] = "cosine"
    timesteps: int = 1000

    @cached_property
    def scheduler(self) -> Any:  # diffusers has no types
        """The scheduler of diffusers, whose configuration is kept beside the weights."""
        return DDPMScheduler(
            num_train_timesteps=self.timesteps,
            beta_schedule="squaredcos_cap_v2" if self.schedule == "cosine" else "linear",
            prediction_type="v_prediction" if self.prediction == "v" else "epsilon",
            timestep_spacing="trailing",
        )

    def add_noise(self, clean: Tensor, generator: torch.Generator | None = None) -> Noisy:
        """Add noise of random timesteps to images in [-1, 1], B x channels x height x width.

        generator: on the CPU, so that the noise is the same on every device; None: torch's global one.
        """
        size = len(clean)
        # One offset for evenly spaced timesteps: each is still uniform, but a batch covers the whole range.
        offset = torch.rand((), generator=generator)
        timesteps_B = ((torch.arange(size) + offset) * (self.timesteps / size)).long().clamp_(max=self.timesteps - 1)
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        timesteps_B = timesteps_B.to(clean.device)
        is_v = self.prediction == "v"
        target = self.scheduler.get_velocity(clean, noise, timesteps_B) if is_v else noise
        return Noisy(self.scheduler.add_noise(clean, noise, timesteps_B), timesteps_B, target)


def denoising_error(unet: Any, noisy: Noisy, labels_B: Tensor) -> Tensor:
    """The mean squared error of the network's prediction, over all pixels of all images: a scalar."""
    predicted = unet(noisy.images, noisy.timesteps_B, labels_B, return_dict=False)[0]
    return F.mse_loss(predicted.float(), noisy.target)
