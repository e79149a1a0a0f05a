r"""The formulas of Chourasia, Ye, Shokri 2021 (arXiv 2102.05855) as printed.

Noisy gradient descent: theta <- Pi(theta - eta * grad L(theta) + N(0, 2 eta sigma^2 I)), L the mean
of n losses. Every `..._rate` is the divergence divided by its order: D_alpha <= alpha * rate for
all alpha > 1 (the last one: a lower bound). All arguments are numbers:

* total_sensitivity: S_g >= 0, the sensitivity of the SUM of the n gradients, one record replaced
* dataset_size: n
* noise_std: sigma > 0
* learning_rate: eta >= 0
* num_steps: K >= 0
"""

from __future__ import annotations

import math

import attrs

from hidden_state_accountants import validate


def _base(
    total_sensitivity: float,
    dataset_size: int,
    noise_std: float,
    learning_rate: float,
    num_steps: int,
) -> tuple[float, float]:
    """(S_g / (sigma n))**2 and eta K."""
    sensitivity = validate.magnitude("total_sensitivity", total_sensitivity)
    size = validate.integer("dataset_size", dataset_size, minimum=1)
    sigma = validate.magnitude("noise_std", noise_std)
    time = validate.magnitude("learning_rate", learning_rate) * validate.integer(
        "num_steps", num_steps, minimum=0
    )
    if sigma == 0:
        return (math.inf if sensitivity else 0.0), time
    return (sensitivity / (sigma * size)) ** 2, time


def _saturating(level: float, exponent: float) -> float:
    """level * (1 - exp(-exponent))."""
    return 0.0 if exponent == 0 else level * -math.expm1(-exponent)


def linear_rate(
    total_sensitivity: float,
    dataset_size: int,
    noise_std: float,
    learning_rate: float,
    num_steps: int,
) -> float:
    r"""Theorem 1: :math:`S_g^2\,\eta K / (4 \sigma^2 n^2)`, for any loss.

    Formal guarantees: equal to ordinary composition of the K Gaussian mechanisms.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Theorem 1 with S_v = S_g/n, T = eta K.
    """
    square, time = _base(total_sensitivity, dataset_size, noise_std, learning_rate, num_steps)
    return square * time / 4 if time else 0.0


def log_sobolev_rate(
    total_sensitivity: float,
    dataset_size: int,
    noise_std: float,
    learning_rate: float,
    num_steps: int,
    log_sobolev_constant: float,
) -> float:
    r"""Theorem 2: :math:`\frac{S_g^2}{2c\,\sigma^4 n^2}\,(1 - e^{-\sigma^2 c \eta K})`.

    Formal guarantees: holds if both tracing diffusions satisfy c-LSI throughout.

    Args:
        total_sensitivity: S_g.
        dataset_size: n.
        noise_std: sigma.
        learning_rate: eta.
        num_steps: K.
        log_sobolev_constant: c > 0.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Theorem 2.
    """
    square, time = _base(total_sensitivity, dataset_size, noise_std, learning_rate, num_steps)
    c = validate.magnitude("log_sobolev_constant", log_sobolev_constant, positive=True)
    if square == math.inf:
        return math.inf if time else 0.0
    product = c * noise_std**2
    return _saturating(square / (2 * product) if product else 0.0, product * time)


def strongly_convex_rate(
    total_sensitivity: float,
    dataset_size: int,
    noise_std: float,
    learning_rate: float,
    num_steps: int,
    strong_convexity: float,
) -> float:
    r"""Corollary 1: :math:`\frac{S_g^2}{\lambda\sigma^2 n^2}\,(1 - e^{-\lambda\eta K/2})`.

    Formal guarantees: lambda-strongly convex, beta-smooth losses, eta < 1/beta, and the start
    Pi(N(0, 2 sigma^2/lambda I)) or any fixed one. It is Theorem 2 with c = lambda/(2 sigma^2).

    Args:
        total_sensitivity: S_g.
        dataset_size: n.
        noise_std: sigma.
        learning_rate: eta.
        num_steps: K.
        strong_convexity: lambda > 0.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Corollary 1.
    """
    square, time = _base(total_sensitivity, dataset_size, noise_std, learning_rate, num_steps)
    convexity = validate.magnitude("strong_convexity", strong_convexity, positive=True)
    return _saturating(square / convexity, convexity * time / 2)


def squared_norm_rate(
    total_sensitivity: float,
    dataset_size: int,
    noise_std: float,
    learning_rate: float,
    num_steps: int,
) -> float:
    r"""Corollary 2: :math:`\frac{S_g^2}{(2-\eta)\sigma^2 n^2}\,(1 - e^{-(2-\eta)\eta K/2})`.

    Formal guarantees: the loss |theta - x|**2 / 2 on R^d, start 0, eta < 1.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Corollary 2.
    """
    square, time = _base(total_sensitivity, dataset_size, noise_std, learning_rate, num_steps)
    convexity = 2 - _below_one(learning_rate)
    return _saturating(square / convexity, convexity * time / 2)


def squared_norm_lower_rate(
    total_sensitivity: float,
    dataset_size: int,
    noise_std: float,
    learning_rate: float,
    num_steps: int,
) -> float:
    r"""Theorem 3, a LOWER bound: :math:`\frac{S_g^2}{4\sigma^2 n^2}\,(1 - e^{-\eta K})`.

    Formal guarantees: attained or exceeded by the loss |theta - x|**2 / 2 from the fixed start 0,
    eta < 1. From the paper's random start it is false (docs/theory/langevin.md).

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Theorem 3.
    """
    square, time = _base(total_sensitivity, dataset_size, noise_std, learning_rate, num_steps)
    _below_one(learning_rate)
    return _saturating(square / 4, time)


def _below_one(learning_rate: float) -> float:
    if not learning_rate < 1:
        raise ValueError(
            f"Expected learning_rate < 1 (the loss is 1-smooth), got {learning_rate!r}."
        )
    return learning_rate


@attrs.frozen
class Prescription:
    """What Theorem 4 prescribes.

    Attributes:
        noise_std: sigma.
        learning_rate: eta = lambda / (2 beta^2).
        num_steps: K*, for utility; the privacy holds for every number of steps.
    """

    noise_std: float
    learning_rate: float
    num_steps: int


def prescription_for_rdp(
    order: float,
    epsilon: float,
    *,
    lipschitz: float,
    strong_convexity: float,
    smoothness: float,
    dataset_size: int,
    dimension: int,
) -> Prescription:
    r"""Theorem 4 for (alpha, epsilon)-Rényi differential privacy.

    .. math:: \sigma^2 = \frac{4\alpha L^2}{\lambda \varepsilon n^2}, \qquad
              K^* = \frac{2\beta^2}{\lambda^2} \log\frac{n^2 \varepsilon}{\alpha d}

    Args:
        order: alpha > 1.
        epsilon: > 0.
        lipschitz: L > 0 of every loss, so that S_g = 2 L.
        strong_convexity: lambda > 0.
        smoothness: beta >= lambda.
        dataset_size: n.
        dimension: d >= 1.

    Returns:
        K* is rounded up, and 1 where the formula is below that.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Theorem 4, equation (71).
    """
    order = validate.real("order", order, above=1)
    epsilon = validate.magnitude("epsilon", epsilon, positive=True)
    return _prescription(
        4 * order / epsilon, epsilon / order, lipschitz, strong_convexity, smoothness,
        dataset_size, dimension,
    )  # fmt: skip


def prescription_for_dp(
    epsilon: float,
    delta: float,
    *,
    lipschitz: float,
    strong_convexity: float,
    smoothness: float,
    dataset_size: int,
    dimension: int,
) -> Prescription:
    r"""Theorem 4 for (epsilon, delta)-differential privacy.

    .. math:: \sigma^2 = \frac{8 L^2 (\varepsilon + 2\log(1/\delta))}{\lambda\varepsilon^2 n^2},
              \qquad K^* = \frac{2\beta^2}{\lambda^2}
              \log\frac{n^2\varepsilon^2}{4\log(1/\delta)\, d}

    Args:
        epsilon: In (0, 2 log(1/delta)].
        delta: In (0, 1).
        lipschitz: L > 0.
        strong_convexity: lambda > 0.
        smoothness: beta >= lambda.
        dataset_size: n.
        dimension: d >= 1.

    Returns:
        K* is rounded up, and 1 where the formula is below that.

    Source: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855), Theorem 4, equation (72).
    """
    delta = validate.real("delta", delta, above=0, maximum=1)
    log_delta = -math.log(delta)
    epsilon = validate.magnitude("epsilon", epsilon, positive=True)
    if epsilon > 2 * log_delta:
        raise ValueError(
            f"Expected epsilon <= 2 * log(1/delta) = {2 * log_delta:g}, got {epsilon!r}."
        )
    return _prescription(
        8 * (epsilon + 2 * log_delta) / epsilon**2, epsilon**2 / (4 * log_delta), lipschitz,
        strong_convexity, smoothness, dataset_size, dimension,
    )  # fmt: skip


def _prescription(
    noise_factor: float,
    privacy: float,
    lipschitz: float,
    strong_convexity: float,
    smoothness: float,
    dataset_size: int,
    dimension: int,
) -> Prescription:
    big = validate.magnitude("lipschitz", lipschitz, positive=True)
    convexity = validate.magnitude("strong_convexity", strong_convexity, positive=True)
    beta = validate.real("smoothness", smoothness, minimum=convexity, maximum=validate.LARGEST)
    size = validate.integer("dataset_size", dataset_size, minimum=1)
    d = validate.integer("dimension", dimension, minimum=1)
    steps = 2 * (beta / convexity) ** 2 * math.log(size**2 * privacy / d)
    return Prescription(
        noise_std=math.sqrt(noise_factor / convexity) * big / size,
        learning_rate=convexity / (2 * beta**2),
        num_steps=max(1, math.ceil(steps)),
    )
