"""The `pipeline` generator on pipelines that make images from text: prompts, LoRA, safety checkers, the hub's cache."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_weights import make_dataset

from raysim.core.errors import UserError
from raysim.generation import pipeline_folder
from raysim.generation.pipeline import pipeline

pytest.importorskip("transformers", reason="pip install 'raysim[text]'")
import toy_pipelines

TEMPLATE = "a photo of a {class}"
LABELS, SEEDS = np.array([0, 1, 2, 0, 1]), np.array([3, 4, 5, 6, 7])


@pytest.fixture(scope="module")
def sd(tmp_path_factory) -> Path:
    return toy_pipelines.save_stable_diffusion(tmp_path_factory.mktemp("sd") / "sd")


def dataset(channels: int = 3, size: int = 16):
    toy = make_dataset(channels, size, size)
    return dataclasses.replace(toy, class_names=("ant", "bee", "cat"))


def make(folder: Path, like=None, **keys) -> pipeline:
    return pipeline(like or dataset(), "cpu", **{"folder": str(folder), "steps": 2, "prompts": TEMPLATE, **keys})


def one(generator: pipeline, label: int = 0, seed: int = 5) -> np.ndarray:
    return generator.sample(np.array([label]), np.array([seed]))[0]


def test_image_i_is_bitwise_the_same_in_any_request(sd):
    generator = make(sd, guidance=3.0)
    together = generator.sample(LABELS, SEEDS)
    assert together.shape == (5, 3, 16, 16) and together.dtype == np.uint8
    assert np.array_equal(generator.sample(LABELS[::-1], SEEDS[::-1])[::-1], together)
    assert np.array_equal(one(generator, 2, 5), together[2])
    assert len({image.tobytes() for image in together}) == 5


def test_images_of_a_batch_do_not_depend_on_its_others(sd):
    """Two at once: the last of five is padded, and each image is the same at either place of a batch."""
    generator = make(sd, guidance=3.0, batch_size=2)
    together = generator.sample(LABELS, SEEDS)
    assert np.array_equal(generator.sample(LABELS[::-1], SEEDS[::-1])[::-1], together)
    assert np.array_equal(one(generator, 2, 5), together[2])
    assert generator.fingerprint() != make(sd, guidance=3.0).fingerprint()
    assert np.abs(together.astype(int) - make(sd, guidance=3.0).sample(LABELS, SEEDS)).max() <= 1


def test_it_is_what_the_pipeline_itself_returns(sd):
    """Same size and channels, so nothing is resized: pixels are round(255 value)."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(sd)
    pipe.set_progress_bar_config(disable=True)
    made = pipe("a photo of a cat", negative_prompt="dog", generator=torch.Generator().manual_seed(9),
                num_inference_steps=3, guidance_scale=4.0, output_type="np").images[0]
    image = one(make(sd, guidance=4.0, steps=3, negative_prompt="dog"), 2, 9)
    assert np.abs(image.transpose(1, 2, 0).astype(int) - made * 255).max() <= 0.51


def test_prompts_of_each_kind_name_the_same_images(sd):
    """A template, a list in the classes' order and a mapping by name that say the same."""
    texts = ["a photo of a ant", "a photo of a bee", "a photo of a cat"]
    by_name = dict(zip(("cat", "bee", "ant"), texts[::-1], strict=True))
    first, *others = [make(sd, prompts=given) for given in (TEMPLATE, texts, by_name)]
    for other in others:
        assert other.fingerprint() == first.fingerprint()
        assert np.array_equal(one(other, 1), one(first, 1))


def test_of_several_prompts_the_seed_chooses(sd):
    several = make(sd, prompts={"ant": ["one ant", "two red {class}s"], "bee": "a bee", "cat": "a cat"})
    assert np.array_equal(one(several, 0, 4), one(make(sd, prompts=["one ant", "a bee", "a cat"]), 0, 4))
    assert np.array_equal(one(several, 0, 5), one(make(sd, prompts=["two red ants", "a bee", "a cat"]), 0, 5))


def test_prompt_label_size_and_lora_change_images_and_fingerprint(sd, tmp_path):
    unet = toy_pipelines.text_parts(tmp_path)[3]
    lora = str(toy_pipelines.save_lora(tmp_path / "lora" / "own.safetensors", unet))
    made = [make(sd, **keys) for keys in (
        {"guidance": 3.0}, {"guidance": 3.0, "prompts": "a {class}"}, {"guidance": 3.0, "negative_prompt": "x"},
        {"guidance": 3.0, "image_size": 32}, {"guidance": 3.0, "lora": lora},
        {"guidance": 3.0, "lora": str(Path(lora).parent), "lora_scale": 0.5},
        {"guidance": 3.0, "scheduler": "EulerAncestralDiscreteScheduler"}, {"guidance": 3.0, "steps": 3},
    )]
    assert len({one(generator).tobytes() for generator in made}) == len(made)
    assert len({generator.fingerprint() for generator in made}) == len(made)
    assert not np.array_equal(one(made[0], 0), one(made[0], 1))


def test_images_are_brought_to_the_data_and_it_is_said(sd):
    grey = dataset(1, 28)
    assert one(make(sd, grey)).shape == (1, 28, 28)
    notes = pipeline.notes(grey, np.ones((1, 3), int), folder=str(sd), prompts=TEMPLATE)
    assert any("16 x 16 pixels, which are enlarged (bicubic) to 28 x 28" in note for note in notes)
    assert any("ant 'a photo of a ant', bee 'a photo of a bee'" in note for note in notes)
    assert any("own default is 7.5" in note for note in notes)


@pytest.mark.parametrize("save", [toy_pipelines.save_sdxl, toy_pipelines.save_lcm])
def test_other_families_are_reproducible(save, tmp_path):
    """Stable Diffusion XL with a scheduler that draws noise, and a latent consistency model."""
    generator = make(save(tmp_path / "pipe"), guidance=2.0)
    first = generator.sample(LABELS[:3], SEEDS[:3])
    assert np.array_equal(generator.sample(LABELS[2:3], SEEDS[2:3])[0], first[2])
    assert len({image.tobytes() for image in first}) == 3


def test_nothing_is_loaded_before_an_image_is_asked_for(sd):
    generator = make(sd)
    assert generator.memory_bytes() > 0 and len(generator.fingerprint()) == 64
    assert "pipe" not in vars(generator)


def test_a_blanked_image_names_its_prompt(tmp_path):
    folder = toy_pipelines.save_stable_diffusion(tmp_path / "sd", toy_pipelines.make_safety_checker(flags_all=True))
    named = r"safety checker blanked an image of class 'bee' \(prompt 'a photo of a bee', seed 5"
    with pytest.raises(UserError, match=named):
        one(make(folder), 1)
    unchecked = make(folder, safety_checker=False)
    assert one(unchecked, 1).any()
    assert unchecked.memory_bytes() < make(folder).memory_bytes()


def test_a_checker_that_finds_nothing_changes_nothing(sd, tmp_path):
    folder = toy_pipelines.save_stable_diffusion(tmp_path / "sd", toy_pipelines.make_safety_checker(flags_all=False))
    assert np.array_equal(one(make(folder)), one(make(sd)))


def test_images_that_are_all_black_are_refused(sd, monkeypatch):
    """As an autoencoder makes them that overflows in half precision."""
    generator = make(sd)
    decode = generator.pipe.vae.decode
    black = torch.full((1, 3, 16, 16), -1.0)
    monkeypatch.setattr(generator.pipe.vae, "decode", lambda *args, **keys: (black, *decode(*args, **keys)[1:]))
    with pytest.raises(UserError, match="all black, an image of class 'ant'"):
        one(generator)


@pytest.mark.parametrize(("keys", "message"), [
    ({"prompts": None}, "makes images from text; give a template"),
    ({"prompts": "a photo"}, r"without \{class\}"),
    ({"prompts": ["a", "b"]}, r"2 entries for 3 classes \(ant, bee, cat"),
    ({"prompts": {"ant": "a", "bee": "b"}}, "cat has no prompt"),
    ({"prompts": {"ant": "a", "bee": "b", "cta": "c"}}, r"'cta' is no class of the data set.* cat"),
    ({"prompts": ["a", " ", "c"]}, "class 'bee' has an empty prompt"),
    ({"prompts": ["a", "b", "a"]}, "'ant' and 'cat' have the same prompts"),
    ({"prompts": "a {klass} {class}"}, r"\{klass\} .* stands for nothing"),
    ({"prompts": "x" * 90 + "{class}"}, r"tokens and .* reads 77"),
    ({"negative_prompt": "x"}, "no effect without guidance"),
    ({"class_map": [0, 1, 2]}, "takes text, not class labels"),
    ({"null_class": 1}, r"generator.null_class = 1: .* is called as it is"),
    ({"image_size": 20}, "multiples of 8"),
    ({"steps": 21}, "trained on 20"),
    ({"scheduler": "Best"}, "no scheduler of diffusers"),
    ({"lora": "nowhere.safetensors"}, "generator.lora = nowhere.safetensors: give a"),
    ({"lora": "evil.bin"}, r"evil.bin is refused: .* can run any"),
    ({"variant": "fp16"}, "generator.variant = 'fp16': no file of weights"),
    ({"lora_scale": 0.5}, "no effect without generator.lora"),
])
def test_keys_that_cannot_work_are_refused(sd, keys, message):
    with pytest.raises(UserError, match=message):
        make(sd, **keys)


def test_data_of_two_channels_are_refused(sd):
    with pytest.raises(UserError, match=r"images of 3 channels and the data set has 2"):
        make(sd, make_dataset(2, 16, 16), prompts=["a", "b", "c"])


def test_lora_of_another_network_is_refused(sd, tmp_path):
    other = torch.nn.ModuleDict({"to_q": torch.nn.Linear(3, 3)})
    file = toy_pipelines.save_lora(tmp_path / "other.safetensors", other, prefix="transformer.")
    with pytest.raises(UserError, match=r"generator.lora: .*other.safetensors"):
        one(make(sd, lora=str(file)))


def test_without_transformers_it_says_what_to_install(sd, monkeypatch):
    monkeypatch.setattr(pipeline_folder.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"which needs transformers; install it with: pip install 'raysim\[text\]'"):
        make(sd)


def copy(sd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sd, tmp_path / "copy"))


def test_weights_that_are_missing_are_not_drawn_at_random(sd, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in ("unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        folder = copy(sd, tmp_path)
        tensors = load_file(folder / file)
        tensors.pop(next(iter(tensors)))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"{file.split('/')[0]} do not fit .* 1 tensors are"):
            one(make(folder))
        shutil.rmtree(folder)


def test_pickles_and_foreign_code_are_refused(sd, tmp_path):
    folder = copy(sd, tmp_path)
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is refused: .* can run any code"):
        make(folder)
    index = json.loads((sd / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "vae": ["os", "system"]}))
    (folder / "text_encoder" / "pytorch_model.bin").rename(folder / "text_encoder" / "model.safetensors")
    with pytest.raises(UserError, match="takes vae from 'os', which is not diffusers or transformers"):
        make(folder)


def test_another_variant_alone_names_the_key(sd, tmp_path):
    folder = copy(sd, tmp_path)
    unet = folder / "unet"
    (unet / "diffusion_pytorch_model.safetensors").rename(unet / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(UserError, match=r"variant fp16 only; choose it with generator.variant=fp16"):
        make(folder)
    assert np.array_equal(one(make(folder, variant="fp16")), one(make(sd)))


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(sd, monkeypatch):
    generator = make(sd)
    monkeypatch.setattr(pipeline_folder, "physical_bytes", lambda: 1000)
    monkeypatch.setattr(pipeline_folder, "_load_weights", lambda *_: pytest.fail("a network was loaded"))
    with pytest.raises(UserError, match=r"take 0\.0 GB in float32, and there are 0\.0 GB in this machine"):
        _ = generator.pipe


def test_half_precision_takes_half_the_memory_and_says_so_in_the_fingerprint(sd):
    full, half = make(sd), make(sd, precision="bf16")
    assert half.memory_bytes() == full.memory_bytes() // 2
    assert half.fingerprint() != full.fingerprint()
    assert np.abs(one(half).astype(int) - one(full)).max() < 60 and not np.array_equal(one(half), one(full))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty cache of the hub, without a network."""
    from huggingface_hub import constants

    for name in [name for name in sys.modules if name.startswith(("huggingface_hub", "diffusers"))]:
        for key, value in (("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", True)):
            if key in vars(sys.modules[name]):
                monkeypatch.setattr(sys.modules[name], key, value)
    assert str(tmp_path) == constants.HF_HUB_CACHE
    return tmp_path


def test_a_name_on_the_hub_is_read_from_its_cache(sd, hub):
    """As the hub's client leaves a download: a folder for each commit, and a file that names the newest."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = hub / "models--someone--tiny"
    shutil.copytree(sd, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    for name in ("someone/tiny", f"someone/tiny@{commit}"):
        cached = make(name)
        assert cached.fingerprint() == make(sd).fingerprint()
        assert np.array_equal(one(cached), one(make(sd)))


def test_a_name_on_the_hub_without_network_says_what_to_do(hub):
    with pytest.raises(UserError, match=r"someone/absent is no folder here, .*`hf download someone/absent`"):
        make("someone/absent")
    with pytest.raises(UserError, match=r"holds no model_index.json; give a folder"):
        make("/nowhere/at/all")
