r"""Noisy gradient descent as a Langevin diffusion: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855).

Full batches, strongly convex and smooth losses, noise N(0, 2 eta sigma^2 I) on the iterate; all
results are Rényi divergences. Theorem A is never larger (docs/theory/langevin.md). The formulas as
printed, Theorems 1 to 4 with their corollaries: `bounds.langevin.formulas`.
"""

from __future__ import annotations

import functools

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
from hidden_state_accountants.bounds.langevin.formulas import strongly_convex_rate
from hidden_state_accountants.bounds.solvers.log_sobolev import log_sobolev_step
from hidden_state_accountants.curves.base import RdpCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.guarantee import Assumption, Topic
from hidden_state_accountants.process.conditions import (
    Unmet,
    UnmetCondition,
    constant_parameters,
    last_iterate_alone,
)
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

_NEVER_BENT = (LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)  # a clip leaves them in their class


@attrs.frozen
class Langevin(HiddenStateBound):
    r"""The Langevin analysis of full-batch noisy gradient descent.

    `analysis="published"`: Corollary 1,

    .. math:: D_\alpha \le \frac{\alpha S_g^2}{\lambda \sigma^2 n^2}
              \left(1 - e^{-\lambda \eta K / 2}\right).

    `analysis="sound"`: the log-Sobolev recursion behind it from the fixed start of the event, with
    the inequality of Lemma 2 balanced best at every instant; smaller, and for schedules as well.

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
    analyses = (SOUND, PUBLISHED)
    dominated_by = ("shifted_interpolation",)
    paper = Citation("Chourasia, Ye, Shokri 2021", "Lemmas 2 and 3", "2102.05855")
    published_theorem = "Corollary 1"

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Full batches of a strongly convex loss that is never clipped, and small steps."""
        unmet = list(unmet_conditions(event, relation, (BatchOrder.FULL,)))
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
            curve=RdpCurve(functools.partial(_linear_in_order, rate)),
            theorem=f"{self.citation}, fixed start",
            assumptions=(
                Assumption.declared(
                    "the initial model is fixed, or random and data independent", Topic.START
                ),
            ),
        )


def _linear_in_order(rate: float, orders: np.ndarray) -> np.ndarray:
    return rate * orders


def recursion_rate(process: NoisyProcess) -> float:
    """The sum over the segments between releases of the rate of `log_sobolev_step`."""
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


def _corollary_rate(event: LastIterateDpEvent, process: NoisyProcess) -> float:
    assert event.loss is not None
    eta, decay = float(event.per_step("learning_rate")[0]), float(event.per_step("weight_decay")[0])
    if eta == 0:
        return 0.0
    size = event.batch_size
    return strongly_convex_rate(
        total_sensitivity=float(process.sensitivity[0]) * size / eta,
        dataset_size=size,
        noise_std=float(process.noise_std[0]) / (2 * eta) ** 0.5,
        learning_rate=eta,
        num_steps=event.num_steps,
        strong_convexity=_lowest_curvature(event.loss) + decay,
    )


def _lowest_curvature(loss: LossGeometry) -> float:
    if loss.kind is LossKind.STRONGLY_CONVEX:
        return loss.strong_convexity
    return -(loss.smoothness if loss.kind is LossKind.HOELDER else loss.weak_convexity)


def _unmet_curvature(event: LastIterateDpEvent, loss: LossGeometry) -> Unmet:
    unmet = []
    event = event.one_step_if_constant()
    eta, decay = event.per_step("learning_rate"), event.per_step("weight_decay")
    convexity = decay + _lowest_curvature(loss)
    worst = int(np.argmin(convexity))
    if not convexity[worst] > 0:
        unmet.append(
            UnmetCondition(
                "strong convexity",
                "lambda > 0 at every step (weight_decay, or LossGeometry.strongly_convex), "
                "or LastIterateAccountant",
                f"{convexity[worst]:g} at step {worst + 1}",
            )
        )
    product = eta * (loss.smoothness + decay)
    worst = int(np.argmax(product))
    if not product[worst] < 1:
        limit = 1 / float(loss.smoothness + decay[worst])
        unmet.append(
            UnmetCondition(
                "step size",
                f"learning_rate < 1/beta = {limit:g} (lower it, or use LastIterateAccountant)",
                f"{eta[worst]:g} at step {worst + 1}",
            )
        )
    if loss.kind not in _NEVER_BENT and event.clip_norm is not None:
        clip = float(event.per_step("clip_norm").min())
        if loss.lipschitz is None or loss.lipschitz > clip:
            unmet.append(
                UnmetCondition(
                    "no clipping",
                    "loss.lipschitz <= clip_norm, so that clipping never acts (raise clip_norm, "
                    "or use LastIterateAccountant)",
                    f"loss.lipschitz {loss.lipschitz} and clip_norm {clip:g}",
                )
            )
    return unmet
