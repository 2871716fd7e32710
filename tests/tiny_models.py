"""A model of the tests' own, found by its dotted name as a user's would be."""

from torch import nn


def batch_norm_cnn(channels: int, image_size: tuple[int, int], classes: int, *, width: int = 8) -> nn.Module:
    """Convolution, batch normalisation on maps and after global pooling, classifier."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )
