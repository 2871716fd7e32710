"""Where results go that should outlive the run: the working directory, unless Ray deletes that with its job."""

from pathlib import Path

_PACKAGES = "working_dir_files"  # where Ray unpacks the working directory that `ray job submit` sent


def persistent_folder() -> Path:
    """The working directory; for a job that Ray runs in a copy of somebody's working directory, the home directory."""
    here = Path.cwd()
    return Path.home() if _PACKAGES in here.parts else here


def persistent_path(path: str | Path) -> Path:
    """The absolute form of a path; a relative one begins in `persistent_folder()`."""
    return persistent_folder() / Path(path).expanduser()
