"""Keyed random streams: the only source of randomness.

A stream is a pure function of (seed, purpose, keys): which worker draws from it, and when, cannot change a number.
Purposes are independent of each other, so more draws for one never change the numbers of another.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PARTITION = "partition"  # who owns which sample
SPLIT = "split"  # train/test split of data sets that have none; subsets
MODIFIER = "modifier"  # rare clients, label noise, input noise
KEPT = "kept"  # which real samples a client keeps; keys: client
QUOTA = "quota"  # random quotas; keys: rounds trained
COHORT = "cohort"  # keys: round
MODEL = "model"  # initial parameters
BATCHES = "batches"  # keys: round, client
AUGMENT = "augment"  # keys: round, client
DROPOUT = "dropout"  # keys: round, client
PROBE = "probe"  # keys: client
FINE_TUNED = "tuned"  # which clients are fine-tuned for evaluation
ROUNDING = "rounding"  # rounding of quantised updates; keys: round, client
NOISE = "noise"  # privacy noise on updates; keys: round, and client where the client adds it
SYNTHETIC = "synthetic"  # keys: client, class, index
PRETRAIN = "pretrain"  # keys: step


def _entropy(seed: int, purpose: str, keys: tuple[int, ...]) -> int:
    text = "/".join([str(int(seed)), purpose, *(str(int(k)) for k in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A numpy generator for this purpose and these keys."""
    return np.random.Generator(np.random.Philox(key=_entropy(seed, purpose, keys)))


def integer(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit integer for libraries that take a seed of their own, such as `torch.manual_seed`."""
    return _entropy(seed, purpose, keys) & (2**63 - 1)


def numpy_stream(seed: int) -> np.random.RandomState:
    """numpy's legacy RandomState with this seed: the stream that code draws from after calling numpy.random.seed."""
    return np.random.RandomState(seed)


def torch_stream(seed: int, purpose: str, *keys: int) -> "torch.Generator":
    """A CPU torch generator for this purpose and these keys."""
    import torch

    return torch.Generator().manual_seed(integer(seed, purpose, *keys))
