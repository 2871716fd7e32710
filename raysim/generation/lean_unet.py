"""Imports diffusers' UNet2DModel without the other models of diffusers, because every new worker imports it.

A package that it needs imports all models of diffusers (2.5 s of CPU time), and `torch._dynamo` (1.6 s) only marks
functions for a compiler that is not used here. Without both the import after torch takes 0.6 s instead of 3.5 (medians
of three by benchmarks/private_parts.py). A diffusers or torch with another layout is imported in full, by its public
name, which is only slower.
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
PARTS = ("diffusers.models.transformers", "torch._dynamo")
"""Not loaded: a package of diffusers, of which only the modules that are asked for are loaded, and torch's compiler."""


def unet_class() -> Any:  # diffusers is imported only here, and has no types
    """Import and return `diffusers.UNet2DModel`: the same class as by any other way to import it."""
    if _MODULE not in sys.modules:
        with contextlib.suppress(Exception), _without(*PARTS):  # whatever fails here is imported in full below
            importlib.import_module("diffusers.utils")  # which finds out, for good, whether transformers is installed
            with _without("transformers"):  # another 1 s, for settings that are not used here
                importlib.import_module(_MODULE)
    module = sys.modules.get(_MODULE)
    return importlib.import_module("diffusers").UNet2DModel if module is None else module.UNet2DModel


@contextlib.contextmanager
def _without(*parts: str) -> Iterator[None]:
    """A context in which a package of diffusers loads only the modules that are asked for; others are not found."""
    found = importlib.util.find_spec("diffusers")
    root = Path((found and found.origin) or "").parent.parent
    instead: dict[str, ModuleType | None] = {}
    for part in parts:
        if part.startswith("diffusers."):
            bare = ModuleType(part)
            bare.__path__ = [str(root.joinpath(*part.split(".")))]
            instead[part] = bare
        else:
            instead[part] = None
    instead = {name: module for name, module in instead.items() if name not in sys.modules}
    sys.modules.update(instead)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in instead:
            del sys.modules[name]
