"""The source code of plug-ins from elsewhere: a digest of a module and of everything of the user's that it imports."""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[1]
"""Folder of raysim's own source."""

_INSTALLED = ("site-packages", "dist-packages")


def own_digest() -> str:
    """Hex sha256 of raysim's own source."""
    return _sha256({str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")})


def source_digest(name: str) -> str:
    """Hex sha256 of the source behind a plug-in's name `package.module:attribute`; empty for one of raysim's own.

    It covers the plug-in's module, the whole package where it is in one, and every module that these import, however
    deep, which is neither installed nor part of Python or raysim.  The plug-in must have been resolved before.
    """
    module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
    if module is None or _file(module) is None:
        return ""
    files: dict[str, Path] = {}
    left = [module]
    while left:
        module = left.pop()
        file = _file(module)
        if file is None or module.__name__ in files:
            continue
        files[module.__name__] = file
        left += _imported(module, file)
        top = sys.modules.get(module.__name__.partition(".")[0])
        folder = getattr(top, "__path__", None)
        if folder and top is not None and top is not module:
            left.append(top)
        for place in folder or ():
            files.update({str(path.relative_to(Path(place).parent)): path for path in Path(place).rglob("*.py")})
    return _sha256(files)


def with_source(name: str, fingerprint: str) -> str:
    """A generator's fingerprint; for one from elsewhere also of its source, which decides on its images, too."""
    source = source_digest(name)
    return hashlib.sha256(f"{fingerprint} {source}".encode()).hexdigest() if source else fingerprint


def _file(module: ModuleType) -> Path | None:
    """The source file of a module of the user's; None for raysim's own, installed and built-in ones."""
    name = getattr(module, "__file__", None)
    if name is None or not name.endswith(".py"):
        return None
    file = Path(name).resolve()
    standard = Path(sysconfig.get_paths()["stdlib"]).resolve()
    foreign = PACKAGE.resolve() in file.parents or any(part in file.parts for part in _INSTALLED)
    return None if foreign or standard in file.parents else file


def _imported(module: ModuleType, file: Path) -> Iterator[ModuleType]:
    """The loaded modules that a module's import statements name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, module.__package__) if node.level else relative
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    for name in sorted(names):
        if name in sys.modules:
            yield sys.modules[name]


def _sha256(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
