"""Theorem A as general optimisation problems, solved by scipy: what the engine must equal."""

import numpy as np
from scipy import optimize


def least_squares_mu_squared(contraction, sensitivity, noise_std, initial_shift=0.0):
    """min sum (a_t/sigma_t)^2 over z >= 0 by bounded-variable least squares (exact, T small)."""
    matrix, offset = _shifts(contraction, sensitivity, noise_std, initial_shift)
    if matrix.shape[1] == 0:
        return float(offset @ offset)
    solution = optimize.lsq_linear(
        matrix, -offset, bounds=(0, np.inf), method="bvls", tol=1e-15, max_iter=10_000
    )
    residual = matrix @ solution.x + offset
    return float(residual @ residual)


def _shifts(contraction, sensitivity, noise_std, initial_shift):
    """a/sigma = matrix @ z + offset for z = (z_1, ..., z_{T-1})."""
    c, s, sigma = (np.asarray(a, dtype=float) for a in (contraction, sensitivity, noise_std))
    steps = len(s)
    matrix = np.zeros((steps, steps - 1))
    for t in range(steps - 1):
        matrix[t, t] = -1.0
        matrix[t + 1, t] = c[t + 1]
    offset = s.copy()
    offset[0] += c[0] * initial_shift
    return matrix / sigma[:, None], offset / sigma


def windows_mu_squared(contraction, sensitivity, noise_std, drift_contraction, drift, diameter):
    """Minimum over every start tau, with the three-branch forward tracking of theory section 1.

    The first step of a window may use the drift branch; the later ones use the modulus.
    """
    distance, best = 0.0, np.inf
    steps = len(sensitivity)
    for tau in range(steps):
        window = slice(tau, steps)
        moved = min(
            contraction[tau] * distance + sensitivity[tau],
            drift_contraction[tau] * distance + drift[tau],
        )
        shifts = np.concatenate([[moved], sensitivity[tau + 1 :]])
        best = min(best, least_squares_mu_squared(contraction[window], shifts, noise_std[window]))
        distance = min(moved, diameter)
    return best
