"""Plug-ins of the user's own at work: what they raise and what they answer, checked where they meet raysim."""

from collections.abc import Mapping
from dataclasses import replace
from traceback import walk_tb
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

import numpy as np

from raysim.config.protocols import AllocationPolicy, ImageGenerator, Partitioner
from raysim.config.registry import asked_for
from raysim.core.errors import RunError, UserError, described
from raysim.core.plain import PlainMapping
from raysim.core.records import Allocation, ByteArray, Dataset, IntArray, Partition

if TYPE_CHECKING:
    from numpy.random import Generator, RandomState

MOST_IMAGES = 1e15


class blaming:
    """A context in which plug-ins of the user's own run: what they raise ends as one message with file and line.

    plugins: key of the configuration -> name, such as local.name -> mine:slow; those that come with raysim do not
    count.  error: what is raised, UserError before the training and RunError in it.  What has no line of such a plug-in
    in its traceback passes.
    """

    def __init__(self, plugins: Mapping[str, str], error: type[UserError | RunError] = UserError) -> None:
        self.plugins, self.error = plugins, error

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or isinstance(error, KeyboardInterrupt | UserError | RunError):
            return
        found = blamed(error, self.plugins)
        if found:
            raise self.error(found) from error


def blamed(error: BaseException, plugins: Mapping[str, str]) -> str:
    """`local.name = mine:slow: ValueError: text (/home/me/mine.py:12)`; empty where none of these plug-ins took part.

    The line is the innermost one in the package of such a plug-in.
    """
    found = ""
    for frame, line in walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        owners = [f"{key} = {name}" for key, name in plugins.items() if _package(name) == package]
        if owners:
            where = f"{frame.f_code.co_filename}:{line}"
            found = f"{' or '.join(owners)}: {described(error)} ({where})"
    return found


def _package(name: str) -> str | None:
    """Where a plug-in of the user's own lives; None for one of raysim's."""
    return name.partition(":")[0].partition(".")[0] if ":" in name else None


def ask_policy(
    name: str, policy: AllocationPolicy, counts_KC: IntArray, params: PlainMapping, key: str = "allocation.name",
    given: PlainMapping = MappingProxyType({}),
) -> Allocation:
    """What a policy decides, checked; UserError unless it is whole numbers >= 0, K x C, and no client is left empty.

    It sees the counts read-only.  key: what names it in the configuration, for messages.  given: what it may ask for by
    the name of a parameter.
    """
    counts_view_KC = counts_KC.view()
    counts_view_KC.flags.writeable = False
    wanted = asked_for(policy)
    missing = [input_ for input_, is_needed in wanted.items() if is_needed and input_ not in given]
    if missing:
        raise UserError(f"{key} = {name}: it asks for {', '.join(missing)}, not known here; use another policy")
    with blaming({key: name}):
        answer: object = policy(counts_view_KC, **{i: given[i] for i in wanted if i in given}, **params)
    if not isinstance(answer, Allocation):
        return Allocation(_whole_numbers(answer, counts_KC, f"{key} = {name}: it returned"))
    quota_KC = _whole_numbers(answer.quota_KC, counts_KC, f"{key} = {name}: it returned a quota_KC that is")
    keep_KC = _kept(answer.keep_KC, counts_KC, quota_KC, f"{key} = {name}: it returned a keep_KC")
    return Allocation(quota_KC, keep_KC, bool(answer.shared))


def _kept(keep: object, counts_KC: IntArray, quota_KC: IntArray, where: str) -> IntArray | None:
    """What a policy keeps of the real samples, checked; None for all of them."""
    if keep is None:
        return None
    keep_KC = _whole_numbers(keep, counts_KC, f"{where} that is", "samples")
    if (keep_KC > counts_KC).any():
        k, c = np.argwhere(keep_KC > counts_KC)[0]
        raise UserError(
            f"{where} of {keep_KC[k, c]} for client {k} and class {c}, of which it has {counts_KC[k, c]} real samples; "
            "keep at most what there is, such as numpy.minimum(keep_KC, counts_KC)"
        )
    emptied_K = np.flatnonzero((counts_KC.sum(axis=1) > 0) & (keep_KC.sum(axis=1) + quota_KC.sum(axis=1) == 0))
    if len(emptied_K):
        raise UserError(
            f"{where} that empties client {emptied_K[0]}: none of its {counts_KC[emptied_K[0]].sum()} real samples is "
            "kept and it gets no image, so it could not train; keep a sample, or give it an image"
        )
    return None if (keep_KC == counts_KC).all() else keep_KC


def _whole_numbers(answer: object, counts_KC: IntArray, where: str, unit: str = "images") -> IntArray:
    """An array that a policy returned, as int64; UserError unless it is whole numbers >= 0, K x C."""
    if not isinstance(answer, np.ndarray):
        wrong = "None" if answer is None else f"a {type(answer).__name__}"
    elif not np.issubdtype(answer.dtype, np.integer):
        wrong = f"an array of {answer.dtype}"
    elif answer.shape != counts_KC.shape:
        wrong = f"an array of shape {answer.shape}"
    elif answer.size and answer.min() < 0:
        k, c = np.argwhere(answer < 0)[0]
        wrong = f"{answer[k, c]} {unit} for client {k} and class {c}"
    elif answer.sum(dtype=np.float64) > MOST_IMAGES:
        wrong = f"{answer.sum(dtype=np.float64):.3g} {unit} in all, and raysim counts up to {MOST_IMAGES:.0e}"
    else:
        return answer.astype(np.int64, copy=False)
    raise UserError(
        f"{where} {wrong}; a policy must return a numpy array of whole numbers >= 0 (such as "
        f"numpy.floor(...).astype(numpy.int64)), clients x classes, here of shape {counts_KC.shape}"
    )


def ask_generator(
    name: str,
    generator: ImageGenerator,
    labels_B: IntArray,
    seeds_B: IntArray,
    dataset: Dataset,
    error: type[UserError | RunError] = RunError,
) -> ByteArray:
    """The images of a generator; `error` for what it raises, and unless they are uint8 in the shape of the data set."""
    with blaming({"generator.name": name}, error):
        images = generator.sample(labels_B, seeds_B)
    return checked_images(images, (len(labels_B), dataset.channels, *dataset.image_size), name, error)


def checked_images(
    images: object, shape: tuple[int, ...], name: str, error: type[UserError | RunError] = RunError
) -> ByteArray:
    """What a generator returned; `error` unless it is uint8 of `shape`, B x channels x height x width.

    Floats would wrap round when they are stored as bytes, and images of another shape would be repeated.
    """
    if isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape == shape:
        return images
    found = f"a {type(images).__name__}"
    if isinstance(images, np.ndarray):
        found = f"{images.dtype} of shape {images.shape}"
    raise error(
        f"generator.name = {name}: sample returned {found}; it must return uint8, images x channels x height x width, "
        f"here of shape {shape}; scale pixels to 0..255, clamp them and cast them to uint8"
    )


def checked_dataset(dataset: object, name: str) -> Dataset:
    """What a data set of the user's own returned, its labels as int64; UserError that says what is wrong with it."""
    where = f"data.name = {name}: it returned"
    if not isinstance(dataset, Dataset):
        raise UserError(f"{where} a {type(dataset).__name__}; a data set must return a raysim.plugins_api.Dataset")
    train, test = _labels(dataset.train_labels_N), _labels(dataset.test_labels_N)
    for part, images, labels_N in (("train", dataset.train_images, train), ("test", dataset.test_images, test)):
        if not (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 4):
            found = f"{images.dtype} of {images.ndim} dimensions" if isinstance(images, np.ndarray) else type(images)
            raise UserError(f"{where} {part}_images of {found}; they must be uint8, N x channels x height x width")
        if labels_N is None or len(labels_N) != len(images):
            raise UserError(f"{where} {part}_labels_N that are not one whole number for each of {len(images)} images")
        if len(labels_N) and not 0 <= labels_N.min() <= labels_N.max() < dataset.classes:
            raise UserError(
                f"{where} {part}_labels_N of {labels_N.min()} to {labels_N.max()}; the {dataset.classes} class_names "
                f"allow 0 to {dataset.classes - 1}"
            )
    assert train is not None and test is not None
    if not len(train):
        raise UserError(f"{where} no training image; give some")
    if len(test) and dataset.test_images.shape[1:] != dataset.train_images.shape[1:]:
        raise UserError(f"{where} test images of another size than the training images; bring them to one size")
    one_each = len(dataset.mean) == len(dataset.std) == dataset.channels
    if not one_each or not np.isfinite([*dataset.mean, *dataset.std]).all() or min(dataset.std) <= 0:
        raise UserError(f"{where} mean and std that are not one finite number for each channel, std above 0")
    if min(dataset.mean) < 0 or max(dataset.mean) > 1 or max(dataset.std) > 1:
        raise UserError(
            f"{where} mean = {dataset.mean}, std = {dataset.std}, which are not those of pixels from 0 to 1; divide "
            "those of bytes by 255"
        )
    return replace(dataset, train_labels_N=train, test_labels_N=test)


def _labels(labels: object) -> IntArray | None:
    """As int64, or None if they are no flat array of whole numbers."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        return labels.astype(np.int64, copy=False)
    return None


def ask_partition(
    name: str, partitioner: Partitioner, dataset: Dataset, rng: "Generator | RandomState", params: PlainMapping
) -> Partition:
    """Who owns which training sample, checked where the partition is the user's own; UserError for what is wrong.

    Samples may have several owners where the function has an attribute `replacement` that is True.
    """
    with blaming({"partition.name": name}):
        partition = partitioner(dataset.train_labels_N, dataset.classes, rng, **params)
    shared = getattr(partitioner, "replacement", False) is True  # of a function, which has no class to give a default
    samples = len(dataset.train_labels_N)
    return checked_partition(partition, samples, dataset.classes, name, shared) if _package(name) else partition


def checked_partition(partition: object, samples: int, classes: int, name: str, shared: bool) -> Partition:
    """What a partition of the user's own returned; UserError that says what is wrong with it.

    samples: rows of the training split.  shared: whether clients may own the same sample.
    """
    where = f"partition.name = {name}: it returned"
    if not isinstance(partition, Partition):
        raise UserError(
            f"{where} a {type(partition).__name__}; a partition must return a raysim.plugins_api.Partition, such as "
            "raysim.plugins_api.from_owners makes"
        )
    problem = partition_problem(partition, samples, classes, shared)
    if problem:
        more = "" if shared else " (unless the function has an attribute `replacement` that is True)"
        raise UserError(f"{where} a partition that does not fit: {problem}{more if 'twice' in problem else ''}")
    whole = {name: getattr(partition, name).astype(np.int64, copy=False) for name in _WHOLE}
    return replace(partition, **whole)


_WHOLE = ("indices", "offsets_K1", "labels")


def partition_problem(partition: Partition, samples: int, classes: int, shared: bool) -> str:
    """What is wrong with a partition of a training split of `samples` rows and `classes` classes; empty if nothing.

    shared: whether several clients may own the same sample, or one client own it twice.
    """
    indices, offsets, labels = map(_labels, (partition.indices, partition.offsets_K1, partition.labels))
    if indices is None or offsets is None or labels is None:
        return "its indices, offsets_K1 or labels are no flat arrays of whole numbers"
    K = len(offsets) - 1
    end = len(indices) if partition.drawn is None else offsets[-1]
    if K < 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        return f"its offsets_K1 do not ascend from 0 to the number of indices, {len(indices)}"
    per_client = (partition.rare_K, partition.noisy_K, partition.input_noise_K)
    if len(labels) != len(indices) or {len(column) for column in per_client} != {K}:
        return "its labels, or its values per client, are not as many as the indices, or the clients"
    if partition.classes != classes:
        return f"it is made for {partition.classes} classes, but the data set has {classes}"
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        return f"its labels are {labels.min()} to {labels.max()}, but the data set has the classes 0 to {classes - 1}"
    beyond = indices[(indices < 0) | (indices >= samples)]
    if len(beyond):
        return (
            f"row {beyond[0]} does not exist; the training split has the rows 0 to {samples - 1}, counted after "
            "data.train_samples"
        )
    rows, times = np.unique(indices, return_counts=True)
    if not shared and len(rows) < len(indices):
        return f"row {rows[times > 1][0]} comes twice; a sample belongs to one client at most"
    return ""
