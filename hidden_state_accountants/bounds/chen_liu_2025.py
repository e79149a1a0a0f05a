r"""Noisy mini-batch block coordinate descent (DP-MBCD): Chen & Liu 2025 (arXiv 2407.08233).

`analysis="sound"` is what is true of the algorithm; `analysis="published"` is Theorem 4.6, which
is not (docs/papers/block_coordinate.md).
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import PUBLISHED, SOUND, Bound, Citation, Proof
from hidden_state_accountants.bounds.composition import Composition
from hidden_state_accountants.bounds.paper import mean_over_positions
from hidden_state_accountants.bounds.shifted_interpolation import (
    ShiftedInterpolation,
    worst_mu_squared,
)
from hidden_state_accountants.curves.base import GaussianCurve, RdpCurve
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.guarantee import Assumption, Topic
from hidden_state_accountants.process.conditions import (
    Unmet,
    equal_batches,
    neighboring_relation,
    unless,
)
from hidden_state_accountants.process.noisy_process import NoisyProcess, update_lipschitz


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

    The closed form (9) has index slips (docs/papers/block_coordinate.md) and is not used. The
    noise variances have shape (epochs, batches), the result (batches,).

    Source: Chen & Liu 2025 (arXiv 2407.08233), Corollary 4.5 and Lemma C.3.
    """
    rates = np.zeros(noise_variances.shape[1])
    inverse = 0.0  # 1/c
    exponent = prox_lipschitz**-2 if prox_lipschitz else np.inf
    # eta S_g^2 / (4 b^2 o) = s^2 / (2 v) with s = eta S_g / b and v = 2 eta o
    square = (step_size * gradient_sensitivity / batch_size) ** 2
    for row in (2 * step_size * noise_variances).tolist():
        for j, variance in enumerate(row):
            kept = float(rates[j])
            stretched = update_lipschitz**2 * inverse
            spread = stretched + variance
            decay = stretched / spread if 0 < variance and spread < np.inf else 1.0
            decay *= update_lipschitz > 0  # what forgets its start needs no noise
            inverse = prox_lipschitz**2 * spread
            rates = rates * decay**exponent if decay else np.zeros_like(rates)
            rates[j] = kept
            if square:
                rates[j] += square / (2 * variance) if variance else np.inf
    return rates


def _theorem_4_6(rates: np.ndarray, num_blocks: int, orders: np.ndarray) -> np.ndarray:
    # Chen & Liu 2025, Theorem 4.6, arXiv 2407.08233: the losses of the blocks add up
    return num_blocks * mean_over_positions(rates, orders)


@attrs.frozen
class BlockCoordinate(Bound):
    r"""DP-MBCD: the sound account of the algorithm, or the published one.

    `analysis="sound"`, with :math:`s = \eta S_g/b` and :math:`\sigma_{k,j} = \sqrt{2\eta\,o(k,j)}`:

    * one block whose update is known to be c-Lipschitz: Theorem A with the contraction
      :math:`c\,p`, p <= 1 that of the prox;
    * otherwise composition of the sub-steps of all p blocks,
      :math:`\mu^2 = p \max_j \sum_k (s/\sigma_{k,j})^2`.

    `analysis="published"`: Theorem 4.6 by its own recursion, with
    :math:`L_F = |1 - \eta\beta|` unless `update_lipschitz` declares one.

    Formal guarantees ("sound"):
      - Relation: REPLACE_ONE and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for full batches. S_g is
        `event.sensitivity` under the relation that is asked for.
      - The partition into batches is public, the record in the worst of them.
      - Theorem A: the other blocks and the hidden variables are public, or recomputed from the
        block and one record with `block_loss` describing the composite. Composition: blocks count
        as released after each sub-step, s bounds the composite update.
      - Contraction comes from the prox of a strongly convex regulariser, from a strongly convex
        block loss where clipping never acts, or from what is declared.
    """

    key = "block_coordinate"
    event_type = BlockCoordinateDpEvent
    analyses = (SOUND, PUBLISHED)
    paper = Citation("Chen & Liu 2025", "Theorem 4.6", "2407.08233")

    def conditions(self, event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Neighbours that fixed batches admit, and equal batches; the paper's needs L_F."""
        return [
            *neighboring_relation(event, relation),
            *equal_batches(event),
            *unless(
                self.sound or _published_update_lipschitz(event) is not None,
                "Lipschitz constant of the update",
                'update_lipschitz, or a block_loss with a Lipschitz gradient (or analysis="sound")',
                "neither",
            ),
        ]

    def prove(self, event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> Proof:
        """Theorem A or composition, or what the paper claims."""
        if not self.sound:
            return _published(event, relation)
        contraction = block_contraction(event) if event.num_blocks == 1 else None
        if contraction is None:
            return Proof(
                curve=GaussianCurve(math.sqrt(_composed_mu_squared(event, relation))),
                theorem="composition of the sub-steps that hold the record (every block may be "
                "released after each)",
                assumptions=(_HIDDEN_WHEN_RELEASED,),
                citations=(Composition.paper,),
            )
        process, theorem_a = _process(event, relation, contraction), ShiftedInterpolation()
        return Proof(
            curve=GaussianCurve(math.sqrt(worst_mu_squared(process))),
            theorem=f"{theorem_a.cited('Theorem A')}, optimal shifts, one block",
            assumptions=(*_contraction_assumptions(event), _HIDDEN_FROM_THE_DATA),
            citations=(theorem_a.citation,),
        )

    def event_assumptions(
        self, event: BlockCoordinateDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """Sensitivity, steps and divisor, schedules, releases, the public partition."""
        return (
            Assumption.declared("one record per person", Topic.UNIT),
            Assumption.declared(_sensitivity_text(event, relation), Topic.SENSITIVITY),
            Assumption.declared(
                f"the step size {event.step_size:g} is a constant, and sums are divided by the "
                f"constant {event.batch_size}",
                Topic.DIVISOR,
            ),
            assumptions.fixed_in_advance("number of epochs and noise variances"),
            Assumption.declared("only the released blocks are seen", Topic.RELEASES),
            Assumption.public("partition into batches and their order", Topic.ORDER),
            Assumption.public("hyper-parameters", Topic.HYPER_PARAMETERS),
        )


def _sensitivity(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> float:
    return event.step_size * event.sensitivity(relation) / event.batch_size


def _composed_mu_squared(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> float:
    sensitivity = _sensitivity(event, relation)
    if sensitivity == 0:
        return 0.0
    variances = 2 * event.step_size * event.noise_variances()
    if not variances.all():
        return math.inf
    return event.num_blocks * float((sensitivity**2 / variances).sum(axis=0).max())


def block_contraction(event: BlockCoordinateDpEvent) -> float | None:
    """The proved or declared Lipschitz constant of update and prox; None if none is known.

    The prox after step t is counted with the update of step t + 1 (Theorem A, c_t p_{t-1}).
    """
    candidates = (event.update_lipschitz, _proved_update_lipschitz(event))
    known = [candidate for candidate in candidates if candidate is not None]
    return min(known) * min(1.0, _prox_lipschitz(event)) if known else None


def _prox_lipschitz(event: BlockCoordinateDpEvent) -> float:
    return min(event.prox_lipschitz, 1 / (1 + event.step_size * event.prox_strong_convexity))


def _proved_update_lipschitz(event: BlockCoordinateDpEvent) -> float | None:
    loss = event.block_loss
    if loss is None or loss.exponent != 1:
        return None
    eta, may_act = np.array([event.step_size]), np.array([event.clipping_may_act])
    return float(update_lipschitz(loss, eta, np.zeros(1), may_act)[0])


def _process(
    event: BlockCoordinateDpEvent, relation: NeighboringRelation, contraction: float
) -> NoisyProcess:
    steps, period = event.num_steps, event.batches_per_epoch
    variances = 2 * event.step_size * event.noise_variances().ravel()
    return NoisyProcess(
        contraction=np.broadcast_to(contraction, steps),
        sensitivity=np.broadcast_to(_sensitivity(event, relation), steps),
        noise_std=np.sqrt(variances),
        drift_contraction=np.ones(steps),
        drift=np.full(steps, np.inf),  # no bound on the gradients themselves
        domain_diameter=math.inf,
        period=period,
        positions=range(period),
        release_steps=(),
        is_constant=bool((variances == variances[0]).all()),
    )


_HIDDEN_WHEN_RELEASED = Assumption.declared(
    "hidden variables: each is a function of one record and of the released blocks, its effect "
    "within the clipped gradient of that record (fitted on a whole batch: only if the gradient of "
    "the whole batch is clipped); never released",
    Topic.HIDDEN_STATE,
)
_HIDDEN_FROM_THE_DATA = Assumption.declared(
    "everything but the trained block is public or fixed; hidden variables, if any, are a function "
    "of one record and of the block, recomputed at every step, and the declared geometry is that "
    "of the composite update; never released",
    Topic.HIDDEN_STATE,
)


def _sensitivity_text(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> str:
    sensitivity = f"{event.sensitivity(relation):g}"
    if event.clip_norm is None:
        return (
            f"under {relation.name} the sum of the per-record gradients of a block moves by at "
            f"most {sensitivity}, at equal released values"
        )
    text = f"the gradient of every record for a block is clipped to {event.clip_norm:g}"
    if not event.clipping_may_act:
        text += f" and no longer than {event.sensitivity(NeighboringRelation.REPLACE_SPECIAL):g}"
    return f"{text}: under {relation.name} one record moves their sum by at most {sensitivity}"


def _contraction_assumptions(event: BlockCoordinateDpEvent) -> tuple[Assumption, ...]:
    assumed = [assumptions.FIXED_RECORDS]
    if event.update_lipschitz is not None:
        text = (
            f"the update of the block is Lipschitz with constant {event.update_lipschitz:g} on "
            "every data set"
        )
        assumed.append(Assumption.declared(text, Topic.LOSS))
    loss = event.block_loss
    if loss is not None:
        text = f"per-record block loss, of every record that the data could have: {loss!r}"
        # S_g does not tell the clip norm: one that is too large would hide that clipping acts.
        clipping = "the gradient of each record is clipped on its own and as one vector, if at all"
        if not event.clipping_may_act:
            clipping = (
                f"no gradient is ever clipped: each record's, of norm at most {loss.lipschitz:g}, "
                "lies within the clip norm, and no mean of a batch is clipped"
            )
        assumed.append(Assumption.declared(text, Topic.LOSS))
        assumed.append(Assumption.declared(clipping, Topic.GRADIENT_NORM))
    if event.prox_strong_convexity:
        text = f"{event.prox_strong_convexity:g}-strongly convex regulariser"
        assumed.append(Assumption.declared(text, Topic.REGULARISER))
    text = "the regulariser, if any, is convex: its prox does not expand"
    if event.prox_lipschitz < 1:
        text = f"the prox is Lipschitz with constant {event.prox_lipschitz:g}"
    return (*assumed, Assumption.declared(text, Topic.REGULARISER))


def _published(event: BlockCoordinateDpEvent, relation: NeighboringRelation) -> Proof:
    lipschitz = _published_update_lipschitz(event)
    assert lipschitz is not None  # checked
    rates = published_rates(
        event.step_size,
        event.noise_variances(),
        event.sensitivity(relation),
        event.batch_size,
        lipschitz,
        _prox_lipschitz(event),
    )
    secret = "the batch that holds the record is secret and uniform"
    return Proof(
        curve=RdpCurve(functools.partial(_theorem_4_6, rates, event.num_blocks)),
        theorem=f"{BlockCoordinate.paper}, as published",
        assumptions=(*_contraction_assumptions(event), Assumption.declared(secret, Topic.ORDER)),
        caveat=_caveat(event, lipschitz),
    )


def _published_update_lipschitz(event: BlockCoordinateDpEvent) -> float | None:
    loss = event.block_loss
    if event.update_lipschitz is not None or loss is None or loss.exponent != 1:
        return event.update_lipschitz
    # Chen & Liu 2025, Lemma 4.1 (constant step) and Lemma B.1, arXiv 2407.08233
    return abs(1 - event.step_size * loss.smoothness)


def _caveat(event: BlockCoordinateDpEvent, lipschitz: float) -> str:
    reasons = []
    proved = _proved_update_lipschitz(event)
    if event.update_lipschitz is not None:
        if lipschitz < 1:
            reasons.append(
                f"the contraction {lipschitz:.4g} is declared: Lemma 4.1 derives it from "
                "convexity, which gives none"
            )
    elif proved is not None and lipschitz < proved:
        reasons.append(
            f"Lemma 4.1 claims the contraction |1 - eta*beta| = {lipschitz:.4g}, but directions "
            "without curvature are not contracted and clipping can expand: the constant is "
            f"{proved:.4g}"
        )
    if _prox_lipschitz(event) < 1:
        reasons.append(
            "for L_T < 1 Corollary 4.5 has the exponent 1/L_T^2 > 1; an invertible prox such as "
            "x/2 leaves the divergence unchanged, so that 1 is the most it can be"
        )
    reasons.append(
        "section 4.2 takes no account of what leaks between the blocks and through hidden variables"
    )
    return "; ".join(reasons)
