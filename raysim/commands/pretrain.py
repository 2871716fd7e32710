"""`raysim pretrain`: trains a generator by a configuration, shows its progress, and measures its quality."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from raysim.config.load import apply_overrides, check_command, foreign_code, foreign_note, read_config, validate
from raysim.config.markers import chosen, dotted, walk, without_effect
from raysim.config.registry import check_parameters, resolve
from raysim.config.yaml_io import find_file
from raysim.core import rng
from raysim.core.errors import ConfigError, DiskError, UserError
from raysim.core.files import cannot_write, write_atomic, write_file
from raysim.core.locks import FolderLock
from raysim.core.plain import PlainDict
from raysim.core.records import ByteArray, Dataset, IntArray
from raysim.core.signals import Signals
from raysim.generation.pretrain import is_finished
from raysim.generation.pretrain import pretrain as train
from raysim.generation.pretrain_config import PretrainConfig
from raysim.generation.weights_folder import CARD, add_to_card, read_json
from raysim.tracking.tracker import NullTracker, Status, Tracker
from raysim.ui import plots
from raysim.ui.display import Display

QUALITY = "quality.json"
RUN = "run.json"
GRID = "real_and_synthetic.png"
PREVIEW_IMAGES = 80  # images of a preview, at least one of each class


def pretrain(source: str | Path, overrides: Iterable[str] = ()) -> Path:
    """Train the generator of a configuration and measure its quality; returns the folder with its weights.

    SIGINT, SIGTERM and SIGHUP end the training after the current step; it is saved, and Interrupted is raised.
    """
    with Display() as display, Signals() as signals:
        source = find_file(source)
        display.line(f"raysim: reading {source}")
        plain, _ = read_config(source)
        if "output" not in plain and "steps" not in plain:
            check_command(plain, "raysim pretrain", source)
        if code := foreign_code(plain, overrides):
            display.line(foreign_note(source, code))
        apply_overrides(plain, overrides)
        config = validate(PretrainConfig, plain, str(source))
        _check_sampling(config)
        notes = unread_keys(config, plain)
        dataset = load(config.data, notes)
        for note in notes:
            display.line(f"note: {note}")
        display.line(f"{dataset.name}: {len(dataset.train_labels_N):,} training images; {config.steps:,} steps")
        folder = Path(config.output).expanduser()
        done = is_finished(folder, config)
        if done and (not config.sampling.images or (folder / QUALITY).is_file()):
            display.line(f"{folder} is finished; nothing to do")
            return folder
        with _own(folder):
            _to_the_end(config, dataset, display, signals)
        return folder


def _own(folder: Path) -> FolderLock:
    """Make the output folder, and take its lock; UserError where that cannot be, or another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"output: {folder} cannot be made ({error.strerror})"
        raise UserError(f"{told}; free space there, or name another folder") from error
    return FolderLock(folder)


def _to_the_end(config: PretrainConfig, dataset: Dataset, display: Display, signals: Signals) -> None:
    """Train and measure, and record in MLflow how that ended.  Raises DiskError where the disk refuses a file."""
    folder = Path(config.output).expanduser()
    tracker = _tracker(config, folder)
    status: Status = "FAILED"
    try:
        _train(config, dataset, display, tracker, signals)
        if is_finished(folder, config) and config.sampling.images:
            try:
                _measure(config, dataset, display, tracker)
            except OSError as error:
                told = cannot_write(Path(error.filename or folder), error, "output")
                raise DiskError(f"{told}; the same command then measures the finished weights again") from error
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracker.finish(status)
        for problem in tracker.problems:
            display.line(f"warning: {problem}")


def unread_keys(config: PretrainConfig, plain: PlainDict) -> list[str]:
    """The keys of `plain`, as the user wrote them, that have no effect on this training, one line each."""
    resolved = config.model_dump(mode="json")
    set_by_user = chosen(walk(PretrainConfig.model_fields, resolved), frozenset(dotted(plain)))
    found = without_effect(set_by_user.values())
    guidance = config.sampling.guidance
    if "sampling.guidance" in set_by_user and _guidance(config) != guidance:
        told = f"sampling.guidance = {guidance:g} has no effect: without a null class (label_dropout = 0) it is 1"
        found.setdefault("sampling.guidance", told)
    return list(found.values())


def _check_sampling(config: PretrainConfig) -> None:
    if config.sampling.steps > config.train_steps:
        raise UserError(
            f"sampling.steps = {config.sampling.steps}: there are train_steps = {config.train_steps} timesteps; "
            "use at most that"
        )


def _guidance(config: PretrainConfig) -> float:
    return config.sampling.guidance if config.label_dropout > 0 else 1.0


def _tracker(config: PretrainConfig, folder: Path) -> NullTracker:
    """The MLflow run of this folder, the same one when a training is resumed."""
    path = folder / RUN
    tracking = config.tracking
    before = str(read_json(path, "output").get("mlflow_run_id") or "") if path.is_file() else None
    tracker = Tracker.start(
        tracking.uri, tracking.experiment, folder.name, config.model_dump(mode="json"), {"kind": "pretrain"},
        before or None, folder,
    )
    if tracker.run_id:
        try:
            write_file(path, json.dumps({"mlflow_run_id": tracker.run_id}).encode(), "output")
        except DiskError as error:
            tracker.finish("FAILED", str(error))
            raise
    return tracker


def _train(config: PretrainConfig, dataset: Dataset, display: Display, tracker: NullTracker, signals: Signals) -> None:
    display.phase("steps")

    def show(progress: PlainDict) -> None:
        shown = {k: v for k, v in progress.items() if k in ("loss", "images_per_s")}
        display.round(progress["step"], config.steps, shown, progress.get("eta_s"))
        tracker.log_round(progress["step"], {key: progress[key] for key in ("loss", "lr", "images_per_s")})

    def preview(weights: Path, step: int) -> None:
        per_class = max(1, PREVIEW_IMAGES // dataset.classes)
        images, labels_M = _sample(config, dataset, weights, per_class * dataset.classes)
        path = weights.parent / "samples" / f"step-{step:07d}.png"
        tracker.log_figure(plots.image_grid(images, labels_M, dataset.class_names, path, per_class))

    can_show = dataset.channels in (1, 3)
    signals.ending = True  # signals are only noted from here on, so that every step is completed
    train(
        config, dataset, show, preview if can_show else None, should_stop=lambda: bool(signals.names),
        on_problem=lambda problem: display.line(f"warning: {problem}"),
    )
    signals.ending = False
    if signals.names:
        display.line(f"stopped and saved in {config.output}; the same command goes on from there")
        signals.check()


def _sample(config: PretrainConfig, dataset: Dataset, weights: Path, count: int) -> tuple[ByteArray, IntArray]:
    """Make `count` images, with classes in turn, from random streams that no federated run uses."""
    from raysim.generation.ddpm import ddpm
    from raysim.generation.pretrain_trainer import device_of

    options = config.sampling
    generator = ddpm(
        dataset, str(device_of(config.device)), weights=str(weights.absolute()), sampler=options.sampler,
        steps=options.steps, guidance=_guidance(config), allow_seen_test=True,
    )
    labels_M = np.arange(count, dtype=np.int64) % dataset.classes
    seeds_M = np.array([rng.integer(config.seed, rng.PRETRAIN, -1, i) for i in range(count)], dtype=np.int64)
    return generator.sample(labels_M, seeds_M), labels_M


def _measure(config: PretrainConfig, dataset: Dataset, display: Display, tracker: NullTracker) -> None:
    """Measure the finished weights; print the quality, and write it to quality.json, model card, figure and MLflow."""
    from raysim.generation.quality import measure, table

    folder = Path(config.output).expanduser()
    options = config.sampling
    display.line(f"quality: {options.images:,} images with {options.sampler}, {options.steps} steps ...")
    images, labels_M = _sample(config, dataset, folder, options.images)
    used = {"sampler": options.sampler, "steps": options.steps, "guidance": _guidance(config)}
    quality = {**measure(dataset, images, labels_M, config.seed), "sampling": used, "steps_done": config.steps}
    lines = table(quality)
    for line in lines:
        display.line(line)
    sampled = f"Sampled with {options.sampler}, {options.steps} steps, guidance {_guidance(config)}."
    add_to_card(folder, "quality", quality, "\n".join(["## Quality", "", sampled, "", *lines]))
    if dataset.channels in (1, 3):
        real = dataset.train_images, dataset.train_labels_N
        tracker.log_figure(plots.comparison_grid(real, (images, labels_M), dataset.class_names, folder / GRID))
    tracker.log_round(config.steps, {
        "accuracy_from_synthetic": quality["accuracy"]["from_synthetic"],
        "accuracy_from_real": quality["accuracy"]["from_real"],
        "recognised": quality["recognised"],
    })
    write_atomic(folder / QUALITY, (json.dumps(quality, indent=2) + "\n").encode())
    for name in (QUALITY, CARD):
        tracker.log_artifact(folder / name)


def load(section: PlainDict, notes: list[str] | None = None) -> Dataset:
    """Load the data set of a pretraining; with `public_frac`, its training images are those that no client owns.

    section: the section `data`.  notes: messages of the data set are appended to it.  Raises ConfigError or UserError.
    """
    from raysim.data.reader import Reader, read_dataset
    from raysim.data.splits import hold_out

    name = str(section.get("name"))
    fraction = section.get("public_frac", 0.0)
    given = {key: value for key, value in section.items() if key not in ("name", "public_frac")}
    try:
        source = resolve("data", name)
        params, problems = check_parameters(source, given, "data", also=["name", "public_frac"])
    except LookupError as error:
        raise ConfigError([f"data.name = {name}: {error}"]) from error
    if problems:
        raise ConfigError(problems)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise UserError(f"data.public_frac = {fraction!r}: give a number from 0 to below 1")
    dataset = hold_out(
        read_dataset(name, source, params, Reader(notes=[] if notes is None else notes)), fraction
    )
    if dataset.public_images is None or dataset.public_labels_N is None:
        return dataset
    return replace(dataset, train_images=dataset.public_images, train_labels_N=dataset.public_labels_N)
