"""A network and a generator of the tests' own, for raysim to find by their dotted names."""

import numpy as np
import torch
from second_simulator import synthetic_image
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with BatchNorm and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.downsample(x))


class Body(nn.Module):
    """A convolution and two blocks; the second halves the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return h.mean((2, 3))


class SmallResNet(nn.Module):
    """Features and classifier, as MOON wants them."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.body = Body(channels, width)
        self.classifier = nn.Linear(2 * width, classes)

    def features(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def small_resnet(channels: int, image_size: tuple[int, int], classes: int, *, width: int = 3) -> nn.Module:
    """A residual network with BatchNorm, small enough for a test."""
    return SmallResNet(channels, classes, width)


class stripes:
    """Images that are known without a generator."""

    def __init__(self, dataset, device: str) -> None:
        self.shape = dataset.train_images.shape[1:]

    def fingerprint(self) -> str:
        return "stripes 1"

    def sample(self, labels_B: np.ndarray, seeds_B: np.ndarray) -> np.ndarray:
        pairs = zip(labels_B.tolist(), seeds_B.tolist(), strict=True)
        return np.stack([synthetic_image(label, seed, self.shape) for label, seed in pairs])
