"""The weights folder of a diffusion generator: the files that diffusers itself loads, plus a model card.

config.json and diffusion_pytorch_model.safetensors are read by `UNet2DModel.from_pretrained`, scheduler_config.json by
every diffusers scheduler, card.json by raysim (classes, null class, checksum), training_images.npy with digests of the
images that the network was trained on, README.md by people.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from raysim.core.errors import UserError
from raysim.core.files import write_atomic
from raysim.core.plain import Plain, PlainDict, PlainMapping
from raysim.generation.lean_unet import unet_class

SHIPPED = Path(__file__).parent / "weights"
CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
SCHEDULER = "scheduler_config.json"
CARD = "card.json"
README = "README.md"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def shipped_names() -> list[str]:
    """Names of the weights that come with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def find_folder(weights: str) -> Path:
    """The folder that `weights` names: a shipped name, or a path.

    Raises UserError where there is no such folder, where it has no weights, and for a pickle.
    """
    path = SHIPPED / weights if weights in shipped_names() else Path(weights).expanduser()
    if path.suffix.lower() in PICKLES:
        raise UserError(pickle_refusal(path))
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise UserError(
            f"generator.weights: {weights!r} {found}; give a folder that holds {CONFIG} and {WEIGHTS}, "
            f"or one of the shipped names: {', '.join(shipped_names()) or '(none)'}"
        )
    if not (path / WEIGHTS).is_file():
        pickles = sorted(file for file in path.iterdir() if file.suffix.lower() in PICKLES)
        raise UserError(pickle_refusal(pickles[0]) if pickles else _empty(path))
    return path


def _empty(path: Path) -> str:
    there = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
    return (
        f"generator.weights: {path.absolute()} is a folder without {WEIGHTS} (there is {there}); give one that `raysim "
        f"pretrain` made or that holds {CONFIG} and {WEIGHTS}, or a shipped name: {', '.join(shipped_names())}"
    )


def pickle_refusal(path: Path, key: str = "generator.weights") -> str:
    """The message that says why a pickle is not loaded, and what to do."""
    return (
        f"{key}: {path} is refused: a {path.suffix} file is a pickle, and loading a pickle can run any "
        f"code that its author put in it; convert it to {WEIGHTS} (safetensors)"
    )


def read_json(path: Path, key: str = "generator.weights") -> PlainDict:
    """Read the object in a JSON file of the weights folder; UserError with key and path if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key}: {path} is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} must hold a JSON object, not a {type(content).__name__}")
    return content


def progress(card: PlainMapping) -> tuple[int, int]:
    """(steps that are done, steps that there are to be) by the card of weights; 0 of 0 where it does not tell.

    Weights that clients trained are only written when their last round is done.
    """
    done, config = card.get("steps_done"), card.get("config")
    asked = config.get("steps") if isinstance(config, dict) else None
    return (done, asked) if isinstance(done, int) and isinstance(asked, int) else (0, 0)


def read_unet(folder: Path) -> tuple[Any, str]:  # diffusers has no types
    """Read (the float32 network in a weights folder, the sha256 of its weight file).

    Raises UserError with the path if a file is missing, damaged, or not for the network in config.json.
    """
    config = read_json(folder / CONFIG)
    path = folder / WEIGHTS
    if config.get("_class_name") != "UNet2DModel":
        raise UserError(f"generator.weights: {folder / CONFIG} describes no UNet2DModel")
    try:
        content = path.read_bytes()
        state = load(content)
    except (OSError, SafetensorError) as error:
        raise UserError(f"generator.weights: {path} is missing or damaged: {error}") from None
    digest = hashlib.sha256(content).hexdigest()
    expected = read_json(folder / CARD).get("weights_sha256", digest) if (folder / CARD).is_file() else digest
    if expected != digest:
        raise UserError(f"generator.weights: {path} is damaged or not the file that {CARD} describes (sha256 differs)")
    try:
        unet: Any = unet_class().from_config(config)
        unet.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"generator.weights: {path} and {CONFIG} do not fit each other: {error}") from None
    return unet.eval().requires_grad_(False), digest


def build_unet(
    channels: int, image_size: tuple[int, int], embeddings: int, widths: list[int], layers: int, attention: bool
) -> Any:  # diffusers has no types
    """Build a class-conditional UNet with one resolution for each width.

    channels, image_size: those of the images.  embeddings: rows of the class table, with the null class if there is
    one.
    layers: residual blocks at each resolution.  attention: whether the lowest resolution has self-attention.
    """
    plain = len(widths) - 1
    last = "Attn" if attention else ""
    return unet_class()(
        sample_size=image_size,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        down_block_types=("DownBlock2D",) * plain + (f"{last}DownBlock2D",),
        up_block_types=(f"{last}UpBlock2D",) + ("UpBlock2D",) * plain,
        add_attention=attention,
        norm_num_groups=math.gcd(8, *widths),
        num_class_embeds=embeddings,
    )


def write_folder(folder: Path, unet: Any, scheduler: Any, card: PlainMapping, readme: str) -> None:
    """Write network (in half precision), scheduler and card; card.json, with the checksum, is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in unet.state_dict().items()}
    weights = save(half, metadata={"format": "pt"})
    card = {**card, "weights_sha256": hashlib.sha256(weights).hexdigest(), "weights_bytes": len(weights)}
    for name, content in (
        (WEIGHTS, weights),
        (CONFIG, unet.to_json_string().encode()),
        (SCHEDULER, scheduler.to_json_string().encode()),
        (README, readme.encode()),
        (CARD, (json.dumps(card, indent=2) + "\n").encode()),
    ):
        write_atomic(folder / name, content)


def add_to_card(folder: Path, key: str, value: Plain, markdown: str) -> None:
    """Add an entry to card.json, and a section to README.md, of a finished weights folder."""
    card = {**read_json(folder / CARD), key: value}
    text = (folder / README).read_text(encoding="utf-8").split("\n## ")[0].rstrip()
    write_atomic(folder / README, f"{text}\n\n{markdown}\n".encode())
    write_atomic(folder / CARD, (json.dumps(card, indent=2) + "\n").encode())
