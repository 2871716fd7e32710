"""Curves that coincide are both seen, labels do not overprint, and a figure is a PNG and a PDF."""

import io
import itertools
import re
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fontTools.subset import Options
from fontTools.ttLib import TTFont
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from raysim.ui import comparison_plots, figure, oui_plots


def pixels_of(path: Path, colour: str) -> int:
    """How many pixels of a picture have this colour."""
    wanted = np.round(np.array(to_rgb(colour)) * 255).astype(int)
    pixels = np.round(imread(path)[:, :, :3] * 255).astype(int)
    return int((abs(pixels - wanted).max(axis=2) <= 2).sum())


@pytest.mark.parametrize("of", [2, 4, 7])
def test_curves_that_coincide_are_all_seen(tmp_path, of):
    """Each leaves pixels of its own colour inside the axes, where there is no legend."""
    drawn, axes = figure.blank_figure(6, 4)
    for i in range(of):
        axes.plot(np.arange(31), np.linspace(0, 1, 31), **figure.look(i, of, 31))
    path = figure.save(drawn, tmp_path / "same.png")
    assert all(pixels_of(path, colour) > 15 for colour in figure.COLOURS[:of])


def test_no_two_of_many_curves_look_alike():
    looks = [figure.look(i, 50) for i in range(50)]
    assert len({(look["color"], look["marker"], str(look["linestyle"])) for look in looks}) == 50


def test_labels_move_as_little_as_they_must():
    """0, 0.1, 5 with a gap of 1: the first two share their move, 0.05 -+ 0.5; the third stays."""
    assert figure.spread([0.0, 0.1, 5.0], 1, -10, 10) == pytest.approx([-0.45, 0.55, 5.0])
    assert figure.spread([5.0, 0.1, 0.0], 1, -10, 10) == pytest.approx([5.0, 0.55, -0.45])
    assert figure.spread([0.0, 0.0, 0.0], 1, 0, 10) == pytest.approx([0, 1, 2])
    assert figure.spread([3.0] * 5, 10, 0, 8) == pytest.approx([0, 2, 4, 6, 8])
    assert len(figure.spread([], 1, 0, 1)) == 0


def test_fonts_in_a_pdf_have_the_outlines_of_their_glyphs_and_no_tables_for_laying_out_text(tmp_path):
    """A program that starts like this is TrueType; other streams of the file are not."""
    drawn, axes = figure.blank_figure(3, 2)
    axes.set_title("first and office")  # whose ligatures are in the font
    figure.save(drawn, tmp_path / "a.png")
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", (tmp_path / "a.pdf").read_bytes(), re.DOTALL)
    programs = [zlib.decompress(stream) for stream in streams]
    fonts = [TTFont(io.BytesIO(program)) for program in programs if program.startswith(b"\0\1\0\0")]
    assert fonts and all("glyf" in font and not {"GDEF", "GPOS", "GSUB"} & set(font.keys()) for font in fonts)
    assert "GSUB" not in Options().drop_tables


def test_a_figure_is_a_png_and_a_pdf_with_fonts_that_conferences_take(tmp_path):
    drawn, axes = figure.blank_figure(3, 2)
    axes.set_title("accuracy")
    path = figure.save(drawn, tmp_path / "deep" / "a.png")
    pdf = (tmp_path / "deep" / "a.pdf").read_bytes()
    assert path.read_bytes().startswith(b"\x89PNG") and pdf.startswith(b"%PDF")
    assert b"/Type3" not in pdf and b"CreationDate" not in pdf


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text of the figures that are saved from now on, legends and annotations too."""
    from matplotlib.text import Text

    found: list[str] = []
    for module in (comparison_plots, oui_plots):

        def keep(drawn, path, save=module.save):
            found.extend(text.get_text().strip() for text in drawn.findobj(Text))
            return save(drawn, path)

        monkeypatch.setattr(module, "save", keep)
    return found


def run(top: float) -> pd.DataFrame:
    rounds = np.arange(4)
    return pd.DataFrame({"round": rounds, "accuracy": top * rounds / 3, "local_steps": rounds * 10})


def test_a_method_that_lacks_a_run_has_no_curve_and_the_legend_says_so(tmp_path, texts):
    """The colour of the third method is nowhere but in the legend's own sample of it."""
    whole = {"a": comparison_plots.Curves([run(0.5), run(0.7)], 2), "b": comparison_plots.Curves([run(0.6)], 1)}
    lacking = {**whole, "c": comparison_plots.Curves([run(0.9)], 2)}
    path = comparison_plots.accuracy_curves({"": lacking}, tmp_path / "a.png")
    assert {"a (2 runs)", "b (1 run)", "c: not drawn, 1 of 2 runs are there"} <= {*texts}
    assert any("band: from the lowest to the highest" in text for text in texts)
    drawn = comparison_plots.accuracy_curves({"": {**whole, "c": comparison_plots.Curves([run(0.9)], 1)}}, path)
    assert pixels_of(drawn, figure.COLOURS[2]) > 0


def test_figures_of_several_settings_have_a_panel_each(tmp_path, texts):
    curves = {"a": comparison_plots.Curves([run(0.5)], 1)}
    comparison_plots.accuracy_curves({"alpha 0.1": curves, "alpha 0.3": curves}, tmp_path / "a.png", "local_steps")
    assert {"alpha 0.1", "alpha 0.3", "local steps of all clients so far"} <= {*texts}


def test_images_gains_and_maps_are_figures_that_name_methods_and_classes(tmp_path, texts):
    points = pd.DataFrame({"images": [10, 20], "final_accuracy": [0.5, 0.6]})
    comparison_plots.accuracy_by_images({"": {"a": (points, 2), "b": (points, 3)}}, tmp_path / "images.png")
    assert {"a (2 runs)", "b: not drawn, 2 of 3 runs are there"} <= {*texts}
    alike = {"a": (points, 2), "b": (points, 2)}  # their means coincide
    drawn = comparison_plots.accuracy_by_images({"": alike}, tmp_path / "alike.png")
    assert pixels_of(drawn, figure.COLOURS[0]) > 250 and pixels_of(drawn, figure.COLOURS[1]) > 100
    gain = comparison_plots.Gain(np.array([[1, 2], [3, 4]]), np.array([[0.1, np.nan], [0.2, np.nan]]))
    gains = tmp_path / "gains.png"
    comparison_plots.class_gains({"ours": gain}, "none", ["cat", "dog"], gains, ["none", "ours"], "alpha 0.1")
    assert {"ours", "cat", "alpha 0.1", "accuracy gained on none (points)"} <= {*texts} and "dog" not in texts
    assert pixels_of(gains, figure.COLOURS[1]) and not pixels_of(gains, figure.COLOURS[0])  # that of the second method
    quotas = {"ours": np.array([[1, 0], [0, 30]])}
    comparison_plots.allocation_maps(quotas, ["cat", "dog"], tmp_path / "maps.png", "images")
    assert {"ours: 31 images", "30", "cat", "dog"} <= {*texts}


@pytest.mark.parametrize("clients", [12, 31])
def test_ids_of_clients_stand_where_they_are_promised_and_do_not_overprint(tmp_path, texts, monkeypatch, clients):
    """With as many as can be named, all ids stand at the edge, the closest of them a line apart; with more, none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation, Text

    placed: list[float] = []
    save = oui_plots.save

    def keep(drawn, path):
        FigureCanvasAgg(drawn).draw()
        boxes = sorted((Text.get_window_extent(note) for note in drawn.findobj(Annotation)), key=lambda box: box.y0)
        placed.extend(above.y0 - below.y1 for below, above in itertools.pairwise(boxes))
        return save(drawn, path)

    monkeypatch.setattr(oui_plots, "save", keep)
    frame = pd.DataFrame({
        "round": np.repeat([1, 2], clients), "client": np.tile(np.arange(clients), 2), "n_real": 5, "weight": 0.1,
        "oui": 0.3 + 0.0001 * np.tile(np.arange(clients), 2),
    })  # fmt: skip
    frame.loc[0, "oui"] = 0.5
    oui_plots.oui_by_client(frame, tmp_path / "oui.png")
    ids = {str(client) for client in range(clients)}
    if clients == 12:
        assert ids <= {*texts} and "OUI of each client (right: client ids)" in texts
        assert min(placed) > -2
    else:
        assert "OUI of each client" in texts and not placed
