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


def slsqp_mu_squared(contraction, sensitivity, noise_std, initial_shift=0.0):
    """The same minimum, with a_t >= 0 imposed as well, by sequential quadratic programming."""
    matrix, offset = _shifts(contraction, sensitivity, noise_std, initial_shift)
    if matrix.shape[1] == 0:
        return float(offset @ offset)
    sigma = np.asarray(noise_std, dtype=float)
    scale = float(offset @ offset) or 1.0

    def solve(start):
        # The solver's own answer is not trusted to be feasible: it is one only where it says so.
        result = optimize.minimize(
            lambda z: float(np.sum((matrix @ z + offset) ** 2)) / scale,
            start,
            jac=lambda z: 2 * matrix.T @ (matrix @ z + offset) / scale,
            bounds=[(0, None)] * len(start),
            constraints=[
                {
                    "type": "ineq",
                    "fun": lambda z: (matrix @ z + offset) * sigma,
                    "jac": lambda z: matrix * sigma[:, None],
                }
            ],
            method="SLSQP",
            options={"ftol": 1e-16, "maxiter": 2_000},
        )
        return float(result.fun) * scale if result.success else np.inf

    reachable = np.zeros(matrix.shape[1])
    distance = initial_shift
    for t in range(len(reachable)):
        distance = contraction[t] * distance + sensitivity[t]
        reachable[t] = distance
    return min(solve(share * reachable) for share in (0.0, 0.25, 0.5, 0.75, 0.95))


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
