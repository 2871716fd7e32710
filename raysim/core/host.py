"""How much memory this machine has."""

import os


def physical_bytes() -> int:
    """Of the whole machine, whatever part of it a container allows."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
