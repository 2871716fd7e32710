"""What an allocation policy decides reaches training: samples that are left out, images that clients share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim import Result
from raysim.config.load import load_config
from raysim.lifecycle.prepare import prepare

Run = Callable[..., Result]


@pytest.fixture
def config(small: dict[str, Any]) -> dict[str, Any]:
    """All 6 clients in each of 2 rounds, cheap images."""
    generator = {"name": "ddpm", "steps": 2, "batch_size": 16}
    return {**small, "rounds": 2, "clients_per_round": 1.0, "generator": generator}


def elsewhere(config: dict[str, Any], tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {**config, "output": {**config["output"], "dir": str(tmp_path / "elsewhere"), "cache": None}, **changes}


def test_clients_train_on_what_a_policy_keeps_and_on_its_images(run: Run, config: dict[str, Any], tmp_path: Path):
    """With fbl no client has a sample more or less than before; the same bits for 1 and 2 workers, and resumed."""
    config = {**config, "allocation": {"name": "fbl"}}
    prepared = prepare(load_config(config))
    sizes_K = prepared.dealt.sizes_K
    result = run(config)
    summary = result.summary
    assert summary["n_real"] + summary["n_real_left_out"] == 300
    assert summary["n_real_left_out"] == summary["n_synthetic"] == prepared.images > 0
    first = result.clients[result.clients["round"] == 1]
    assert (first["n_real"] + first["n_synthetic"]).tolist() == sizes_K.tolist()
    with np.load(result.directory / "partition.npz") as kept:
        assert (kept["counts"] + kept["quota"]).sum(axis=1).tolist() == sizes_K.tolist()
        assert kept["counts"].tolist() == prepared.partition.counts_KC.tolist() != kept["dealt"].tolist()
    one = run(elsewhere(config, tmp_path, resources={"workers": 1}))
    assert one.summary["model_sha256"] == summary["model_sha256"]
    run(elsewhere(config, tmp_path, rounds=1))
    resumed = run(elsewhere(config, tmp_path), resume=True)
    assert resumed.summary["model_sha256"] == summary["model_sha256"]
    plain = run({**config, "allocation": {"name": "none"}}).summary
    assert plain["partition_sha256"] != summary["partition_sha256"] and plain["config_hash"] != summary["config_hash"]
    assert plain["n_real_left_out"] == 0 and plain["entropy_K"] == summary["entropy_K"]


def test_a_pool_is_made_once_and_every_client_trains_on_all_of_it(run: Run, config: dict[str, Any], tmp_path: Path):
    config = {**config, "allocation": {"name": "server_pool", "total": 23}}
    result = run(config)
    summary = result.summary
    assert (summary["n_synthetic"], summary["n_synthetic_made"], summary["n_synthetic_held"]) == (23, 23, 6 * 23)
    assert (result.clients["n_synthetic"] == 23).all()
    one = run(elsewhere(config, tmp_path, resources={"workers": 1}))
    assert one.summary["model_sha256"] == summary["model_sha256"]
    again = run(config, rounds=1).summary
    assert again["n_synthetic_made"] == 0 and again["synthetic_sha256"] == summary["synthetic_sha256"]



def half_a_pool(counts_KC: np.ndarray) -> Any:
    """The first client gets the first 2 images of each class, the others 3."""
    from raysim.plugins_api import Allocation

    quota_KC = np.full_like(counts_KC, 3)
    quota_KC[0] = 2
    return Allocation(quota_KC, shared=True)


def test_clients_may_have_a_part_of_the_pool(
    run: Run, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """10 classes: 30 images, of which client 0 has images 0 and 1 of each class."""
    from raysim.engine.object_store import images_of
    from raysim.federation.synthesis import Synthesis

    seen = []

    def kept(*arguments: Any) -> Any:
        seen.append(make(*arguments))
        return seen[-1]

    make = Synthesis.make
    monkeypatch.setattr(Synthesis, "make", kept)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    summary = run({**config, "rounds": 1, "allocation": {"name": f"{Path(__file__).stem}:half_a_pool"}}).summary
    assert (summary["n_synthetic"], summary["n_synthetic_held"]) == (30, 20 + 5 * 30)
    (synthetic,) = seen
    images = images_of(synthetic.of(1))
    pool = images.reshape(10, 3, *images.shape[1:])
    assert (images_of(synthetic.of(0)).reshape(10, 2, *pool.shape[2:]) == pool[:, :2]).all()
