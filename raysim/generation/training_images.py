"""Records which images a generator was trained on, as short digests beside its weights, to find test images among them.

`training_images.npy` holds the first 8 bytes of the sha256 of each image, as sorted 64-bit numbers. With 50,000
training images, the probability that at least one of 10,000 other images has an equal digest is 3e-11.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raysim.core.errors import UserError
from raysim.core.files import write_atomic
from raysim.core.plain import PlainDict, PlainMapping
from raysim.core.records import ByteArray, Dataset

FILE = "training_images.npy"
ENTRY = "training_images"  # key in card.json

Keys = NDArray[np.uint64]


def image_keys(images: ByteArray) -> Keys:
    """A 64-bit number for each image, computed from its shape and pixels alone: N.

    images: N x channels x height x width.
    """
    shape = str(images.shape[1:]).encode()
    digests = [hashlib.sha256(shape + np.ascontiguousarray(image).tobytes()).digest()[:8] for image in images]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def record(folder: Path, images: ByteArray) -> PlainDict:
    """Write the digests of the images that the weights in `folder` are trained on; returns their entry in card.json.

    The file is a function of the set of images alone.
    """
    content = _content(images)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE, content)
    return {"images": len(images), "file": FILE, "sha256": hashlib.sha256(content).hexdigest()}


def digest(images: ByteArray) -> str:
    """Hex sha256 that identifies a set of images: the one in the card of weights that were trained on it."""
    return hashlib.sha256(_content(images)).hexdigest()


def _content(images: ByteArray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.unique(image_keys(images)))
    return buffer.getvalue()


def recorded(folder: Path, card: PlainMapping) -> Keys | None:
    """Read the digests beside the weights in `folder`; None where card.json names none.

    Raises UserError where the file that it names is missing or damaged.
    """
    entry = card.get(ENTRY)
    if not isinstance(entry, dict):
        return None
    path = folder / FILE
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.get("sha256"):
            raise ValueError("its checksum is not the one in card.json")
        keys: Keys = np.load(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"generator.weights: {path} is missing or damaged ({error}); copy it from where the weights came from"
        ) from error
    return keys


def seen(keys: Keys, images: ByteArray) -> int:
    """How many of these images have a digest among `keys`."""
    return int(np.isin(image_keys(images), keys).sum())


def refuse_seen_test(keys: Keys | None, dataset: Dataset, weights: str) -> None:
    """Raise UserError where the weights were trained on test images, on which accuracy would then be measured."""
    found = seen(keys, dataset.test_images) if keys is not None else 0
    if found:
        raise UserError(
            f"generator.weights = {weights}: {found:,} of the {len(dataset.test_images):,} test images of "
            f"{dataset.name!r} are among the images that these weights were trained on, so accuracy would be measured "
            "on images that the training has seen; use the split that they were trained with (data.split_seed, "
            "data.test_fraction), other weights, or generator.allow_seen_test: true"
        )


def notes_of(keys: Keys | None, dataset: Dataset, weights: str, clients: str = "") -> list[str]:
    """Notes for the summary about which images of the data set the weights were trained on.

    clients: of a training by clients, what the card says of it.
    """
    name = f"generator.weights = {weights}"
    if keys is None:
        return [f"{name} do not say which images they were trained on, so test images among them cannot be found"]
    notes = []
    owned = seen(keys, dataset.train_images)
    tested = seen(keys, dataset.test_images)
    if owned:
        of_all = f"{owned:,} of the {len(dataset.train_images):,} images of all clients"
        notes.append(
            f"{name} were trained by {clients}: on {of_all}" if clients
            else f"{name} were trained on {of_all}: what is made for one client carries what others own"
        )
    chosen_on = 0 if dataset.validation_images is None else seen(keys, dataset.validation_images)
    if chosen_on:
        notes.append(
            f"{name} were trained on {chosen_on:,} of the validation images, too: validation accuracy is not quite "
            "that on unseen images"
        )
    if tested:
        notes.append(
            f"{name} were trained on {tested:,} of the {len(dataset.test_images):,} test images, too "
            "(generator.allow_seen_test)"
        )
    return notes
