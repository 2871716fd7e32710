"""A table for people, as plain text, Markdown, LaTeX (booktabs) or a part of an HTML page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MISSING = "–"  # noqa: RUF001 (an en dash)
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": r"\textbar{}",
    "±": r"$\pm$", MISSING: "--", "−": "$-$",  # noqa: RUF001 (a minus sign)
})  # fmt: skip
_TEXT = str.maketrans({"±": "+-", MISSING: "-", "−": "-"})  # noqa: RUF001


@dataclass(frozen=True)
class Table:
    """A table whose cells are text.

    name: short, for a label.  best: the cells (row, column) to stand out.  notes: sentences that say what stands in it.
    """

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    def text(self) -> str:
        """Plain text in ASCII, columns aligned; the best cells have a star."""
        starred = {column for _, column in self.best}
        marked = [
            [f"{cell}{'*' if (r, c) in self.best else ' ' if c in starred else ''}" for c, cell in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]
        cells = [[cell.translate(_TEXT) for cell in line] for line in [self.headings, *marked]]
        notes = [*self.notes, *(["*: the best of the column"] if self.best else [])]
        lines = [self.title, *aligned(cells), "", *notes]
        return "\n".join(lines).translate(_TEXT).rstrip() + "\n"

    def markdown(self) -> str:
        """A table of Markdown, the best cells bold."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)]]
        lines += [[f"**{cell}**" if (r, c) in self.best else cell for c, cell in enumerate(row)]
                  for r, row in enumerate(self.rows)]  # fmt: skip
        drawn = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([f"**{self.title}**", "", *drawn, "", "; ".join(self._all_notes())]).rstrip() + "\n"

    def latex(self) -> str:
        """A `table` with its caption, for `\\usepackage{booktabs,graphicx}`; the best cells bold; never too wide."""
        rows = [
            [rf"\textbf{{{_escaped(cell)}}}" if (r, c) in self.best else _escaped(cell) for c, cell in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]
        notes = "; ".join(self._all_notes())
        caption = ". ".join(text[:1].upper() + text[1:] for text in [self.title, notes] if text)
        return "\n".join([
            r"\begin{table}[tb]", r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
            r"  \setlength{\belowcaptionskip}{6pt}",
            rf"  \caption{{{_escaped(caption)}.}}", rf"  \label{{tab:{self.name}}}",
            r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"  \begin{{tabular}}{{l{'r' * (len(self.headings) - 1)}}}", r"    \toprule",
            f"    {' & '.join(map(_escaped, self.headings))} \\\\", r"    \midrule",
            *(f"    {' & '.join(row)} \\\\" for row in rows),
            r"    \bottomrule", r"  \end{tabular}}", r"\end{table}", "",
        ])  # fmt: skip

    def _all_notes(self) -> list[str]:
        """The notes, and what bold print means."""
        return [*self.notes, *(["bold: the best of the column"] if self.best else [])]


def aligned(lines: list[list[str]]) -> list[str]:
    """Format lines of cells as text: all cells of a column have one width, and a rule is below the first line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return [drawn[0], "-" * max(map(len, drawn)), *drawn[1:]]


def mean_sd(mean: float, sd: float, digits: int = 2, factor: float = 1.0) -> str:
    """`97.22 ± 0.45`; the mean alone where there is no sd, a dash where there is no mean.  factor: 100 for percent."""
    if mean != mean:
        return MISSING
    return f"{factor * mean:,.{digits}f}" + ("" if sd != sd else f" ± {factor * sd:,.{digits}f}")


def _escaped(text: str) -> str:
    return re.sub(r"(?<![^\s(\[])-(?=[\d\s])", "$-$", text.translate(_LATEX))  # a minus sign, and not a hyphen
