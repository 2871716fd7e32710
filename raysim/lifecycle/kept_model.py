"""The trained model of a run, as MLflow and people load it."""

from pathlib import Path

import torch
from torch import nn

from raysim.core.errors import UserError
from raysim.core.records import ByteArray, Dataset, ModelState
from raysim.core.signals import stoppable
from raysim.engine.messages import Classifier
from raysim.lifecycle.build import plugin, read_config
from raysim.lifecycle.directory import MODEL, SUMMARY, RunDirectory, readable
from raysim.models.classifier import ImageClassifier
from raysim.models.flat_model import FlatModel, build_model
from raysim.tracking.model_folder import write_model_folder

EXAMPLES = 2  # images in the input example


def write_for_mlflow(directory: RunDirectory, module: nn.Module, dataset: Dataset, example: ByteArray) -> Path:
    """Write the folder of the trained model that MLflow takes; returns its path.

    example: a few images of the data set, whose own are not read.
    """
    folder = directory.model_folder
    directory.remove_model_folder()
    model = ImageClassifier(module, dataset.mean, dataset.std).eval()
    write_model_folder(folder, model, torch.from_numpy(example), dataset.classes)
    return folder


@stoppable
def load_model(folder: str | Path) -> ImageClassifier:
    """Load the trained model of a finished run: a `torch.nn.Module` from uint8 images to a number for each class.

    folder: that of the run.  Its `module` is the network, to which model.safetensors belongs.  Raises UserError for a
    folder that is no run, for a run that has not finished, and for files that are damaged.
    """
    from safetensors.torch import load_file

    directory = RunDirectory(Path(folder).expanduser())
    summary = directory.summary()
    if summary is None:
        raise UserError(f"{folder}: this is no folder of a finished run (it has no {SUMMARY} of one)")
    if problem := directory.model_problem(summary):
        raise UserError(problem)
    config = read_config(directory.path / "config.yaml", (), {})
    if "image" not in summary:
        raise UserError(f"{folder}: this run is of an earlier raysim, which did not keep the shape of its images")
    channels, height, width = summary["image"]
    build = plugin("model", config.model).build
    module = build_model(build, channels, (height, width), len(summary["class_names"]), config.model_seed)
    with readable(directory.path / MODEL):
        module.load_state_dict(load_file(directory.path / MODEL))
    return ImageClassifier(module, summary["image_mean"], summary["image_std"]).eval()


def load_classifier(folder: str | Path, dataset: Dataset) -> tuple[Classifier, ModelState]:
    """The trained model of a finished run, to judge images by: (how it is built, its parameters).

    Raises UserError as `load_model` does, and for a model of other images or other classes than those of the data set.
    """
    key = f"generator.keep.classifier = {folder}"
    try:
        model = load_model(folder)
        directory = RunDirectory(Path(folder).expanduser())
        summary, config = directory.summary() or {}, read_config(directory.path / "config.yaml", (), {})
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    shape, classes = [dataset.channels, *dataset.image_size], len(summary["class_names"])
    if summary["image"] != shape or classes != dataset.classes:
        raise UserError(
            f"{key}: its model takes images of {summary['image']} and knows {classes} classes, and {dataset.name} has "
            f"images of {shape} and {dataset.classes} classes; give a run on such data"
        )
    seed = config.model_seed
    mean, std = tuple(map(float, summary["image_mean"])), tuple(map(float, summary["image_std"]))
    return Classifier(plugin("model", config.model), seed, mean, std), FlatModel(model.module).state()
