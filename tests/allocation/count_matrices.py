"""Counts of clients and classes, by hand and drawn by hypothesis, for the tests of allocation policies."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

counts_matrices = (
    st.tuples(st.integers(1, 6), st.integers(1, 5))
    .flatmap(lambda shape: arrays(np.int64, shape, elements=st.integers(0, 60)))
    .map(lambda counts_KC: counts_KC + (counts_KC.sum(axis=1, keepdims=True) == 0))
)
quick = settings(max_examples=60, deadline=None)


def counts(*rows: list[int]) -> np.ndarray:
    """Counts with a row for each client."""
    return np.array(rows, dtype=np.int64)
