"""The memory of this machine, and whether it has a GPU."""

import os


def physical_bytes() -> int:
    """The memory of the whole machine in bytes, even where a container allows less."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def has_gpu() -> bool:
    """Whether this process can use a GPU of this machine; imports torch."""
    import torch

    return torch.cuda.device_count() > 0
