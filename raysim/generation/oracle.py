"""The `oracle` generator: real images in place of synthetic ones, an upper bound on what any generator can achieve."""

import hashlib

import numpy as np

from raysim.config.protocols import ImageGenerator
from raysim.core import rng
from raysim.core.errors import UserError
from raysim.core.records import ByteArray, Dataset, IntArray, sha256

__all__ = ["oracle"]

_INDEX_BITS = 28  # the low bits of a seed hold the position in a client's order, the high bits choose the order


class oracle(ImageGenerator):
    """Real images that no client owns (`data.public_frac`): separates the allocation rule from image quality.

    Each client draws from the whole pool of a class, in an order of its own that depends on seed, client and class. Its
    images differ from each other until the pool is used up, and are then repeated in the same order; two clients may
    have the same image. A larger budget therefore extends a smaller one, and no request fails.
    Raises UserError without public images.
    """

    def __init__(self, dataset: Dataset, device: str) -> None:  # noqa: ARG002 - a generator is given a device
        if dataset.public_images is None or dataset.public_labels_N is None:
            raise UserError(
                "generator.name = oracle: no real images are held out from the clients; set data.public_frac, such as "
                "data.public_frac=0.2"
            )
        self.images = dataset.public_images
        labels_N = dataset.public_labels_N
        self.rows_by_class = [np.flatnonzero(labels_N == c) for c in range(dataset.classes)]
        self.pool_sha256 = sha256(self.images, labels_N)

    @staticmethod
    def image_seed(seed: int, client: int, class_: int, index: int) -> int:
        """The seed from which `sample` reads the client's order (high bits) and the position in it (low bits)."""
        order = rng.integer(seed, rng.SYNTHETIC, client, class_) >> _INDEX_BITS
        return (order << _INDEX_BITS) | (index % (1 << _INDEX_BITS))

    @staticmethod
    def notes(dataset: Dataset, quota_KC: IntArray) -> list[str]:
        """Say where clients ask for more images of a class than are held out."""
        if dataset.public_labels_N is None:
            return []
        pool_C = np.bincount(dataset.public_labels_N, minlength=dataset.classes)
        over_KC = np.maximum(0, quota_KC - pool_C)
        if not over_KC.any():
            return []
        classes = np.flatnonzero(over_KC.any(axis=0))
        return [
            f"oracle: {int(over_KC.sum()):,} of {int(quota_KC.sum()):,} images are repeats within a client, because "
            f"{len(classes)} classes hold fewer public images (at least {int(pool_C.min()):,}) than a client asked for "
            f"(up to {int(quota_KC.max()):,}); raise data.public_frac for more"
        ]

    def fingerprint(self) -> str:
        """Hex sha256 of the pool and of the rule that draws from it."""
        return hashlib.sha256(f"oracle/1/{self.pool_sha256}".encode()).hexdigest()

    def sample(self, labels_B: IntArray, seeds_B: IntArray) -> ByteArray:
        """Return the held-out image of each label at the position in its seed: uint8 B x channels x height x width."""
        orders: dict[tuple[int, int], IntArray] = {}
        rows = np.empty(len(labels_B), dtype=np.int64)
        for i, (label, seed) in enumerate(zip(labels_B.tolist(), seeds_B.tolist(), strict=True)):
            key = (label, seed >> _INDEX_BITS)
            if key not in orders:
                orders[key] = rng.stream(key[1], rng.SYNTHETIC, label).permutation(self.rows_by_class[label])
            rows[i] = orders[key][(seed & ((1 << _INDEX_BITS) - 1)) % len(orders[key])]
        return self.images[rows]
