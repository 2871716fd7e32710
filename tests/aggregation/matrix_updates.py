"""The updates of a round as a matrix, for rules that ask about them."""

import math

import numpy as np


class MatrixUpdates:
    """Answers from delta_KP, read-only; sums are correctly rounded, so that no order of clients shows in them."""

    def __init__(self, delta_KP):
        self.delta_KP = np.array(delta_KP, dtype=np.float64)
        self.delta_KP.flags.writeable = False

    def norms(self):
        return np.array([math.sqrt(math.fsum(row * row)) for row in self.delta_KP])

    def dot(self, v_P):
        return np.array([math.fsum(row * v_P) for row in self.delta_KP])

    def weighted_sum(self, w_K):
        return np.array([math.fsum(column * w_K) for column in self.delta_KP.T])

    def gram(self):
        return np.array([[math.fsum(a * b) for b in self.delta_KP] for a in self.delta_KP])

    def by_coordinate(self, fn):
        """In two slices, as from two workers."""
        return np.concatenate([fn(part) for part in np.array_split(self.delta_KP, 2, axis=1)])
