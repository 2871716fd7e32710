"""A model of the tests' own, found by its dotted name as a user's would be."""

from torch import nn


def three_classes(channels: int, image_size: tuple[int, int], classes: int) -> nn.Module:
    """A model that takes no notice of how many classes there are."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size[0] * image_size[1], 3))


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


def lazy(channels: int, image_size: tuple[int, int], classes: int) -> nn.Module:
    """A model whose layer has no size before it has seen an image."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
