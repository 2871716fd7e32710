"""One self-contained HTML page of a report: it loads nothing, so it opens anywhere, offline."""

import base64
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from raysim.commands.report.figures import caption
from raysim.core.secrets import without_secrets
from raysim.ui.tables import Table

_TEMPLATE = "page.html.j2"


def page(
    title: str,
    about: str,
    *,
    warnings: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    tables: Sequence[Table] = (),
    figures: Sequence[Path] = (),
    listings: Sequence[tuple[str, str]] = (),
) -> str:
    """Make the page; all texts are escaped, and secrets in them masked.

    facts: (label, value).  figures: PNG files, which are put into the page.  listings: (heading, text), such as a
    configuration.  Raises OSError for a figure that cannot be read.
    """
    from jinja2 import Environment

    template = (files("raysim.commands.report") / _TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    shown = [{"data": base64.b64encode(path.read_bytes()).decode(), "caption": caption(path)} for path in figures]
    return environment.from_string(template).render(
        title=title,
        about=about,
        warnings=[without_secrets(text) for text in warnings],
        facts=[(label, without_secrets(value)) for label, value in facts],
        tables=tables,
        figures=shown,
        listings=[(heading, without_secrets(text)) for heading, text in listings],
    )
