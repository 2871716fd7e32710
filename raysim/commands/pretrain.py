"""`raysim pretrain`: trains a generator by a configuration, shows its progress, and measures its quality."""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from raysim.commands.sweep.grid import read_sweep
from raysim.config.load import (
    apply_overrides,
    build,
    check_command,
    command_for,
    foreign_code,
    foreign_note,
    read_config,
    validate,
    with_sections,
)
from raysim.config.markers import chosen, dotted, walk, without_effect
from raysim.config.schema import Section
from raysim.config.yaml_io import find_file
from raysim.core import rng
from raysim.core.errors import ConfigError, DiskError, UserError
from raysim.core.files import cannot_write, write_atomic, write_file
from raysim.core.locks import FolderLock
from raysim.core.plain import PlainDict
from raysim.core.records import ByteArray, Dataset, IntArray
from raysim.core.signals import Signals
from raysim.core.validation import problems_of, show
from raysim.generation import training_images
from raysim.generation.find_weights import AUTO, HOME
from raysim.generation.pretrain import is_finished, settle
from raysim.generation.pretrain import pretrain as train
from raysim.generation.pretrain_config import Federation, PretrainConfig, defaults_for
from raysim.generation.weights_folder import CARD, add_to_card, read_json, shipped_names
from raysim.lifecycle.prepare import load_dataset
from raysim.tracking.tracker import NullTracker, Status, Tracker
from raysim.ui import plots
from raysim.ui.display import Display

if TYPE_CHECKING:
    from raysim.engine.session import Session

QUALITY = "quality.json"
RUN = "run.json"
GRID = "real_and_synthetic.png"
PREVIEW_IMAGES = 80  # images of a preview, at least one of each class


def pretrain(
    source: str | Path | None = None, overrides: Iterable[str] = (), *, for_run: str | Path | None = None,
    session: "Session | None" = None,
) -> Path:
    """Train a generator and measure its quality; returns the folder with its weights.

    source: the configuration of the training; None: the defaults.  for_run: that of a run, whose data it is trained on,
    and which then finds the weights.  At least one of the two is needed.  session: an open Ray session, for a training
    by clients.

    SIGINT, SIGTERM and SIGHUP end the training after the current step; it is saved, and Interrupted is raised.
    """
    overrides = list(overrides)
    with Display() as display, Signals() as signals:
        plain, where = _read(source, overrides, for_run, display)
        notes: list[str] = []
        if for_run is None:
            config = _checked(plain, where)
            dataset = load(config.data, notes, by_clients=config.federation is not None)
        else:
            dataset = load(plain["data"], notes, by_clients="federation" in plain)
            if "output" not in plain:
                plain["output"] = str(Path(HOME) / _name_of(dataset, "federation" in plain))
            config = _checked(_with_defaults(plain, dataset), where)
        for note in [*notes, *unread_keys(config, plain)]:
            display.line(f"note: {note}")
        folder = Path(config.output).expanduser()
        again = _command(source, overrides, for_run)
        if config.federation is not None:
            _by_clients(config, dataset, display, signals, again, session)
            return folder
        config = settle(config, dataset)
        display.line(f"{dataset.name}: {_described(dataset)}; {config.length:,} steps; weights go to {folder}")
        if is_finished(folder, config) and _is_measured(folder, config, config.length):
            display.line(f"{folder} is finished; nothing to do (steps={2 * config.length} would train as long again)")
            return folder
        with _own(folder):
            _to_the_end(config, dataset, display, signals, again)
        return folder


def _by_clients(
    config: PretrainConfig, dataset: Dataset, display: Display, signals: Signals, again: str, session: "Session | None"
) -> None:
    """Have the clients of `federation` train the generator, and measure its quality."""
    from raysim.commands import pretrain_federated as federated

    folder = Path(config.output).expanduser()
    run = federated.run_config(config, dataset)
    display.line(f"{dataset.name}: {_described(dataset)}; {run.rounds:,} rounds; weights go to {folder}")
    finished = federated.is_finished(folder, run)
    if finished and _is_measured(folder, config, run.rounds):
        display.line(f"{folder} is finished; nothing to do (federation.rounds={2 * run.rounds} would go on with it)")
        return

    def show(weights: Path, round_: int) -> Path:
        return _draw_samples(config, dataset, weights, round_, "round", display)

    with _own(folder):
        if not finished:
            can_show = dataset.channels in (1, 3)
            run_id = federated.train(
                config, run, dataset, display, signals, again, show if can_show else None, session
            )
            signals.ending = False
            write_file(folder / RUN, json.dumps({"mlflow_run_id": run_id}).encode(), "output")
        if config.sampling.images:
            with _tracked(config, display) as tracker:
                _measure(config, dataset, display, tracker, run.rounds)


def _read(
    source: str | Path | None, overrides: list[str], for_run: str | Path | None, display: Display
) -> tuple[PlainDict, str]:
    """(the keys that the user gave, data and output taken from the run, where they stand)."""
    plain: PlainDict = {}
    if source is not None:
        source = find_file(source)
        display.line(f"raysim: reading {source}")
        plain, _ = read_config(source)
        if command_for(plain) == "raysim run":
            told = f"`raysim pretrain --for {source}` trains a generator for its data"
            raise ConfigError([f"this is the configuration of a single run; {told}"], str(source))
        check_command(plain, "raysim pretrain", source)
    if for_run is not None:
        for_run = find_file(for_run)
        display.line(f"raysim: reading {for_run}")
        if "data" in plain:
            raise ConfigError([f"data: {source} has a section of its own, and --for gives another; remove one"])
        taken, partition = _from_run(for_run, display.line)
        plain |= taken
    where = " and ".join(str(file) for file in (source, for_run) if file is not None)
    if code := [*foreign_code(plain, overrides), *foreign_code(plain.get("federation") or {})]:
        display.line(foreign_note(where, code))
    apply_overrides(plain, overrides)
    if isinstance(plain.get("federation"), dict):
        if for_run is not None and partition is not None:
            plain["federation"] = {"partition": partition, **plain["federation"]}
        elif for_run is not None and "partition" not in plain["federation"]:
            told = "the runs of the sweep differ in theirs, as by their seeds; give the one that the generator is for"
            raise ConfigError([f"federation.partition is missing: {told}"], str(for_run))
        plain["federation"] = _with_names(with_sections(plain["federation"]))
    return plain, where


def _with_names(federation: PlainDict) -> PlainDict:
    """The keys of a federation, its sections with the name of the default plug-in where they have none, as in a run."""
    defaults = {key: field.default for key, field in Federation.model_fields.items()}
    return {
        key: {"name": defaults[key].name, **value}
        if isinstance(value, dict) and isinstance(defaults.get(key), Section) else value
        for key, value in federation.items()
    }


def _from_run(file: str | Path, say: Callable[[str], object]) -> tuple[PlainDict, PlainDict | None]:
    """What a run, or a sweep, says of the generator that it needs: its data and the folder of the weights.

    And its partition, None where the runs of a sweep differ in that.  Raises ConfigError where they differ in the rest.
    """
    plain, _ = read_config(file)
    runs = [plain]
    if command_for(plain) == "raysim sweep":
        runs = [cell.config.resolved() for cell in read_sweep(file, say=say).cells]
    else:
        check_command(plain, "raysim run", file)
    taken, partitions = zip(*(_needed(run, file) for run in runs), strict=True)
    for key in ("data", "output"):
        values = list({json.dumps(one.get(key), sort_keys=True, default=str): one.get(key) for one in taken}.values())
        if len(values) > 1:
            named = "generator.weights" if key == "output" else "data"
            remedy = "give --for the configuration of one of them"
            told = f"{named}: the runs of the sweep differ in it ({show(values[0])} and {show(values[1])}); {remedy}"
            raise ConfigError([told], str(file))
    same = all(partition == partitions[0] for partition in partitions)
    return taken[0], partitions[0] if same else None


def _needed(run: PlainDict, file: str | Path) -> tuple[PlainDict, PlainDict]:
    """(data, and the folder of the weights where it is named; partition) of the configuration of a run."""
    if not isinstance(run.get("data"), dict):
        raise ConfigError(["data is missing: --for takes the configuration of a run or of a sweep"], str(file))
    data = {key: value for key, value in run["data"].items() if key != "augment"}
    generator = run.get("generator")
    weights = generator.get("weights") if isinstance(generator, dict) else None
    names_folder = isinstance(weights, str) and weights not in (AUTO, *shipped_names())
    partition = dict(run.get("partition") or {"name": "dirichlet"})
    if partition.get("seed") is None and partition.get("name") != "file":
        partition["seed"] = run.get("seed", 0)  # so that clients own the same samples
    return {"data": data, **({"output": weights} if names_folder else {})}, partition


def _checked(plain: PlainDict, where: str) -> PretrainConfig:
    """The configuration of a training; ConfigError lists every problem."""
    federation = plain.get("federation")
    if isinstance(federation, dict):
        try:
            Federation.model_validate(federation)
        except ValidationError as error:
            raise ConfigError(problems_of(error, Federation, federation, "federation"), where) from error
    config = validate(PretrainConfig, plain, where)
    if problems := config.problems():
        raise ConfigError(problems, where)
    _check_sampling(config)
    return config


def _name_of(dataset: Dataset, by_clients: bool) -> str:
    """A folder's name: that of the data set, and the beginning of the digest of the images that are trained on."""
    how = "-federated" if by_clients else ""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', dataset.name)}-{training_images.digest(dataset.train_images)[:8]}{how}"


def _with_defaults(plain: PlainDict, dataset: Dataset) -> PlainDict:
    """The keys with defaults that suit the size of the images; the length of the training only where none is given."""
    defaults = defaults_for(dataset.image_size)
    if isinstance(plain.get("unet"), dict):
        plain = {**plain, "unet": {**defaults["unet"], **plain["unet"]}}
    if "federation" in plain:
        return {"unet": defaults["unet"], **plain}
    if "steps" in plain or "minutes" in plain:
        defaults = {key: value for key, value in defaults.items() if key not in ("steps", "minutes")}
    return {**defaults, **plain}


def _described(dataset: Dataset) -> str:
    height, width = dataset.image_size
    shape = f"{dataset.channels} x {height} x {width} pixels"
    return f"{len(dataset.train_labels_N):,} training images of {shape}, {dataset.classes} classes"


def _command(source: str | Path | None, overrides: list[str], for_run: str | Path | None) -> str:
    """The command that does this again."""
    chosen = [] if for_run is None else ["--for", str(for_run)]
    return shlex.join(["raysim", "pretrain", *chosen, *([] if source is None else [str(source)]), *overrides])


def _is_measured(folder: Path, config: PretrainConfig, done: int) -> bool:
    """Whether the quality of the weights after `done` steps or rounds is known, or is not to be."""
    if not config.sampling.images:
        return True
    return (folder / QUALITY).is_file() and read_json(folder / QUALITY, "output").get("steps_done") == done


def _own(folder: Path) -> FolderLock:
    """Make the output folder, and take its lock; UserError where that cannot be, or another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"output: {folder} cannot be made ({error.strerror})"
        raise UserError(f"{told}; free space there, or name another folder") from error
    return FolderLock(folder)


def _to_the_end(config: PretrainConfig, dataset: Dataset, display: Display, signals: Signals, again: str) -> None:
    """Train and measure.  again: the command that goes on.  Raises DiskError where the disk refuses a file."""
    with _tracked(config, display) as tracker:
        _train(config, dataset, display, tracker, signals, again)
        if is_finished(Path(config.output).expanduser(), config) and config.sampling.images:
            _measure(config, dataset, display, tracker, config.length)


@contextlib.contextmanager
def _tracked(config: PretrainConfig, display: Display) -> Iterator[NullTracker]:
    """The MLflow run of a training, which says how what is done inside has ended."""
    tracker = _tracker(config, Path(config.output).expanduser())
    status: Status = "FAILED"
    try:
        yield tracker
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
    resolved = config.model_dump(mode="json", exclude={"federation"})
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


def _train(
    config: PretrainConfig, dataset: Dataset, display: Display, tracker: NullTracker, signals: Signals, again: str
) -> None:
    display.phase("steps")

    def show(progress: PlainDict) -> None:
        shown = {k: v for k, v in progress.items() if k in ("loss", "images_per_s")}
        display.round(progress["step"], config.length, shown, progress["eta_s"])

    def track(progress: PlainDict) -> None:
        tracker.log_round(progress["step"], {key: progress[key] for key in ("loss", "lr", "images_per_s")})

    def preview(weights: Path, step: int) -> None:
        tracker.log_figure(_draw_samples(config, dataset, weights, step, "step", display))

    can_show = dataset.channels in (1, 3)
    signals.ending = True  # signals are only noted from here on, so that every step is completed
    train(
        config, dataset, track, preview if can_show else None, should_stop=lambda: bool(signals.names),
        on_problem=lambda problem: display.line(f"warning: {problem}"), on_tick=show,
    )
    signals.ending = False
    if not is_finished(Path(config.output).expanduser(), config):
        display.line(f"stopped and saved in {config.output}; go on with: {again}")
    signals.check()


def _draw_samples(
    config: PretrainConfig, dataset: Dataset, weights: Path, done: int, unit: str, display: Display
) -> Path:
    """Draw a grid of sample images from the weights as they are after `done` steps or rounds; returns its path."""
    per_class = max(1, PREVIEW_IMAGES // dataset.classes)
    images, labels_M = _sample(config, dataset, weights, per_class * dataset.classes)
    path = weights.parent / "samples" / f"{unit}-{done:07d}.png"
    plots.image_grid(images, labels_M, dataset.class_names, path, per_class)
    display.line(f"samples of {unit} {done:,}: {path}")
    return path


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


def _measure(config: PretrainConfig, dataset: Dataset, display: Display, tracker: NullTracker, done: int) -> None:
    """Measure the finished weights after `done` steps or rounds.  Raises DiskError where the disk refuses a file."""
    try:
        _measure_and_write(config, dataset, display, tracker, done)
    except OSError as error:
        told = cannot_write(Path(error.filename or config.output), error, "output")
        raise DiskError(f"{told}; the same command then measures the finished weights again") from error


def _measure_and_write(
    config: PretrainConfig, dataset: Dataset, display: Display, tracker: NullTracker, done: int
) -> None:
    """Print the quality, and write it to quality.json, model card, figure and MLflow."""
    from raysim.generation.quality import measure, table

    folder = Path(config.output).expanduser()
    options = config.sampling
    display.line(f"quality: {options.images:,} images with {options.sampler}, {options.steps} steps ...")
    images, labels_M = _sample(config, dataset, folder, options.images)
    used = {"sampler": options.sampler, "steps": options.steps, "guidance": _guidance(config)}
    quality = {**measure(dataset, images, labels_M, config.seed), "sampling": used, "steps_done": done}
    lines = table(quality)
    for line in lines:
        display.line(line)
    sampled = f"Sampled with {options.sampler}, {options.steps} steps, guidance {_guidance(config)}."
    add_to_card(folder, "quality", quality, "\n".join(["## Quality", "", sampled, "", *lines]))
    if dataset.channels in (1, 3):
        real = dataset.train_images, dataset.train_labels_N
        tracker.log_figure(plots.comparison_grid(real, (images, labels_M), dataset.class_names, folder / GRID))
    tracker.log_round(done, {
        "accuracy_from_synthetic": quality["accuracy"]["from_synthetic"],
        "accuracy_from_real": quality["accuracy"]["from_real"],
        "recognised": quality["recognised"],
    })
    write_atomic(folder / QUALITY, (json.dumps(quality, indent=2) + "\n").encode())
    for name in (QUALITY, CARD):
        tracker.log_artifact(folder / name)


def load(section: PlainDict, notes: list[str] | None = None, *, by_clients: bool = False) -> Dataset:
    """The data set of a run with this section `data`, with the images to train on as its training images.

    They are those that no client owns, where there are some (`public_frac`), and else those of all clients, as always
    where the clients train (by_clients).
    notes: messages of the data set are appended to it.  Raises ConfigError or UserError.
    """
    config = build({"data": section, "rounds": 1}, "the data of the training", sections=("data",))
    dataset = load_dataset(config, notes)
    if by_clients or dataset.public_images is None or dataset.public_labels_N is None:
        return dataset
    return replace(
        dataset, train_images=dataset.public_images, train_labels_N=dataset.public_labels_N, public_images=None,
        public_labels_N=None,
    )
