"""A table reads the same as text, Markdown and LaTeX, and survives what stands in it."""

import re

from raysim.ui.tables import Table, mean_sd

TABLE = Table(
    "accuracy", "Accuracy over seeds", ["", "final acc.", "images"],
    [["a_1 {beta: 12}", "97.22 ± 0.45", "0"], ["50% | #2 & $x^2~", "–", "1,770"]],  # noqa: RUF001
    ["mean ± sd", "n - 1"], frozenset({(0, 1)}),
)  # fmt: skip


def test_the_best_is_bold_or_has_a_star():
    assert "97.22 +- 0.45*" in TABLE.text() and "*: the best" in TABLE.text()
    assert "| **97.22 ± 0.45** |" in TABLE.markdown()
    assert r"\textbf{97.22 $\pm$ 0.45}" in TABLE.latex()


def test_text_is_ascii_and_its_columns_are_aligned():
    lines = TABLE.text().splitlines()
    assert TABLE.text().isascii() and lines[0] == "Accuracy over seeds"
    assert lines[1].endswith("images") and len(lines[3]) == len(lines[1]) == len(lines[4])
    assert lines[4].split()[-2:] == ["-", "1,770"]


def test_latex_is_booktabs_with_every_sign_escaped_and_the_notes_in_the_caption():
    drawn = TABLE.latex()
    for rule in ("toprule", "midrule", "bottomrule"):
        assert drawn.count(f"\\{rule}") == 1
    caption = r"\caption{Accuracy over seeds. Mean $\pm$ sd; n $-$ 1; bold: the best of the column.}"
    assert caption in drawn and r"\label{tab:accuracy}" in drawn
    assert r"a\_1 \{beta: 12\} &" in drawn
    assert r"50\% \textbar{} \#2 \& \$x\textasciicircum{}2\textasciitilde{} & -- & 1,770 \\" in drawn
    assert r"\begin{tabular}{lrr}" in drawn


def test_a_minus_sign_is_one_in_latex_and_a_hyphen_stays_one():
    drawn = Table("t", "T", ["a-1", "b"], [["non-iid", "-1.37 ± 2"], ["(a - none)", "[-0.2, -3.0]"]]).latex()
    assert r"non-iid & $-$1.37 $\pm$ 2" in drawn and "a-1 & b" in drawn
    assert "(a $-$ none) & [$-$0.2, $-$3.0]" in drawn


def test_a_bar_in_a_cell_does_not_end_it_in_markdown():
    row = TABLE.markdown().splitlines()[5]
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


def test_no_sd_of_one_run_and_a_dash_for_nothing():
    nan = float("nan")
    assert mean_sd(0.91234, 0.005, factor=100) == "91.23 ± 0.50"
    assert mean_sd(0.9, nan, factor=100) == "90.00" and mean_sd(nan, nan) == "–"  # noqa: RUF001
    assert mean_sd(1234.5, 3, digits=0) == "1,234 ± 3"
