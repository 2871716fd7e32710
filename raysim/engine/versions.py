"""The versions of the packages on which the bits of a result depend: equal on every node, or the run stops."""

import importlib.metadata
import platform
from collections.abc import Mapping

from raysim.core.errors import UserError


def installed() -> dict[str, str]:
    """The versions of Python and of the packages that compute, in this process, such as torch 2.14.1+cu130."""
    import numpy
    import torch

    from raysim import __version__

    return {
        "python": platform.python_version(), "ray": importlib.metadata.version("ray"), "torch": str(torch.__version__),
        "numpy": numpy.__version__, "raysim": __version__,
    }


def check_versions(expected: Mapping[str, str], node: str) -> None:
    """Raise UserError that names the node where a version differs from the driver's."""
    here = installed()
    differ = [f"{name} {here[name]} instead of {wanted}" for name, wanted in expected.items() if here[name] != wanted]
    if differ:
        raise UserError(
            f"node {node} has {', '.join(differ)}: the same versions are needed on every node, for the same bits; "
            "install those of the machine that runs the driver"
        )
