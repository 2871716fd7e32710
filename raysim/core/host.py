"""The memory of this machine, private and shared, and whether it has a GPU."""

import functools
import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def physical_bytes() -> int:
    """The memory of the whole machine in bytes, even where a container allows less."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shared_memory_free_bytes() -> int | None:
    """The free bytes of /dev/shm, where Ray keeps its objects; None where there is none, as on macOS."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None


@functools.cache
def has_gpu() -> bool:
    """Whether this process can use a GPU of this machine; imports torch."""
    import torch

    return torch.cuda.device_count() > 0
