"""The numbers of a run with constant hyper-parameters that the published theorems are stated in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.events.batch_order import (
    BatchOrder,
    sensitivity_in_clip_norms,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.noisy_process import update_lipschitz


@attrs.frozen
class ConstantRun:
    """Lengths are in units of the noise's standard deviation on the iterate (sigma of the papers).

    Attributes:
        learning_rate: eta.
        weight_decay: w.
        decay: kappa = 1 - eta w.
        sensitivity: s/sigma, with s = 2 eta K/b under REPLACE_ONE, half of it otherwise.
        drift: 2 eta K/sigma; two updates differ by at most kappa |x - y| + drift. (2 b + 1 terms
            instead of 2 b under ADD_OR_REMOVE_ONE.)
        diameter: R/sigma.
        noise_std: sigma, in the units of the parameters.
        clip_is_active: Whether a gradient may be longer than the clip norm.
        batch_size: b.
        num_steps: T.
        period: Batches per epoch; 1 for FULL.
        position: The index of the record's batch in the epoch, None for the worst.
        loss: The declared geometry.
    """

    learning_rate: float
    weight_decay: float
    decay: float
    sensitivity: float
    drift: float
    diameter: float
    noise_std: float
    clip_is_active: bool
    batch_size: int
    num_steps: int
    period: int
    position: int | None
    loss: LossGeometry

    def contraction(self) -> float:
        """The modulus of the update (docs/theory/moduli.md); not for a Hölder exponent below 1."""
        eta, decay = np.array([self.learning_rate]), np.array([self.weight_decay])
        active = np.array([self.clip_is_active])
        return float(update_lipschitz(self.loss, eta, decay, active)[0])

    @property
    def gradient_lipschitz(self) -> float:
        """L of the published theorems: Hessians between -m and M."""
        return max(self.loss.smoothness, self.loss.weak_convexity)

    @property
    def last_position(self) -> int:
        """The batch that is processed last."""
        return (self.num_steps - 1) % self.period


def unmet_for_constant_run(
    event: LastIterateDpEvent,
    relation: NeighboringRelation,
    orders: Sequence[BatchOrder],
    *,
    published: bool,
) -> conditions.Unmet:
    """What the theorems of both papers need; `published` adds what only their own text needs."""
    of_paper = (NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL)
    relations = of_paper if published else tuple(NeighboringRelation)
    return [
        *conditions.batches(event, relation, orders, relations),
        *conditions.declared_loss(event),
        *conditions.constant_parameters(event),
        *conditions.last_iterate_alone(event),
        *conditions.unless(
            not published or not np.any(event.per_step("weight_decay") > 0),
            "weight decay",
            'weight_decay = 0 (analysis="sound" covers decoupled decay)',
            f"{event.weight_decay!r}",
        ),
        *conditions.unless(
            not published or not event.prox_strong_convexity,
            "proximal map",
            'prox_strong_convexity = 0 (analysis="sound" does not need it to be)',
            f"{event.prox_strong_convexity!r}",
        ),
    ]


def constant_run(event: LastIterateDpEvent, relation: NeighboringRelation) -> ConstantRun:
    """The numbers of an event without unmet conditions."""
    assert event.loss is not None
    eta, decay = (float(event.per_step(name)[0]) for name in ("learning_rate", "weight_decay"))
    bound, b = float(event.gradient_bound()[0]), event.batch_size
    lipschitz = math.inf if event.loss.lipschitz is None else event.loss.lipschitz
    clips = event.clip_norm is not None and lipschitz > float(event.per_step("clip_norm")[0])
    noise_std = eta * float(event.noise_std_on_sum()[0]) / b
    factor = sensitivity_in_clip_norms(event.batch_order, relation)
    terms = 2 * b + (relation is NeighboringRelation.ADD_OR_REMOVE_ONE)
    with np.errstate(divide="ignore", invalid="ignore"):
        # A step that moves nothing needs no noise: 0/0 counts as 0.
        in_noise = np.nan_to_num(
            np.array([factor * eta * bound / b, eta * bound * terms / b, event.domain_diameter])
            / noise_std,
            nan=0.0,
            posinf=math.inf,
        )
    return ConstantRun(
        learning_rate=eta,
        weight_decay=decay,
        decay=1 - eta * decay,
        sensitivity=float(in_noise[0]),
        drift=float(in_noise[1]),
        diameter=float(in_noise[2]),
        noise_std=noise_std,
        clip_is_active=clips,
        batch_size=b,
        num_steps=event.num_steps,
        period=1 if event.batch_order is BatchOrder.FULL else event.batches_per_epoch,
        position=event.record_position,
        loss=event.loss,
    )
