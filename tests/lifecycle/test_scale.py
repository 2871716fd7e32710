"""What a run costs follows the cohort, not the number of registered clients."""

import hashlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raysim import load_config
from raysim.core.errors import UserError
from raysim.core.records import sha256
from raysim.core.rng import PARTITION, stream
from raysim.data.modifiers import label_noise, rare
from raysim.data.partitions import DRAWN_FROM, dirichlet_client
from raysim.federation.server import cohort
from raysim.lifecycle.prepare import load_dataset, prepare

LABELS = np.repeat(np.arange(10), 30)


def clients(count: int):
    return dirichlet_client(LABELS, 10, stream(0, PARTITION), clients=count, alpha=0.3, samples_per_client=20)


def test_a_drawn_client_has_the_same_samples_as_one_that_is_written_out():
    """The same client ids below and above the number from which rows are drawn late."""
    few, many = clients(50), clients(DRAWN_FROM)
    assert few.drawn is None and many.drawn is not None and len(many.indices) == 0
    assert many.clients == DRAWN_FROM and (many.sizes_K == 20).all()
    for k in range(50):
        for written, drawn in zip(few.client(k), many.client(k), strict=True):
            assert written.tolist() == drawn.tolist()


def test_the_hash_of_a_drawn_partition_tells_seeds_and_labels_apart():
    other = dirichlet_client(LABELS, 10, stream(1, PARTITION), clients=DRAWN_FROM, alpha=0.3, samples_per_client=20)
    swapped = dirichlet_client(
        LABELS[::-1].copy(), 10, stream(0, PARTITION), clients=DRAWN_FROM, alpha=0.3, samples_per_client=20
    )
    hashes = {partition.sha256() for partition in (clients(DRAWN_FROM), other, swapped)}
    assert len(hashes) == 3 and clients(DRAWN_FROM).sha256() in hashes


@pytest.mark.parametrize("modifier", [rare, label_noise])
def test_what_changes_samples_beforehand_refuses_a_drawn_partition(modifier: Callable[..., Any]):
    with pytest.raises(UserError, match="drawn when they train"):
        modifier(clients(DRAWN_FROM), stream(0, PARTITION))


def test_preparing_a_million_clients_makes_no_array_of_rows_or_counts():
    """Rows would take 1,000,000 x 20 x 8 = 160 MB, counts and quota 80 MB each; offsets, sizes, flags under 40 MB."""
    partition = {"name": "dirichlet_client", "clients": 1_000_000, "alpha": 0.3, "samples_per_client": 20}
    config = load_config({"rounds": 1, "clients_per_round": 100, "data": {"name": "digits"}, "partition": partition})
    dataset = load_dataset(config)
    tracemalloc.start()
    prepared = prepare(config, dataset)
    prepared.partition.sha256(), sha256(prepared.quota_KC), cohort(0, 1, prepared.partition.clients, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert prepared.quota_KC.shape == (1_000_000, 10) and not prepared.quota_KC.any()
    assert peak < 60_000_000


def test_a_hash_in_parts_is_that_of_the_whole_bytes():
    """The definition: dtype, shape and bytes, whatever the strides; more rows than one part holds."""
    array = np.arange(3 * 70_000).reshape(70_000, 3)[:, ::2]
    expected = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()
    assert sha256(array) == expected
