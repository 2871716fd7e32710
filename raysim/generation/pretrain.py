"""Trains the diffusion model behind the `ddpm` generator and writes its weights folder; can be stopped and resumed."""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
from safetensors import SafetensorError, safe_open

from raysim.core.errors import DiskError, UserError
from raysim.core.files import cannot_write
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import Dataset
from raysim.core.secrets import plain_without_secrets
from raysim.generation.pretrain_config import PretrainConfig, SamplingConfig
from raysim.generation.pretrain_trainer import Trainer
from raysim.generation.training_images import ENTRY, record
from raysim.generation.weights_folder import CARD, progress, read_json, write_folder

CHECKPOINT = "checkpoint.safetensors"
PREVIEW = "preview"
TICK_S = 2.0  # seconds between reports to a person
PACE_S = 5.0  # how long steps are timed where minutes are to be turned into steps


def pretrain(
    config: PretrainConfig,
    dataset: Dataset,
    on_progress: Callable[[PlainDict], None],
    on_preview: Callable[[Path, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_problem: Callable[[str], object] = lambda _: None,
    on_tick: Callable[[PlainDict], None] = lambda _: None,
) -> Path:
    """Train a diffusion model on the training split and return the folder of its weights.

    config: with its `steps` (see `settle`).
    Resumes from a checkpoint of the same configuration, and returns at once if the folder is already finished. Finished
    weights that differ in having fewer steps are trained on, with a learning rate that rises and falls anew.
    on_progress gets {step, steps, loss, lr, images_per_s, eta_s} every `log_every` steps and at every checkpoint; loss
    is the mean squared error since the report before.
    on_tick gets {step, steps, loss, images_per_s, eta_s} after the first and the last step and every TICK_S seconds.
    on_preview gets, as often as `sampling` says, a weights folder of the present model, and the step; the folder is
    deleted when the training ends.
    should_stop is called before every step; a training that it stops is saved, and goes on from there the next time.
    on_problem gets a message on each checkpoint or preview that the disk refuses; the training goes on.
    Raises UserError if the folder holds another run or the network cannot take the images, RunError if the training
    diverges, DiskError if the disk refuses the last checkpoint or the weights.
    """
    folder = Path(config.output).expanduser()
    if is_finished(folder, config):
        return folder
    trainer = _begin(config, dataset, folder)
    start = previewed = time.monotonic()
    ticked = -math.inf
    before_s = trainer.seconds
    first = saved = trainer.step
    while trainer.step < config.length and (trainer.step == first or not _is_time_up(config, start)):
        if should_stop():
            break
        trainer.train_step()
        now = time.monotonic()
        trainer.seconds = before_s + now - start
        pace_s = (now - start) / (trainer.step - first)
        if now - ticked >= TICK_S or trainer.step == config.length:
            on_tick({
                "step": trainer.step, "steps": config.length, "loss": trainer.recent_loss(),
                "images_per_s": config.batch_size / pace_s, "eta_s": pace_s * (config.length - trainer.step),
            })
            ticked = now
        is_checkpoint = trainer.step % config.checkpoint_every == 0
        if is_checkpoint or trainer.step % config.log_every == 0 or trainer.step == config.length:
            on_progress(trainer.progress(pace_s))
        if is_checkpoint:
            try:
                saved = _save(trainer, folder / CHECKPOINT, saved)
            except DiskError as error:
                on_problem(str(error))
        if on_preview is not None and _is_preview_due(config.sampling, trainer.step, now - previewed):
            start += _preview(trainer, folder / PREVIEW, on_preview, on_problem)
            previewed = time.monotonic()
    if trainer.step > saved:
        _save(trainer, folder / CHECKPOINT, saved)
    try:
        card = {**_card(trainer), ENTRY: record(folder, dataset.train_images)}
        write_folder(folder, trainer.averaged_unet(), trainer.scheduler, card, _readme(card))
    except OSError as error:
        told = cannot_write(Path(error.filename or folder), error, "output")
        raise DiskError(f"{told}; the same command then goes on from the checkpoint of step {trainer.step}") from error
    if trainer.step == config.length:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    shutil.rmtree(folder / PREVIEW, ignore_errors=True)
    return folder


def settle(config: PretrainConfig, dataset: Dataset) -> PretrainConfig:
    """The configuration with its number of steps, where `minutes` alone says how long to train.

    It is that with which the training in the folder was begun, or else as many steps as fit into the minutes at the
    pace of the first ones, which are timed here and thrown away.
    """
    if config.steps is not None:
        return config
    steps = _begun_with(Path(config.output).expanduser()) or _steps_in(60 * (config.minutes or 0), config, dataset)
    return config.model_copy(update={"steps": steps, "minutes": None})


def _begun_with(folder: Path) -> int | None:
    """The number of steps of the training in a folder; None where there is none."""
    saved = _about_checkpoint(folder / CHECKPOINT).get("steps")
    if isinstance(saved, int):
        return saved
    _, steps = progress(read_json(folder / CARD, "output") if (folder / CARD).is_file() else {})
    return steps or None


def _about_checkpoint(path: Path) -> PlainDict:
    """What a checkpoint says of itself; nothing where there is none, or a damaged one, which the trainer refuses."""
    try:
        with safe_open(path, "pt") as file:
            return dict(json.loads(file.metadata()["raysim"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return {}


def _steps_in(seconds: float, config: PretrainConfig, dataset: Dataset) -> int:
    """How many optimiser steps this machine takes in so many seconds, by the pace of a few: at least 1."""
    trainer = Trainer(config.model_copy(update={"steps": 10**9}), dataset)
    trainer.train_step()  # the first one takes longer
    start = time.monotonic()
    while trainer.step < 4 or (time.monotonic() - start < min(PACE_S, 0.1 * seconds) and trainer.step < 1000):
        trainer.train_step()
    return max(1, int(seconds * (trainer.step - 1) / (time.monotonic() - start)))


def _begin(config: PretrainConfig, dataset: Dataset, folder: Path) -> Trainer:
    """The trainer at the step that it goes on from: that of a checkpoint, of finished weights, or the first."""
    trainer = Trainer(config, dataset)
    card = read_json(folder / CARD, "output") if (folder / CARD).is_file() else {}
    begun = _about_checkpoint(folder / CHECKPOINT).get("config_hash") == config.hash()
    if card and not begun and _goes_on(card, config):
        (folder / CHECKPOINT).unlink(missing_ok=True)
        trainer.restart(folder, int(card["steps_done"]), card.get("restarts", []))
        trainer.seconds = float(card.get("seconds", 0.0))
    else:
        trainer.resume(folder / CHECKPOINT)
    return trainer


def _goes_on(card: PlainMapping, config: PretrainConfig) -> bool:
    """Whether the weights of a card are finished ones of this configuration but for fewer steps."""
    done, asked = progress(card)
    if not 0 < asked == done < config.length:
        return False
    try:
        longer = PretrainConfig.model_validate({**card["config"], "output": config.output, "steps": config.steps})
    except (ValueError, TypeError):  # of an earlier version, or changed by hand
        return False
    return longer.hash() == config.hash()


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


def _is_preview_due(sampling: SamplingConfig, step: int, seconds: float) -> bool:
    """seconds: since the preview before."""
    by_time = sampling.every_minutes > 0 and seconds >= 60 * sampling.every_minutes
    return by_time or (sampling.every > 0 and step % sampling.every == 0)


def is_finished(folder: Path, config: PretrainConfig) -> bool:
    """Whether the folder holds the weights of this configuration, trained to the end.

    Raises UserError if it holds those of another one.
    """
    if not (folder / CARD).is_file():
        return False
    card = read_json(folder / CARD, "output")
    if card.get("config_hash") == config.hash():
        return bool(card.get("steps_done") == config.steps)
    if _goes_on(card, config):
        return False
    raise UserError(
        f"output: {folder} already holds weights of another configuration; choose another folder, or remove it"
    )


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
        **({"restarts": trainer.restarts} if trainer.restarts else {}),
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
    if card.get("restarts"):
        unfinished += f"; taken up again from finished weights at step {', '.join(map(str, card['restarts']))}"
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
