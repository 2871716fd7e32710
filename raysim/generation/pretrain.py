"""Trains the diffusion model behind the `ddpm` generator and writes its weights folder; can be stopped and resumed."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch

from raysim.core.errors import DiskError, UserError
from raysim.core.files import cannot_write
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import Dataset
from raysim.core.secrets import plain_without_secrets
from raysim.generation.pretrain_config import PretrainConfig
from raysim.generation.pretrain_trainer import Trainer
from raysim.generation.training_images import ENTRY, record
from raysim.generation.weights_folder import CARD, read_json, write_folder

CHECKPOINT = "checkpoint.safetensors"
PREVIEW = "preview"


def pretrain(
    config: PretrainConfig,
    dataset: Dataset,
    on_progress: Callable[[PlainDict], None],
    on_preview: Callable[[Path, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_problem: Callable[[str], object] = lambda _: None,
) -> Path:
    """Train a diffusion model on the training split and return the folder of its weights.

    Resumes from a checkpoint of the same configuration, and returns at once if the folder is already finished.
    on_progress gets {step, steps, loss, lr, images_per_s, eta_s} every `log_every` steps and at every checkpoint; loss
    is the mean squared error since the report before.
    on_preview gets, every `sampling.every` steps, a weights folder of the present model, and the step; the folder is
    deleted when the training ends.
    should_stop is called before every step; a training that it stops is saved, and goes on from there the next time.
    on_problem gets a message on each checkpoint or preview that the disk refuses; the training goes on.
    Raises UserError if the folder holds another run or the network cannot take the images, RunError if the training
    diverges, DiskError if the disk refuses the last checkpoint or the weights.
    """
    folder = Path(config.output).expanduser()
    if is_finished(folder, config):
        return folder
    trainer = Trainer(config, dataset)
    trainer.resume(folder / CHECKPOINT)
    start = time.monotonic()
    before_s = trainer.seconds
    first = saved = trainer.step
    while trainer.step < config.steps and (trainer.step == first or not _is_time_up(config, start)):
        if should_stop():
            break
        trainer.train_step()
        trainer.seconds = before_s + time.monotonic() - start
        is_checkpoint = trainer.step % config.checkpoint_every == 0
        if is_checkpoint or trainer.step % config.log_every == 0 or trainer.step == config.steps:
            on_progress(trainer.progress((time.monotonic() - start) / (trainer.step - first)))
        if is_checkpoint:
            try:
                saved = _save(trainer, folder / CHECKPOINT, saved)
            except DiskError as error:
                on_problem(str(error))
        if on_preview is not None and config.sampling.every and trainer.step % config.sampling.every == 0:
            start += _preview(trainer, folder / PREVIEW, on_preview, on_problem)
    if trainer.step > saved:
        _save(trainer, folder / CHECKPOINT, saved)
    try:
        card = {**_card(trainer), ENTRY: record(folder, dataset.train_images)}
        write_folder(folder, trainer.averaged_unet(), trainer.scheduler, card, _readme(card))
    except OSError as error:
        told = cannot_write(Path(error.filename or folder), error, "output")
        raise DiskError(f"{told}; the same command then goes on from the checkpoint of step {trainer.step}") from error
    if trainer.step == config.steps:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    shutil.rmtree(folder / PREVIEW, ignore_errors=True)
    return folder


def _save(trainer: Trainer, path: Path, before: int) -> int:
    """Write the checkpoint and return its step; DiskError where that fails.  before: the step of the newest one."""
    try:
        trainer.save(path)
    except OSError as error:
        kept = f"the checkpoint of step {before} is intact" if before else "there is no earlier checkpoint"
        raise DiskError(f"step {trainer.step}: {cannot_write(path, error, 'output')}; {kept}") from error
    return trainer.step


def _preview(
    trainer: Trainer, folder: Path, on_preview: Callable[[Path, int], None], on_problem: Callable[[str], object]
) -> float:
    """Pass the present model to `on_preview`; returns the seconds that this took, which do not count as training."""
    began = time.monotonic()
    try:
        write_folder(folder, trainer.averaged_unet(), trainer.scheduler, {"null_class": trainer.null_class}, "")
        on_preview(folder, trainer.step)
    except OSError as error:
        on_problem(f"preview of step {trainer.step}: {cannot_write(Path(error.filename or folder), error, 'output')}")
    return time.monotonic() - began


def _is_time_up(config: PretrainConfig, start: float) -> bool:
    return config.minutes is not None and time.monotonic() - start > 60 * config.minutes


def is_finished(folder: Path, config: PretrainConfig) -> bool:
    """Whether the folder holds the weights of this configuration, trained to the end.

    Raises UserError if it holds those of another one.
    """
    if not (folder / CARD).is_file():
        return False
    card = read_json(folder / CARD)
    if card.get("config_hash") != config.hash():
        raise UserError(
            f"output: {folder} already holds weights of another configuration; choose another folder, or remove it"
        )
    return bool(card.get("steps_done") == config.steps)


def _card(trainer: Trainer) -> PlainDict:
    config = trainer.config
    dataset = trainer.dataset
    card: PlainDict = plain_without_secrets({
        "data": {**config.data, "train_images": len(dataset.train_images)},
        "channels": dataset.channels,
        "image_size": list(dataset.image_size),
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "null_class": trainer.null_class,
        "parameters": sum(p.numel() for p in trainer.unet.parameters()),
        "config": config.model_dump(mode="json", exclude={"output", "device", "notes", "sampling", "tracking"}),
        "config_hash": config.hash(),
        "seed": config.seed,
        "steps_done": trainer.step,
        "images_seen": trainer.step * config.batch_size,
        "seconds": round(trainer.seconds, 1),
        "threads": torch.get_num_threads(),
        "loss": {split: round(value, 6) for split, value in trainer.quality().items()},
        "made_with": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "notes": config.notes,
    })
    return card


def _readme(card: PlainMapping) -> str:
    config = card["config"]
    height, width = card["image_size"]
    unfinished = "" if card["steps_done"] == config["steps"] else f" of {config['steps']:,}; training is not finished"
    null = "no null class, so no guidance" if card["null_class"] is None else f"null class {card['null_class']}"
    return f"""---
library_name: diffusers
pipeline_tag: unconditional-image-generation
tags: [diffusion, class-conditional]
---
# Class-conditional diffusion model of `{card["data"]["name"]}`

A diffusers `UNet2DModel` of {card["parameters"]:,} parameters (half precision) for {width} x {height} images of
{card["channels"]} channel(s) in [-1, 1]. Classes 0 to {card["classes"] - 1} ({null}): {", ".join(card["class_names"])}.

| | |
|---|---|
| data | {card["data"]["train_images"]:,} training images of `{card["data"]["name"]}` |
| seed | {card["seed"]} |
| optimiser steps | {card["steps_done"]:,}{unfinished} |
| batch size, learning rate | {config["batch_size"]}, {config["lr"]} |
| diffusion | {config["prediction"]} prediction, {config["schedule"]} schedule, {config["train_steps"]} timesteps |
| training time | {card["seconds"]:.0f} s on {card["threads"]} thread(s) |
| denoising error, training images | {card["loss"]["train"]} |
| denoising error, test images | {card["loss"]["test"]} |

The denoising error is the mean squared error of the prediction over all timesteps; a test error well above the training
error means that training images were memorised. Remake with `raysim pretrain` and the configuration in `card.json`.
{card["notes"]}
"""
