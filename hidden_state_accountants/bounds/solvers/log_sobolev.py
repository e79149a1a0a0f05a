r"""Rényi divergence along noisy Lipschitz steps, by log-Sobolev inequalities (LSI).

Two runs whose divergence of every order alpha > 1 is at most alpha * rate, and whose laws both
satisfy the LSI with constant kappa, make one more step. Proofs: docs/theory/langevin.md.
"""

from __future__ import annotations

import math


def log_sobolev_step(
    rate: float,
    inverse_constant: float,
    update_lipschitz: float,
    sensitivity: float,
    noise_variance: float,
    prox_lipschitz: float = 1.0,
) -> tuple[float, float]:
    r"""One step X <- T(phi(X) + N(0, v I)) of both runs, their maps phi at most s apart.

    With :math:`q = 1/\kappa`, the distance that explains the rate, :math:`d = \sqrt{2\rho q}`, and
    :math:`q' = L_F^2 q + v`

    .. math::
        \rho' = \begin{cases}
          (L_F d + s)^2 / (2 q') & \text{if } d v \ge s L_F q \\
          \rho + s^2 / (2 v)     & \text{otherwise}
        \end{cases}, \qquad 1/\kappa' = L_T^2\, q'

    which for s = 0 is :math:`\rho' = \rho\,(1 + v \kappa / L_F^2)^{-1}`.

    Formal guarantees: if D_alpha <= alpha * rate for every alpha > 1 in both directions, then the
    same holds after the step with the rate that is returned. From a common fixed start (rate 0,
    inverse constant 0) the rate is never below mu**2 / 2 of Theorem A.

    Args:
        rate: rho in [0, inf].
        inverse_constant: 1/kappa >= 0 of both laws; 0 for a point.
        update_lipschitz: L_F >= 0 of phi, on both data sets.
        sensitivity: s >= 0.
        noise_variance: v >= 0, in each coordinate.
        prox_lipschitz: L_T >= 0 of the map T, the same for both runs.

    Returns:
        rate and inverse constant after the step.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Lemmas 2, 3, 8, 9, with the balance gamma
    of Lemma 2 chosen best at every instant instead of 1/2 throughout; Chen & Liu 2025, Corollary
    4.5 (case 1: s = 0) and Lemma C.3.
    """
    if update_lipschitz == 0:  # the step forgets where it started
        rate = inverse_constant = 0.0
    spread = update_lipschitz**2 * inverse_constant + noise_variance
    after = prox_lipschitz**2 * spread
    if rate == math.inf:
        return math.inf, after
    if noise_variance == 0:
        return (math.inf if sensitivity else rate), after
    if spread < math.inf:
        distance = math.sqrt(2 * rate * inverse_constant)
        if sensitivity == 0:
            return rate * (update_lipschitz**2 * inverse_constant / spread), after
        if distance * noise_variance >= sensitivity * update_lipschitz * inverse_constant:
            return (update_lipschitz * distance + sensitivity) ** 2 / (2 * spread), after
    return rate + sensitivity**2 / (2 * noise_variance), after
