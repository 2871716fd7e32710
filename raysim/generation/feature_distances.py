"""How far two sets of images are apart in the features of a network: Fréchet distance, and what neighbours tell.

Features are float64 vectors, N x D.  All values depend on how many images there are, so only those of equally many can
be compared; with features of another network than Inception they are no FID, though computed as one.
"""

import numpy as np
import torch

from raysim.core.records import FloatArray

NEIGHBOURS = 5


def frechet(a_ND: FloatArray, b_ND: FloatArray) -> float:
    """The Fréchet distance of the Gaussians of two sets of features (FID, arXiv 1706.08500, equation 6); 0: equal.

    |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)), with the covariances A and B.  Raises ValueError below 2 images.
    """
    if min(len(a_ND), len(b_ND)) < 2:
        raise ValueError("a covariance needs 2 images at least")
    cov_a, cov_b = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a_ND, b_ND))
    values, vectors = np.linalg.eigh(cov_a)
    root_a = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    # A B and A^(1/2) B A^(1/2) have the same eigenvalues, and the second is symmetric.
    shared = np.sqrt(np.maximum(np.linalg.eigvalsh(root_a @ cov_b @ root_a), 0)).sum()
    means = np.square(a_ND.mean(0) - b_ND.mean(0)).sum()
    return float(max(0.0, means + np.trace(cov_a) + np.trace(cov_b) - 2 * shared))


def neighbourhoods(real_ND: FloatArray, made_MD: FloatArray, k: int = NEIGHBOURS) -> dict[str, float]:
    """Precision and recall (arXiv 1904.06991), density and coverage (arXiv 2002.09797), from nearest neighbours.

    The neighbourhood of an image reaches to the k-th nearest other one of its own set.  precision: the fraction of
    made images in the neighbourhood of a real one.  recall: of real images in that of a made one.  density: in how many
    neighbourhoods of real images a made one is, over k; about 1 for real images, and above 1 where made ones crowd.
    coverage: the fraction of real images with a made one in their neighbourhood.
    Raises ValueError where a set has no k + 1 images.
    """
    if min(len(real_ND), len(made_MD)) <= k:
        raise ValueError(f"{k} neighbours need {k + 1} images at least")
    real, made = torch.from_numpy(np.ascontiguousarray(real_ND)), torch.from_numpy(np.ascontiguousarray(made_MD))
    between_NM = torch.cdist(real, made)
    reach_N, reach_M = (torch.cdist(own, own).kthvalue(k + 1, dim=1).values for own in (real, made))
    near_real_NM = between_NM <= reach_N[:, None]
    return {
        "precision": float(near_real_NM.any(0).double().mean()),
        "recall": float((between_NM <= reach_M[None]).any(1).double().mean()),
        "density": float(near_real_NM.double().sum(0).mean() / k),
        "coverage": float(near_real_NM.any(1).double().mean()),
    }
