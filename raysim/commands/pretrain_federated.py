"""`raysim pretrain` with a `federation`: the clients train the generator, as a run trains a classifier."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch

from raysim.aggregation import running_mean
from raysim.config.load import build
from raysim.config.schema import Config
from raysim.core.errors import ConfigError, DiskError, UserError
from raysim.core.files import cannot_write
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import Dataset
from raysim.core.secrets import plain_without_secrets
from raysim.core.signals import Signals
from raysim.engine.session import Session
from raysim.generation.denoising import NETWORK, Denoiser
from raysim.generation.pretrain_config import Federation, PretrainConfig
from raysim.generation.training_images import ENTRY, record
from raysim.generation.weights_folder import CARD, read_json, write_folder
from raysim.lifecycle.generator_run import TrainedGenerator, train_generator
from raysim.lifecycle.session import open_session
from raysim.ui.display import Display

FOLDER = "federation"  # below the output, for the files of the rounds
PREVIEW = "preview"


def run_config(config: PretrainConfig, dataset: Dataset) -> Config:
    """The configuration of the run in which clients train the generator.

    Raises ConfigError for keys of the federation that its plug-ins do not take, under the names that the user wrote.
    """
    federation = config.federation
    assert federation is not None  # the caller has looked
    plain = _plain(config, federation, dataset)
    try:
        checked = build(plain, "the federation")
        if federation.ema:
            of = checked.server.model_dump()
            wrapped = {"name": running_mean.PLUGIN, "of": of, "decay": federation.ema}
            checked = build({**plain, "server": wrapped}, "the federation")
    except ConfigError as error:
        own = re.compile(rf"({'|'.join(Federation.model_fields)})\b")
        problems = [f"federation.{problem}" if own.match(problem) else problem for problem in error.problems]
        raise ConfigError(problems, "the federation") from error
    _refuse(checked)
    return checked


def _refuse(config: Config) -> None:
    from raysim.lifecycle.build import plugin

    if config.local.name == "moon":
        raise UserError("federation.local.name = moon: it compares features of a classifier; use another algorithm")
    if "oui" in plugin("aggregation", config.aggregation).build().needs:
        raise UserError(
            f"federation.aggregation.name = {config.aggregation.name}: it weighs by the activations of a classifier; "
            "use another rule, such as fedavg"
        )


def _plain(config: PretrainConfig, federation: Federation, dataset: Dataset) -> PlainDict:
    flips = dataset.flips if config.flips == "auto" else config.flips
    given = federation.model_dump(mode="json", exclude={"ema", "checkpoint_every"})
    return {
        **given,
        "seed": config.seed,
        "data": {**config.data, "augment": ["flip"] if flips else []},
        "allocation": {"name": "none"},
        "model": {
            "name": NETWORK, "widths": config.unet.channels, "layers_per_block": config.unet.layers_per_block,
            "attention": config.unet.attention, "prediction": config.prediction, "schedule": config.schedule,
            "train_steps": config.train_steps, "label_dropout": config.label_dropout,
        },
        "tracking": config.tracking.model_dump(mode="json"),
        "output": {
            "dir": str(Path(config.output).expanduser() / FOLDER), "checkpoint_every": federation.checkpoint_every,
            "cache": None,
        },
    }


def is_finished(folder: Path, config: Config) -> bool:
    """Whether the folder holds the weights of this federation, trained to the end.

    Raises UserError if it holds those of another training.
    """
    if not (folder / CARD).is_file():
        return False
    card = read_json(folder / CARD, "output")
    if card.get("config_hash") != config.hash():
        raise UserError(
            f"output: {folder} already holds weights of another configuration; choose another folder, or remove it"
        )
    return bool(card.get("rounds_done") == config.rounds)


def train(
    pretraining: PretrainConfig, config: Config, dataset: Dataset, display: Display, signals: Signals, again: str,
    show: Callable[[Path, int], Path] | None, session: Session | None = None,
) -> str:
    """Train, or go on, and write the weights folder; returns the id of the MLflow run, empty without one.

    config: made by `run_config`.  show: called now and then with a weights folder of the present network and the round.
    session: an open Ray session; None: that of `raysim.session`, or one for this training alone.
    """
    folder = Path(pretraining.output).expanduser()
    kept = open_session()

    def preview(denoiser: Denoiser, round_: int) -> Path | None:
        if show is None:
            return None
        try:
            scheduler = denoiser.diffusion.scheduler
            write_folder(folder / PREVIEW, denoiser.unet, scheduler, {"null_class": denoiser.null_class}, "")
            return show(folder / PREVIEW, round_)
        except OSError as error:
            told = cannot_write(Path(error.filename or folder), error, "output")
            display.line(f"warning: preview of round {round_}: {told}")
            return None

    trained = train_generator(
        config, folder.name, dataset, display, signals, again=again, on_preview=preview,
        preview_s=60 * pretraining.sampling.every_minutes, session=session or (kept.ray if kept is not None else None),
    )
    shutil.rmtree(folder / PREVIEW, ignore_errors=True)
    card = _card(pretraining, config, dataset, trained)
    try:
        card[ENTRY] = record(folder, dataset.train_images)
        write_folder(folder, trained.denoiser.unet, trained.denoiser.diffusion.scheduler, card, _readme(card))
    except OSError as error:
        told = cannot_write(Path(error.filename or folder), error, "output")
        raise DiskError(f"{told}; the same command then writes the weights") from error
    return str(trained.summary["mlflow_run_id"] or "")


def _card(pretraining: PretrainConfig, config: Config, dataset: Dataset, trained: TrainedGenerator) -> PlainDict:
    denoiser, summary = trained.denoiser, trained.summary
    privacy = summary["privacy"]
    card: PlainDict = plain_without_secrets({
        "data": {**pretraining.data, "train_images": len(dataset.train_images), "sha256": summary["data_sha256"]},
        "channels": dataset.channels,
        "image_size": list(dataset.image_size),
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "null_class": denoiser.null_class,
        "parameters": sum(p.numel() for p in denoiser.unet.parameters()),
        "trained_by": {
            "who": f"{summary['clients']} clients, in {summary['rounds']} rounds; no image left its client",
            "clients": summary["clients"],
            "clients_per_round": config.clients_per_round,
            "partition": config.partition.model_dump(mode="json"),
            "partition_sha256": summary["partition_sha256"],
            "rounds": summary["rounds"],
            "local_steps": summary["steps"],
            "bytes_up": summary["bytes_up"],
            "privacy": privacy,
        },
        "config": pretraining.model_dump(
            mode="json", exclude={"output", "device", "notes", "sampling", "tracking"}, exclude_unset=True
        ),
        "config_hash": config.hash(),
        "seed": pretraining.seed,
        "rounds_done": summary["rounds"],
        "seconds": summary["seconds"]["total"],
        "loss": {"test": round(summary["denoising_error"], 6)},
        "made_with": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "notes": pretraining.notes,
    })
    return card


def _readme(card: PlainMapping) -> str:
    height, width = card["image_size"]
    by = card["trained_by"]
    privacy = by["privacy"]
    protected = "none" if privacy is None else (
        f"epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g} for a client as a whole"
    )
    null = "no null class, so no guidance" if card["null_class"] is None else f"null class {card['null_class']}"
    return f"""---
library_name: diffusers
pipeline_tag: unconditional-image-generation
tags: [diffusion, class-conditional, federated]
---
# Class-conditional diffusion model of `{card["data"]["name"]}`, trained by its clients

A diffusers `UNet2DModel` of {card["parameters"]:,} parameters (half precision) for {width} x {height} images of
{card["channels"]} channel(s) in [-1, 1]. Classes 0 to {card["classes"] - 1} ({null}): {", ".join(card["class_names"])}.

| | |
|---|---|
| trained by | {by["who"]} |
| data | {card["data"]["train_images"]:,} training images of `{card["data"]["name"]}`, sha256 {card["data"]["sha256"]} |
| partition | {by["partition"]["name"]}, sha256 {by["partition_sha256"]} |
| local steps | {by["local_steps"]:,} |
| differential privacy | {protected} |
| seed | {card["seed"]} |
| training time | {card["seconds"]:.0f} s |
| denoising error, test images | {card["loss"]["test"]} |

The denoising error is the mean squared error of the prediction over all timesteps. Remake with `raysim pretrain` and
the configuration in `card.json`; the rounds are in `{FOLDER}/`.
{card["notes"]}
"""
