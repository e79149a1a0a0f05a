r"""Chourasia, Ye, Shokri 2021 (arXiv 2102.05855): noisy gradient descent as a Langevin diffusion.

Corollary 1, for full batches of n records, lambda-strongly convex losses, noise N(0, 2 eta sigma^2
I) on the iterate and a sum of gradients that one record moves by S_g:

.. math:: D_\alpha \le \frac{\alpha S_g^2}{\lambda \sigma^2 n^2}
          \left(1 - e^{-\lambda \eta K / 2}\right)

The recursion behind it (Lemmas 2 and 3) is `log_sobolev_step`. Theorem A is never larger than
either (docs/theory/langevin.md).
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
from hidden_state_accountants.curves.base import RdpCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.guarantee import Assumption, Topic
from hidden_state_accountants.process.conditions import (
    Unmet,
    constant_parameters,
    last_iterate_alone,
    unless,
)
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

_NEVER_BENT = (LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)  # a clip leaves them in their class


def corollary_1(
    sensitivity: float, variance: float, learning_rate: float, convexity: float, num_steps: int
) -> float:
    """D_alpha/alpha as printed, with S_g = n s/eta and sigma^2 = v/(2 eta).

    Args:
        sensitivity: s >= 0, how far one record moves a step.
        variance: v >= 0 of the noise of a step.
        learning_rate: eta >= 0.
        convexity: lambda > 0, with weight decay.
        num_steps: K.
    """
    if sensitivity == 0 or learning_rate == 0:
        return 0.0
    if variance == 0:
        return math.inf
    # Chourasia, Ye, Shokri 2021, Corollary 1, arXiv 2102.05855
    exponent = convexity * learning_rate * num_steps / 2
    return 2 * sensitivity**2 / (convexity * learning_rate * variance) * -math.expm1(-exponent)


def log_sobolev_step(
    rate: float,
    inverse_constant: float,
    update_lipschitz: float,
    sensitivity: float,
    noise_variance: float,
    prox_lipschitz: float = 1.0,
) -> tuple[float, float]:
    r"""One step X <- T(phi(X) + N(0, v I)) of both runs, whose maps phi are at most s apart.

    Their divergence of every order alpha > 1 is at most alpha * rate before it, and both laws
    satisfy the log-Sobolev inequality with constant kappa. Proofs: docs/theory/langevin.md.

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


def recursion_rate(process: NoisyProcess) -> float:
    """D_alpha/alpha by the recursion: the sum over the segments between releases."""
    total = rate = inverse = 0.0
    releases = set(process.release_steps)
    steps = zip(
        process.contraction.tolist(),
        process.sensitivity.tolist(),
        np.square(process.noise_std).tolist(),
        strict=True,
    )
    for t, (contraction, sensitivity, variance) in enumerate(steps, start=1):
        rate, inverse = log_sobolev_step(rate, inverse, contraction, sensitivity, variance)
        if t in releases:  # the next segment starts at a point that both runs share
            total, rate, inverse = total + rate, 0.0, 0.0
    return total + rate


@attrs.frozen
class Langevin(HiddenStateBound):
    r"""The Langevin analysis of full-batch noisy gradient descent.

    `analysis="published"`: Corollary 1. `analysis="sound"`: the recursion behind it from the fixed
    start of the event, with the inequality of Lemma 2 balanced best at every instant; smaller, and
    for schedules as well.

    Formal guarantees:
      - Relations: those of Theorem A for FULL batches. Both analyses are proved for them: each is
        at least alpha mu**2 / 2 of Theorem A.
      - Start: fixed and data independent, which satisfies the log-Sobolev inequality with every
        constant. Corollary 1 holds for it as for the paper's Gaussian start.
      - Conditions: with lambda = strong convexity and beta = smoothness of the loss, weight decay
        included, lambda > 0 and learning_rate < 1/beta at every step, and clipping never acts.
      - Released ("sound"): the last iterate and those after `release_steps`, whose rates add up.
    """

    key = "langevin"
    orders = (BatchOrder.FULL,)
    analyses = (SOUND, PUBLISHED)
    dominated_by = ("shifted_interpolation",)
    paper = Citation("Chourasia, Ye, Shokri 2021", "Lemmas 2 and 3", "2102.05855")
    published_theorem = "Corollary 1"

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Full batches of a strongly convex loss that is never clipped, and small steps."""
        unmet = list(unmet_conditions(event, relation, self.orders))
        if event.loss is not None:
            unmet += _unmet_curvature(event, event.loss)
        if not self.sound:
            unmet += [*constant_parameters(event), *last_iterate_alone(event)]
        return unmet

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """A Rényi guarantee that is linear in the order."""
        process = noisy_process(event, relation)
        rate = recursion_rate(process) if self.sound else _corollary_rate(event, process)
        return Proof(
            curve=RdpCurve(functools.partial(np.multiply, rate)),
            theorem=f"{self.citation}, fixed start",
            assumptions=(
                Assumption.declared(
                    "the initial model is fixed, or random and data independent", Topic.START
                ),
            ),
        )


def _corollary_rate(event: LastIterateDpEvent, process: NoisyProcess) -> float:
    return corollary_1(
        float(process.sensitivity[0]),
        float(process.noise_std[0]) ** 2,
        float(event.per_step("learning_rate")[0]),
        float(_convexity(event)[0]),
        event.num_steps,
    )


def _convexity(event: LastIterateDpEvent) -> np.ndarray:
    """lambda of every step."""
    loss = event.loss
    assert loss is not None
    if loss.kind is LossKind.STRONGLY_CONVEX:
        return event.per_step("weight_decay") + loss.strong_convexity
    lowest = loss.smoothness if loss.kind is LossKind.HOELDER else loss.weak_convexity
    return event.per_step("weight_decay") - lowest


def _unmet_curvature(event: LastIterateDpEvent, loss: LossGeometry) -> Unmet:
    event = event.one_step_if_constant()
    eta, beta = event.per_step("learning_rate"), loss.smoothness + event.per_step("weight_decay")
    convexity = _convexity(event)
    weak, long = int(np.argmin(convexity)), int(np.argmax(eta * beta))
    clip = math.inf if event.clip_norm is None else float(event.per_step("clip_norm").min())
    lipschitz = math.inf if loss.lipschitz is None else loss.lipschitz
    return [
        *unless(
            bool(convexity[weak] > 0),
            "strong convexity",
            "lambda > 0 at every step (weight_decay, or LossGeometry.strongly_convex), "
            "or LastIterateAccountant",
            f"{convexity[weak]:g} at step {weak + 1}",
        ),
        *unless(
            bool(eta[long] * beta[long] < 1),
            "step size",
            f"learning_rate < 1/beta = {1 / float(beta[long] or math.inf):g} "
            "(lower it, or use LastIterateAccountant)",
            f"{eta[long]:g} at step {long + 1}",
        ),
        *unless(
            loss.kind in _NEVER_BENT or lipschitz <= clip,
            "no clipping",
            "loss.lipschitz <= clip_norm, so that clipping never acts (raise clip_norm, "
            "or use LastIterateAccountant)",
            f"loss.lipschitz {loss.lipschitz} and clip_norm {clip:g}",
        ),
    ]
