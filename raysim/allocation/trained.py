"""Policies that look at what training has shown, each time they are asked (`allocation.at`).

Accuracies and losses are those on the validation split (`data.validation_fraction`), by class: of the global model, and
of each client's own, which is the global model after the client's local training of the next round.
"""

import numpy as np

from raysim.allocation.common import Total, checked_counts, required_total, served
from raysim.core.records import FloatArray, IntArray
from raysim.core.rounding import largest_remainder

__all__ = ["gap", "loss_guided"]


def gap(
    counts_KC: IntArray, global_accuracy_KC: FloatArray, local_accuracy_KC: FloatArray, *, total: Total = None
) -> IntArray:
    """Images where a client's own model falls behind the global one: in proportion to the accuracy that it lacks.

    d_kc = max(0, a_c - a_kc), a_c the accuracy of the global model on validation images of class c, a_kc that of client
    k's model; g = total d / sum d, rounded by largest remainders.  After the idea of FedPDG ("Prediction
    Discrepancy-Guided Data Generation for Heterogeneous Federated Learning", ICML 2026), which looks at what local and
    global model say of data; here it is taken at the level of classes.
    By hand, a = (0.8, 0.6, 0.5), a_0 = (0.9, 0.0, 0.4), a_1 = (0.8, 0.6, 0.5), a_2 = (0.5, 0.6, 0.5): d sums to 1.0,
    0.6 and 0.1 for client 0 and 0.3 for client 2, so of 10 images the quotas are (0, 6, 1), (0, 0, 0) and (3, 0, 0).
    Where no client falls behind, the images are spread evenly.  A class without a validation image gets none.
    Raises UserError without a total, and for a client that has no sample and gets no image.
    """
    counts_KC = checked_counts(counts_KC)
    wanted = required_total(total, counts_KC, "gap")
    behind_KC = np.maximum(np.nan_to_num(global_accuracy_KC - local_accuracy_KC), 0.0)
    if not behind_KC.any():
        behind_KC = np.ones_like(behind_KC)
    return served(counts_KC, largest_remainder(behind_KC, wanted), "gap")


def loss_guided(
    counts_KC: IntArray, images_KC: IntArray, global_loss_KC: FloatArray, *, total: Total = None
) -> IntArray:
    """Images of the classes that the global model finds hard, for the clients that lack them.

    w_kc = l_c (max_c' m_kc' - m_kc), l_c the global model's mean cross-entropy on validation images of class c, m the
    samples that a client has so far, real and synthetic; g = total w / sum w, rounded by largest remainders.  It is no
    paper's: the plainest way to spend a budget by loss, beside which others can be held.
    By hand, l = (1, 2, 4), m_0 = (4, 0, 2), m_1 = (3, 3, 3), m_2 = (0, 1, 1): w_0 = (0, 8, 8), w_1 = (0, 0, 0),
    w_2 = (1, 0, 0), so of 17 images the quotas are (0, 8, 8), (0, 0, 0) and (1, 0, 0).
    Where no client lacks a class that has a loss, the images are spread evenly.  A class without a validation image, or
    with a loss that is not finite, gets none.
    Raises UserError without a total, and for a client that has no sample and gets no image.
    """
    counts_KC = checked_counts(counts_KC)
    wanted = required_total(total, counts_KC, "loss_guided")
    samples_KC = counts_KC + images_KC
    lacks_KC = samples_KC.max(axis=1, keepdims=True) - samples_KC
    weight_KC = np.where(np.isfinite(global_loss_KC), global_loss_KC, 0.0) * lacks_KC
    if not weight_KC.any():
        weight_KC = np.ones_like(weight_KC)
    return served(counts_KC, largest_remainder(weight_KC, wanted), "loss_guided")
