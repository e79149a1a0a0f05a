"""Ordinary composition: the guarantee with every iterate released, whatever the curvature is.

What one record does to a step whose batch is drawn at random is a sampled mechanism per step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import Bound, Citation, Proof
from hidden_state_accountants.bounds.solvers.rounding import fewer, geometric
from hidden_state_accountants.curves import profiles
from hidden_state_accountants.curves.balls_in_bins import bins_curve
from hidden_state_accountants.curves.base import Curve, GaussianCurve, with_delta
from hidden_state_accountants.curves.by_profile import (
    replaced_in_poisson_batch,
    replaced_without_replacement,
    sampled_curve,
    zeroed_without_replacement,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.profiles import Profile
from hidden_state_accountants.curves.standard import EventCurve
from hidden_state_accountants.events.batch_order import BINS, BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import same_in_all_steps, values_and_counts
from hidden_state_accountants.guarantee import Assumption, Guarantee
from hidden_state_accountants.process.conditions import Unmet, batches

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_SAMPLED = (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT)
_MANY_LEVELS = 100  # of noise, which are then rounded to fewer: a larger mu is less private
_FEW_LEVELS = 4  # of epochs of balls in bins: each takes a second
_APART = 1.004  # ratio of these; epsilon grows by half of that on average


@attrs.frozen
class Composition(Bound):
    """The composition of the steps, as `LastIterateDpEvent.as_composition` has it.

    Formal guarantees: holds for any curvature, domain and decay, even if all iterates are released;
    the only fact about the loss that it uses is a declared Lipschitz constant below the clip norm.
    Exact (mu-GDP) for FULL and for epoch-wise orders; random batches by the privacy losses of their
    steps, also under relations that no standard event expresses; balls in bins by one pair for
    every draw (docs/theory/hidden_coins.md). A cap on batches of random sizes adds
    `event.cap_delta`.
    """

    key = "composition"
    event_type = LastIterateDpEvent
    paper = Citation("Dong, Roth, Su 2022", "composition of the steps", "1905.02383")

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Neighbours that the order of the batches admits, and equal batches."""
        return batches(event, relation)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The composed steps."""
        if event.batch_order in BINS:
            curve = composed_bins(event, relation)
        elif event.batch_order in _SAMPLED:
            curve = composed_steps(event, relation)
        else:
            curve = _curve(event.as_composition(relation))
        extra = event.cap_delta(relation)
        return Proof(
            curve=with_delta(curve, extra),
            theorem="composition (every iterate may be released)",
        )

    def event_assumptions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """Schedules, batches, divisor; a gradient bound where it lies below the clip norm."""
        is_amplified = event.batch_order in (*_SAMPLED, *BINS)
        assumed = [
            assumptions.fixed_in_advance("number of steps and schedules"),
            assumptions.batches(event, are_secret=is_amplified),
            assumptions.divisor(event.batch_size),
        ]
        lipschitz = None if event.loss is None else event.loss.lipschitz
        if lipschitz is not None and (
            event.clip_norm is None
            or (lipschitz < event.one_step_if_constant().per_step("clip_norm")).any()
        ):
            assumed.append(assumptions.gradient_norm(lipschitz))
        return tuple(assumed)


def composition_of(event: LastIterateDpEvent, relation: NeighboringRelation) -> Guarantee | None:
    """Ordinary composition of the steps; None if it does not cover the order of the batches."""
    bound = Composition()
    return None if bound.check(event, relation) else bound.guarantee(event, relation)


def _curve(event: dp_accounting.DpEvent) -> Curve:
    """Curve of Gaussian mechanisms."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return GaussianCurve(0.0)
    inner, count = event, 1
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        inner, count = event.event, event.count
    noise = inner.noise_multiplier
    return GaussianCurve(math.sqrt(count) / noise if noise > 0 else math.inf)


@same_in_all_steps
def record_mus(event: LastIterateDpEvent) -> np.ndarray:
    """Per step, the gradient bound over the noise on the sum; 0 if nothing moves, shape (T,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = event.gradient_bound() / event.noise_std_on_sum()
    moves = (event.per_step("learning_rate") > 0) & (event.gradient_bound() > 0)
    return np.where(moves, ratio, 0.0)


@functools.lru_cache(maxsize=2)  # composition and its amplification evaluate the same curve
def composed_steps(event: LastIterateDpEvent, relation: NeighboringRelation) -> Curve:
    """All steps of a POISSON or WITHOUT_REPLACEMENT run, with every iterate released."""
    mus, counts = values_and_counts(record_mus(event))
    if not np.isfinite(mus).all():
        return GaussianCurve(math.inf)
    if len(mus) > _MANY_LEVELS:  # every one of them is a mechanism of its own
        mus, counts = fewer(mus, counts, geometric(mus, _APART))
    levels = zip(mus.tolist(), counts.astype(int).tolist(), strict=True)
    return compose_curves([(step_curve(event, relation, mu), n) for mu, n in levels if mu])


def composed_bins(event: LastIterateDpEvent, relation: NeighboringRelation) -> Curve:
    """All steps of balls in bins, all iterates released: every draw is as bad as its worst bin."""
    bins, is_replaced = event.batches_per_epoch, relation is _REPLACE_ONE
    is_one_draw = event.batch_order is BatchOrder.BALLS_IN_BINS
    if event.has_schedules:
        squares = np.pad(record_mus(event) ** 2, (0, -event.num_steps % bins)).reshape(-1, bins)
        if is_one_draw:
            squares = squares.sum(axis=0, keepdims=True)
        mus, counts = np.unique(np.sqrt(squares.max(axis=1)), return_counts=True)
        positive = mus[mus > 0]
        if len(mus) > _FEW_LEVELS and np.isfinite(mus).all():
            edges = np.append(0.0, np.geomspace(positive[0], positive[-1], _FEW_LEVELS + 1))
            mus, counts = fewer(mus, counts, edges)
    else:
        mus, counts = record_mus(event)[:1], np.array([-(-event.num_steps // bins)])
        if is_one_draw:
            mus, counts = mus * np.sqrt(counts), np.ones(1, dtype=int)
    levels = zip(mus.tolist(), counts.astype(int).tolist(), strict=True)
    return compose_curves([(bins_curve(mu, bins, is_replaced=is_replaced), n) for mu, n in levels])


def step_curve(event: LastIterateDpEvent, relation: NeighboringRelation, mu: float) -> Curve:
    """The curve of one step of a POISSON or WITHOUT_REPLACEMENT run.

    The pair is ordered where its directions differ: the data set with the record comes first, in
    every step, so that steps compose in each of the two orders. mu is the gradient bound over the
    noise of the step, in (0, inf).
    """
    rate = event.sampling_probability
    if rate == 1:  # nothing is drawn
        return GaussianCurve(2 * mu if relation is _REPLACE_ONE else mu)
    pair = _sampled_pair(event, relation)
    if pair is not None:
        return sampled_curve(pair, mu, rate)
    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(1 / mu))
    # Zeroing a record of a Poisson sample is removing it.
    return EventCurve(sampled, NeighboringRelation.ADD_OR_REMOVE_ONE)


def step_profile(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> Callable[[float], Profile]:
    """The privacy profile of a step by its mu; arguments as for `step_curve`."""
    rate, pair = event.sampling_probability, _sampled_pair(event, relation)
    if pair is not None:
        return lambda mu: pair(mu, rate)
    return lambda mu: profiles.poisson(profiles.gaussian(mu), rate)


def _sampled_pair(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> Callable[[float, float], Profile] | None:
    """Pair of a `sampled_curve`; None if the record counts on one data set only."""
    if event.batch_order is BatchOrder.POISSON:
        return replaced_in_poisson_batch if relation is _REPLACE_ONE else None
    return replaced_without_replacement if relation is _REPLACE_ONE else zeroed_without_replacement
