"""Measures the OUI of the clients that a worker has trained: chooses the images, and finds the layer once."""

import torch

from raysim.aggregation.oui import hookable_layer, measure_oui, measure_oui_by_layer
from raysim.core import rng
from raysim.core.plain import PlainMapping
from raysim.core.records import ByteArray, Dataset
from raysim.local.contract import ClientData
from raysim.models.flat_model import FlatModel, ImageScale


class Probe:
    """Measures the OUI of one client after another; does not change the model.

    spec: `probe` (client or shared), `probe_size` and `layers` of the rule.  The shared batch is drawn from all
    training images; a client's own batch from its real images (its synthetic ones if it has no other), and is the same
    in every round.
    """

    def __init__(self, spec: PlainMapping, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._has_searched = False
        self._layer = ""

    def measure(
        self, model: FlatModel, scale: ImageScale, client: int, data: ClientData, dataset: Dataset
    ) -> dict[str, float]:
        """Measure a client's trained model; returns `oui`, and with several layers `oui.LAYER` of each.

        data: the client's samples.  Raises the errors of `oui.measure_oui`.
        """
        images = torch.from_numpy(self._images(client, data, dataset)).to(model.device)
        probe_B = scale(images, model.channels_last)
        layers = self.spec["layers"]
        if layers is None:
            if not self._has_searched:
                self._has_searched = True
                self._layer = hookable_layer(model.module, probe_B)
            layers = [self._layer] if self._layer else None
        if layers is None or len(layers) == 1:
            return {"oui": measure_oui(model.module, probe_B, layers)}
        by_layer = measure_oui_by_layer(model.module, probe_B, layers)
        mean = sum(by_layer.values()) / len(by_layer)
        return {"oui": mean, **{f"oui.{layer}": oui for layer, oui in by_layer.items()}}

    def _images(self, client: int, data: ClientData, dataset: Dataset) -> ByteArray:
        size = self.spec["probe_size"]
        shared = self.spec["probe"] == "shared"
        source = dataset.train_images if shared else data.images
        n = len(source) if shared else data.n_real or len(source)
        keys = () if shared else (client,)
        chosen: ByteArray = source[rng.stream(self.seed, rng.PROBE, *keys).choice(n, size, replace=n < size)]
        return chosen
