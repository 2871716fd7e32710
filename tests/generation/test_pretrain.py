"""Pretraining: reproducible to the bit, resumable at any step, and honest about what it wrote."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DModel
from pydantic import ValidationError
from safetensors.torch import load_file

from raysim.config.yaml_io import read_yaml
from raysim.core import rng
from raysim.core.errors import RunError, UserError
from raysim.core.records import Dataset
from raysim.generation.ddpm import ddpm
from raysim.generation.pretrain import CHECKPOINT, pretrain, settle
from raysim.generation.pretrain_config import PretrainConfig
from raysim.generation.pretrain_trainer import Trainer, to_range
from raysim.generation.weights_folder import SHIPPED, shipped_names

ROOT = Path(__file__).parents[2]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def make_dataset(size: int = 4, flips: bool = False) -> Dataset:
    """Two classes: a dark left half, and a dark right half."""
    images = np.full((20, 1, size, size), 230, np.uint8)
    images[:10, :, :, : size // 2] = 20
    images[10:, :, :, size // 2 :] = 20
    labels_N = np.repeat(np.arange(2), 10)
    return Dataset("halves", images, labels_N, images[::5], labels_N[::5], ("left", "right"), (0.5,), (0.3,), flips)


def make_config(output: Path, **keys) -> PretrainConfig:
    plain = {"data": {"name": "halves"}, "unet": {"channels": [8]}, "steps": 6, "batch_size": 8, "warmup": 2,
             "log_every": 1, "checkpoint_every": 2, "output": str(output), "device": "cpu"}
    return PretrainConfig.model_validate({**plain, **keys})


def ignore(progress: dict) -> None:
    pass


class Stopped(Exception):
    """Stands for a killed process."""


def stop_at(step: int):
    def report(progress: dict) -> None:
        if progress["step"] == step:
            raise Stopped

    return report


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, progress reports) of an undisturbed run."""
    reports: list[dict] = []
    folder = pretrain(make_config(tmp_path_factory.mktemp("finished")), make_dataset(), reports.append)
    return folder, reports


@pytest.mark.parametrize("stop", [3, 5])
def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path, finished, stop):
    """Checkpoints after steps 2 and 4; killed in step 3 or 5, the run repeats that step and goes on."""
    with pytest.raises(Stopped):
        pretrain(make_config(tmp_path), make_dataset(), stop_at(stop))
    reports: list[dict] = []
    pretrain(make_config(tmp_path), make_dataset(), reports.append)
    assert [r["step"] for r in reports] == list(range(stop, 7))
    assert (tmp_path / WEIGHTS).read_bytes() == (finished[0] / WEIGHTS).read_bytes()
    assert [r["loss"] for r in reports] == [r["loss"] for r in finished[1][stop - 1 :]]
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_time_limit_leaves_usable_weights_and_a_run_that_goes_on(tmp_path, finished):
    """A limit of no time at all still takes one step a run: six runs end where one run does."""
    config = make_config(tmp_path, minutes=1e-9)
    for step in range(1, 7):
        pretrain(config, make_dataset(), ignore)
        card = json.loads((tmp_path / "card.json").read_text())
        assert (card["steps_done"], (tmp_path / CHECKPOINT).exists()) == (step, step < 6)
        assert ("not finished" in (tmp_path / "README.md").read_text()) == (step < 6)
        generator = ddpm(make_dataset(), "cpu", weights=str(tmp_path), steps=1, allow_seen_test=True,
                         allow_unfinished=True)
        assert generator.sample(np.array([1]), np.array([1])).any()
    assert (tmp_path / WEIGHTS).read_bytes() == (finished[0] / WEIGHTS).read_bytes()


def test_a_finished_folder_is_left_alone(finished):
    folder, before = finished[0], (finished[0] / WEIGHTS).stat().st_mtime_ns
    assert pretrain(make_config(folder), make_dataset(), stop_at(1)) == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == before


def test_weights_or_a_checkpoint_of_another_configuration_are_never_overwritten(tmp_path, finished):
    with pytest.raises(UserError, match="another configuration"):
        pretrain(make_config(finished[0], seed=1), make_dataset(), ignore)
    with pytest.raises(Stopped):
        pretrain(make_config(tmp_path), make_dataset(), stop_at(3))
    with pytest.raises(UserError, match="another configuration"):
        pretrain(make_config(tmp_path, lr=0.1), make_dataset(), ignore)


def test_finished_weights_are_trained_on_for_more_steps_with_a_rate_that_rises_anew(tmp_path):
    """6 steps, then 4 more with warm-up 2: rates of 1/2, 1, 1/2, 0 of the peak; stopped in between, the same bits."""
    rates: list[float] = []
    for name in ("whole", "stopped"):
        pretrain(make_config(tmp_path / name), make_dataset(), ignore)
    folder = pretrain(make_config(tmp_path / "whole", steps=10), make_dataset(), lambda r: rates.append(r["lr"]))
    assert np.divide(rates, 0.002).tolist() == pytest.approx([0.5, 1.0, 0.5, 0.0])
    card = json.loads((folder / "card.json").read_text())
    assert (card["steps_done"], card["restarts"]) == (10, [6]) and "at step 6" in (folder / "README.md").read_text()
    with pytest.raises(Stopped):
        pretrain(make_config(tmp_path / "stopped", steps=10), make_dataset(), stop_at(9))
    again: list[int] = []
    pretrain(make_config(tmp_path / "stopped", steps=10), make_dataset(), lambda r: again.append(r["step"]))
    assert again == [9, 10]
    assert (tmp_path / "stopped" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    with pytest.raises(UserError, match="another configuration"):
        pretrain(make_config(folder, steps=12, lr=0.1), make_dataset(), ignore)
    with pytest.raises(UserError, match="another configuration"):
        pretrain(make_config(folder, steps=8), make_dataset(), ignore)


def test_a_person_hears_of_the_first_step_and_the_last(tmp_path):
    ticks: list[dict] = []
    pretrain(make_config(tmp_path, log_every=4), make_dataset(), ignore, on_tick=ticks.append)
    assert (ticks[0]["step"], ticks[-1]["step"], ticks[-1]["eta_s"]) == (1, 6, 0)
    assert ticks[0]["loss"] > 0


def test_minutes_are_turned_into_steps_that_were_timed(tmp_path):
    config = settle(make_config(tmp_path, steps=None, minutes=0.02), make_dataset())
    assert config.steps and config.minutes is None
    assert settle(config, make_dataset()) is config


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"\x00" * 40)
    with pytest.raises(UserError, match=CHECKPOINT):
        pretrain(make_config(tmp_path), make_dataset(), ignore)


def test_the_seed_decides_everything_and_the_global_random_state_nothing(tmp_path, finished):
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state()
    same = pretrain(make_config(tmp_path / "same"), make_dataset(), ignore)
    assert torch.equal(torch.get_rng_state(), before)
    other = pretrain(make_config(tmp_path / "other", seed=1), make_dataset(), ignore)
    assert (same / WEIGHTS).read_bytes() == (finished[0] / WEIGHTS).read_bytes()
    assert (other / WEIGHTS).read_bytes() != (finished[0] / WEIGHTS).read_bytes()


def test_the_folder_holds_what_diffusers_loads_and_a_card_that_describes_it(finished):
    folder, reports = finished
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md", "card.json", "config.json", WEIGHTS, "scheduler_config.json", "training_images.npy"]
    assert UNet2DModel.from_pretrained(folder, use_safetensors=True).config.num_class_embeds == 3
    assert {t.dtype for t in load_file(folder / WEIGHTS).values()} == {torch.float16}
    card = json.loads((folder / "card.json").read_text())
    assert (card["seed"], card["steps_done"], card["images_seen"], card["null_class"]) == (0, 6, 48, 2)
    assert card["data"] == {"name": "halves", "train_images": 20}
    assert PretrainConfig.model_validate({**card["config"], "output": "elsewhere"}).hash() == card["config_hash"]
    assert 0 < card["loss"]["test"] < 2
    assert set(reports[-1]) == {"step", "steps", "loss", "lr", "images_per_s", "eta_s"}
    assert reports[-1]["eta_s"] == 0


def test_training_learns_the_classes(tmp_path):
    """80 steps on two images: the dark half of a sample, at 8 steps and guidance 1, is where its class has it."""
    config = make_config(tmp_path, steps=80, batch_size=32, lr=0.01, warmup=10, log_every=20, ema=0.9,
                         unet={"channels": [16]})
    losses: list[float] = []
    folder = pretrain(config, make_dataset(), lambda r: losses.append(r["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    labels_B = np.arange(16) % 2
    generator = ddpm(make_dataset(), "cpu", weights=str(folder), steps=8, guidance=1.0, allow_seen_test=True)
    images = generator.sample(labels_B, np.arange(16))
    left, right = images[..., :2].mean((1, 2, 3)), images[..., 2:].mean((1, 2, 3))
    assert ((left > right) == (labels_B == 1)).mean() >= 0.9


def test_the_learning_rate_warms_up_and_falls_along_a_half_cosine(tmp_path):
    """Peak 0.1, warm-up 2 of 4 steps: 0.05, 0.1, then half way down the cosine 0.05, then 0."""
    trainer = Trainer(make_config(tmp_path, lr=0.1, warmup=2, steps=4), make_dataset())
    rates = []
    for trainer.step in (1, 2, 3, 4):
        rates.append(trainer.learning_rate())
    assert rates == pytest.approx([0.05, 0.1, 0.05, 0.0])


def test_the_running_mean_starts_with_a_short_memory(tmp_path):
    """After step 1 the decay is min(ema, 2 / 11): mean = old + (9 / 11) (new - old)."""
    trainer = Trainer(make_config(tmp_path, ema=0.999, warmup=0), make_dataset())
    old = trainer.unet.conv_in.weight.detach().clone()
    trainer.train_step()
    new = trainer.unet.conv_in.weight.detach()
    assert not torch.equal(old, new)
    assert torch.allclose(trainer.average["conv_in.weight"], old + 9 / 11 * (new - old), atol=1e-7)


def clean_images(trainer: Trainer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, labels) of a batch, its noise taken off again: x0 = sqrt(abar) x - sqrt(1 - abar) v."""
    batch = trainer.draw(rng.torch_stream(0, rng.PRETRAIN, step))
    abar = trainer.scheduler.alphas_cumprod[batch.timesteps_B][:, None, None, None]
    return abar**0.5 * batch.noisy - (1 - abar) ** 0.5 * batch.target, batch.labels_B


@pytest.mark.parametrize(("flips", "data_flips", "mirrored"), [("auto", False, False), ("auto", True, True),
                                                              (True, False, True), (False, True, False)])
def test_half_of_the_images_are_mirrored_only_where_that_keeps_the_label(tmp_path, flips, data_flips, mirrored):
    """Class 0 is dark on the left; a mirrored one on the right."""
    config = make_config(tmp_path, flips=flips, batch_size=400, label_dropout=0.0)
    images, labels_B = clean_images(Trainer(config, make_dataset(flips=data_flips)), 1)
    wrong_side = (images[labels_B == 0][:, 0, 0, 0] > 0).float().mean()
    assert 0.35 < wrong_side < 0.65 if mirrored else wrong_side == 0


def test_a_batch_covers_the_timesteps_evenly_and_drops_labels_at_the_given_rate(tmp_path):
    """8,000 images: 8 a timestep; label dropout 0.25 gives 2,000 null labels, standard deviation 39."""
    trainer = Trainer(make_config(tmp_path, batch_size=8000, label_dropout=0.25), make_dataset())
    batch = trainer.draw(rng.torch_stream(0, rng.PRETRAIN, 1))
    assert batch.timesteps_B.bincount(minlength=1000).tolist() == pytest.approx([8] * 1000, abs=1)
    assert abs(int((batch.labels_B == 2).sum()) - 2000) < 200
    again = trainer.draw(rng.torch_stream(0, rng.PRETRAIN, 1))
    assert torch.equal(again.noisy, batch.noisy)
    assert not torch.equal(trainer.draw(rng.torch_stream(0, rng.PRETRAIN, 2)).noisy, batch.noisy)


def test_no_label_dropout_means_no_null_class(tmp_path):
    folder = pretrain(make_config(tmp_path, label_dropout=0.0, steps=1), make_dataset(), ignore)
    assert UNet2DModel.from_pretrained(folder).config.num_class_embeds == 2
    with pytest.raises(UserError, match="null class"):
        ddpm(make_dataset(), "cpu", allow_seen_test=True, weights=str(folder), guidance=2.0)


@pytest.mark.parametrize(
    ("prediction", "schedule", "precision"),
    [("epsilon", "linear", "bf16"), ("v", "cosine", "bf16"), ("epsilon", "cosine", "float32")],
)
def test_every_prediction_schedule_and_precision_trains(tmp_path, prediction, schedule, precision):
    config = make_config(tmp_path, prediction=prediction, schedule=schedule, precision=precision, steps=2)
    folder = pretrain(config, make_dataset(), ignore)
    scheduler = json.loads((folder / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == {"epsilon": "epsilon", "v": "v_prediction"}[prediction]
    assert scheduler["beta_schedule"] == {"linear": "linear", "cosine": "squaredcos_cap_v2"}[schedule]


def test_pixels_map_to_minus_one_to_one():
    assert to_range(np.array([0, 255], np.uint8)).tolist() == pytest.approx([-1, 1])


def test_images_that_cannot_be_halved_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"unet.channels: 3 resolutions .*6 x 6 .* by 4"):
        pretrain(make_config(tmp_path, unet={"channels": [8, 8, 8]}), make_dataset(6), ignore)


def test_a_training_that_diverges_stops_and_names_the_learning_rate(tmp_path):
    with pytest.raises(RunError, match=r"diverged.*lr = 1e\+30"):
        pretrain(make_config(tmp_path, lr=1e30, warmup=0), make_dataset(), ignore)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0}, {"lr": float("nan")}, {"label_dropout": 1.0}, {"ema": -0.1},
                                   {"batch_size": 0}, {"unet": {"channels": []}}, {"unet": {"channel": [8]}},
                                   {"prediction": "x0"}, {"epochs": 3}, {"steps": "6"}, {"train_steps": 1}])
def test_keys_out_of_range_are_refused(tmp_path, wrong):
    with pytest.raises(ValidationError):
        make_config(tmp_path, **wrong)


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_weights_are_those_of_the_shipped_configuration_and_their_quality_was_measured(name):
    config = PretrainConfig.model_validate(read_yaml(ROOT / f"experiments/generators/{name}.yaml"))
    card = json.loads((SHIPPED / name / "card.json").read_text())
    assert card["config_hash"] == config.hash()
    assert PretrainConfig.model_validate({**card["config"], "output": "elsewhere"}).hash() == config.hash()
    assert card["steps_done"] == card["quality"]["steps_done"] == config.steps
    assert f"{card['quality']['accuracy']['from_synthetic']:.4f}" in (SHIPPED / name / "README.md").read_text()
