"""OUI of the clients that a worker has trained: on which images, and at a layer that is looked for only once."""

from collections.abc import Mapping
from typing import Any

import torch

from raysim.aggregation.oui import hookable_layer, measure_oui, measure_oui_by_layer
from raysim.core import rng
from raysim.core.records import ByteArray, Dataset
from raysim.local.contract import ClientData
from raysim.models.flat_model import FlatModel, ImageScale


class Probe:
    """Measures one client after another; reads the model and changes nothing.

    spec: `probe` (client or shared), `probe_size` and `layers` of the rule.  The shared batch is drawn from all
    training images, a client's own from its real ones (from synthetic ones if it has no other), fixed for each client.
    """

    def __init__(self, spec: Mapping[str, Any], seed: int) -> None:
        self.spec, self.seed = spec, seed
        self._looked, self._layer = False, ""

    def measure(
        self, model: FlatModel, scale: ImageScale, client: int, data: ClientData, dataset: Dataset
    ) -> dict[str, float]:
        """`oui`, and with several layers `oui.LAYER` of each."""
        images = torch.from_numpy(self._images(client, data, dataset)).to(model.device)
        probe_B, layers = scale(images, model.channels_last), self.spec["layers"]
        if layers is None:
            if not self._looked:
                self._looked, self._layer = True, hookable_layer(model.module, probe_B)
            layers = [self._layer] if self._layer else None
        if layers is None or len(layers) == 1:
            return {"oui": measure_oui(model.module, probe_B, layers)}
        by_layer = measure_oui_by_layer(model.module, probe_B, layers)
        mean = sum(by_layer.values()) / len(by_layer)
        return {"oui": mean, **{f"oui.{layer}": oui for layer, oui in by_layer.items()}}

    def _images(self, client: int, data: ClientData, dataset: Dataset) -> ByteArray:
        size, shared = self.spec["probe_size"], self.spec["probe"] == "shared"
        source = dataset.train_images if shared else data.images
        n = len(source) if shared else data.n_real or len(source)
        keys = () if shared else (client,)
        chosen: ByteArray = source[rng.stream(self.seed, rng.PROBE, *keys).choice(n, size, replace=n < size)]
        return chosen
