"""The `pipeline` generator on class-conditional diffusers folders: safe, and brought to the data set's images."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    CMStochasticIterativeScheduler,
    ConsistencyModelPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    EulerAncestralDiscreteScheduler,
    UNet2DModel,
)
from toy_weights import make_dataset

from raysim.core.errors import UserError
from raysim.generation.pipeline import fit, pipeline


def make_unet(channels: int = 3, size: int = 16, rows: int | None = 4) -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=size, in_channels=channels, out_channels=channels, block_out_channels=(8,), layers_per_block=1,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=4, num_class_embeds=rows,
        add_attention=False,
    )


@pytest.fixture(scope="module")
def unet_folder(tmp_path_factory) -> Path:
    """An untrained UNet for 16 x 16 RGB images of 4 classes, as diffusers saves a DDPMPipeline."""
    folder = tmp_path_factory.mktemp("ddpm")
    DDPMPipeline(make_unet(), DDPMScheduler(20)).save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def dit_folder(tmp_path_factory) -> Path:
    """An untrained diffusion transformer with its autoencoder, for 16 x 16 RGB images of 1000 classes."""
    folder = tmp_path_factory.mktemp("dit")
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        sample_size=8, patch_size=2, num_attention_heads=2, attention_head_dim=4, in_channels=4, out_channels=8,
        num_layers=1, num_embeds_ada_norm=1000, norm_num_groups=4,
    )
    with torch.no_grad():  # adaLN-Zero: an untrained transformer ignores the label
        for parameter in transformer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    vae = AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=16,
    )
    DiTPipeline(transformer, vae, DDIMScheduler(20)).save_pretrained(folder, safe_serialization=True)
    return folder


def make(folder: Path, dataset=None, **keys) -> pipeline:
    dataset = dataset or make_dataset(1, 8, 8, classes=3)
    return pipeline(dataset, "cpu", **{"folder": str(folder), "steps": 2, **keys})


def test_image_i_of_a_unet_is_bitwise_the_same_in_any_batch(unet_folder):
    """DDPM draws noise at every step: 20 at once, reversed, and one alone."""
    generator = make(unet_folder)
    labels_B, seeds_B = np.arange(20) % 3, np.arange(20) * 31 + 7
    together = generator.sample(labels_B, seeds_B)
    assert together.shape == (20, 1, 8, 8) and together.dtype == np.uint8
    assert np.array_equal(generator.sample(labels_B[::-1], seeds_B[::-1])[::-1], together)
    assert np.array_equal(generator.sample(labels_B[13:14], seeds_B[13:14])[0], together[13])
    assert len({image.tobytes() for image in together}) == 20


def test_the_label_changes_the_image(unet_folder, dit_folder):
    for folder in (unet_folder, dit_folder):
        a, b = make(folder, make_dataset(3, 16, 16)).sample(np.array([0, 1]), np.array([5, 5]))
        assert not np.array_equal(a, b)


def test_a_transformer_pipeline_is_called_one_image_at_a_time_with_its_own_seed(dit_folder):
    generator = make(dit_folder, make_dataset(3, 16, 16), guidance=2.0)
    torch.manual_seed(1)
    labels_B, seeds_B = np.array([0, 1, 2, 0]), np.array([3, 4, 5, 6])
    together = generator.sample(labels_B, seeds_B)
    state = torch.get_rng_state()
    assert np.array_equal(generator.sample(labels_B[::-1], seeds_B[::-1])[::-1], together)
    assert torch.equal(torch.get_rng_state(), state)
    assert not np.array_equal(together, make(dit_folder, make_dataset(3, 16, 16)).sample(labels_B, seeds_B))


def test_it_is_what_the_pipeline_itself_returns(dit_folder):
    """Same size and channels, so nothing is resized: pixels are round(255 value)."""
    (image,) = make(dit_folder, make_dataset(3, 16, 16)).sample(np.array([2]), np.array([9]))
    pipe = DiTPipeline.from_pretrained(dit_folder)
    pipe.set_progress_bar_config(disable=True)
    made = pipe([2], generator=torch.Generator().manual_seed(9), num_inference_steps=2, guidance_scale=1.0,
                output_type="np").images[0]
    assert np.abs(image.transpose(1, 2, 0).astype(int) - made * 255).max() <= 0.51


def test_a_consistency_model_is_called_with_labels(tmp_path):
    """Two steps, so that noise is drawn between them; it comes from the image's own generator."""
    ConsistencyModelPipeline(make_unet(), CMStochasticIterativeScheduler(20)).save_pretrained(tmp_path)
    generator = make(tmp_path, make_dataset(3, 16, 16))
    labels_B, seeds_B = np.array([0, 1, 2, 0]), np.array([3, 4, 5, 3])
    together = generator.sample(labels_B, seeds_B)
    assert np.array_equal(generator.sample(labels_B[::-1], seeds_B[::-1])[::-1], together)
    assert np.array_equal(together[0], together[3]) and not np.array_equal(together[0], together[1])
    in_threes = make(tmp_path, make_dataset(3, 16, 16), batch_size=3)
    batched = in_threes.sample(labels_B, seeds_B)
    assert np.array_equal(in_threes.sample(labels_B[::-1], seeds_B[::-1])[::-1], batched)
    with pytest.raises(UserError, match=r"generator.guidance = 2.0: the ConsistencyModelPipeline .* has no guidance"):
        make(tmp_path, make_dataset(3, 16, 16), guidance=2.0)


def test_a_batch_whose_noise_is_drawn_for_all_is_refused(dit_folder, tmp_path):
    """DiTPipeline gives its scheduler no generator, so DDPM draws one noise for the whole batch."""
    pipe = DiTPipeline.from_pretrained(dit_folder)
    DiTPipeline(pipe.transformer, pipe.vae, DDPMScheduler(20)).save_pretrained(tmp_path)
    dataset = make_dataset(3, 16, 16)
    alone = make(tmp_path, dataset).sample(np.array([0, 1]), np.array([5, 6]))
    assert np.array_equal(make(tmp_path, dataset).sample(np.array([1]), np.array([6]))[0], alone[1])
    with pytest.raises(UserError, match=r"generator.batch_size = 2: .* draws random numbers for a whole batch"):
        make(tmp_path, dataset, batch_size=2).sample(np.array([0, 1]), np.array([5, 6]))


def test_class_names_of_the_pipeline_are_held_against_the_data_sets(dit_folder, tmp_path):
    """ImageNet's kind of labels: the same names in another order are refused with the map, others are said."""
    folder = tmp_path / "dit"
    shutil.copytree(dit_folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    names = {"0": "tench, Tinca tinca", "1": "goldfish, Carassius auratus", "2": "great white shark"}
    (folder / "model_index.json").write_text(json.dumps({**index, "id2label": names}))
    like = dataclasses.replace(make_dataset(3, 16, 16), class_names=("goldfish", "Tench", "great white shark"))
    with pytest.raises(UserError, match=r"class 0 of 'toy' is 'goldfish', .* it is generator.class_map=\[1, 0, 2\]"):
        make(folder, like)
    assert make(folder, like, class_map=[1, 0, 2]).class_map == [1, 0, 2]
    quota_KC = np.ones((1, 3), int)
    assert len(pipeline.notes(like, quota_KC, folder=str(folder), class_map=[1, 0, 2])) == 1
    other = dataclasses.replace(like, class_names=("goldfish", "cat", "dog"))
    notes = pipeline.notes(other, quota_KC, folder=str(folder))
    assert any("images are made of class 0 'tench, Tinca tinca' for 'goldfish', 1 'goldfish" in note for note in notes)


def test_guidance_of_a_transformer_needs_the_null_class_that_diffusers_takes(tmp_path):
    """DiTPipeline takes class 1000 for no label, also where there are 10 classes."""
    transformer = DiTTransformer2DModel(
        sample_size=8, patch_size=2, num_attention_heads=2, attention_head_dim=4, in_channels=4, out_channels=8,
        num_layers=1, num_embeds_ada_norm=10, norm_num_groups=4,
    )
    vae = AutoencoderKL(latent_channels=4, norm_num_groups=4, block_out_channels=(8,))
    DiTPipeline(transformer, vae, DDIMScheduler(20)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"takes class 1000 for no label, and this one has 10 classes"):
        make(tmp_path, guidance=2.0)


@pytest.mark.parametrize(("keys", "message"), [
    ({"prompts": "a {class}"}, r"generator.prompts = 'a \{class\}': the DDPMPipeline .* takes class labels, not text"),
    ({"negative_prompt": "x"}, "takes class labels, not text"),
    ({"image_size": 64}, "takes class labels, not text"),
    ({"lora": "."}, "generator.lora = .: give a .safetensors file"),
])
def test_keys_for_text_are_refused(unet_folder, keys, message):
    with pytest.raises(UserError, match=message):
        make(unet_folder, **keys)


def test_a_scheduler_that_scales_its_input_and_draws_noise_is_reproducible(tmp_path):
    DDPMPipeline(make_unet(), EulerAncestralDiscreteScheduler(20)).save_pretrained(tmp_path, safe_serialization=True)
    generator = make(tmp_path)
    first = generator.sample(np.array([0, 1]), np.array([1, 2]))
    assert np.array_equal(generator.sample(np.array([1]), np.array([2]))[0], first[1])


def test_the_class_map_names_the_pipelines_classes(unet_folder):
    plain = make(unet_folder).sample(np.array([2]), np.array([1]))
    mapped = make(unet_folder, class_map=[2, 0, 1]).sample(np.array([0]), np.array([1]))
    assert np.array_equal(plain, mapped)
    assert make(unet_folder).fingerprint() != make(unet_folder, class_map=[2, 0, 1]).fingerprint()


def test_size_and_channels_are_mapped_by_area_luminance_and_repetition():
    """Four pixels 0, 1, 2, 5 average to 2; white RGB is grey of luminance 0.299 + 0.587 + 0.114 = 1."""
    block = torch.tensor([[0.0, 1.0], [2.0, 5.0]]).view(1, 1, 2, 2)
    assert fit(block, (1, 1, 1)).item() == 2.0
    assert fit(block, (3, 2, 2)).shape == (1, 3, 2, 2)
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    assert fit(red, (1, 1, 1)).item() == pytest.approx(0.299)
    assert fit(torch.ones(1, 3, 1, 1), (1, 1, 1)).item() == pytest.approx(1.0)
    assert fit(torch.full((1, 1, 4, 4), 0.5), (1, 8, 8)).numpy() == pytest.approx(0.5)


def test_the_value_range_of_the_network_is_mapped_to_black_and_white(unet_folder):
    """In the range [0, 1], 0 is black (-1) and 1 white (1): an output x becomes 2 x - 1."""
    with torch.inference_mode():
        plain, unit = (make(unet_folder, value_range=r)._unet_batch([0], [1]) for r in ([-1, 1], [0, 1]))
    assert torch.allclose(unit, 2 * plain - 1, atol=1e-5)


@pytest.mark.parametrize(("keys", "message"), [
    ({"steps": 21}, r"generator.steps = 21: .* trained on 20"),
    ({"class_map": [0, 1]}, r"generator.class_map = \[0, 1\]: .* 3 classes"),
    ({"class_map": [0, 1, 4]}, r"classes 0 to 3"),
    ({"guidance": 2.0}, r"generator.guidance = 2.0: guidance needs generator.null_class"),
    ({"guidance": 2.0, "null_class": 4}, r"row \(0 to 3\)"),
    ({"value_range": [1.0, 1.0]}, r"generator.value_range"),
])
def test_keys_that_cannot_work_are_refused(unet_folder, keys, message):
    with pytest.raises(UserError, match=message):
        make(unet_folder, **keys)


def test_guidance_with_a_null_class_changes_the_images(unet_folder):
    plain, guided = (make(unet_folder, guidance=g, null_class=3).sample(np.array([0]), np.array([1])) for g in (1, 3))
    assert not np.array_equal(plain, guided)


def test_more_classes_than_the_pipeline_knows_are_refused(unet_folder):
    with pytest.raises(UserError, match=r"generator.class_map = the same numbers: .* 5 classes"):
        make(unet_folder, make_dataset(classes=5))


def test_an_unconditional_pipeline_is_refused(tmp_path):
    DDPMPipeline(make_unet(rows=None), DDPMScheduler(20)).save_pretrained(tmp_path, safe_serialization=True)
    with pytest.raises(UserError, match="takes no class labels"):
        make(tmp_path)


def test_a_pickle_is_refused_with_the_reason(tmp_path):
    DDPMPipeline(make_unet(), DDPMScheduler(20)).save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(UserError, match=r"generator.folder: .*\.bin is refused: .* can run any code"):
        make(tmp_path)


def test_code_that_comes_with_the_weights_is_not_run(tmp_path):
    DDPMPipeline(make_unet(), DDPMScheduler(20)).save_pretrained(tmp_path, safe_serialization=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    for name in (["evil", "Evil"], "Evil"):
        (tmp_path / "model_index.json").write_text(json.dumps({**index, "_class_name": name}))
        with pytest.raises(UserError, match="no pipeline of diffusers"):
            make(tmp_path)


@pytest.mark.parametrize("damage", ["no index", "no folder", "cut weights", "no weights"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, damage):
    folder = tmp_path / "pipe"
    if damage != "no folder":
        DDPMPipeline(make_unet(), DDPMScheduler(20)).save_pretrained(folder, safe_serialization=True)
    if damage == "no index":
        (folder / "model_index.json").unlink()
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    if damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    if damage == "no weights":
        weights.unlink()
    with pytest.raises(UserError, match=r"generator.folder: .*pipe"):
        make(folder)
