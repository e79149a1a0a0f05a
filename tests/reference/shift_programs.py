"""Theorem A as general optimisation problems, solved by scipy: what the engine must equal."""

import itertools
import math

import numpy as np
from scipy import optimize


def least_squares_mu_squared(contraction, sensitivity, noise_std, initial_shift=0.0, prox=1.0):
    """min sum (a_t/sigma_t)^2 over z >= 0 by bounded-variable least squares (exact, T small).

    z_t is the distance after the proximal map of a step, a_t = c_t z_{t-1} + s_t - z_t/p_t.
    """
    matrix, offset = _shifts(contraction, sensitivity, noise_std, initial_shift, prox)
    if matrix.shape[1] == 0:
        return float(offset @ offset)
    solution = optimize.lsq_linear(
        matrix, -offset, bounds=(0, np.inf), method="bvls", tol=1e-15, max_iter=10_000
    )
    residual = matrix @ solution.x + offset
    return float(residual @ residual)


def _shifts(contraction, sensitivity, noise_std, initial_shift, prox):
    """a/sigma = matrix @ z + offset for z = (z_1, ..., z_{T-1})."""
    c, s, sigma = (np.asarray(a, dtype=float) for a in (contraction, sensitivity, noise_std))
    steps = len(s)
    p = np.broadcast_to(prox, steps)
    matrix = np.zeros((steps, steps - 1))
    for t in range(steps - 1):
        matrix[t, t] = -1 / p[t]
        matrix[t + 1, t] = c[t + 1]
    offset = s.copy()
    offset[0] += c[0] * initial_shift
    return matrix / sigma[:, None], offset / sigma


def windows_mu_squared(
    contraction, sensitivity, noise_std, drift_contraction, drift, diameter, prox=1.0
):
    """Minimum over every start tau, with the three-branch forward tracking of theory section 1.

    The first step of a window may use the drift branch; the later ones use the modulus.
    """
    distance, best = 0.0, np.inf
    steps = len(sensitivity)
    p = np.broadcast_to(prox, steps)
    for tau in range(steps):
        window = slice(tau, steps)
        moved = min(
            contraction[tau] * distance + sensitivity[tau],
            drift_contraction[tau] * distance + drift[tau],
        )
        shifts = np.concatenate([[moved], sensitivity[tau + 1 :]])
        found = least_squares_mu_squared(
            contraction[window], shifts, noise_std[window], prox=p[window]
        )
        best = min(best, found)
        distance = min(p[tau] * moved, diameter)
    return best


def nonlinear_mu_squared(reach, noise_std, starts, least=0.0):
    """min sum (a_t/sigma_t)^2 for any modulus by SLSQP, a_t = reach(t, z_{t-1}) - z_t >= least_t.

    From several points, for every start and every set of distances that are 0.

    Args:
        reach: What a step and a distance before it give.
        noise_std: Shape (T,).
        starts: The distance at each step that a plan may start with.
        least: Of a shift, a number or shape (T,).
    """
    steps, best = len(noise_std), math.inf
    least = np.broadcast_to(least, steps)
    patterns = [
        (start, np.array(pattern, dtype=bool))
        for start in starts
        for pattern in itertools.product([0, 1], repeat=steps - start - 1)
    ]
    for start, is_free in patterns:

        def shifts(values, start=start, is_free=is_free):
            z = np.zeros(steps - start)
            z[:-1][is_free] = values
            before = [starts[start], *z[:-1]]
            return np.array([reach(start + i, max(v, 0)) for i, v in enumerate(before)]) - z

        def total(values, start=start, shifts=shifts):
            return float(np.sum((shifts(values) / noise_std[start:]) ** 2))

        def excess(values, start=start, shifts=shifts):
            return (shifts(values) - least[start:]) / noise_std[start:]

        if not is_free.any():
            best = min(best, total([]))
            continue
        for share in np.linspace(0.1, 0.9, 5):
            z, first = starts[start], []
            for i, free in enumerate(is_free):
                z = (reach(start + i, z) - least[start + i]) * share * free
                first += [z] * int(free)
            for _ in range(2):  # from where it stopped too early
                result = optimize.minimize(
                    total,
                    first,
                    bounds=[(1e-9, None)] * len(first),
                    constraints=[{"type": "ineq", "fun": excess}],
                    method="SLSQP",
                    options={"ftol": 1e-15, "maxiter": 500},
                )
                first = result.x
                if excess(first).min() > -1e-8:
                    best = min(best, result.fun)
    return best
