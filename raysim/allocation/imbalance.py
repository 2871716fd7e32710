"""How skewed the clients' labels are, how much each client adds to it, and how much of it synthetic images remove."""

from collections.abc import Iterator

import numpy as np

from raysim.core.records import BoolArray, FloatArray, IntArray

_CELLS = 1 << 17  # cells at a time: they fit into the cache, and a million clients need no second array of their size


def row_slices(clients: int, classes: int) -> Iterator[slice]:
    """Slices of whole clients that together cover a K x C array."""
    rows = max(1, _CELLS // classes)
    return (slice(start, start + rows) for start in range(0, clients, rows))


def normalised_entropy_K(counts_KC: IntArray) -> FloatArray:
    """H_k = -(sum_c p_kc ln p_kc) / ln C, in [0, 1]: 0 for a client with one class, 1 for equal counts; K.

    counts_KC: samples per client and class.  With C = 1 every client is balanced, so H = 1; an empty client has H = 0.
    """
    clients, classes = counts_KC.shape
    if classes == 1:
        return (counts_KC[:, 0] > 0).astype(np.float64)
    entropy_K = np.zeros(clients)
    for rows in row_slices(clients, classes):
        n_KC = counts_KC[rows].astype(np.float64)
        N_K = n_KC.sum(axis=1)
        # sum_c p ln p = sum_c n ln n / N - ln N; at n = 0 and N = 0 the logarithm of 1 stands for the limit 0.
        n_log_n_K = np.einsum("kc,kc->k", n_KC, np.log(np.maximum(n_KC, 1)))
        entropy_K[rows] = (np.log(np.maximum(N_K, 1)) - n_log_n_K / np.maximum(N_K, 1)) / np.log(classes)
        entropy_K[rows][(counts_KC[rows].max(axis=1) == counts_KC[rows].min(axis=1)) & (N_K > 0)] = 1.0
    return np.clip(entropy_K, 0.0, 1.0)


def contributions_K(counts_KC: IntArray) -> FloatArray:
    """Each client's contribution to the imbalance: (M_k / sum_j M_j) (1 - H_k), M_k its samples: K.

    The contributions sum to `imbalance`.
    """
    M_K = counts_KC.sum(axis=1)
    contribution_K: FloatArray = M_K / max(int(M_K.sum()), 1) * (1.0 - normalised_entropy_K(counts_KC))
    return contribution_K


def imbalance(counts_KC: IntArray) -> float:
    """I = sum_k (M_k / sum_j M_j) (1 - H_k), in [0, 1]: 0 if every client has equal counts of all classes."""
    return float(contributions_K(counts_KC).sum())


def removed_fraction(before_KC: IntArray, after_KC: IntArray) -> float:
    """1 - I_after / I_before: the fraction of the imbalance that was removed; 0 where there was none to remove."""
    before = imbalance(before_KC)
    return 1.0 - imbalance(after_KC) / before if before > 0 else 0.0


def lorenz_curve(contribution_K: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The Lorenz curve (fraction of the clients, fraction of the total that they cause), from (0, 0) to (1, 1).

    contribution_K: a non-negative number per client; the smallest come first.  Raises ValueError for a negative or
    non-finite one.
    """
    ordered_K = np.sort(np.asarray(contribution_K, dtype=np.float64))
    if not np.isfinite(ordered_K).all() or (ordered_K < 0).any():
        raise ValueError("contributions must be finite and not negative")
    clients = np.linspace(0, 1, len(ordered_K) + 1)
    total = ordered_K.sum()
    return clients, np.concatenate([[0.0], ordered_K.cumsum() / total]) if total > 0 else clients.copy()


def top_share(contribution_K: FloatArray, fraction: float = 0.2) -> float:
    """The fraction of the total that the top `fraction` of the clients cause: 1 - L(1 - fraction), L the Lorenz curve.

    The curve is a straight line between two clients.  The result is 0 where the total is 0.
    """
    clients, caused = lorenz_curve(contribution_K)
    return float(1 - np.interp(1 - fraction, clients, caused)) if contribution_K.sum() > 0 else 0.0


def missing_cells(counts_KC: IntArray) -> BoolArray:
    """Whether a client has no sample of a class, K x C."""
    missing_KC: BoolArray = counts_KC == 0
    return missing_KC
