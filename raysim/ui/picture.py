"""A figure as an object: shown by a notebook, saved to a file."""

import base64
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raysim.core.files import write_file


@dataclass(frozen=True)
class Picture:
    """A PNG image.  png: its bytes."""

    png: bytes

    @classmethod
    def drawn(cls, draw: Callable[[Path], object]) -> "Picture":
        """Make one with a function that writes a PNG file to the path it is given."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "figure.png"
            draw(path)
            return cls(path.read_bytes())

    def save(self, path: str | Path) -> Path:
        """Write the image to a file; returns its path.  Raises DiskError where the disk refuses it."""
        target = Path(path).expanduser()
        write_file(target, self.png)
        return target

    def as_html(self) -> str:
        """The image as an element of a page that needs no other file."""
        return f'<img src="data:image/png;base64,{base64.b64encode(self.png).decode()}" style="max-width:42em">'

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png

    def __repr__(self) -> str:
        return f"<Picture of {len(self.png):,} bytes; .save(PATH) writes it as PNG>"
