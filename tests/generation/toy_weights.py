"""A data set of a few blank images and an untrained diffusion model for it."""

from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler

from raysim.core.records import Dataset
from raysim.generation.weights_folder import build_unet, write_folder


def make_dataset(channels: int = 1, height: int = 8, width: int = 8, classes: int = 3) -> Dataset:
    images = np.zeros((classes, channels, height, width), np.uint8)
    labels_N = np.arange(classes, dtype=np.int64)
    names = tuple(str(c) for c in range(classes))
    return Dataset("toy", images, labels_N, images, labels_N, names, (0.5,) * channels, (0.5,) * channels)


def make_folder(folder: Path, dataset: Dataset, prediction: str = "v_prediction", null: bool = True) -> Path:
    """An untrained network of one resolution: it maps noise to something, which is all that tests of sampling need."""
    torch.manual_seed(0)
    unet = build_unet(dataset.channels, dataset.image_size, dataset.classes + int(null), [16], 1, attention=True)
    scheduler = DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2", prediction_type=prediction,
                              timestep_spacing="trailing")
    write_folder(folder, unet, scheduler, {"null_class": dataset.classes if null else None}, "card")
    return folder
