"""Untrained text-to-image pipelines of real diffusers and transformers classes, as they are saved to disk."""

import json
from pathlib import Path

import torch

TEXT_PIXELS = 16  # a side of what the toy Stable Diffusion makes


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of CLIP's kind that knows single letters, with and without the end of a word."""
    letters = [chr(c) for c in range(33, 127)]
    tokens = [*letters, *[f"{letter}</w>" for letter in letters], "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
    }))


def text_parts(folder: Path, time_cond: int | None = None):
    """(autoencoder, text encoder, tokenizer, UNet) of a Stable Diffusion of a few thousand weights."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=TEXT_PIXELS // 2, in_channels=4, out_channels=4, block_out_channels=(8, 8), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4, time_cond_proj_dim=time_cond,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, sample_size=TEXT_PIXELS,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
    )
    save_tokenizer(folder / "saved_tokenizer")
    tokenizer = CLIPTokenizer.from_pretrained(folder / "saved_tokenizer")
    text = CLIPTextModel(CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ))
    with torch.no_grad():  # untrained, a prompt hardly changes an image
        for parameter in text.parameters():
            parameter.mul_(20)
    return vae, text, tokenizer, unet


def save_stable_diffusion(folder: Path, safety_checker: object = None) -> Path:
    """A Stable Diffusion for images of 16 x 16 pixels; with a safety checker where one is given."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    vae, text, tokenizer, unet = text_parts(folder.parent / f"{folder.name}_parts")
    extractor = None
    if safety_checker is not None:
        from transformers import CLIPImageProcessor

        extractor = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    pipe = StableDiffusionPipeline(
        vae, text, tokenizer, unet, DDIMScheduler(20, clip_sample=False, steps_offset=1), safety_checker, extractor,
        requires_safety_checker=safety_checker is not None,
    )
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


def make_safety_checker(flags_all: bool):
    """Stable Diffusion's own checker with a tiny CLIP, which flags every image or none."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4, "projection_dim": 8}
    torch.manual_seed(0)
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=8))
    with torch.no_grad():  # an image is flagged where it is more similar to a concept than the concept's threshold
        for threshold in (checker.concept_embeds_weights, checker.special_care_embeds_weights):
            threshold.fill_(-10.0 if flags_all else 10.0)
    return checker


def save_lcm(folder: Path) -> Path:
    """A latent consistency model for images of 16 x 16 pixels."""
    from diffusers import LatentConsistencyModelPipeline, LCMScheduler

    vae, text, tokenizer, unet = text_parts(folder.parent / f"{folder.name}_parts", time_cond=8)
    LatentConsistencyModelPipeline(
        vae, text, tokenizer, unet, LCMScheduler(original_inference_steps=20), None, None, requires_safety_checker=False
    ).save_pretrained(folder, safe_serialization=True)
    return folder


def save_sdxl(folder: Path) -> Path:
    """A Stable Diffusion XL for images of 16 x 16 pixels, with its two text encoders."""
    from diffusers import EulerAncestralDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    vae, text, tokenizer, _ = text_parts(folder.parent / f"{folder.name}_parts")
    torch.manual_seed(1)
    second = CLIPTextModelWithProjection(CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=16, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))
    unet = UNet2DConditionModel(
        sample_size=TEXT_PIXELS // 2, in_channels=4, out_channels=4, block_out_channels=(8, 8), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4, norm_num_groups=4, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=16 + 6 * 8,
    )
    StableDiffusionXLPipeline(
        vae, text, second, tokenizer, tokenizer, unet, EulerAncestralDiscreteScheduler(20)
    ).save_pretrained(folder, safe_serialization=True)
    return folder


def save_lora(file: Path, unet: object, prefix: str = "unet.") -> Path:
    """Random LoRA weights of rank 2 for every query projection of a UNet."""
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(3)
    weights = {}
    for name, module in unet.named_modules():
        if name.endswith("to_q"):
            weights[f"{prefix}{name}.lora_A.weight"] = torch.randn(2, module.in_features, generator=draw)
            weights[f"{prefix}{name}.lora_B.weight"] = torch.randn(module.out_features, 2, generator=draw)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, file)
    return file
