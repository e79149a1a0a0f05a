r"""What one record can do to a DiceSGD run, and the privacy curves that follow.

The error's effect on the releases is paid for once: if k participations of a record each add at
most h to the difference d of the errors of two neighbouring runs, then the parts p_t that the
clipped errors put into the steps satisfy

.. math:: \sum_t p_t^2 \le \min\big((k h)^2,\; 2 C_2 k h,\; 4 C_2^2 \tau\big),

tau the steps after the first participation (docs/theory/dice_sgd.md, with proofs).
"""

from __future__ import annotations

import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants.bounds.dice_sgd.inclusion_counts import Inclusions, inclusions
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    best_curve,
    with_delta,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.renyi import epsilon_from_rdp
from hidden_state_accountants.curves.sampled_pairs import ZeroedWithoutReplacementCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent

_RARE = 1e-10  # probability of more participations than a bound reckons with: added to delta
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
_ORDERS = np.array([2.0, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256])
_HOPELESS = 1.5  # times the other bound's epsilon, by Renyi divergences: not worth evaluating
_MOST_COMPONENTS = 4096
_COMPONENT_RATIO = 1.0005
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@attrs.frozen
class Effect:
    """What one record can do, in units of the mean update.

    Attributes:
        step: c: how far it moves the clipped mean of a batch that holds it.
        deposit: h: how much such a batch adds to the difference of the errors.
        radius: C2.
    """

    step: float
    deposit: float
    radius: float

    @classmethod
    def of(cls, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Effect:
        factor = (2 if relation is _REPLACE_ONE else 1) / event.batch_size
        if event.automatic:  # normalising is not nonexpansive: no budget
            return cls(factor * event.clip_norm, math.inf, event.error_clip_norm)
        return cls(
            factor * min(event.clip_norm, event.gradient_bound),
            factor * max(0.0, event.gradient_bound - event.clip_norm),
            event.error_clip_norm,
        )

    def error_budget(self, before_last: np.ndarray, after_first: np.ndarray) -> np.ndarray:
        """P: bound on the sum of p_t^2 (Lemma 2 of docs/theory/dice_sgd.md)."""
        total = np.where(before_last > 0, self.deposit, 0.0) * np.maximum(before_last, 1)
        by_deposits = total * np.minimum(total, 2 * self.radius)
        return np.minimum(by_deposits, 4 * self.radius**2 * after_first)

    def squared_shift(self, patterns: Inclusions) -> np.ndarray:
        """Bound, per pattern, on the sum of s_t^2 (Theorem 1 of docs/theory/dice_sgd.md).

        c^2 k + P + 2 c min(sqrt((k - 1) P), 2 C2 (k - 1), h k (k - 1) / 2): the errors do not
        differ before the first participation is over.
        """
        error = self.error_budget(patterns.before_last, patterns.after_first)
        again = np.maximum(patterns.count - 1, 0)
        together = np.minimum(np.sqrt(again * error), 2 * self.radius * again)
        if self.deposit < math.inf:
            together = np.minimum(together, self.deposit * patterns.count * again / 2)
        return self.step**2 * patterns.count + error + 2 * self.step * together


def largest_mu(event: DiceSgdDpEvent, relation: NeighboringRelation) -> float:
    """The mu of a record that takes part in every step: no order costs more."""
    patterns = inclusions(BatchOrder.FULL, event.num_steps, 1, 1.0)
    squared = float(Effect.of(event, relation).squared_shift(patterns).max())
    if not squared:
        return 0.0
    return math.sqrt(squared) / event.noise_std if event.noise_std else math.inf


def sound_curve(event: DiceSgdDpEvent, relation: NeighboringRelation) -> Curve:
    """Theorems 1 and 2 of docs/theory/dice_sgd.md, at every point the smaller one."""
    order, rate = event.batch_order, event.sampling_probability
    effect = Effect.of(event, relation)
    patterns = inclusions(order, event.num_steps, event.batches_per_epoch, rate)
    squared = effect.squared_shift(patterns)
    with np.errstate(divide="ignore", invalid="ignore"):
        mu = np.where(squared > 0, np.sqrt(squared) / event.noise_std, 0.0)
    if order in (BatchOrder.FULL, BatchOrder.CYCLIC) or rate == 1:
        return GaussianCurve(float(mu.max()))
    revealed = GaussianMixtureCurve(patterns.weights, _fewer(mu))
    curves: list[Curve] = [revealed]
    if event.noise_std > 0:
        if order is BatchOrder.POISSON and relation is not _REPLACE_ONE:
            curves += _subsampled(event, effect, revealed.epsilon(1e-6))
        if order is BatchOrder.WITHOUT_REPLACEMENT and effect.deposit == 0:
            curves.append(_plain_without_replacement(event, relation))
    return best_curve(curves)


def _fewer(mus: np.ndarray) -> np.ndarray:
    """Many different values are rounded up, to a geometric grid."""
    largest = mus.max()
    if len(mus) <= _MOST_COMPONENTS or not 0 < largest < math.inf:
        return mus
    with np.errstate(divide="ignore"):
        steps = np.log(largest / mus) / math.log(_COMPONENT_RATIO)
    up = largest * _COMPONENT_RATIO ** -np.floor(steps * (1 - 1e-12))
    return np.where(mus > 0, np.maximum(up, mus), 0.0)


def _subsampled(event: DiceSgdDpEvent, effect: Effect, other_epsilon: float) -> list[Curve]:
    """Theorem 2, for any number of participations and for all but a rare one."""
    steps, rate = event.num_steps, event.sampling_probability
    usual = min(int(stats.binom.isf(_RARE, steps - 1, rate)) + 1, steps - 1) if steps > 1 else 0
    always, mostly = (
        float(effect.error_budget(np.array(most), np.array(steps - 1)))
        for most in (steps - 1, usual)
    )
    curves: list[Curve] = []
    split = _split(event, effect, always)
    if _quick_epsilon(split) <= _HOPELESS * other_epsilon:
        curves.append(split)
    if mostly < always:
        split = _split(event, effect, mostly)
        if _quick_epsilon(split) <= _HOPELESS * other_epsilon:
            curves.append(with_delta(split, float(stats.binom.sf(usual, steps - 1, rate))))
    return curves


def _split(event: DiceSgdDpEvent, effect: Effect, budget: float) -> StandardCurve:
    """The subsampled Gaussian with a share of the noise variance, the error's part with the rest.

    Any share is valid; Renyi divergences choose.
    """

    def curve(share: float) -> StandardCurve:
        step = dp_accounting.PoissonSampledDpEvent(
            event.sampling_probability,
            dp_accounting.GaussianDpEvent(math.sqrt(share) * event.noise_std / effect.step),
        )
        part = StockEvent(step, event.num_steps, NeighboringRelation.ADD_OR_REMOVE_ONE)
        mu = math.sqrt(budget / (1 - share)) / event.noise_std if budget else 0.0
        return StandardCurve((part,), gaussian_mu=mu)

    return min(map(curve, _SHARES), key=_quick_epsilon) if budget else curve(1.0)


def _quick_epsilon(curve: StandardCurve) -> float:
    return epsilon_from_rdp(_ORDERS, curve.rdp(_ORDERS), 1e-6)


def _plain_without_replacement(event: DiceSgdDpEvent, relation: NeighboringRelation) -> Curve:
    """The error never acts: DP-SGD, in which the record replaces a stand-in."""
    largest = min(event.clip_norm, event.gradient_bound) / event.batch_size
    if relation is not _REPLACE_ONE:
        rate = event.sampling_probability
        zeroed = ZeroedWithoutReplacementCurve(largest / event.noise_std, rate)
        return compose_curves([(zeroed, event.num_steps)])
    step = dp_accounting.SampledWithoutReplacementDpEvent(
        event.dataset_size,
        event.batch_size,
        dp_accounting.GaussianDpEvent(event.noise_std / (2 * largest)),
    )
    return StandardCurve((StockEvent(step, event.num_steps, _REPLACE_ONE),))
