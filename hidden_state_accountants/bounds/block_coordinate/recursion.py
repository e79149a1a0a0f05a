"""The recursion of Chen & Liu 2025 for one block, for every position of the record at once."""

from __future__ import annotations

import numpy as np
from scipy import special

from hidden_state_accountants.bounds.solvers.log_sobolev import log_sobolev_step


def published_rates(
    step_size: float,
    noise_variances: np.ndarray,
    gradient_sensitivity: float,
    batch_size: int,
    update_lipschitz: float,
    prox_lipschitz: float,
) -> np.ndarray:
    r"""epsilon_K(alpha, j_0) / alpha of Theorem 4.6, by its own recursion.

    Per step (k, j), with c the log-Sobolev constant of Lemma C.3 (infinite at the start)

    .. math::
        \rho_{j_0} \leftarrow \begin{cases}
          \rho_{j_0} + \eta S_g^2 / (4 b^2 o(k, j)) & j = j_0 \\
          \rho_{j_0} (1 + 2\eta\,o(k, j)\,c / L_F^2)^{-1/L_T^2} & j \ne j_0
        \end{cases} \qquad
        \frac{1}{c} \leftarrow L_T^2 \Big(\frac{L_F^2}{c} + 2\eta\,o(k, j)\Big)

    The closed form (9) has index slips (docs/theory/block_coordinate.md) and is not used.

    Args:
        step_size: eta.
        noise_variances: o, shape (epochs, batches).
        gradient_sensitivity: S_g.
        batch_size: b.
        update_lipschitz: L_F.
        prox_lipschitz: L_T.

    Returns:
        Shape (batches,).

    Source: Chen & Liu 2025 (arXiv 2407.08233), Corollary 4.5 and Lemma C.3.
    """
    rates = np.zeros(noise_variances.shape[1])
    inverse = 0.0
    exponent = prox_lipschitz**-2 if prox_lipschitz else np.inf
    # eta S_g^2 / (4 b^2 o) = s^2 / (2 v) with s = eta S_g / b and v = 2 eta o
    square = (step_size * gradient_sensitivity / batch_size) ** 2
    for row in (2 * step_size * noise_variances).tolist():
        for j, variance in enumerate(row):
            kept = float(rates[j])
            decay, inverse = log_sobolev_step(
                1.0, inverse, update_lipschitz, 0.0, variance, prox_lipschitz
            )
            rates = rates * decay**exponent if decay else np.zeros_like(rates)
            rates[j] = kept
            if square:
                rates[j] += square / (2 * variance) if variance else np.inf
    return rates


def secret_position_rdp(rates: np.ndarray, num_blocks: int, orders: np.ndarray) -> np.ndarray:
    r"""Theorem 4.6: the batch of the record is secret and uniform; the blocks' losses add up.

    .. math:: \varepsilon_K(\alpha) = \frac{p}{\alpha - 1}
              \log \frac{b}{n} \sum_{j_0} e^{(\alpha - 1)\alpha\rho_{j_0}}
    """
    if not np.isfinite(rates).all():
        return np.full(orders.shape, np.inf)
    # Chen & Liu 2025, Theorem 4.6, arXiv 2407.08233
    exponents = ((orders - 1) * orders)[..., None] * rates
    top = exponents.max(axis=-1)
    # log mean e^x; the second form cancels for small x, the first overflows for large ones
    small = np.log1p(np.expm1(np.minimum(exponents, 1.0)).mean(axis=-1))
    large = special.logsumexp(exponents, axis=-1) - np.log(len(rates))
    return num_blocks * np.where(top < 1, small, large) / (orders - 1)
