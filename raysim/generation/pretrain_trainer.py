"""One training run of the diffusion model: its network, its averaged weights, its optimiser and its checkpoint.

Every random draw of a step (rows, timesteps, noise, dropped labels, mirrored images) comes from a stream keyed by the
step, so a run that was stopped and resumed ends with the same bits as one that was not, on the same number of threads.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from raysim.core import rng
from raysim.core.errors import RunError, UserError
from raysim.core.files import write_atomic
from raysim.core.plain import PlainDict
from raysim.core.records import ByteArray, Dataset
from raysim.generation.denoising import check_halvings
from raysim.generation.diffusion import Diffusion, Noisy, denoising_error
from raysim.generation.pretrain_config import PretrainConfig
from raysim.generation.weights_folder import build_unet, read_unet


@dataclass(frozen=True)
class Batch:
    """The images of one optimiser step.

    noisy: images with noise, B x channels x height x width.  target: what the network should predict, same shape.
    """

    noisy: Tensor
    timesteps_B: Tensor
    labels_B: Tensor
    target: Tensor


class Trainer:
    """The network, its averaged weights (a running mean) and the optimiser of one training run, step by step.

    restarts: the steps at which the training was taken up again from finished weights, after which the learning rate
    rises and falls anew.
    """

    def __init__(self, config: PretrainConfig, dataset: Dataset) -> None:
        self.config = config
        self.dataset = dataset
        self.step = 0
        self.restarts: list[int] = []
        self.seconds = 0.0
        self.losses: list[Tensor] = []
        self.reported = math.nan
        self.device = device_of(config.device)
        self.null_class = dataset.classes if config.label_dropout > 0 else None
        self.flips = dataset.flips if config.flips == "auto" else config.flips
        self.unet = build(config, dataset).to(self.device).train()
        self.average = {name: p.detach().clone() for name, p in self.unet.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.diffusion = Diffusion(config.prediction, config.schedule, config.train_steps)

    @property
    def scheduler(self) -> Any:  # diffusers has no types
        """The scheduler of diffusers, whose configuration is kept beside the weights."""
        return self.diffusion.scheduler

    def train_step(self) -> None:
        """Take one optimiser step, and update the averaged weights."""
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self._loss(self.unet, self.draw(rng.torch_stream(self.config.seed, rng.PRETRAIN, self.step)))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        decay = min(self.config.ema, (1 + self.since_start) / (10 + self.since_start))
        with torch.no_grad():
            for name, parameter in self.unet.named_parameters():
                self.average[name].lerp_(parameter, 1 - decay)
        self.losses.append(loss.detach())

    @property
    def since_start(self) -> int:
        """Steps since the last restart, or since the beginning."""
        return self.step - (self.restarts[-1] if self.restarts else 0)

    def learning_rate(self) -> float:
        """The learning rate of the present step: a linear warm-up, then a half cosine to zero at the last step."""
        warmup, step = self.config.warmup, self.since_start
        steps = self.config.length - (self.step - step)
        if step <= warmup:
            return self.config.lr * step / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * done))

    def draw(self, generator: torch.Generator) -> Batch:
        """Draw a training batch; everything random in it comes from `generator`."""
        size = self.config.batch_size
        images = self.dataset.train_images
        rows_B = torch.randint(len(images), (size,), generator=generator).numpy()
        flip_B = torch.rand(size, generator=generator) < (0.5 if self.flips else 0.0)
        drop_B = torch.rand(size, generator=generator) < self.config.label_dropout
        labels_B = torch.from_numpy(self.dataset.train_labels_N[rows_B])
        clean = to_range(images[rows_B])
        clean = torch.where(flip_B[:, None, None, None], clean.flip(3), clean)
        return self._noise(clean, labels_B.masked_fill(drop_B, self.null_class or 0), generator)

    def _noise(self, clean: Tensor, labels_B: Tensor, generator: torch.Generator) -> Batch:
        noisy = self.diffusion.add_noise(clean, generator)
        return Batch(*(t.to(self.device) for t in (noisy.images, noisy.timesteps_B, labels_B, noisy.target)))

    def _loss(self, unet: Any, batch: Batch) -> Tensor:
        bf16 = self.config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return denoising_error(unet, Noisy(batch.noisy, batch.timesteps_B, batch.target), batch.labels_B)

    def progress(self, seconds_per_step: float) -> PlainDict:
        """Report the values of a progress line since the last report; raises RunError if the loss is not finite."""
        loss = float(torch.stack(self.losses).mean())
        self.losses.clear()
        self.reported = loss
        if not math.isfinite(loss):
            raise RunError(f"training diverged before step {self.step} (loss {loss}); lower lr = {self.config.lr}")
        return {
            "step": self.step,
            "steps": self.config.length,
            "loss": loss,
            "lr": self.learning_rate(),
            "images_per_s": self.config.batch_size / seconds_per_step,
            "eta_s": seconds_per_step * (self.config.length - self.step),
        }

    def recent_loss(self) -> float:
        """The mean loss since the last report, or that of the last report where no step was taken since."""
        return float(torch.stack(self.losses).mean()) if self.losses else self.reported

    def averaged_unet(self) -> Any:  # diffusers has no types
        """Build the network with the averaged weights, in evaluation mode and without gradients."""
        unet = build(self.config, self.dataset).to(self.device)
        unet.load_state_dict(self.average)
        return unet.eval().requires_grad_(False)

    def quality(self, batches: int = 16) -> dict[str, float]:
        """Measure the mean denoising error of the averaged network on training and on test images, with equal noise."""
        unet = self.averaged_unet()
        dataset = self.dataset
        size = self.config.batch_size
        error = {}
        splits = {
            "train": (dataset.train_images, dataset.train_labels_N),
            "test": (dataset.test_images, dataset.test_labels_N),
        }
        for split, (images, labels_N) in splits.items():
            losses = []
            for i in range(batches):
                generator = rng.torch_stream(self.config.seed, rng.PRETRAIN, 0, i)
                rows_B = (torch.rand(size, generator=generator) * len(images)).long().numpy()
                batch = self._noise(to_range(images[rows_B]), torch.from_numpy(labels_N[rows_B]), generator)
                with torch.inference_mode():
                    losses.append(float(self._loss(unet, batch)))
            error[split] = sum(losses) / batches
        return error

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on into one file, which is replaced as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            "step": self.step, "steps": self.config.length, "restarts": self.restarts, "seconds": self.seconds,
            "config_hash": self.config.hash(),
        }
        write_atomic(path, save(self._state(), metadata={"raysim": json.dumps(metadata)}))

    def _state(self) -> dict[str, Tensor]:
        """Weights, averaged weights and AdamW's two moments, by name: views into which `resume` copies."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.unet.named_parameters():
            moments = self.optimizer.state[parameter]
            state[f"unet.{name}"] = parameter.data
            state[f"average.{name}"] = self.average[name]
            state[f"exp_avg.{name}"] = moments["exp_avg"]
            state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    def restart(self, weights: Path, step: int, restarts: Sequence[int]) -> None:
        """Take up the training of finished weights, those of `step`, with moments of zero and the rate rising anew.

        restarts: where that was done before.
        """
        unet, _ = read_unet(weights)
        with torch.no_grad():
            for name, parameter in unet.named_parameters():
                self.unet.get_parameter(name).copy_(parameter)
                self.average[name].copy_(parameter)
        self.step = step
        self.restarts = [*restarts, step]

    def resume(self, path: Path) -> None:
        """Load a checkpoint, if there is one; UserError if it is damaged or belongs to another configuration."""
        if not path.is_file():
            return
        try:
            with safe_open(path, "pt") as file:
                metadata = json.loads(file.metadata()["raysim"])
                step, seconds, made_by = int(metadata["step"]), float(metadata["seconds"]), metadata["config_hash"]
                restarts = [int(step) for step in metadata.get("restarts", [])]
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"output: checkpoint {path} is damaged ({error}); remove it to start again") from None
        if made_by != self.config.hash():
            raise UserError(f"output: {path} belongs to another configuration; choose another folder, or remove it")
        self.step = step
        self.restarts = restarts
        self.seconds = seconds
        for parameter in self.unet.parameters():
            # AdamW makes its moments at its first step; a resumed run has them before.
            zeros = (torch.zeros_like(parameter.data) for _ in range(2))
            moments = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.since_start)), **moments}
        try:
            for name, tensor in self._state().items():
                tensor.copy_(saved[name])
        except (KeyError, RuntimeError) as error:
            raise UserError(f"output: checkpoint {path} is damaged ({error}); remove it to start again") from None


def build(config: PretrainConfig, dataset: Dataset) -> Any:  # diffusers has no types
    """Build the network for these images, with initial weights that depend on the seed alone.

    Raises UserError if the network cannot halve the images as often as it has resolutions.
    """
    unet = config.unet
    check_halvings(dataset.image_size, unet.channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.integer(config.seed, rng.PRETRAIN, 0))
        rows = dataset.classes + (1 if config.label_dropout > 0 else 0)
        return build_unet(
            dataset.channels, dataset.image_size, rows, unet.channels, unet.layers_per_block, unet.attention
        )


def to_range(images: ByteArray) -> Tensor:
    """Convert uint8 pixels to float32 in [-1, 1], same shape."""
    return torch.from_numpy(images).float().mul_(1 / 127.5).sub_(1.0)


def device_of(name: str) -> torch.device:
    """The device of this name, such as cpu, cuda or auto; UserError where there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device = {name!r}: not a device; use cpu, cuda or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device = {name!r}: this machine has no usable GPU; use cpu or auto")
    return device
