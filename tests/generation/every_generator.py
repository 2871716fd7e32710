"""Every generator on untrained weights; as a program, it prints the fingerprint of each and describes a sampler.

The program has neither ray nor mlflow.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.modules["ray"] = sys.modules["mlflow"] = None  # type: ignore[assignment]

import numpy as np
import torch
import toy_pipelines
from toy_weights import make_dataset, make_folder

from raysim.config.registry import resolve
from raysim.core.records import Dataset

CLASSES = 3


def dataset() -> Dataset:
    """Blank images of 8 x 8 pixels to look like, and 12 random public ones of each class."""
    toy = make_dataset(1, 8, 8, CLASSES)
    images = np.random.default_rng(0).integers(0, 256, (12 * CLASSES, 1, 8, 8), dtype=np.uint8)
    public = {"public_images": images, "public_labels_N": np.arange(12 * CLASSES) % CLASSES}
    return Dataset(**{**vars(toy), **public})


def prepare(folder: Path) -> None:
    """The weights that generators read, once."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    for name in ("toy", "other"):
        (folder / name).mkdir()
    make_folder(folder / "toy", dataset())
    make_folder(folder / "other", dataset(), prediction="epsilon")
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8,), layers_per_block=1,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=4,
        num_class_embeds=CLASSES + 1, add_attention=False,
    )
    for name, steps in (("unet", 20), ("unet2", 30)):
        DDPMPipeline(unet, DDPMScheduler(steps)).save_pretrained(folder / name, safe_serialization=True)
    with torch.no_grad():
        unet.conv_out.bias.add_(0.5)
    DDPMPipeline(unet, DDPMScheduler(20)).save_pretrained(folder / "fp16", variant="fp16")
    toy_pipelines.save_stable_diffusion(folder / "text")
    toy_pipelines.save_lora(folder / "lora.safetensors", toy_pipelines.text_parts(folder / "parts")[3])


def keys_of(name: str, folder: Path) -> dict:
    """What a generator needs here beyond its defaults, and what makes it quick."""
    return {
        "ddpm": {"weights": str(folder / "toy"), "steps": 2, "batch_size": 16},
        "pipeline": {"folder": str(folder / "unet"), "steps": 2},
        "oracle": {},
    }[name]


def others_of(name: str, folder: Path) -> dict:
    """Another value of each key; a value of several keys where one needs the other."""
    of_text = {"folder": str(folder / "text"), "prompts": "a {class}", "guidance": 3.0}
    for_text = {
        "prompts": "the {class}", "negative_prompt": "x", "image_size": 32, "safety_checker": False,
        "lora": str(folder / "lora.safetensors"),
    }
    return {
        "ddpm": {
            "weights": str(folder / "other"), "sampler": "ddpm", "steps": 3, "guidance": 2.0, "batch_size": 32,
            "spacing": "leading", "precision": "bf16", "allow_seen_test": True, "allow_unfinished": True,
        },
        "pipeline": {
            "folder": str(folder / "unet2"), "steps": 3, "guidance": {"guidance": 2.0, "null_class": CLASSES},
            "class_map": [1, 2, 0], "null_class": CLASSES, "value_range": [0.0, 1.0], "batch_size": 32,
            "scheduler": "DDIMScheduler", "precision": "bf16",
            "variant": {"folder": str(folder / "fp16"), "variant": "fp16"},
            **{key: {**of_text, key: value} for key, value in for_text.items()},
            "lora_scale": {**of_text, "lora": for_text["lora"], "lora_scale": 0.5},
        },
        "oracle": {},
    }[name]


def make(name: str, folder: Path, keys: dict | None = None, like: Dataset | None = None):
    """The generator, on a CPU."""
    return resolve("generator", name)(like or dataset(), "cpu", **{**keys_of(name, folder), **(keys or {})})


def sampler() -> str:
    """The description of a sampler of which diffusers keeps a set of names as a list."""
    from raysim.generation.samplers import Sampler
    from raysim.generation.weights_folder import SHIPPED

    return Sampler(SHIPPED / "digits", "unipc", 10, "auto").describe()


if __name__ == "__main__":
    import raysim.generation.pretrain  # noqa: F401

    print(repr(sampler()))
    for generator in sys.argv[2:]:
        print(generator, make(generator, Path(sys.argv[1])).fingerprint())
