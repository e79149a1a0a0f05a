r"""Kong & Ribero 2025 (arXiv 2407.05237): cyclic batches, clipping, weakly convex losses.

With :math:`L` a Lipschitz constant of the update, :math:`s = 2\lambda C/b` and
:math:`\theta_L(n) = L^{2(n-1)} / \sum_{j<n} L^{2j}` the shifts of every epoch are spent within it:

.. math:: D_\alpha \le \frac{\alpha s^2}{2\sigma^2}\,[E'\,\theta_L(\ell) + \theta_L(r)]

What is published, what is sound and where the two differ: docs/theory/kong_ribero.md.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import (
    PUBLISHED,
    SOUND,
    Citation,
    HiddenStateBound,
    Proof,
)
from hidden_state_accountants.bounds.constant_run import (
    ConstantRun,
    constant_run,
    unmet_for_constant_run,
)
from hidden_state_accountants.curves.base import GaussianCurve, RdpCurve
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.process.conditions import (
    Unmet,
    UnmetCondition,
    linear_modulus,
    refusal_in_words,
)

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


def sharpened_theorem_2_3(
    lipschitz: float, num_steps: int, period: int, position: int | None, sensitivity: float
) -> float:
    """mu**2 of the record's position (None: the worst), from Proposition A.5(a).

    The record takes part E' + 1 times; E' epochs pay theta(period) each, the rest of the run
    theta(its length).
    """
    positions = np.arange(min(period, num_steps)) if position is None else np.array([position])
    left = np.maximum(num_steps - positions, 0)  # steps from the first participation on
    # Kong & Ribero 2025, Proposition A.5(a) with tau = 0, equation (26), arXiv 2407.05237
    full = np.where(left >= period, left // period, 0) * theta(lipschitz, period)
    return sensitivity * sensitivity * float(np.max(full + theta(lipschitz, left % period)))


def sharpened_theorem_2_2(run: ConstantRun) -> float:
    """mu**2 from the last step alone: the domain bounds the distance before it."""
    if run.diameter == math.inf:
        return math.inf
    total = min(
        run.contraction() * run.diameter + run.sensitivity,
        run.decay * run.diameter + run.drift,
    )
    return total * total


@attrs.frozen
class KongRibero(HiddenStateBound):
    """The smallest applicable bound of Kong & Ribero 2025 for FULL and CYCLIC runs.

    Formal guarantees:
      - Relation: REPLACE_ONE (the paper's "swap" model) and REPLACE_SPECIAL (half the
        sensitivity); ADD_OR_REMOVE_ONE for FULL batches, analysis="sound" only.
      - Released: the last iterate alone. Constant hyper-parameters.
      - analysis="sound": mu-GDP by the paper's shifts inside Theorem A (docs/theory/theorem_a.md),
        with this package's modulus (clipping, decoupled decay), the constant 2 alpha that the proof
        gives and the tail of the record's own position. Theorem 2.2 with the clipped modulus.
      - analysis="published": the statements (16), (17), (19) as Renyi bounds; `caveat` is set where
        Theorem 2.2 is used under clipping. Corollaries C.2 and C.3 are never smaller.
      - Conditions, both: learning_rate <= 1/(2(M + m)), or 1/(M + m) if clipping never acts.

    Source: Kong, Ribero 2025 (arXiv 2407.05237).
    """

    key = "kong_ribero"
    analyses = (SOUND, PUBLISHED)
    # (16) is a window of one step, which may use the drift; (17) and (19) are feasible shifts.
    dominated_by = ("shifted_interpolation",)
    paper = Citation("Kong & Ribero 2025", "Theorems 2.2 and 2.3", "2407.05237")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A constant run of a loss with a linear modulus, and a small learning rate."""
        unmet = [
            *unmet_for_constant_run(event, relation, self.orders, published=not self.sound),
            *linear_modulus(event.loss),
        ]
        return unmet or _unmet_learning_rate(constant_run(event, relation))

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The smallest bound with the theorem that gives it."""
        run = constant_run(event, relation)
        if self.sound:
            mu_squared, theorem = _sound(run)
            return Proof(
                curve=GaussianCurve(math.sqrt(mu_squared)),
                theorem=f"{self.citation.of(theorem)}, sharpened",
            )
        twice, theorem = _published(run)
        return Proof(
            curve=RdpCurve(functools.partial(np.multiply, twice / 2)),
            theorem=f"{self.citation.of(theorem)}, as published",
            caveat=_UNSOUND if theorem == "Theorem 2.2" and run.clip_is_active else "",
        )

    def refusal(self, event: LastIterateDpEvent, unmet: tuple[UnmetCondition, ...]) -> str:
        """In the words of the paper."""
        return refusal_in_words(f"Theorem 2.3 ({self.citation.authors})", unmet)


def _curvatures(loss: LossGeometry) -> tuple[float, float]:
    """(M, m) of assumption (A2)."""
    lower = loss.smoothness if loss.kind is LossKind.HOELDER else loss.weak_convexity
    return loss.smoothness, lower


def _unmet_learning_rate(run: ConstantRun) -> Unmet:
    total = sum(_curvatures(run.loss)) * (2 if run.clip_is_active else 1)
    if run.learning_rate * total <= 1:
        return []
    return [
        UnmetCondition(
            "learning rate",
            f"learning_rate <= {1 / total:g}",
            f"{run.learning_rate:g}",
            "Lower it, or use LastIterateAccountant.",
        )
    ]


def _published(run: ConstantRun) -> tuple[float, str]:
    if run.sensitivity == math.inf:  # no noise
        return math.inf, "Theorem 2.3"
    big, small = _curvatures(run.loss)
    unclipped = published_lipschitz(run.learning_rate, big, small)
    steps, s = (run.num_steps, run.period), run.sensitivity
    if run.clip_is_active:
        candidates = [(theorem_2_3(math.sqrt(2) * unclipped, *steps, s), "Theorem 2.3 (17)")]
    else:
        candidates = [(theorem_2_3(unclipped, *steps, s), "Theorem 2.3 (19)")]
    if run.diameter < math.inf and run.learning_rate * 2 * (big + small) <= 1:
        candidates.append((theorem_2_2(unclipped, run.diameter, s), "Theorem 2.2"))
    return min(candidates)


def _sound(run: ConstantRun) -> tuple[float, str]:
    if run.sensitivity == math.inf:  # no noise
        return math.inf, "Theorem 2.3"
    by_epochs = sharpened_theorem_2_3(
        run.contraction(), run.num_steps, run.period, run.position, run.sensitivity
    )
    return min((by_epochs, "Theorem 2.3"), (sharpened_theorem_2_2(run), "Theorem 2.2"))
