r"""Chourasia, Ye, Shokri 2021 (arXiv 2102.05855): noisy gradient descent as a Langevin diffusion.

Corollary 1, for full batches of n records, lambda-strongly convex losses, noise N(0, 2 eta sigma^2
I) on the iterate and a sum of gradients that one record moves by S_g:

.. math:: D_\alpha \le \frac{\alpha S_g^2}{\lambda \sigma^2 n^2}
          \left(1 - e^{-\lambda \eta K / 2}\right)

Theorem A is never larger than it, nor than the recursion behind it (docs/papers/last_iterate.md).
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, Proof
from hidden_state_accountants.bounds.paper import PaperBound
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
from hidden_state_accountants.process.noisy_process import noisy_process, unmet_conditions

_NEVER_BENT = (LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)  # a clip leaves them in their class


def _corollary_1(
    sensitivity: float, variance: float, learning_rate: float, convexity: float, num_steps: int
) -> float:
    """D_alpha/alpha as printed, with S_g = n s/eta and sigma^2 = v/(2 eta); lambda > 0."""
    if sensitivity == 0 or learning_rate == 0:
        return 0.0
    if variance == 0:
        return math.inf
    # Chourasia, Ye, Shokri 2021, Corollary 1, arXiv 2102.05855
    exponent = convexity * learning_rate * num_steps / 2
    return 2 * sensitivity**2 / (convexity * learning_rate * variance) * -math.expm1(-exponent)


@attrs.frozen
class Langevin(PaperBound):
    r"""The Langevin analysis of full-batch noisy gradient descent.

    `analysis="published"`: Corollary 1. `analysis="sound"`: Theorem A, which is never larger than
    the recursion behind it (Lemmas 2 and 3), and covers schedules as well.

    Formal guarantees:
      - Relations: those of Theorem A for FULL batches. Both analyses are proved for them: Corollary
        1 is at least alpha mu**2 / 2 of Theorem A.
      - Start: fixed and data independent, which satisfies the log-Sobolev inequality with every
        constant. Corollary 1 holds for it as for the paper's Gaussian start.
      - Conditions: with lambda = strong convexity and beta = smoothness of the loss, weight decay
        included, lambda > 0 and learning_rate < 1/beta at every step, and clipping never acts.
      - Released ("sound"): the last iterate and those after `release_steps`.
    """

    key = "langevin"
    orders = (BatchOrder.FULL,)
    paper = Citation("Chourasia, Ye, Shokri 2021", "Lemmas 2 and 3", "2102.05855")
    published_theorem = "Corollary 1"

    def paper_conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Full batches of a strongly convex loss that is never clipped, and small steps."""
        unmet = list(unmet_conditions(event, relation, self.orders))
        if event.loss is not None:
            unmet += _unmet_curvature(event, event.loss)
        if not self.sound:
            unmet += [*constant_parameters(event), *last_iterate_alone(event)]
        return unmet

    def published(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """A Rényi guarantee that is linear in the order."""
        process = noisy_process(event, relation)
        rate = _corollary_1(
            float(process.sensitivity[0]),
            float(process.noise_std[0]) ** 2,
            float(event.per_step("learning_rate")[0]),
            float(_convexity(event)[0]),
            event.num_steps,
        )
        return Proof(
            curve=RdpCurve(functools.partial(np.multiply, rate)),
            theorem=f"{self.citation}, fixed start",
        )

    def event_assumptions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """Those of every run, and the start."""
        start = "the initial model is fixed, or random and data independent"
        return (
            *super().event_assumptions(event, relation),
            Assumption.declared(start, Topic.START),
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
            "lambda > 0 at every step (weight_decay, or LossGeometry.strongly_convex)",
            f"{convexity[weak]:g} at step {weak + 1}",
        ),
        *unless(
            bool(eta[long] * beta[long] < 1),
            "step size",
            f"learning_rate < 1/beta = {1 / float(beta[long] or math.inf):g} (lower it)",
            f"{eta[long]:g} at step {long + 1}",
        ),
        *unless(
            loss.kind in _NEVER_BENT or lipschitz <= clip,
            "no clipping",
            "loss.lipschitz <= clip_norm, so that clipping never acts (raise clip_norm)",
            f"loss.lipschitz {loss.lipschitz} and clip_norm {clip:g}",
        ),
    ]
