"""`raysim init`: the examples that come with raysim, copied to where they can be changed."""

import filecmp
import shutil
from pathlib import Path

from raysim.config.yaml_io import experiments
from raysim.core.errors import UserError


def init(folder: str | Path = "experiments") -> Path:
    """Copy the examples into a folder, which is made; returns it.  What is there and the same is left as it is.

    Raises UserError, before anything is copied, for a file of the same name and other content.
    """
    source, target = experiments(), Path(folder).expanduser()
    files = sorted(path.relative_to(source) for path in source.rglob("*") if _is_example(path, source))
    there = [file for file in files if (target / file).exists()]
    changed = [str(file) for file in there if not filecmp.cmp(source / file, target / file, shallow=False)]
    if changed:
        raise UserError(f"{target} holds other files called {', '.join(changed)}; name another folder")
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if file not in there:
            shutil.copyfile(source / file, target / file)
    return target


def _is_example(path: Path, source: Path) -> bool:
    hidden = any(part.startswith((".", "__")) for part in path.relative_to(source).parts)
    return path.is_file() and not hidden
