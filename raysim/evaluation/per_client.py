"""How good a model is for each client: its accuracy on the client's own mix of classes, not the global accuracy.

A client's test data are the test images, weighted so that classes are as frequent as among the client's own real
samples (by their true labels, not those that label noise gave them):
    a_k = sum_c p_kc a_c,  p_kc = n_kc / N_k,  a_c the accuracy on the test images of class c
which is the expected accuracy on test images drawn with the client's class frequencies, without drawing any. Classes
without a test image are left out, and the p_kc of the others are scaled to sum to 1; a client that has no other class
has no accuracy (nan).
"""

import dataclasses

import numpy as np

from raysim.core.records import Dataset, FloatArray, IntArray, Partition


def class_counts(partition: Partition, dataset: Dataset) -> IntArray:
    """Real samples per client and class by their true labels: K x C; 0 x C where clients are drawn one by one."""
    if partition.drawn is not None:
        return np.empty((0, partition.classes), dtype=np.int64)
    return dataclasses.replace(partition, labels=dataset.train_labels_N[partition.indices]).counts_KC


def by_client(counts_KC: IntArray, accuracy_C: FloatArray) -> FloatArray:
    """The accuracy a_k of each client, for a model with accuracy a_c on class c (nan: no test image): K."""
    present_C = np.isfinite(accuracy_C)
    n_KC = counts_KC[:, present_C].astype(np.float64)
    with np.errstate(invalid="ignore"):
        a_K: FloatArray = (n_KC * accuracy_C[present_C]).sum(axis=1) / n_KC.sum(axis=1)
    return a_K


def spread(prefix: str, a_K: FloatArray, n_K: IntArray) -> dict[str, float]:
    """Mean, mean weighted by n_k, minimum and standard deviation over the clients that have an accuracy.

    prefix: begins the names of the metrics.  The standard deviation has n in its denominator (ddof 0), because these
    are all clients and no sample of them.  The result is empty if no client has an accuracy.
    """
    known_K = np.isfinite(a_K)
    a_K = a_K[known_K]
    n_K = n_K[known_K]
    if not len(a_K):
        return {}
    return {
        f"{prefix}_clients": len(a_K),
        f"{prefix}_mean": float(a_K.mean()),
        f"{prefix}_weighted_mean": float((a_K * n_K).sum() / n_K.sum()),
        f"{prefix}_worst": float(a_K.min()),
        f"{prefix}_sd": float(a_K.std()),
    }
