"""Figures are files that show what they are named for."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from raysim.allocation.imbalance import lorenz_curve, top_share
from raysim.ui import plots


def colours(path: Path) -> int:
    """How many different colours a picture has."""
    pixels = (imread(path)[:, :, :3] * 255).astype(np.uint8)
    return len(np.unique(pixels.reshape(-1, 3), axis=0))


def test_accuracy_curve_skips_rounds_that_were_not_evaluated(tmp_path):
    metrics = pd.DataFrame({"round": [1, 2, 3], "accuracy": [0.5, np.nan, 0.75]})
    path = plots.accuracy_curve(metrics, tmp_path / "deep" / "accuracy.png")
    without_gap = plots.accuracy_curve(metrics.dropna(), tmp_path / "dropped.png")
    assert path.read_bytes() == without_gap.read_bytes()
    assert colours(path) > 10


def test_accuracy_curve_of_a_run_that_was_never_evaluated_is_still_a_figure(tmp_path):
    metrics = pd.DataFrame({"round": [1, 2], "accuracy": [np.nan, np.nan]})
    assert colours(plots.accuracy_curve(metrics, tmp_path / "a.png")) > 1


def test_accuracy_curve_names_the_columns_it_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"lack \['accuracy'\].*'loss'"):
        plots.accuracy_curve(pd.DataFrame({"round": [1], "loss": [1.0]}), tmp_path / "a.png")


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (10, 10), (100, 100)])
def test_client_counts_draws_any_number_of_clients_and_classes(tmp_path, clients, classes):
    counts_KC = np.arange(clients * classes, dtype=np.int64).reshape(clients, classes)
    path = plots.client_counts(counts_KC, counts_KC[::-1], [f"c{i}" for i in range(classes)], tmp_path / "counts.png")
    height, width = imread(path).shape[:2]
    assert 200 < height <= 1920
    assert 200 < width <= 2400


def test_client_counts_of_an_empty_plan_does_not_fail(tmp_path):
    nothing_KC = np.zeros((3, 2), dtype=np.int64)
    assert plots.client_counts(nothing_KC, nothing_KC, ["a", "b"], tmp_path / "counts.png").exists()


def test_image_grid_shows_the_pixels_themselves(tmp_path):
    """A pure red image of class 1 puts pure red into the picture, and none of the blue of the eleventh of class 0."""
    images = np.zeros((12, 3, 8, 8), dtype=np.uint8)
    images[10, 2] = 255  # the eleventh of class 0: not shown
    images[11, 0] = 255
    labels = np.array([0] * 11 + [1])
    path = plots.image_grid(images, labels, ["zero", "one"], tmp_path / "grid.png")
    pixels = (imread(path)[:, :, :3] * 255).astype(np.uint8)
    assert (pixels == [255, 0, 0]).all(axis=2).sum() > 100
    assert not (pixels == [0, 0, 255]).all(axis=2).any()


def test_image_grid_takes_grey_images_and_many_classes(tmp_path):
    images = np.full((60, 1, 8, 8), 7, dtype=np.uint8)
    path = plots.image_grid(images, np.arange(60), [f"class {c}" for c in range(60)], tmp_path / "grid.png")
    height, width = imread(path).shape[:2]
    assert height < 1.5 * width


def test_image_grid_refuses_channels_it_cannot_show(tmp_path):
    with pytest.raises(ValueError, match="2 channels"):
        plots.image_grid(np.zeros((1, 2, 4, 4), np.uint8), np.array([0]), ["a"], tmp_path / "grid.png")


def legend(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the legend texts of the figures that are saved from now on."""
    texts: list[str] = []
    save = plots.save

    def keep(figure, path):
        legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
        texts.extend(text.get_text() for legend in legends for text in legend.get_texts())
        return save(figure, path)

    monkeypatch.setattr(plots, "save", keep)
    return texts


def test_lorenz_gives_the_share_of_the_top_fifth(tmp_path, monkeypatch):
    """Of (1, 1, 1, 1, 6) the one client in five that holds most has 6 of 10; of five alike it has a fifth."""
    texts = legend(monkeypatch)
    curves = {"before": np.array([6.0, 1, 1, 1, 1]), "after": np.ones(5)}
    drawn = {name: (*lorenz_curve(values_K), top_share(values_K)) for name, values_K in curves.items()}
    plots.lorenz(drawn, tmp_path / "lorenz.png")
    assert texts[1:] == ["before: top 20 % hold 60 %", "after: top 20 % hold 20 %"]


def test_budget_curve_is_a_figure_and_leaves_the_users_backend_alone(tmp_path):
    import matplotlib

    backend = matplotlib.rcParams._get_backend_or_none()
    path = plots.budget_curve(np.arange(30) * 100.0, np.linspace(0, 1, 30), np.arange(30.0), tmp_path / "budget.png")
    assert colours(path) > 10
    assert matplotlib.rcParams._get_backend_or_none() == backend
