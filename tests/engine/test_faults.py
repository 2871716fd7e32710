"""What dies is done again to the same bits; what fails for good says who, when and why."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysim import Result
from raysim.core.errors import ClientError, DivergenceError, RunError, ServerDivergenceError

Run = Callable[..., Result]
EVERYONE = {"clients_per_round": 1.0}


def only_directory(config: dict[str, Any]) -> Path:
    (path,) = Path(config["output"]["dir"]).iterdir()
    return path


@pytest.mark.parametrize(("rule", "deaths"), [("fedavg", 2), ("fedoui", 1)])
def test_a_worker_that_dies_changes_nothing(run: Run, small: dict[str, Any], tmp_path: Path, rule: str, deaths: int):
    """Its process is killed with updates in it, both kept (fedoui) and already summed (fedavg)."""
    lives = tmp_path / "lives"
    config = {**small, **EVERYONE, "aggregation": {"name": rule}}

    def with_lives(left: int) -> Result:
        lives.write_text(str(left))
        return run(config, local={"name": "tiny_algorithms:dies", "lives": str(lives), "lr": 0.1})

    calm, disturbed = with_lives(0), with_lives(deaths)
    assert lives.read_text() == "0"
    assert disturbed.summary["model_sha256"] == calm.summary["model_sha256"]
    assert disturbed.metrics["accuracy"].tolist() == calm.metrics["accuracy"].tolist()
    assert any(note.startswith(f"{deaths} workers were lost") for note in disturbed.summary["notes"])


def test_a_client_that_keeps_killing_its_worker_is_named_after_bounded_retries(
    run: Run, small: dict[str, Any], tmp_path: Path
):
    lives = tmp_path / "lives"
    lives.write_text("99")
    small |= {**EVERYONE, "local": {"name": "tiny_algorithms:dies", "lives": str(lives)}}
    small["resources"] = {"workers": 2, "max_retries": 1}
    with pytest.raises(RunError, match="client 3 in round 2 failed 2 times; the last time its worker died"):
        run(small)
    assert lives.read_text() == "97"


def test_a_client_that_raises_is_named_with_round_type_and_text(run: Run, small: dict[str, Any]):
    small |= {**EVERYONE, "local": {"name": "tiny_algorithms:raises"}}
    with pytest.raises(ClientError, match=r"client 3 failed in round 2: .*ZeroDivisionError: no luck today"):
        run(small)
    status = json.loads((only_directory(small) / "status.json").read_text())
    assert status["status"] == "FAILED"
    assert "client 3" in status["message"]


def test_a_client_that_hangs_is_given_up_in_time(run: Run, small: dict[str, Any]):
    small |= {**EVERYONE, "local": {"name": "tiny_algorithms:hangs"}}
    small["resources"] = {"workers": 2, "task_timeout_s": 4.0, "max_retries": 0}
    began = time.monotonic()
    with pytest.raises(RunError, match=r"client \d in round 2 failed 1 times; the last time it took longer than"):
        run(small)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", ["raises", "diverges"])
def test_a_failing_client_is_left_out_if_configured_and_counted(run: Run, small: dict[str, Any], name: str):
    small |= {**EVERYONE, "local": {"name": f"tiny_algorithms:{name}"}}
    small["resources"] = {"workers": 2, "on_client_failure": "drop"}
    result = run(small)
    assert result.metrics["dropped"][1:].tolist() == [0, 1, 0]
    assert result.metrics["participants"][1:].tolist() == [6, 5, 6]


def test_a_client_that_diverges_is_named_in_its_round_and_the_last_good_model_is_kept(run: Run, small: dict[str, Any]):
    small |= {**EVERYONE, "local": {"name": "tiny_algorithms:diverges"}, "resources": {"workers": 1}}
    with pytest.raises(DivergenceError, match="client 3 failed in round 2: training diverged: delta has"):
        run(small)
    saved = sorted(p.name for p in (only_directory(small) / "checkpoints").glob("*.json"))
    assert saved == ["round-000001.json"]


def test_a_model_that_diverges_at_the_server_names_the_server_and_the_round(run: Run, small: dict[str, Any]):
    """A server learning rate of 1e300 leaves the range of float32, though every client's update is finite."""
    small["server"] = {"name": "sgd", "lr": 1e300}
    with pytest.raises(ServerDivergenceError, match=r"^the server's step of round 1 diverged: the global model is no"):
        run(small)


def test_a_learning_rate_beyond_reason_is_noticed_as_divergence(run: Run, small: dict[str, Any]):
    small |= {"local": {"name": "sgd", "lr": 1e6}, "resources": {"workers": 1}}
    with pytest.raises(DivergenceError, match=r"client \d failed in round 1: training diverged"):
        run(small)
