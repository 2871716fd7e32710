"""Named data sets: every one gives uint8 images, int64 labels, and a test split that training never sees."""

import hashlib
import importlib.util
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from raysim.config.markers import MAY_CHANGE
from raysim.core.errors import UserError
from raysim.core.records import Dataset
from raysim.data.files import SplitSeed, TestFraction
from raysim.data.splits import Labelled, build_dataset

__all__ = ["cifar10", "cifar100", "digits", "emnist", "fashion_mnist", "labels", "mnist", "svhn"]

# What torchvision raises for files that are missing, cut short or of another format.
_UNREADABLE = (RuntimeError, OSError, ValueError, EOFError, KeyError, AssertionError, pickle.UnpicklingError)

Root = Annotated[str, Field(description="Folder in which torchvision keeps the data set")]
Download = Annotated[bool, Field(description="Fetch the data set, once, if it is not there yet"), MAY_CHANGE]
Count = Annotated[int, Field(ge=0)]


def digits(*, test_fraction: TestFraction = 0.2, split_seed: SplitSeed = 0) -> Dataset:
    """1,797 real handwritten digits of 8 x 8 pixels that come with scikit-learn: no download.

    Grey levels 0..16 become 0..255.  There is no official test split; a fixed fifth of each class is set apart.
    """
    rows = _digits_rows()
    images = np.rint(rows[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    data = (images, rows[:, -1].astype(np.int64))
    names = [str(d) for d in range(10)]
    return build_dataset(
        "digits", data, None, names, flips=False, test_fraction=test_fraction, split_seed=split_seed, key="data"
    )


def _digits_rows() -> NDArray[np.float64]:
    """The 64 grey levels and the label of each digit, from the file of scikit-learn, whose import takes a second."""
    package = importlib.util.find_spec("sklearn")
    for place in package.submodule_search_locations or () if package else ():
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def cifar10(*, root: Root = "data", download: Download = False) -> Dataset:
    """CIFAR-10 through torchvision: 50,000 + 10,000 colour images of 32 x 32 pixels, 10 classes."""
    return _torchvision("cifar10", "CIFAR10", root, download, [{"train": True}, {"train": False}], flips=True)


def cifar100(*, root: Root = "data", download: Download = False) -> Dataset:
    """CIFAR-100 through torchvision: 50,000 + 10,000 colour images of 32 x 32 pixels, 100 classes."""
    return _torchvision("cifar100", "CIFAR100", root, download, [{"train": True}, {"train": False}], flips=True)


def mnist(*, root: Root = "data", download: Download = False) -> Dataset:
    """MNIST through torchvision: 60,000 + 10,000 grey digits of 28 x 28 pixels."""
    return _torchvision("mnist", "MNIST", root, download, [{"train": True}, {"train": False}], flips=False)


def fashion_mnist(*, root: Root = "data", download: Download = False) -> Dataset:
    """Fashion-MNIST through torchvision: 60,000 + 10,000 grey pictures of clothes, 28 x 28 pixels."""
    parts = [{"train": True}, {"train": False}]
    return _torchvision("fashion_mnist", "FashionMNIST", root, download, parts, flips=True)


def emnist(
    *,
    root: Root = "data",
    download: Download = False,
    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced",
) -> Dataset:
    """EMNIST through torchvision: grey handwritten letters and digits of 28 x 28 pixels, turned upright.

    split: one of EMNIST's own; `letters` (numbered 1..26 in the files) becomes 0..25.
    """
    parts = [{"split": split, "train": True}, {"split": split, "train": False}]
    return _torchvision("emnist", "EMNIST", root, download, parts, flips=False)


def svhn(*, root: Root = "data", download: Download = False) -> Dataset:
    """Street View House Numbers through torchvision: 73,257 + 26,032 colour digits of 32 x 32 pixels."""
    return _torchvision("svhn", "SVHN", root, download, [{"split": "train"}, {"split": "test"}], flips=False)


def _torchvision(
    name: str, class_name: str, root: str, download: bool, parts: list[dict[str, Any]], flips: bool
) -> Dataset:
    """parts: what selects the training and the test split, in torchvision's words."""
    import torchvision.datasets

    folder, kind = Path(root).expanduser(), getattr(torchvision.datasets, class_name)
    loaded: list[Labelled] = []
    class_names: list[str] | None = None
    for part in parts:
        try:
            source = kind(str(folder), download=download, **part)
        except _UNREADABLE as error:
            raise UserError(_why_unread(name, kind, root, download, error)) from error
        loaded.append(_uniform_layout(source))
        class_names = class_names or getattr(source, "classes", None)
    train, test = loaded
    if name == "emnist":
        train = _upright(train, class_names)
        test = _upright(test, class_names)
        class_names = _named(class_names)
    return build_dataset(name, train, test, class_names, flips=flips, test_fraction=0.2, split_seed=0, key="data.root")


def _why_unread(name: str, source: Any, root: str, download: bool, error: BaseException) -> str:
    """What is wrong with a data set's files, with the checksum found and the one expected where that tells."""
    folder = Path(root).expanduser()
    where = f"data.root = {root!r}: {name} in {folder.absolute()}"
    present = [(file, md5) for file, md5 in _checksums(source, folder) if file.is_file()]
    found = {file: _md5(file) for file, _ in present}
    damaged = [
        f"{file.name} ({file.stat().st_size:,} bytes) has the MD5 sum {found[file]} and should have {md5}"
        for file, md5 in present
        if found[file] != md5
    ]
    if download:
        more = f"; {damaged[0]}" if damaged else ""
        return f"{where} could not be fetched ({error}){more}; check the network, or copy it there"
    if damaged:
        return f"{where} is damaged: {damaged[0]}; set data.download=true to fetch it again, or replace the file"
    if present:
        return (
            f"{where} is not unpacked, or not complete ({error}): {present[0][0].name} is intact; set "
            "data.download=true, which unpacks it and fetches only what is missing"
        )
    return f"{where} is absent or damaged ({error}); set data.download=true to fetch it"


def _checksums(source: Any, folder: Path) -> list[tuple[Path, str]]:
    """(file, its MD5 sum) of what torchvision fetches and unpacks for a data set."""
    if hasattr(source, "tgz_md5"):  # CIFAR
        unpacked = [(folder / source.base_folder / name, md5) for name, md5 in source.train_list + source.test_list]
        return [(folder / source.filename, source.tgz_md5), *unpacked]
    if hasattr(source, "split_list"):  # SVHN
        return [(folder / name, md5) for _, name, md5 in (source.split_list[part] for part in ("train", "test"))]
    raw = folder / source.__name__ / "raw"
    if hasattr(source, "md5"):  # EMNIST
        return [(raw / Path(source.url).name, source.md5)]
    return [(raw / name, md5) for name, md5 in source.resources]


def _md5(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _uniform_layout(source: Any) -> Labelled:
    """N x channels x H x W and int64 labels, whatever the order in which torchvision keeps the axes."""
    images = np.asarray(source.data)
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] == 3 and images.shape[1] != 3:
        images = images.transpose(0, 3, 1, 2)
    targets = source.targets if hasattr(source, "targets") else source.labels
    return np.ascontiguousarray(images), np.asarray(targets).astype(np.int64)


def _named(class_names: list[str] | None) -> list[str] | None:
    """EMNIST's letters start at 1: class 0 is a placeholder without samples."""
    return class_names[1:] if class_names and class_names[0] == "N/A" else class_names


def _upright(data: Labelled, class_names: list[str] | None) -> Labelled:
    """EMNIST's files hold columns where others hold rows."""
    images, labels_N = data
    shift = 1 if _named(class_names) != class_names else 0
    return np.ascontiguousarray(images.transpose(0, 1, 3, 2)), labels_N - shift


def labels(*, counts: list[Count] | dict[Literal["classes", "per_class"], Count]) -> Dataset:
    """Class counts without images, so that partitions and budgets can be planned without the data themselves.

    counts: samples of each class, as a list or as {classes: 10, per_class: 5000}.  Images have 0 x 0 pixels, and the
    test split is empty.  Raises UserError for a class without a sample.
    """
    if isinstance(counts, dict):
        missing = {"classes", "per_class"} - set(counts)
        if missing:
            raise UserError(f"data.counts = {counts!r}: {', '.join(sorted(missing))} missing; give both numbers")
        counts = [counts["per_class"]] * counts["classes"]
    if not counts or min(counts) < 1:
        raise UserError(f"data.counts = {_shortened(counts)}: every class needs a sample; leave empty ones out")
    labels_N = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    return Dataset(
        name="labels",
        train_images=np.empty((len(labels_N), 1, 0, 0), dtype=np.uint8),
        train_labels_N=labels_N,
        test_images=np.empty((0, 1, 0, 0), dtype=np.uint8),
        test_labels_N=np.empty(0, dtype=np.int64),
        class_names=tuple(str(c) for c in range(len(counts))),
        mean=(0.0,),
        std=(1.0,),
        flips=False,
    )


def _shortened(counts: list[int]) -> str:
    return repr(counts) if len(counts) <= 20 else f"[{', '.join(map(str, counts[:20]))}, ...]"
