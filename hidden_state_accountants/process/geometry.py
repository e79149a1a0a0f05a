r"""The modulus of the update map: how much a step can stretch the distance of two iterates.

For :math:`\phi(x) = (1 - \eta w)x - \eta\, G(x)`, G the mean of b per-example gradients (clipped or
not), every function returns a c with :math:`|\phi(x) - \phi(y)| \le c\,|x - y|`. Proofs:
docs/theory/moduli.md. All arguments may be arrays that broadcast.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hidden_state_accountants import validate
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind

SMALLEST_MODULUS = 1e-300
"""What a modulus of 0 is rounded up to where its logarithm is taken."""


def unclipped_update_lipschitz(
    learning_rate: npt.ArrayLike,
    smoothness: float,
    lower_curvature: float = 0.0,
    weight_decay: npt.ArrayLike = 0.0,
) -> np.ndarray:
    r"""Modulus of a step in which clipping never acts.

    .. math:: c = \max(|1 - \eta w - \eta h|, |1 - \eta w - \eta M|)

    for Hessians between h (mu if strongly convex, 0 if convex, -m if weakly convex) and M. Exactly
    b terms must be averaged.
    """
    eta, w = np.asarray(learning_rate), np.asarray(weight_decay)
    decay = 1 - eta * w
    return np.maximum(np.abs(decay - eta * lower_curvature), np.abs(decay - eta * smoothness))


def clipped_update_lipschitz(
    learning_rate: npt.ArrayLike,
    smoothness: float,
    weak_convexity: float = 0.0,
    weight_decay: npt.ArrayLike = 0.0,
) -> float | np.ndarray:
    r"""Modulus of a step with per-example clipping of M-smooth, m-weakly convex losses.

    With :math:`e = \eta(M - m)/4` and :math:`r = \eta(M + m)/4`

    .. math::
        c(\eta) = \begin{cases}
          1 + \eta m & e \le 0 \text{ or } r(1 - 2e) \ge 2e(1 - e) \\
          \eta M - 1 & e \ge 1 \text{ or } r(2e - 1) \ge 2e(1 - e) \\
          \sqrt{1 + r^2 / (e(1 - e))} & \text{otherwise}
        \end{cases}

    which for convex losses (m = 0) is :math:`2/\sqrt{4 - \eta M}` up to :math:`\eta M = 3`. It is
    the exact maximum, not a grid value. Decoupled decay: :math:`(1-\eta w)\,c(\eta/(1-\eta w))`.

    Formal guarantees: valid for every clip that is firmly nonexpansive (the projection on a ball,
    and Opacus' factor min(1, C/(norm + 1e-6))), any clip norm, batch and b; not for normalisation.

    Args:
        learning_rate: eta >= 0.
        smoothness: M >= 0.
        weak_convexity: m >= 0.
        weight_decay: w >= 0 with learning_rate * weight_decay < 1.

    Returns:
        c >= 0, a float if learning_rate and weight_decay are numbers.

    Source: this project (the open question of Chien & Li 2024, arXiv 2410.01068, section 5).
    """
    eta = np.asarray(learning_rate, dtype=np.float64)
    w = np.asarray(weight_decay, dtype=np.float64)
    big = validate.real("smoothness", smoothness, minimum=0)
    small = validate.real("weak_convexity", weak_convexity, minimum=0)
    for name, array in (("learning_rate", eta), ("weight_decay", w)):
        if not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(f"Expected finite {name} >= 0, got {array!r}.")
    decay = 1 - eta * w
    if not (decay > 0).all():
        raise ValueError(
            f"Expected learning_rate * weight_decay < 1, got {float(np.max(eta * w)):g}."
        )
    result = decay * _clipped(eta / decay, big, small)
    return float(result) if result.ndim == 0 else result


def _clipped(eta: np.ndarray, big: float, small: float) -> np.ndarray:
    e = eta * (big - small) / 4
    r = eta * (big + small) / 4
    product = 2 * e * (1 - e)
    inside = np.where((e > 0) & (e < 1), e * (1 - e), 1.0)
    return np.where(
        (e <= 0) | ((e < 1) & (r * (1 - 2 * e) >= product)),
        1 + eta * small,
        np.where(
            (e >= 1) | (r * (2 * e - 1) >= product),
            eta * big - 1,
            np.sqrt(1 + r * r / inside),
        ),
    )


def update_lipschitz(
    loss: LossGeometry,
    learning_rate: np.ndarray,
    weight_decay: np.ndarray,
    clip_is_active: np.ndarray,
) -> np.ndarray:
    """Modulus per step of the update that averages exactly b gradients of `loss`.

    A generalized linear model keeps the unclipped row: clipping the gradient loss'(z) x gives the
    gradient of another convex function of z whose second derivative is no larger.

    Args:
        loss: Any kind but `hoelder`, whose modulus is not linear.
        learning_rate: Shape (num_steps,).
        weight_decay: Shape (num_steps,).
        clip_is_active: Booleans of shape (num_steps,); False where the gradient bound is at most
            the clip norm.
    """
    if loss.kind is LossKind.HOELDER and loss.exponent != 1:
        raise ValueError("A Hölder gradient has no linear modulus.")
    lower = loss.strong_convexity if loss.kind is LossKind.STRONGLY_CONVEX else -loss.weak_convexity
    if loss.kind is LossKind.HOELDER:  # exponent 1: smooth, nothing known from below
        lower = -loss.smoothness
    unclipped = unclipped_update_lipschitz(learning_rate, loss.smoothness, lower, weight_decay)
    if loss.kind in (LossKind.LINEAR, LossKind.GENERALIZED_LINEAR) or not clip_is_active.any():
        return unclipped
    clipped = clipped_update_lipschitz(learning_rate, loss.smoothness, max(-lower, 0), weight_decay)
    return np.where(clip_is_active, clipped, unclipped)
