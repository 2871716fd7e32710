"""What a run leaves behind, and what it leaves alone."""

import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import ray
import yaml
from safetensors.numpy import load_file

import raysim
from raysim import Result, load_config
from raysim.core.errors import UserError
from raysim.engine.object_store import put_shared
from raysim.lifecycle import inputs
from raysim.lifecycle.prepare import load_dataset
from raysim.lifecycle.summary import accuracy_auc, accuracy_summary
from raysim.ui.display import Display

Run = Callable[..., Result]


def store_bytes(expected: float = -1.0) -> int:
    """Bytes that the object store holds, once Ray has deleted what nobody refers to any more (it takes a second).

    expected: as soon as it holds no more than that, it is not waited any longer.
    """
    from ray._private.internal_api import memory_summary

    address, sizes = ray.get_runtime_context().gcs_address, []  # other Rays may run on this machine
    for _ in range(12):
        summary = memory_summary(address, stats_only=True)
        line = next(x for x in summary.splitlines() if x.startswith("Plasma memory usage"))
        sizes.append(int(float(line.split()[3]) * 2**20))
        if sizes[-1] <= expected:
            break
        time.sleep(0.25)
    return min(sizes)


@pytest.fixture
def tracked(small: dict[str, Any], store: str) -> dict[str, Any]:
    return {**small, "tracking": {"uri": store, "experiment": "mine"}}


@pytest.mark.drawn
def test_the_run_directory_holds_everything_and_loads_without_pickle(run: Run, small: dict[str, Any]):
    result = run({**small, "aggregation": {"name": "fedoui"}})
    files = {str(p.relative_to(result.directory)) for p in result.directory.rglob("*") if p.is_file()}
    assert files >= {
        "config.yaml", "run.json", "status.json", "summary.json", "metrics.parquet", "metrics.csv", "clients.parquet",
        "per_client.csv", "partition.npz", "model.safetensors", "figures/accuracy.png", "figures/client_counts.png",
    }
    saved = np.load(result.directory / "partition.npz", allow_pickle=False)
    assert saved["counts"].sum() == 300
    for path in result.directory.rglob("*.safetensors"):
        assert load_file(path)
    for path in result.directory.rglob("*.json"):
        json.loads(path.read_text())
    again = load_config(yaml.safe_load((result.directory / "config.yaml").read_text()))
    assert again.hash() == result.summary["config_hash"]
    assert json.loads((result.directory / "status.json").read_text())["status"] == "FINISHED"


def test_everything_that_a_run_writes_has_the_permissions_that_the_umask_leaves(
    run: Run, small: dict[str, Any], tmp_path: Path
):
    """Checkpoints, too, which safetensors would let only their owner read: others of a group can go on with a run."""
    few_images = {"allocation": {"name": "fedeas", "total": 10}, "generator": {"name": "ddpm", "steps": 2}}
    kept = {**small["output"], "mirror": str(tmp_path / "mirror")}
    before = os.umask(0o007)
    try:
        run({**small, **few_images, "local": {"name": "scaffold"}, "output": kept})
    finally:
        os.umask(before)
    written = [path for folder in ("runs", "cache", "mirror") for path in (tmp_path / folder).rglob("*")]
    assert {(path.is_dir(), oct(path.stat().st_mode)[-3:]) for path in written} == {(True, "770"), (False, "660")}


def test_the_summary_has_the_promised_keys_and_agrees_with_the_metrics(run: Run, small: dict[str, Any]):
    result = run(small)
    summary = json.loads((result.directory / "summary.json").read_text())
    assert summary == result.summary
    promised = (
        "final_accuracy best_accuracy best_round accuracy_auc rounds clients n_real n_synthetic "
        "n_synthetic_full_balance seconds model_sha256 synthetic_sha256 mlflow_run_id config_hash"
    )
    assert set(promised.split()) <= set(summary)
    metrics = pd.read_parquet(result.directory / "metrics.parquet")
    assert metrics["round"].tolist() == [0, 1, 2, 3]
    assert summary["final_accuracy"] == metrics["accuracy"].iloc[-1]
    assert summary["best_accuracy"] == metrics["accuracy"][1:].max()


def test_the_summary_tells_where_the_time_went_and_how_idle_the_workers_were(run: Run, small: dict[str, Any]):
    """No phase is part of another: the four of the rounds add up to their seconds, all to less than the total.

    A worker is busy for at least the seconds that its clients trained, which the workers measured themselves, and for
    at most the time of the rounds.
    """
    result = run(small)
    seconds, workers, metrics = result.summary["seconds"], result.summary["workers"], result.metrics[1:]
    rounds_s = metrics[["seconds_train", "seconds_aggregate", "seconds_evaluate"]].to_numpy().sum()
    in_rounds = sum(seconds[phase] for phase in ("train", "dispatch", "aggregate", "evaluate"))
    assert in_rounds == pytest.approx(rounds_s + result.metrics["seconds_evaluate"][0], abs=0.01)
    assert sum(s for phase, s in seconds.items() if phase != "total") <= seconds["total"] + 0.01
    assert (metrics["seconds_dispatch"] >= 0).all() and (metrics["seconds_dispatch"] < metrics["seconds_train"]).all()
    busy_s = sum(worker["busy_s"] for worker in workers)
    trained_s = pd.read_parquet(result.directory / "clients.parquet")["seconds"].sum()
    assert len(workers) == 2 and trained_s <= busy_s <= 2 * rounds_s + 0.01
    assert metrics["seconds_idle"].sum() == pytest.approx(rounds_s - busy_s / 2, abs=0.01)
    assert all(0 <= worker["idle_frac"] <= 1 for worker in workers)


def test_final_best_and_round_of_best_are_three_things():
    """0.2, 0.6, 0.6, 0.4: best 0.6, first reached in round 2; trapezoids 0.4 + 0.6 + 0.5 over 3 intervals: 0.5."""
    metrics = pd.DataFrame({"round": [1, 2, 3, 4], "accuracy": [0.2, 0.6, 0.6, 0.4]})
    expected = {"final_accuracy": 0.4, "best_accuracy": 0.6, "best_round": 2, "accuracy_auc": 0.5}
    found = accuracy_summary(metrics)
    assert {k: found[k] for k in expected} == pytest.approx(expected)


def test_the_area_under_the_curve_takes_the_distance_between_evaluations_into_account():
    """Accuracy 0, 0.5, 1 after rounds 2, 4, 8: (2 * 0.25 + 4 * 0.75) / 6 = 3.5 / 6."""
    assert accuracy_auc([2, 4, 8], [0.0, 0.5, 1.0]) == pytest.approx(3.5 / 6)
    assert accuracy_auc([5], [0.3]) == 0.3


def test_a_validation_split_is_measured_with_the_test_split_and_no_client_trains_on_it(
    run: Run, tracked: dict[str, Any], capfd: Any
):
    """143 or 144 of 1,438 digits; the run itself is that of the same images without the split's evaluation."""
    import mlflow

    data = {**tracked["data"], "validation_fraction": 0.1}
    result = run({**tracked, "data": data, "evaluate_every": 2, "rounds": 3})
    said = capfd.readouterr().out
    accuracy, metrics = result.metrics["validation_accuracy"], result.metrics
    assert accuracy.notna().tolist() == metrics["accuracy"].notna().tolist() == [True, False, True, True]
    assert accuracy.dropna().between(0, 1).all() and (metrics["validation_loss"].dropna() > 0).all()
    measured = metrics[1:].dropna(subset=["accuracy"])
    best = measured["validation_accuracy"].idxmax()
    assert result.summary["best_round"] == measured["round"][best]
    assert result.summary["best_accuracy"] == measured["accuracy"][best]
    assert "best (chosen on validation)" in said and "validation_accuracy 0." in said
    logged = mlflow.MlflowClient(tracking_uri=tracked["tracking"]["uri"]).get_run(result.summary["mlflow_run_id"])
    assert {"validation_accuracy", "validation_loss"} <= set(logged.data.metrics)
    assert "best_validation_accuracy" in logged.data.tags
    identity = json.loads((result.directory / "run.json").read_text())
    assert "validation_images" in identity["data"]


def test_rounds_without_evaluation_have_no_accuracy_and_the_last_always_has(run: Run, small: dict[str, Any]):
    metrics = run({**small, "rounds": 5, "evaluate_every": 2}).metrics
    assert metrics["accuracy"].notna().tolist() == [True, False, True, False, True, True]


def test_four_workers_make_one_mlflow_run_with_every_round_once(run: Run, tracked: dict[str, Any]):
    import mlflow

    result = run({**tracked, "resources": {"workers": 4}})
    client = mlflow.MlflowClient(tracking_uri=tracked["tracking"]["uri"])
    runs = {e.name: client.search_runs([e.experiment_id]) for e in client.search_experiments()}
    assert {name: len(found) for name, found in runs.items()} == {"mine": 1, "Default": 0}
    (found,) = runs["mine"]
    assert (found.info.status, found.info.run_id) == ("FINISHED", result.summary["mlflow_run_id"])
    assert [m.step for m in client.get_metric_history(found.info.run_id, "accuracy")] == [0, 1, 2, 3]
    assert found.data.metrics["accuracy"] == result.summary["final_accuracy"]
    assert found.data.params["local.lr"] == "0.1"
    text = mlflow.artifacts.load_text(f"{found.info.artifact_uri}/config.yaml")
    assert yaml.safe_load(text) == load_config(tracked).resolved() | {"resources": yaml.safe_load(text)["resources"]}


def test_a_run_that_fails_is_failed_in_mlflow(run: Run, tracked: dict[str, Any]):
    import mlflow

    with pytest.raises(Exception, match="client 3 failed in round 2"):
        failing = {"local": {"name": "tiny_algorithms:raises"}, "resources": {"workers": 1}}
        run({**tracked, "clients_per_round": 1.0, **failing})
    client = mlflow.MlflowClient(tracking_uri=tracked["tracking"]["uri"])
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert found.info.status == "FAILED"
    assert "client 3 failed in round 2" in found.data.tags["message"]


def test_the_object_store_is_as_full_after_many_rounds_as_after_few(run: Run, small: dict[str, Any]):
    """Models of 1.7 MB for 15 rounds with client state: 25 MB if old references stayed."""
    config = {**small, "model": {"name": "mlp", "hidden": [600, 600]}, "local": {"name": "scaffold", "lr": 0.01}}
    config["output"] = {**small["output"], "checkpoint_every": 100}
    sizes = []
    for rounds in (3, 18):
        run(config, rounds=rounds)
        sizes.append(store_bytes(expected=sizes[0] if sizes else -1.0))
    assert abs(sizes[1] - sizes[0]) < 4_000_000


def test_while_it_trains_the_driver_keeps_no_images_of_its_own(
    run: Run, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The array that was read is gone once it is in the object store, which the driver looks into like any worker."""
    prepare, read, alive = inputs.prepare, [], []

    def watched(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        read.append(weakref.ref(prepared.dataset.train_images))
        return prepared

    monkeypatch.setattr(inputs, "prepare", watched)
    monkeypatch.setattr(Display, "round", lambda *_: alive.append(read[0]() is not None))
    run(small)
    assert alive == [False] * 3


def test_an_array_from_the_store_is_the_same_and_cannot_be_written_to(ray_here: None):
    reference, array = put_shared(np.arange(1000))
    assert np.array_equal(array, np.arange(1000)) and not array.flags.writeable and not array.flags.owndata
    assert ray.get(reference).ctypes.data == array.ctypes.data


def test_an_actor_carries_no_data_with_it():
    from raysim.engine.worker import Worker

    assert len(cloudpickle.dumps(Worker)) < 100_000


def test_fedeas_on_balanced_clients_is_plain_fedavg_to_the_bit(run: Run, small: dict[str, Any], tmp_path: Path):
    """60 rows, each client with one of every class: every threshold is 0, so no image is made, and nothing changes."""
    labels_N = load_dataset(load_config(small, (), ("data", "partition", "allocation"))).train_labels_N
    by_class = [np.flatnonzero(labels_N == c)[:6] for c in range(10)]
    rows = [[int(of_class[k]) for of_class in by_class] for k in range(6)]
    (tmp_path / "balanced.json").write_text(json.dumps(rows))
    config = {**small, "partition": {"name": "file", "path": str(tmp_path / "balanced.json")}}
    fedeas, plain = (run({**config, "allocation": {"name": name}}).summary for name in ("fedeas", "none"))
    assert fedeas["n_synthetic"] == plain["n_synthetic"] == 0
    for key in ("model_sha256", "partition_sha256", "synthetic_sha256", "final_accuracy"):
        assert fedeas[key] == plain[key]


def test_a_run_without_test_images_is_refused_before_it_starts(small: dict[str, Any], tmp_path: Path):
    """Class counts 15: round(0.01 * 15) = 0 of each class are set apart."""
    images = np.zeros((30, 8, 8), np.uint8)
    np.savez(tmp_path / "data.npz", train_images=images, train_labels=np.repeat([0, 1], 15))
    config = {**small, "data": {"name": "npz", "path": str(tmp_path / "data.npz"), "test_fraction": 0.01}}
    config["partition"] = {"name": "iid", "clients": 6}
    with pytest.raises(UserError, match=r"no test image.*test_images and test_labels.*raise data\.test_fraction"):
        raysim.run(config)
    assert not (tmp_path / "runs").exists()


def test_local_steps_in_place_of_epochs_are_announced(run: Run, small: dict[str, Any], capfd: Any):
    run({**small, "local": {**small["local"], "steps": 2}}, rounds=1)
    captured = capfd.readouterr()
    assert "local.steps = 2 takes the place of local.epochs = 1, which is not used" in captured.out + captured.err


def test_the_package_shows_its_public_names():
    assert {"run", "load_config", "Result"} <= set(dir(raysim))


def test_a_client_of_four_samples_trains_on_all_of_them(run: Run, small: dict[str, Any], tmp_path: Path):
    """Class counts (1, 0, 3): nothing is set apart for validation, so batches of 3 make steps of 3 and 1."""
    labels_N = load_dataset(load_config(small, (), ("data", "partition", "allocation"))).train_labels_N
    zeros, twos = (np.flatnonzero(labels_N == c).tolist() for c in (0, 2))
    (tmp_path / "tiny.json").write_text(json.dumps([[zeros[0], *twos[:3]], [*zeros[1:6], *twos[3:8]]]))
    partition = {"name": "file", "path": str(tmp_path / "tiny.json")}
    local = {"name": "sgd", "epochs": 1, "batch_size": 3}
    result = run({**small, "partition": partition, "local": local, "clients_per_round": 1.0}, rounds=1)
    tiny = pd.read_parquet(result.directory / "clients.parquet").set_index("client").loc[0]
    assert (tiny["n_real"], tiny["steps"]) == (4, 2) and np.isfinite(tiny["loss"])


def test_the_data_set_is_read_once_and_by_the_driver(
    run: Run, small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So a data set that is downloaded is downloaded once, however many workers there are."""
    (tmp_path / "counted_digits.py").write_text(
        "import os\nfrom raysim.data.datasets import digits\n\n\ndef counted(*, log: str):\n"
        "    with open(log, 'a') as file:\n        file.write(f'{os.getpid()}\\n')\n    return digits()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log.txt"
    run({**small, "data": {"name": "counted_digits:counted", "log": str(log), "train_samples": 300}}, rounds=1)
    assert log.read_text().split() == [str(os.getpid())]
