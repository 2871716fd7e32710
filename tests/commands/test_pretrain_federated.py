"""A generator that the clients train: the same bits for any number of workers, honest weights, clear refusals."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from raysim.commands.pretrain import pretrain
from raysim.commands.pretrain_federated import run_config
from raysim.config.load import read_config
from raysim.core.errors import UserError
from raysim.core.signals import Interrupted
from raysim.data.datasets import digits
from raysim.generation.ddpm import ddpm
from raysim.generation.denoising import NETWORK
from raysim.generation.pretrain_config import PretrainConfig
from raysim.generation.weights_folder import WEIGHTS
from raysim.ui.display import Display

Train = Callable[..., Path]
ROUNDS = 3
GENERATORS = Path(__file__).parents[2] / "experiments/generators"


@pytest.fixture
def train(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains a tiny network on 200 digits of four clients, on warm workers, into the folder of this name."""
    monkeypatch.chdir(tmp_path)
    plain: dict[str, Any] = {
        "data": {"name": "digits", "train_samples": 200, "test_samples": 60}, "unet": {"channels": [8]},
        "sampling": {"images": 0}, "tracking": {"uri": "none"},
        "federation": {
            "rounds": ROUNDS, "clients_per_round": 3, "ema": 0.5, "evaluate_every": 1, "checkpoint_every": 1,
            "partition": {"name": "dirichlet", "clients": 4, "alpha": 1.0, "min_samples": 4},
            "local": {"name": "adamw", "steps": 2, "batch_size": 8, "lr": 0.002},
            "resources": {"workers": 2},
        },
    }
    (tmp_path / "federated.yaml").write_text(yaml.safe_dump(plain))

    def called(output: str, *overrides: str) -> Path:
        return pretrain("federated.yaml", [f"output={output}", *overrides], session=session)

    return called


def only_run(folder: Path) -> Path:
    (found,) = (folder / "federation").iterdir()
    return found


def test_one_and_two_workers_make_the_same_weights_and_the_card_says_who_made_them(train: Train):
    one, two = train("one", "federation.resources.workers=1"), train("two")
    assert (one / WEIGHTS).read_bytes() == (two / WEIGHTS).read_bytes()
    metrics = [pd.read_parquet(only_run(folder) / "metrics.parquet") for folder in (one, two)]
    errors = [table["denoising_error"].tolist() for table in metrics]
    assert errors[0] == errors[1] and len(errors[0]) == ROUNDS + 1 and errors[0][-1] < errors[0][0]
    card = json.loads((one / "card.json").read_text())
    by = card["trained_by"]
    assert by["who"] == "4 clients, in 3 rounds; no image left its client" and by["privacy"] is None
    assert (by["clients"], by["rounds"], by["local_steps"]) == (4, 3, 3 * 3 * 2)
    assert by["partition"]["alpha"] == 1.0 and len(by["partition_sha256"]) == len(card["data"]["sha256"]) == 64
    assert card["loss"]["test"] == pytest.approx(errors[0][-1], abs=1e-6)
    assert "no image left its client" in (one / "README.md").read_text()
    assert not (one / "preview").exists()


def test_a_run_finds_the_weights_of_its_clients_and_says_how_they_were_made(train: Train, session: Any):
    (Path("run.yaml")).write_text(yaml.safe_dump({
        "seed": 3, "rounds": 1, "data": {"name": "digits", "train_samples": 200, "test_samples": 60},
        "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5, "min_samples": 2},
    }))
    keys = ["federation.rounds=1", "federation.local.steps=1", "federation.resources.workers=2", "unet.channels=[8]",
            "sampling.images=0", "tracking.uri=none"]
    folder = pretrain(None, keys, for_run="run.yaml", session=session)
    assert folder.parent == Path("weights") and folder.name.endswith("-federated")
    by = json.loads((folder / "card.json").read_text())["trained_by"]
    assert (by["partition"]["alpha"], by["partition"]["seed"]) == (0.5, 3)  # its clients, with their samples
    from raysim.lifecycle.build import generator_plugin, read_config
    from raysim.lifecycle.prepare import load_dataset

    config = read_config("run.yaml", [], {})
    plugin = generator_plugin(config, load_dataset(config))
    assert plugin.params["weights"] == str(folder.absolute())
    (note,) = ddpm.notes(load_dataset(config), None, weights=str(folder))
    assert "were trained by 4 clients, in 1 rounds; no image left its client: on 200 of the 200 images" in note
    assert ddpm(digits(), "cpu", weights=str(folder), steps=1, allow_seen_test=True).classes == 10


def test_an_interrupted_training_goes_on_to_the_same_weights_and_says_how(
    train: Train, capsys: pytest.CaptureFixture[str]
):
    calm = train("calm")
    show = Display.round

    def interrupted(self: Display, number: int, *others: Any) -> None:
        show(self, number, *others)
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Display, "round", interrupted)
        with pytest.raises(Interrupted):
            train("stopped")
    assert "go on with: raysim pretrain federated.yaml output=stopped" in capsys.readouterr().out
    assert not (Path("stopped") / "card.json").exists()
    folder = train("stopped")
    assert (folder / WEIGHTS).read_bytes() == (calm / WEIGHTS).read_bytes()
    assert "resuming" in capsys.readouterr().out
    assert train("stopped") == folder and "nothing to do" in capsys.readouterr().out


def test_more_rounds_go_on_with_finished_weights_as_if_they_had_never_ended(train: Train):
    more = train("whole", f"federation.rounds={ROUNDS + 1}")
    train("longer")
    assert (train("longer", f"federation.rounds={ROUNDS + 1}") / WEIGHTS).read_bytes() == (more / WEIGHTS).read_bytes()


def test_a_worker_that_dies_changes_nothing(train: Train, tmp_path: Path):
    lives = tmp_path / "lives"

    def with_lives(left: int) -> bytes:
        lives.write_text(str(left))
        local = f"{{name: 'tiny_algorithms:dies', lives: {lives}, lr: 0.1}}"
        folder = train(f"lives-{left}", f"federation.local={local}", "federation.clients_per_round=1.0")
        return (folder / WEIGHTS).read_bytes()

    assert with_lives(0) == with_lives(1)
    assert lives.read_text() == "0"


def test_noise_on_clipped_updates_gives_an_epsilon_on_the_card(train: Train):
    private = train(
        "private", "federation.update={clip: 0.5, noise_multiplier: 2.0}", "federation.aggregation=uniform",
    )
    privacy = json.loads((private / "card.json").read_text())["trained_by"]["privacy"]
    assert privacy["epsilon"] > 0 and privacy["delta"] == 1e-5
    assert not any("standard deviation by which inputs" in text for text in privacy["outside_guarantee"])
    assert "epsilon" in (private / "README.md").read_text()
    assert (private / WEIGHTS).read_bytes() != (train("plain", "federation.aggregation=uniform") / WEIGHTS).read_bytes()


@pytest.mark.parametrize(("keys", "message"), [
    (["steps=5"], r"steps = 5: with federation this is federation.rounds and federation.local.steps; remove it"),
    (["lr=0.1"], "lr = 0.1: with federation this is federation.local.lr"),
    (["sampling.every=5"], "sampling.every = 5: with federation this is sampling.every_minutes"),
    (["federation.local.epoch=2"], "federation.local.epoch = 2: no such key"),
    (["federation.local.name=moon"], "federation.local.name = moon: it compares features of a classifier"),
    (["federation.aggregation.name=fedoui"], "federation.aggregation.name = fedoui: .*activations of a classifier"),
    (["federation.update.noise_multiplier=1"], "federation.update.noise_multiplier = 1: .*set update.clip"),
    (["federation.rounds=0"], "federation.rounds = 0: must be a whole number of at least 1"),
    (["federation.clients_per_round=9"], "federation.clients_per_round = 9: there are only 4 clients"),
    (["federation.model=cnn"], r"federation.model = \{name: cnn\}: no such key"),
    (["unet.channels=[8, 8, 8, 8, 8]"], "unet.channels: 5 resolutions .* 8 x 8 pixels"),
])
def test_keys_that_make_no_sense_for_clients_are_refused(train: Train, keys: list[str], message: str):
    with pytest.raises(UserError, match=message):
        train("refused", *keys)


@pytest.mark.parametrize("file", sorted(GENERATORS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_of_a_generator_is_a_right_configuration(file: Path):
    config = PretrainConfig.model_validate(read_config(file)[0])
    assert config.problems() == []
    if config.federation is not None:
        assert run_config(config, digits()).model.name == NETWORK


def test_a_folder_with_another_training_is_refused_by_what_differs(train: Train):
    train("taken", "federation.rounds=1")
    (Path("taken") / "card.json").unlink()
    with pytest.raises(UserError, match=r"holds a training with other values \(local.lr: 0.002 -> 0.1\)"):
        train("taken", "federation.local.lr=0.1")
    train("taken", "federation.rounds=2")
    with pytest.raises(UserError, match="already holds weights of another configuration"):
        train("taken", "federation.local.lr=0.1")
    (Path("taken") / "card.json").unlink()
    with pytest.raises(UserError, match=r"federation.rounds = 1: .* has done 2 rounds"):
        train("taken", "federation.rounds=1")
