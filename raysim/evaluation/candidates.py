"""How good a candidate image is, by what a model says of it: the larger, the sooner it is kept (`generator.keep`)."""

import numpy as np

from raysim.core.records import FloatArray, IntArray


def confidence(log_p_NC: FloatArray, labels_N: IntArray) -> FloatArray:
    """p(y | x), and 1 more for an image that the classifier takes to be of its class: N.

    Right ones come first, the surest of them before the others.  log_p_NC: logarithms of what the classifier predicts.
    """
    p_N = np.exp(log_p_NC[np.arange(len(labels_N)), labels_N])
    score_N: FloatArray = np.nan_to_num(p_N + (log_p_NC.argmax(axis=1) == labels_N), nan=-1.0)
    return score_N


def discrepancy(log_p_NC: FloatArray, log_q_NC: FloatArray) -> FloatArray:
    """sum_c |p_c - q_c| / 2, the total variation distance of what two models predict for an image, in [0, 1]: N.

    After the idea of FedPDG (ICML 2026), which takes where the local and the global model differ as a sign of what a
    client lacks.
    """
    distance_N: FloatArray = np.abs(np.exp(log_p_NC) - np.exp(log_q_NC)).sum(axis=1) / 2
    return np.nan_to_num(distance_N, nan=-1.0)


def best(keys_M3: IntArray, score_M: FloatArray, wanted_KC: IntArray) -> IntArray:
    """The rows, ascending, of the wanted_KC[k, c] best candidates of each client and class; of equals the first made.

    keys_M3: client, class, index of each candidate.
    """
    order = np.lexsort((keys_M3[:, 2], -score_M, keys_M3[:, 1], keys_M3[:, 0]))
    cell = keys_M3[order, 0] * wanted_KC.shape[1] + keys_M3[order, 1]
    place = np.arange(len(order)) - np.searchsorted(cell, cell)
    return np.sort(order[place < wanted_KC.reshape(-1)[cell]])
