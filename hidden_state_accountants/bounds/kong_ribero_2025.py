r"""Kong & Ribero 2025 (arXiv 2407.05237): cyclic batches, clipping, weakly convex losses.

With :math:`L` a Lipschitz constant of the update, :math:`s = 2\lambda C/b` and
:math:`\theta_L(n) = L^{2(n-1)} / \sum_{j<n} L^{2j}` the shifts of every epoch are spent within it:

.. math:: D_\alpha \le \frac{\alpha s^2}{\sigma^2}\,[1 + E\,\theta_L(\ell)]

What is published, what is sound and where the two differ: docs/papers/last_iterate.md.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, Proof
from hidden_state_accountants.bounds.paper import (
    PaperBound,
    in_units_of_noise,
    unmet_for_constant_run,
)
from hidden_state_accountants.curves.base import RdpCurve
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.process.conditions import Unmet, linear_modulus, unless
from hidden_state_accountants.process.noisy_process import clips_act, noisy_process

_UNSOUND = (
    "the statement has L_lambda where the proof for clipped gradients gives sqrt(2)*L_lambda: a "
    'clipped step of a convex loss can expand. Use analysis="sound", or declare a loss.lipschitz '
    "of at most the clip norm"
)


def theta(lipschitz: float, steps: np.ndarray | int) -> np.ndarray:
    r"""The share of a squared shift that :math:`n` steps with Lipschitz constant L must pay.

    .. math:: \theta_L(n) = \frac{L^{2(n-1)}}{\sum_{j=0}^{n-1} L^{2j}}, \qquad \theta_L(0) = 0
    """
    n = np.asarray(steps, dtype=np.float64)
    if lipschitz == 0:  # everything is forgotten at the next step
        return (n == 1).astype(np.float64)
    # Kong & Ribero 2025, equation (15), arXiv 2407.05237: 1 / sum_{j<n} L^(-2j)
    log_ratio = -2 * math.log(lipschitz)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        total = n if log_ratio == 0 else np.expm1(n * log_ratio) / math.expm1(log_ratio)
        return np.where(n > 0, 1 / total, 0.0)


def published_lipschitz(learning_rate: float, smoothness: float, weak_convexity: float) -> float:
    r"""L_lambda of an update without clipping, for learning_rate <= 1/(M + m).

    .. math:: L_\lambda = \sqrt{1 + 2\lambda m\Big[1 + \frac{m}{2(M + m)}\Big]}
    """
    m = weak_convexity
    if m == 0:
        return 1.0
    # Kong & Ribero 2025, equation (13), arXiv 2407.05237
    return math.sqrt(1 + 2 * learning_rate * m * (1 + m / (2 * (smoothness + m))))


def theorem_2_2(lipschitz: float, diameter: float, sensitivity: float) -> float:
    """2 D_alpha/alpha of a projected run; lengths in units of the noise."""
    # Kong & Ribero 2025, Theorem 2.2, equation (16), arXiv 2407.05237
    total = lipschitz * diameter + sensitivity
    return total * total


def theorem_2_3(lipschitz: float, num_steps: int, period: int, sensitivity: float) -> float:
    """2 D_alpha/alpha as stated: equation (17) with sqrt(2)*L_lambda, (19) with L_lambda."""
    # Kong & Ribero 2025, Theorem 2.3, equations (17), (19), arXiv 2407.05237; s = 2 lambda C/b
    epochs = -(-num_steps // period)
    return 2 * sensitivity * sensitivity * (1 + epochs * float(theta(lipschitz, period)))


@attrs.frozen
class KongRibero(PaperBound):
    """The smallest applicable bound of Kong & Ribero 2025 for FULL and CYCLIC runs.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's "swap" model) and REPLACE_SPECIAL (half the
        sensitivity); ADD_OR_REMOVE_ONE for FULL batches, analysis="sound" only.
      - Released: the last iterate alone. Constant hyper-parameters.
      - analysis="sound": what Theorem A proves (`ShiftedInterpolation`), whose shifts include those
        of both theorems, with this package's modulus (clipping, decoupled decay).
      - analysis="published": the statements (16), (17), (19) as Renyi bounds; `caveat` is set where
        Theorem 2.2 is used under clipping. Corollaries C.2 and C.3 are never smaller.
      - Conditions, both: learning_rate <= 1/(2(M + m)), or 1/(M + m) if clipping never acts.

    Source: Kong, Ribero 2025 (arXiv 2407.05237).
    """

    key = "kong_ribero"
    paper = Citation("Kong & Ribero 2025", "Theorems 2.2 and 2.3", "2407.05237")

    def paper_conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run of a loss with a linear modulus, and a small learning rate."""
        unmet = [
            *unmet_for_constant_run(event, relation, self.orders, published=not self.sound),
            *linear_modulus(event.loss),
        ]
        return unmet or _unmet_learning_rate(event)

    def published(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The smallest of the statements with its name."""
        process = noisy_process(event, relation)
        (s, _, diameter), (big, small) = in_units_of_noise(process), _curvatures(event)
        learning_rate = float(event.per_step("learning_rate")[0])
        lipschitz = published_lipschitz(learning_rate, big, small)
        is_clipped = bool(clips_act(event)[0])
        factor, theorem = (math.sqrt(2), "(17)") if is_clipped else (1.0, "(19)")
        twice = math.inf  # no noise
        if s < math.inf:
            twice = theorem_2_3(factor * lipschitz, event.num_steps, process.period, s)
        candidates = [(twice, f"Theorem 2.3 {theorem}")]
        if diameter < math.inf and learning_rate * 2 * (big + small) <= 1:
            candidates.append((theorem_2_2(lipschitz, diameter, s), "Theorem 2.2"))
        twice, theorem = min(candidates)
        return Proof(
            curve=RdpCurve(functools.partial(np.multiply, twice / 2)),
            theorem=f"{self.cited(theorem)}, as published",
            caveat=_UNSOUND if theorem == "Theorem 2.2" and is_clipped else "",
        )


def _curvatures(event: LastIterateDpEvent) -> tuple[float, float]:
    """(M, m) of assumption (A2)."""
    loss = event.loss
    assert loss is not None
    lower = loss.smoothness if loss.kind is LossKind.HOELDER else loss.weak_convexity
    return loss.smoothness, lower


def _unmet_learning_rate(event: LastIterateDpEvent) -> Unmet:
    total = sum(_curvatures(event)) * (2 if clips_act(event)[0] else 1)
    learning_rate = float(event.per_step("learning_rate")[0])
    is_met, needed = learning_rate * total <= 1, f"learning_rate <= {1 / (total or 1):g}"
    return unless(is_met, "learning rate", f"{needed} (lower it)", f"{learning_rate:g}")
