"""Which weights a run uses: those that it names, or, for `auto`, those that were trained on its own images."""

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path

from raysim.core.errors import UserError
from raysim.core.plain import PlainMapping
from raysim.core.records import Dataset
from raysim.generation import training_images
from raysim.generation.weights_folder import CARD, SHIPPED, find_folder, read_json, shipped_names

AUTO = "auto"
HOME = "weights"  # folder in the working directory with a folder for each set of weights of the user's own


class UnsuitableWeights(UserError):
    """There are no weights for these images, or those that are named were made for others.

    problem: the message without its remedy, to which a caller that knows the configuration's file adds the command.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; {remedy()}")
        self.problem = problem


def remedy(source: str = "RUN.yaml", overrides: Sequence[str] = ()) -> str:
    """What helps where no weights fit.  source, overrides: what the configuration of the run was read from."""
    return (
        f"train some with `{pretrain_command(source, overrides)}`, use generator.name=pipeline with a pipeline of "
        "diffusers for such images, or make no images: allocation=none"
    )


def pretrain_command(source: str, overrides: Sequence[str] = ()) -> str:
    """The command that trains weights for the data of a run, which the run then finds."""
    of_data = [text for text in overrides if text.startswith(("data.", "data="))]
    return shlex.join(["raysim", "pretrain", "--for", source, *of_data])


def find(weights: str, dataset: Dataset) -> Path:
    """The folder of the weights that `generator.weights` names.

    auto: those below ./weights that were trained on exactly the images of all clients, or exactly on those that no
    client owns; else those that come with raysim for images and classes like these.

    Raises UnsuitableWeights where auto finds none, and UserError where it finds several, or for a name that is wrong.
    """
    if weights != AUTO:
        return find_folder(weights)
    own = _trained_on(dataset)
    if len(own) > 1:
        names = ", ".join(str(folder) for folder in own)
        raise UserError(f"generator.weights = {AUTO}: {names} were all trained on these images; name one of them")
    fitting = own or [SHIPPED / name for name in shipped_names() if _fits(read_json(SHIPPED / name / CARD), dataset)]
    if not fitting:
        height, width = dataset.image_size
        raise UnsuitableWeights(
            f"generator.weights = {AUTO}: there are no weights for the data set {dataset.name!r} "
            f"({dataset.channels} x {height} x {width} pixels, {dataset.classes} classes): none in ./{HOME} were "
            "trained on its images, and none that come with raysim fit"
        )
    return fitting[0]


def settled(weights: str, dataset: Dataset) -> str:
    """`weights` with auto replaced by what it finds: a shipped name, or the absolute path of a folder."""
    if weights != AUTO:
        return weights
    folder = find(weights, dataset)
    return folder.name if folder.parent == SHIPPED else str(folder.absolute())


def _trained_on(dataset: Dataset) -> list[Path]:
    """The folders below ./weights whose weights were trained on exactly one of its sets of images, sorted."""
    sets = [images for images in (dataset.train_images, dataset.public_images) if images is not None]
    digest = functools.cache(lambda i: training_images.digest(sets[i]))  # of those alone whose number fits
    found = []
    for card_path in sorted(Path(HOME).glob(f"*/{CARD}")):
        entry = read_json(card_path).get(training_images.ENTRY)
        if not isinstance(entry, dict):
            continue
        alike = [i for i, images in enumerate(sets) if len(images) == entry.get("images")]
        if any(entry.get("sha256") == digest(i) for i in alike):
            found.append(card_path.parent)
    return found


def _fits(card: PlainMapping, dataset: Dataset) -> bool:
    made_for = card.get("channels"), card.get("image_size"), card.get("class_names")
    return made_for == (dataset.channels, list(dataset.image_size), list(dataset.class_names))
