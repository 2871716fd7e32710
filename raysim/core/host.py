"""What this machine has: memory, and a GPU or none."""

import os


def physical_bytes() -> int:
    """Memory of the whole machine, whatever part of it a container allows."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def has_gpu() -> bool:
    """Whether this process can use a GPU of this machine; imports torch."""
    import torch

    return torch.cuda.device_count() > 0
