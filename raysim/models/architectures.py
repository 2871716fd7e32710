"""Image classifiers, one small function per architecture.

Every model maps B x channels x height x width float images to B x C logits, as `classifier(features(x))`. `features`
are the inputs of the classifier: penultimate activations, or the output of the projection head where there is one
(MOON, arXiv 2103.16257, section 3.2). Initial parameters come from torch's global generator, which the caller seeds.
"""

from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from raysim.config.markers import OnlyWith
from raysim.core.errors import UserError

__all__ = ["cnn", "lenet", "linear", "mlp", "resnet18"]

Width = Annotated[int, Field(ge=1, le=65536)]
Projection = Annotated[
    int | None,
    Field(ge=1, le=65536, description="size of a Linear-ReLU-Linear head between features and classifier; null: none"),
]

_HIDDEN = [200, 200]  # the 2NN of McMahan et al. (arXiv 1602.05629)


class Classifier(nn.Module):
    """A network of a body that computes flat features, an optional projection head, and a linear classifier."""

    def __init__(self, body: nn.Module, width: int, classes: int, projection: int | None) -> None:
        """Build the network around `body`.

        width: how many features per image `body` gives.  projection: size of the head's output; None: no head.
        """
        super().__init__()
        self.body = body
        self.projection: nn.Module = nn.Identity()
        if projection is not None:
            self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))
        self.classifier = nn.Linear(width if projection is None else projection, classes)

    def features(self, x: Tensor) -> Tensor:
        """Compute the inputs of the classifier for images x: B x features."""
        features: Tensor = self.projection(self.body(x))
        return features

    def chain(self) -> list[nn.Module]:
        """List the layers in the order in which they run; the layers of a sequence in place of the sequence."""
        layers: list[nn.Module] = []
        left: list[nn.Module] = [self.body, self.projection, self.classifier]
        while left:
            layer = left.pop(0)
            if type(layer) is nn.Sequential:
                left[:0] = layer.children()
            else:
                layers.append(layer)
        return layers

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of images x: B x C."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def cnn(
    channels: int,
    image_size: tuple[int, int],
    classes: int,
    *,
    width: Annotated[Width, Field(description="channels of the first convolution; the second has twice as many")] = 32,
    hidden: Annotated[Width, Field(description="units of the hidden layer")] = 128,
    projection: Projection = None,
) -> nn.Module:
    """The small CNN of the FedEAS and FedOUI papers: two 3x3 convolutions, each pooled, and one hidden layer.

    conv3x3(32)-pool-conv3x3(64)-pool-fc128-fcC, padding 1, ReLU, no normalisation.  The ReLU follows the pooling, which
    gives the same numbers, because max(0, x) keeps the order, for a quarter of the work.  Any image of 4 x 4 pixels or
    more; an odd row or column at the edge is dropped by the pooling.  Raises UserError for smaller images.
    """
    height = image_size[0] // 4
    columns = image_size[1] // 4
    _require(min(height, columns) >= 1, "cnn", image_size, at_least=4)
    body = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * height * columns, hidden),
        nn.ReLU(),
    )
    return Classifier(body, hidden, classes, projection)


def mlp(
    channels: int,
    image_size: tuple[int, int],
    classes: int,
    *,
    hidden: Annotated[list[Width], Field(min_length=1, description="units of each hidden layer")] = _HIDDEN,
    projection: Projection = None,
) -> nn.Module:
    """A fully connected network on the flattened image, with ReLU after every hidden layer."""
    sizes = [channels * image_size[0] * image_size[1], *hidden]
    layers = [module for inputs, units in pairwise(sizes) for module in (nn.Linear(inputs, units), nn.ReLU())]
    return Classifier(nn.Sequential(nn.Flatten(), *layers), sizes[-1], classes, projection)


def linear(channels: int, image_size: tuple[int, int], classes: int, *, projection: Projection = None) -> nn.Module:
    """Multinomial logistic regression on the pixels: one layer, no hidden activation (so no OUI)."""
    return Classifier(nn.Flatten(), channels * image_size[0] * image_size[1], classes, projection)


def lenet(channels: int, image_size: tuple[int, int], classes: int, *, projection: Projection = None) -> nn.Module:
    """The LeNet of NIID-Bench and MOON for 28 to 32 pixel images: two 5x5 convolutions, fc120, fc84.

    conv5x5(6)-pool-conv5x5(16)-pool-fc120-fc84-fcC, no padding, ReLU.  Raises UserError below 16 x 16 pixels, where
    nothing is left after the second pooling.
    """
    height, columns = (((side - 4) // 2 - 4) // 2 for side in image_size)
    _require(min(height, columns) >= 1, "lenet", image_size, at_least=16)
    body = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * height * columns, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return Classifier(body, 84, classes, projection)


def resnet18(
    channels: int,
    image_size: tuple[int, int],  # noqa: ARG001
    classes: int,
    *,
    norm: Annotated[Literal["group", "batch"], Field(description="normalisation layers")] = "group",
    groups: Annotated[
        Literal[1, 2, 4, 8, 16, 32, 64],
        Field(description="groups of each normalisation layer where norm is `group`"),
        OnlyWith("norm", "group"),
    ] = 32,
    projection: Projection = None,
) -> nn.Module:
    """ResNet-18 with the CIFAR stem (3x3 convolution, no pooling) and group or batch normalisation (arXiv 1512.03385).

    Images may have any size: global average pooling precedes the classifier.  GroupNorm (arXiv 1803.08494) keeps no
    running statistics, which label skew would make different between clients.
    """
    from torchvision.models.resnet import BasicBlock, ResNet

    # Every layer's channel count is a multiple of 64.  A partial, not a lambda: the network keeps it and is pickled.
    normalise = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
    body = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=1, norm_layer=normalise)
    body.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")
    body.maxpool = nn.Identity()
    body.fc = nn.Identity()
    return Classifier(body, 512, classes, projection)


def _require(fits: bool, name: str, image_size: tuple[int, int], at_least: int) -> None:
    if not fits:
        smaller = "`cnn` (from 4 x 4), `mlp` or `linear` (any size)" if min(image_size) >= 4 else "`mlp` or `linear`"
        raise UserError(
            f"model.name = {name}: needs images of at least {at_least} x {at_least} pixels, the data has "
            f"{image_size[0]} x {image_size[1]}; choose {smaller}"
        )
