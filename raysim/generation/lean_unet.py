"""diffusers' UNet2DModel without the models beside it: 0.5 s of CPU time to import, where all it asks for takes 3.

Every worker imports it, also one that takes the place of a lost one. Two of the packages on the way import every
model that they hold, and `torch._dynamo`, half of the time, only marks functions for a compiler that is not used here.
Neither is loaded on this way in. A version of diffusers that is laid out differently is imported in full, only slower.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "diffusers.models.unets.unet_2d"
_PACKAGES = ("models.transformers", "models.unets")
_COMPILER = "torch._dynamo"


def unet_class() -> Any:
    """`diffusers.UNet2DModel`: the same class, however and whenever else it is imported."""
    if _MODULE not in sys.modules:
        with contextlib.suppress(ImportError, RuntimeError), _bare_packages():
            importlib.import_module(_MODULE)
    return importlib.import_module(_MODULE).UNet2DModel


@contextlib.contextmanager
def _bare_packages() -> Iterator[None]:
    """While this is entered, the packages load only the modules that are asked for, and the compiler is not found."""
    found = importlib.util.find_spec("diffusers")
    root = Path((found and found.origin) or "").parent
    instead: dict[str, ModuleType | None] = {_COMPILER: None}
    for package in _PACKAGES:
        bare = instead[f"diffusers.{package}"] = ModuleType(f"diffusers.{package}")
        bare.__path__ = [str(root.joinpath(*package.split(".")))]
    instead = {name: module for name, module in instead.items() if name not in sys.modules}
    sys.modules.update(instead)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in instead:
            del sys.modules[name]
