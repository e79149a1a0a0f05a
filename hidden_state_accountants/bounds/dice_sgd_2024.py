r"""Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632): DiceSGD, all iterates released, the error hidden.

The error's effect on the releases is paid for once: if k participations of a record each add at
most h to the difference d of the errors of two neighbouring runs, then the parts p_t that the
clipped errors put into the steps satisfy

.. math:: \sum_t p_t^2 \le \min\big((k h)^2,\; 2 C_2 k h,\; 4 C_2^2 \tau\big),

tau the steps after the first participation. Published is Theorem 3.7 (A.3 in the appendix), which
is false: docs/papers/dice_sgd.md, with proofs.
"""

from __future__ import annotations

import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants.bounds import assumptions
from hidden_state_accountants.bounds.base import PUBLISHED, SOUND, Bound, Citation, Proof
from hidden_state_accountants.bounds.solvers.inclusion_counts import Inclusions, inclusions
from hidden_state_accountants.bounds.solvers.rounding import fewer, geometric
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    best_curve,
    epsilon_from_rdp,
    with_delta,
)
from hidden_state_accountants.curves.by_profile import sampled_curve, zeroed_without_replacement
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.standard import EventCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.guarantee import Assumption, Topic
from hidden_state_accountants.process.conditions import (
    Unmet,
    batch_order,
    equal_batches,
    neighboring_relation,
    unless,
)

_RARE = 1e-10  # probability of more participations than a bound reckons with: added to delta
# Of the noise variance, for the clipped gradient; Renyi orders that are quick, to choose one.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
_ORDERS = np.array([2.0, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256])
_HOPELESS = 1.5  # times the other bound's epsilon, by Renyi divergences: not worth evaluating
_MOST_COMPONENTS = 4096  # Gaussians of a mixture; more are rounded up to
_COMPONENT_RATIO = 1.0005  # neighbouring ones of these
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_CAVEAT = (
    "the theorem is false: it treats the error as if every step sampled it anew. One outlier "
    "saturates the error, and clip(e, C2) then shifts every later step, without amplification "
    "(docs/papers/dice_sgd.md). Use "
    'analysis="sound"'
)
_OF_THE_PAPER = (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL)


@attrs.frozen
class DiceSgd(Bound):
    """DiceSGD under any order of the batches; the smaller of two bounds where both apply.

    Formal guarantees of analysis="sound":
      - Released: all iterates (or all noisy updates v). The last iterate alone gets no less.
      - Relation: REPLACE_SPECIAL and REPLACE_ONE; ADD_OR_REMOVE_ONE for FULL and POISSON.
      - (i) The participations of the record are revealed: Gaussian for each pattern, averaged over
        the patterns (for CYCLIC the worst position). (ii) POISSON, except under REPLACE_ONE: the
        clipped gradient stays a subsampled Gaussian with a share of the noise, the error's part is
        one Gaussian with the rest.
      - A gradient bound at most the clip norm makes it ordinary DP-SGD. Without a gradient bound,
        and for the automatic variant, the error can shift every later step by 2 C2.
      - Assumptions: those of `DiceSgdDpEvent`; both clips are exactly min(1, C/|v|) v.

    analysis="published" is Theorem 3.7 (automatic: the noise of Appendix C.4) solved for epsilon.
    It is false.

    Args:
        analysis: "sound" or "published".
    """

    key = "dice_sgd"
    event_type = DiceSgdDpEvent
    analyses = (SOUND, PUBLISHED)
    paper = Citation(
        "Zhang, Bu, Wu, Hong 2024", "the algorithm; bound of this project", "2311.14632"
    )
    published_theorem = "Theorem 3.7"

    def conditions(self, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Unmet:
        """Neighbours that the order of the batches admits, and equal batches."""
        if not self.sound:
            return _unmet_by_theorem_3_7(event, relation)
        return [*neighboring_relation(event, relation), *equal_batches(event)]

    def prove(self, event: DiceSgdDpEvent, relation: NeighboringRelation) -> Proof:
        """A budget for the error, or what the paper claims."""
        if self.sound:
            return Proof(
                curve=sound_curve(event, relation), theorem="DiceSGD with a budget for the error"
            )
        return Proof(
            curve=_published_curve(event),
            theorem="Theorem 3.7 of Zhang, Bu, Wu, Hong 2024",
            caveat=_CAVEAT,
        )

    def event_assumptions(
        self, event: DiceSgdDpEvent, relation: NeighboringRelation
    ) -> tuple[Assumption, ...]:
        """The secret of the error, its start, schedules, batches, divisor, gradient bound."""
        is_averaged = event.batch_order not in (BatchOrder.FULL, BatchOrder.CYCLIC)
        assumed = [
            Assumption.declared(
                "the error of the feedback is never released, saved or logged; noise is added to "
                "the update before anything else (a moment estimate) is computed from it",
                Topic.HIDDEN_STATE,
            ),
            assumptions.fixed_in_advance("number of steps and hyper-parameters"),
            Assumption.declared(
                "the start does not depend on the data and the error starts at zero: a run that "
                "goes on with the error of an earlier one is ONE event with the steps of both",
                Topic.START,
            ),
            assumptions.batches(event, are_secret=is_averaged),
            assumptions.divisor(event.batch_size),
        ]
        if not event.automatic and event.gradient_bound < math.inf:
            assumed.append(assumptions.gradient_norm(event.gradient_bound))
        return tuple(assumed)


def _unmet_by_theorem_3_7(event: DiceSgdDpEvent, relation: NeighboringRelation) -> Unmet:
    c1, c2 = event.clip_norm, event.error_clip_norm
    rate = event.sampling_probability
    needed = f"clip_norm = {c1:g}" if event.automatic else f">= clip_norm = {c1:g}"
    is_large_enough = c1 == c2 if event.automatic else c1 <= c2
    return [
        *batch_order(event, (BatchOrder.POISSON,)),
        *neighboring_relation(event, relation, _OF_THE_PAPER),
        *unless(
            event.sampling_rate is None, "sampling rate", "batch_size / dataset_size", f"{rate:g}"
        ),
        *unless(rate <= 0.2, "batch_size / dataset_size", "<= 0.2", f"{rate:g}"),
        *unless(is_large_enough, "error_clip_norm", needed, f"{c2:g}"),
    ]


# --- sound ------------------------------------------------------------------------------------


@attrs.frozen
class Effect:
    """Effect of one record, in units of the mean update.

    A batch that holds it moves the clipped mean by `step` (c) and adds `deposit` (h) to the
    difference of the errors, of which none is longer than `radius` (C2).
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
        """P: bound on the sum of p_t^2 (Lemma 2 of docs/papers/dice_sgd.md)."""
        total = np.where(before_last > 0, self.deposit, 0.0) * np.maximum(before_last, 1)
        by_deposits = total * np.minimum(total, 2 * self.radius)
        return np.minimum(by_deposits, 4 * self.radius**2 * after_first)

    def squared_shift(self, patterns: Inclusions) -> np.ndarray:
        """Bound, per pattern, on the sum of s_t^2 (Theorem 1 of docs/papers/dice_sgd.md).

        c^2 k + P + 2 c min(sqrt((k - 1) P), 2 C2 (k - 1), h k (k - 1) / 2): the errors do not
        differ before the first participation is over.
        """
        error = self.error_budget(patterns.before_last, patterns.after_first)
        again = np.maximum(patterns.count - 1, 0)
        together = np.minimum(np.sqrt(again * error), 2 * self.radius * again)
        if self.deposit < math.inf:
            together = np.minimum(together, self.deposit * patterns.count * again / 2)
        return self.step**2 * patterns.count + error + 2 * self.step * together


def sound_curve(event: DiceSgdDpEvent, relation: NeighboringRelation) -> Curve:
    """Theorems 1 and 2 of docs/papers/dice_sgd.md, at every point the smaller one."""
    order, rate = event.batch_order, event.sampling_probability
    effect = Effect.of(event, relation)
    patterns = inclusions(order, event.num_steps, event.batches_per_epoch, rate)
    squared = effect.squared_shift(patterns)
    with np.errstate(divide="ignore", invalid="ignore"):
        mu = np.where(squared > 0, np.sqrt(squared) / event.noise_std, 0.0)
    if order in (BatchOrder.FULL, BatchOrder.CYCLIC) or rate == 1:
        return GaussianCurve(float(mu.max()))
    weights = patterns.weights
    if len(mu) > _MOST_COMPONENTS:
        mu, weights = fewer(mu, weights, geometric(mu, _COMPONENT_RATIO))
    revealed = GaussianMixtureCurve(weights, mu)
    curves: list[Curve] = [revealed]
    if event.noise_std > 0:
        if order is BatchOrder.POISSON and relation is not _REPLACE_ONE:
            curves += _subsampled(event, effect, revealed.epsilon(1e-6))
        if order is BatchOrder.WITHOUT_REPLACEMENT and effect.deposit == 0:
            curves.append(_plain_without_replacement(event, relation))
    return best_curve(curves)


def _subsampled(event: DiceSgdDpEvent, effect: Effect, other_epsilon: float) -> list[Curve]:
    """Theorem 2, for any number of participations and for all but a rare one."""
    steps, rate = event.num_steps, event.sampling_probability
    usual = min(int(stats.binom.isf(_RARE, steps - 1, rate)) + 1, steps - 1) if steps > 1 else 0
    failures: dict[float, float] = {}  # by budget
    for most, failure in ((steps - 1, 0.0), (usual, float(stats.binom.sf(usual, steps - 1, rate)))):
        budget = float(effect.error_budget(np.array(most), np.array(steps - 1)))
        failures.setdefault(budget, failure)
    curves = [(_split(event, effect, budget), failure) for budget, failure in failures.items()]
    return [
        with_delta(curve, failure)
        for curve, failure in curves
        if _quick_epsilon(curve) <= _HOPELESS * other_epsilon
    ]


def _split(event: DiceSgdDpEvent, effect: Effect, budget: float) -> Curve:
    """The subsampled Gaussian with a share of the noise variance, chosen by Renyi divergences."""

    def curve(share: float) -> Curve:
        step = dp_accounting.PoissonSampledDpEvent(
            event.sampling_probability,
            dp_accounting.GaussianDpEvent(math.sqrt(share) * event.noise_std / effect.step),
        )
        part = EventCurve(step, NeighboringRelation.ADD_OR_REMOVE_ONE)
        mu = math.sqrt(budget / (1 - share)) / event.noise_std if budget else 0.0
        return compose_curves([(part, event.num_steps), (GaussianCurve(mu), 1)])

    return min(map(curve, _SHARES), key=_quick_epsilon) if budget else curve(1.0)


def _quick_epsilon(curve: Curve) -> float:
    return epsilon_from_rdp(_ORDERS, curve.rdp(_ORDERS), 1e-6)


def _plain_without_replacement(event: DiceSgdDpEvent, relation: NeighboringRelation) -> Curve:
    """The error never acts: DP-SGD, in which the record replaces a stand-in."""
    largest = min(event.clip_norm, event.gradient_bound) / event.batch_size
    if relation is not _REPLACE_ONE:
        rate = event.sampling_probability
        zeroed = sampled_curve(zeroed_without_replacement, largest / event.noise_std, rate)
        return compose_curves([(zeroed, event.num_steps)])
    step = dp_accounting.SampledWithoutReplacementDpEvent(
        event.dataset_size,
        event.batch_size,
        dp_accounting.GaussianDpEvent(event.noise_std / (2 * largest)),
    )
    return compose_curves([(EventCurve(step, _REPLACE_ONE), event.num_steps)])


# --- as printed: not sound --------------------------------------------------------------------


@attrs.frozen
class SquareRootCurve(Curve):
    """epsilon = sqrt(scale * log(1/delta)), with a Renyi divergence of alpha * scale / 2.

    Nothing satisfies it at small epsilons: it is what the paper claims, not what can be proved.
    """

    scale: float

    def epsilon(self, delta: float) -> float:
        if delta >= 1:
            return 0.0
        return math.sqrt(self.scale * math.log(1 / delta)) if delta > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        if self.scale == math.inf or epsilon == 0:
            return 1.0
        return math.exp(-(epsilon**2) / self.scale)

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return orders * self.scale / 2


def _published_curve(event: DiceSgdDpEvent) -> SquareRootCurve:
    r"""The sigma_1 of Theorem 3.7 for (epsilon, delta), solved for epsilon.

    .. math::
        \sigma_1^2 = \frac{32\, T \tilde G \log(1/\delta)}{N^2 \varepsilon^2}, \qquad
        \tilde G = C_1^2 + 2\min((B C_2)^2, \max(0, G - C_1)^2),
        \quad\text{automatic: } 3 C_1^2

    Its Renyi divergence is the sum that the paper's proof ends with. (Even if that sum were right,
    its conversion would give epsilon >= sqrt(2 * scale * log(1/delta)).)
    """
    # ZBWH24, Theorem 3.7 and Appendix C.4 (C1 = C2), arXiv 2311.14632
    excess = min(
        event.batch_size * event.error_clip_norm, max(0.0, event.gradient_bound - event.clip_norm)
    )
    squared = event.clip_norm**2 + 2 * (event.clip_norm if event.automatic else excess) ** 2
    noise = event.noise_std * event.dataset_size
    return SquareRootCurve(32 * event.num_steps * squared / noise**2 if noise else math.inf)
