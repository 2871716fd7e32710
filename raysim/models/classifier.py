"""A trained model as people use it: images in, a number for each class out."""

from collections.abc import Sequence

from torch import Tensor, nn

from raysim.models.flat_model import ImageScale


class ImageClassifier(nn.Module):
    """A network with the scaling of images that it was trained with.

    module: the network, whose `state_dict` has the names of model.safetensors.  mean, std: per channel, of images
    scaled to [0, 1].
    """

    def __init__(self, module: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.module = module
        self._scale = ImageScale(tuple(mean), tuple(std))

    def forward(self, images: Tensor) -> Tensor:
        """Logits B x classes of uint8 images B x channels x height x width."""
        logits: Tensor = self.module(self._scale(images, channels_last=False))
        return logits
