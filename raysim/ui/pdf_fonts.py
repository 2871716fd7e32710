"""Fonts that are embedded in PDFs without their tables for laying out text: a private part of fontTools."""

import contextlib
from collections.abc import Iterator

LAYOUT_TABLES = ("GDEF", "GPOS", "GSUB")  # of OpenType: classes of glyphs, kerning and marks, ligatures and alternates


@contextlib.contextmanager
def lean_fonts() -> Iterator[None]:
    """A context in which matplotlib embeds fonts without these tables, to cut them down to the glyphs in use.

    Each glyph has its place by then, so no reader of the PDF needs them; drawing the figures of a run takes two thirds
    of the time.  Where fontTools keeps its defaults elsewhere, the tables stay.
    """
    from fontTools.subset import Options

    defaults = getattr(Options, "_drop_tables_default", None)
    if not isinstance(defaults, list):
        yield
        return
    defaults += LAYOUT_TABLES
    try:
        yield
    finally:
        del defaults[-len(LAYOUT_TABLES) :]
