"""Figures of OUIs show the fit of the last round and tell noisy and rare clients from the others."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from raysim.ui import oui_plots


@pytest.fixture
def clients() -> pd.DataFrame:
    """Two rounds of four clients: 0 is rare, 1 has noisy labels, 2 has noisy images, 3 is like most."""
    k = np.tile(np.arange(4), 2)
    oui = np.array([0.2, 0.3, 0.35, 0.4, 0.25, 0.3, 0.35, 0.5])
    return pd.DataFrame({
        "round": np.repeat([1, 2], 4), "client": k, "n_real": 10 * (k + 1), "weight": 0.25, "score": oui, "oui": oui,
        "rare": (k == 0) * 1.0, "noisy": (k == 1) * 1.0, "input_noise": (k == 2) * 0.1,
    })


@pytest.fixture
def metrics() -> pd.DataFrame:
    return pd.DataFrame({"round": [1, 2], "fit_a": [9.0, 2.0], "fit_b": [9.0, 4.0]})


@pytest.fixture
def legends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The legend texts of all figures saved during a test."""
    texts: list[str] = []
    save = oui_plots.save

    def keep(figure, path):
        drawn = [*(axes.get_legend() for axes in figure.axes), *figure.legends]
        texts.extend(text.get_text() for legend in drawn if legend for text in legend.get_texts())
        return save(figure, path)

    monkeypatch.setattr(oui_plots, "save", keep)
    return texts


def test_the_fit_is_that_of_the_last_round_and_every_group_is_named(tmp_path, clients, metrics, legends):
    oui_plots.oui_fit(clients, metrics, tmp_path / "fit.png")
    assert sorted(legends) == ["4 clients", "Beta(2, 4)", "noisy", "other clients", "rare"]


@pytest.mark.parametrize("missing", [["fit_a", "fit_b"], []])
def test_without_a_beta_fit_in_the_last_round_no_density_is_drawn(tmp_path, clients, metrics, legends, missing):
    metrics.loc[1, ["fit_a", "fit_b"]] = np.nan
    oui_plots.oui_fit(clients, metrics.drop(columns=missing), tmp_path / "fit.png")
    assert not any(text.startswith("Beta") for text in legends)


@pytest.mark.parametrize("name", ["oui_by_client", "oui_weight"])
def test_noisy_and_rare_clients_are_marked_and_named_once(tmp_path, clients, legends, name):
    getattr(oui_plots, name)(clients, tmp_path / "figure.png")
    assert sorted(legends) == ["noisy", "other clients", "rare"]


def test_clients_that_are_all_alike_are_just_clients(tmp_path, clients, legends):
    oui_plots.oui_weight(clients.drop(columns=["rare", "noisy", "input_noise"]), tmp_path / "figure.png")
    assert legends == ["clients"]


def test_a_run_without_oui_has_no_such_figures(tmp_path, clients, metrics):
    assert oui_plots.oui_figures(clients.drop(columns="oui"), metrics, tmp_path) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ouis", [[0.5], [0.0, 0.0], [1.0, 1.0, 1.0], np.linspace(0, 1, 200)])
def test_any_ouis_make_figures(tmp_path: Path, ouis):
    n = len(ouis)
    clients = pd.DataFrame({"round": 1, "client": range(n), "n_real": 5, "weight": 1 / n, "score": 1.0, "oui": ouis})
    paths = oui_plots.oui_figures(clients, pd.DataFrame({"round": [1]}), tmp_path)
    assert [path.stat().st_size > 5000 for path in paths] == [True] * 3
