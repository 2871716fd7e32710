"""Updates that are clipped, sparse, rounded or noisy, through real workers."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysim import Result
from raysim.core.errors import UserError

Run = Callable[..., Result]
needs_library = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs the extra `privacy`")
ALL = {"top_k": 0.1, "quantise": 4, "clip": 0.5}


def sha(result: Result) -> str:
    return str(result.summary["model_sha256"])


def parameters(result: Result) -> np.ndarray:
    from safetensors.numpy import load_file

    return np.concatenate([a.ravel() for a in load_file(result.directory / "model.safetensors").values()])


def test_options_that_change_nothing_leave_every_bit(run: Run, small: dict[str, Any]):
    """No update is that long; all of every update is sent; noise of size 0."""
    plain = sha(run(small))
    for update in ({"clip": 1e6}, {"top_k": 1.0}, {"noise_multiplier": 0.0, "noise_at": "client"}):
        assert sha(run({**small, "update": update})) == plain, update


def test_workers_deaths_and_resumes_change_no_bit(run: Run, small: dict[str, Any], tmp_path: Path):
    """What a client remembers belongs to the driver: a worker killed in round 2, or a stop after it, loses nothing."""
    lives = tmp_path / "lives"
    small |= {"update": ALL, "clients_per_round": 1.0}
    small["local"] = {"name": "tiny_algorithms:dies", "lives": str(lives), "lr": 0.1, "batch_size": 16}
    lives.write_text("0")
    run({**small, "output": {**small["output"], "dir": str(tmp_path / "parts")}}, rounds=2)
    resumed = run({**small, "output": {**small["output"], "dir": str(tmp_path / "parts")}}, resume=True)
    lives.write_text("1")
    disturbed = run(small)
    one = run(small, resources={"workers": 1})
    assert lives.read_text() == "0"
    assert sha(one) == sha(resumed) == sha(disturbed)
    assert one.metrics["loss"].tolist() == resumed.metrics["loss"].tolist() == disturbed.metrics["loss"].tolist()


def test_what_is_sent_is_short_few_and_counted(run: Run, small: dict[str, Any]):
    """Per client: a tenth of P values of 4 bits, a 4-byte index each, a scale, 4 scalars; down goes the whole model."""
    plain, squeezed = run(small), run({**small, "update": ALL})
    clients = pd.read_parquet(squeezed.directory / "clients.parquet")
    assert clients["update_norm"].max() <= 0.5 * (1 + 1e-6)
    assert pd.read_parquet(plain.directory / "clients.parquet")["update_norm"].max() > 0.5
    assert squeezed.metrics["clipped_mean"].between(0.01, 1).any()
    P = plain.metrics["bytes_down"].iloc[1] // (4 * 4)
    sent = round(0.1 * P)
    assert squeezed.metrics["bytes_up"][1:].unique().tolist() == [4 * (-(-sent * 4 // 8) + 4 + 4 * sent + 8 * (3 + 1))]
    assert squeezed.metrics["bytes_down"][1:].tolist() == plain.metrics["bytes_down"][1:].tolist()
    assert plain.metrics["bytes_up"][1:].unique().tolist() == [4 * (4 * P + 8 * 3)]


def test_error_feedback_sends_later_what_it_left_out(run: Run, small: dict[str, Any]):
    """The round-2 update of a client that holds back 99 % of round 1 differs from that of a client that forgot it."""
    first = run({**small, "clients_per_round": 1.0, "update": {"top_k": 0.01}}, rounds=2)
    norms = pd.read_parquet(first.directory / "clients.parquet").groupby("round")["update_norm"].mean()
    assert norms[2] > 1.2 * norms[1]


@needs_library
def test_noise_at_the_server_is_in_proportion_to_clip_multiplier_and_weight(run: Run, small: dict[str, Any]):
    """4 clients of equal weight, clip 0.5, multiplier 2: standard deviation 2 * 0.5 / 4 = 0.25 on every parameter."""
    small |= {"rounds": 1, "aggregation": {"name": "uniform"}}
    quiet = run({**small, "update": {"clip": 0.5}})
    noisy = run({**small, "update": {"clip": 0.5, "noise_multiplier": 2.0}})
    difference = parameters(noisy) - parameters(quiet)
    assert difference.std() == pytest.approx(0.25, rel=0.05)
    assert noisy.metrics["epsilon"].iloc[1] > 0
    assert "epsilon" not in quiet.metrics


@needs_library
@pytest.mark.parametrize("where", ["server", "client"])
def test_epsilon_grows_with_every_round_that_counts(run: Run, small: dict[str, Any], where: str):
    """At the client it grows only when the client that took part most often does so again."""
    small |= {"server": {"name": "sgd", "lr": 0.01}, "aggregation": {"name": "uniform"}}
    small["update"] = {"clip": 0.5, "noise_multiplier": 4.0, "noise_at": where}
    result = run(small)
    epsilon = result.metrics["epsilon"][1:]
    assert epsilon.is_monotonic_increasing
    times = pd.read_parquet(result.directory / "clients.parquet")["client"].value_counts().max()
    assert epsilon.nunique() == (3 if where == "server" else times)
    claim = result.summary["privacy"]
    assert claim["epsilon"] == epsilon.iloc[-1]
    assert claim["noise_std"] == (0.5 if where == "server" else 2.0)  # 4 * 0.5, over 4 clients at the server
    assert "replace one client" in claim["adjacency"] and "4 of 6 clients" in claim["sampling"]
    assert any("losses" in what for what in claim["outside_guarantee"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": {"name": "scaffold"}}, "local.name = scaffold sends further vectors"),
        ({"model": {"name": "tiny_models:batch_norm_cnn"}}, "running statistics"),
        ({"aggregation": {"name": "median"}}, "median is no weighted sum.*update.noise_at=client"),
        ({"local": {"name": "feddyn"}}, "local.name = feddyn works out drift"),
        ({"aggregation": {"name": "fedavg"}}, "fedavg weighs a client by its part of the cohort.*fixed_denominator"),
        ({"aggregation": {"name": "fedoui"}}, "fedoui weighs clients by what they computed"),
    ],
)
def test_what_the_noise_would_not_hide_is_refused_before_anything_starts(
    run: Run, small: dict[str, Any], change: dict[str, Any], message: str
):
    with pytest.raises(UserError, match=message):
        run({**small, **change, "update": {"clip": 1.0, "noise_multiplier": 1.0}})


@needs_library
def test_a_fixed_denominator_weighs_every_client_the_same_in_all_its_rounds(run: Run, small: dict[str, Any]):
    """w_k = min(n_k, 40) / (4/6 sum_j min(n_j, 40)), whatever the cohort."""
    small |= {"aggregation": {"name": "fixed_denominator", "cap": 40}}
    result = run({**small, "update": {"clip": 0.5, "noise_multiplier": 2.0}})
    sizes_K = np.minimum(np.array(result.summary["sizes_K"]), 40)
    clients = pd.read_parquet(result.directory / "clients.parquet")
    expected = sizes_K[clients["client"].to_numpy()] / (4 / 6 * sizes_K.sum())
    assert clients["weight"].to_numpy() == pytest.approx(expected, rel=1e-12)
    assert result.summary["privacy"]["noise_std"] == pytest.approx(2.0 * 0.5 * expected.max(), rel=1e-12)
