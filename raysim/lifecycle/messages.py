"""The messages of a run on the terminal, and the values that it sends to the tracker."""

import math
from pathlib import Path

from raysim.allocation.policies import fedeas, full_balance
from raysim.config.schema import Config, Resources
from raysim.core.host import shared_memory_free_bytes
from raysim.core.persistent import persistent_folder
from raysim.engine.object_store import capacity_bytes
from raysim.engine.placement import Placement
from raysim.engine.session import store_bytes
from raysim.lifecycle.prepare import Prepared
from raysim.ui.display import Display


def say_plan(display: Display, config: Config, prepared: Prepared) -> None:
    """Show the data, the clients and the images asked for, in a line or two before anything starts."""
    sizes_K = prepared.partition.sizes_K
    number = "its own number of" if prepared.budget is None else f"{prepared.budget:,}"
    asked = "" if prepared.schedule is None else f", asked after rounds {', '.join(map(str, prepared.schedule.at))}"
    left_out = f", {prepared.left_out:,} real samples left out" if prepared.left_out else ""
    display.line(
        f"{prepared.dataset.name}: {len(prepared.dataset.train_labels_N):,} training images; {config.partition.name}: "
        f"{prepared.partition.clients:,} clients of {sizes_K.min():,} to {sizes_K.max():,}; "
        f"{config.allocation.name}: {number} synthetic images{asked}{left_out}"
    )
    if not prepared.makes_images and prepared.partition.drawn is None:
        counts_KC = prepared.partition.counts_KC
        display.line(
            f"for comparison: fedeas (beta 12) would ask for {int(fedeas(counts_KC, beta=12.0).sum()):,} images, full "
            f"balance for {full_balance(counts_KC):,}"
        )


def say_start(display: Display, placement: Placement | None, directory: Path, store: str) -> None:
    """Show the workers that will start, where that is known, and where results go.

    The run's folder is shown if it is not below the working directory; `store`, the address of the MLflow store, unless
    it is "none".
    """
    if placement:
        display.line(f"to start: {placement}")
    if store != "none":
        display.line(f"MLflow: {store}")
    if persistent_folder() != Path.cwd():
        display.line(f"note: Ray deletes this job's working directory; results go to {directory}")


def _shared_bytes(prepared: Prepared, is_mapped: bool) -> tuple[int, int]:
    """(bytes of the data set, bytes of the images to make), which are in the object store.

    is_mapped: whether the data set is in files instead.
    """
    dataset = prepared.dataset
    images = prepared.images * dataset.image_bytes
    return 0 if is_mapped else dataset.nbytes, images


def shared_memory_note(prepared: Prepared, resources: Resources) -> list[str]:
    """A note where /dev/shm is too small for the shared arrays of a Ray that starts here; else nothing."""
    data, images = _shared_bytes(prepared, prepared.dataset.nbytes > store_bytes(resources))
    free = shared_memory_free_bytes()
    if free is None or data + images <= free:
        return []
    enough = math.ceil(1.5 * (data + images) / 1e9)
    return [
        f"the data set takes {_mb(data)} and the images to make {_mb(images)}, and /dev/shm has {_mb(free)} free: Ray "
        f"keeps its objects in files on the disk instead, which is slower; free memory in /dev/shm, or start the "
        f"container with --shm-size={enough}g"
    ]


def store_note(prepared: Prepared, is_mapped: bool = False) -> list[str]:
    """A note where the shared arrays are larger than the object store; else nothing.

    is_mapped: whether the data set is in files instead.
    """
    data, images = _shared_bytes(prepared, is_mapped)
    capacity = capacity_bytes()
    if data + images <= capacity:
        return []
    return [
        f"the data set takes {_mb(data)} and the images to make {_mb(images)}, and the object store holds "
        f"{_mb(capacity)}: the rest spills to disk, which is slower; raise resources.object_store_bytes (in a "
        "container, with a --shm-size above it)"
    ]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
