r"""Theorem C: random batches (Poisson, without replacement) with hidden iterates.

Part of the noise of the last steps hides that the batches differ, the rest that the iterates do,
whose distance depends on the coins of the record:

.. math::
    D_t = c_t D_{t-1} + s_t b_t,\quad z_\tau = D_\tau,\quad z_t = c_t z_{t-1} - a_t \ge 0,
    \quad z_T = 0

and (X_T, X'_T) is dominated by the composition, over t > tau, of the sampled mechanisms with noise
:math:`\sqrt{\beta_t}\,\sigma_t`, and a mixture of Gaussians of
:math:`\mu = a_t(b)/(\sqrt{1-\beta_t}\,\sigma_t)`, the coins b before tau revealed. Proofs:
docs/theory/random_distance.md.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.composition import (
    composed_steps,
    record_mus,
    step_curve,
    step_profile,
)
from hidden_state_accountants.bounds.solvers.windows import (
    FINE,
    Plan,
    SampledSteps,
    Window,
    Windows,
    best_plan,
    moved,
)
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    Known,
    best_curve,
    with_delta,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import Schedule, mapped, values_and_counts
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import Unmet
from hidden_state_accountants.process.distances import distance_after, tracked_distances
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    segments,
)
from hidden_state_accountants.process.stretching import BatchSizes, Stretching, modulus_lines

_MOST_NOISE_LEVELS = 8  # each has privacy losses of its own
_NEGLIGIBLE = 1e-2  # beside the probability that a window does not cover
_TAILS = tuple(2**k for k in range(6, 19))  # steps that a long run of equal ones is looked at
_FORGOTTEN = 1e-4  # the share of a step's sensitivity that distances before them may leave
_NEARLY_FORGOTTEN = 1e-2  # the same share, good enough to choose a window
_MOST_PLANS = 64  # that are remembered, of a few numbers each
_FEW_SEGMENTS = 8  # more of them are planned as a power of two
_NOISES_PER_DOUBLING = 8  # noise multipliers for which runs are searched
_DIGITS = 12  # of the noise of a schedule beside its first
_SMALL_DELTA = 1e-7  # the largest one that is planned as `FOR_SMALL_DELTAS`


@attrs.frozen
class Target:
    """Purpose of a plan: the delta of comparisons, and the failure of sizes of batches."""

    delta: float
    failure: float


USUAL, FOR_SMALL_DELTAS = Target(1e-5, 1e-12), Target(1e-10, 3e-15)


@attrs.frozen
class Subsampling(HiddenStateBound):
    """Theorem C for POISSON and WITHOUT_REPLACEMENT runs of a loss with a linear modulus.

    Formal guarantees:
      - Relation: all three for POISSON; REPLACE_SPECIAL and REPLACE_ONE for WITHOUT_REPLACEMENT.
        Both directions.
      - Released: the last iterate and those after `release_steps`, whose segments compose.
      - POISSON batches vary in size and the divisor does not: the modulus has to hold for every
        size up to a limit, and products of moduli are bounded with high probability. The
        probability that a run is outside of what is planned (a cap that acts included) adds to
        delta.
      - Any window tau, any split beta, any shifts are valid: those of a search are used.
      - Assumptions: Theorem A's; batches independent of the data and never published.
    """

    key = "subsampling"
    orders = (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT)
    paper = Citation(
        "Bok, Su, Altschuler 2024", "shifted interpolation with sampled batches", "2403.00278"
    )

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Random batches of a loss with a linear modulus, and few noise levels."""
        levels = len(values_and_counts(record_mus(event))[0])
        few = f"at most {_MOST_NOISE_LEVELS} values"
        return [
            *conditions.batches(event, relation, self.orders),
            *conditions.declared_loss(event),
            *conditions.linear_modulus(event.loss),
            *conditions.unless(
                levels <= _MOST_NOISE_LEVELS, "noise multiplier", few, f"{levels} values"
            ),
        ]

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The best windows found, segment by segment."""
        run = planned_run(event, relation)
        curve = run.released_curve(event)
        if run.failure <= USUAL.failure:  # else a cap acts, with a probability that counts
            curve = PlannedCurve(event, relation, curve)
        return Proof(curve=curve, theorem=f"{self.cited('Theorem C')}, sampled batches")


@attrs.frozen(eq=False, slots=False)
class PlannedCurve(Curve):
    """The windows of a run, planned for the delta that is asked: a `usual` or a small one."""

    event: LastIterateDpEvent
    relation: NeighboringRelation
    usual: Curve

    @functools.cached_property
    def small(self) -> Curve:
        """By the plan for small deltas."""
        return planned_run(self.event, self.relation, FOR_SMALL_DELTAS).released_curve(self.event)

    def epsilon(self, delta: float) -> float:
        usual = self.usual.epsilon(delta)
        if delta > _SMALL_DELTA:
            return usual
        # No smaller one at a smaller delta, whichever of the two plans is read off.
        return min(usual, max(self.small.epsilon(delta), self.usual.epsilon(_SMALL_DELTA)))

    def least_epsilon(self, delta: float) -> float:
        return self.usual.least_epsilon(delta) if delta > _SMALL_DELTA else 0.0

    def delta(self, epsilon: float) -> float:
        usual = self.usual.delta(epsilon)
        return usual if usual > _SMALL_DELTA else min(usual, self.small.delta(epsilon))

    def rdp(self, orders: np.ndarray) -> np.ndarray:
        return self.usual.rdp(orders)

    def to_dpevent(self) -> dp_accounting.DpEvent | None:
        return self.usual.to_dpevent()

    def alternatives(self) -> Known:
        return best_curve([self.usual, self.small]).alternatives()


def planned_run(
    event: LastIterateDpEvent, relation: NeighboringRelation, target: Target = USUAL
) -> SampledRun:
    """The run, or a longer one of the same steps, with what is planned of its batches.

    Equal steps are planned up to the next power of two, so that a run that goes on keeps its plan.
    (Not if there is a cap, which acts with a probability that counts.)
    """
    if event.has_schedules:  # not kept: its arrays can take a gigabyte
        return SampledRun.of(attrs.evolve(event, release_steps=()), relation, target)
    steps = event.num_steps
    if event.max_batch_size is None:
        steps = 2 ** math.ceil(math.log2(steps))
    return _equal_steps(attrs.evolve(event, num_steps=steps, release_steps=()), relation, target)


@functools.lru_cache(maxsize=2)  # a run that goes on, by both plans
def _equal_steps(
    event: LastIterateDpEvent, relation: NeighboringRelation, target: Target
) -> SampledRun:
    return SampledRun.of(event, relation, target)


@functools.lru_cache(maxsize=2)  # a run that goes on, by both plans
def _settled_window(run: SampledRun, num_steps: int, count: int) -> Curve | None:
    return run.window(0, num_steps, count)


_PLANS: dict[Hashable, Plan | None] = {}
"""The latest plans that were searched for. Of an event the hash is kept: any plan is valid."""


def _remembered(key: Hashable, search: Callable[[], Plan | None]) -> Plan | None:
    """The plan that was searched for the key, now if it was not before."""
    found = _PLANS.pop(key) if key in _PLANS else search()
    _PLANS[key] = found  # the latest is the last one
    if len(_PLANS) > _MOST_PLANS:
        del _PLANS[next(iter(_PLANS))]
    return found


@attrs.frozen(eq=False)
class SampledRun:
    """A run and what is planned of its batches, which fails with probability `failure`.

    The process has the moduli of the largest batch; `stretching` bounds products of moduli.
    """

    event: LastIterateDpEvent
    relation: NeighboringRelation
    process: NoisyProcess
    stretching: Stretching
    failure: float
    target: Target

    @classmethod
    def of(
        cls, event: LastIterateDpEvent, relation: NeighboringRelation, target: Target = USUAL
    ) -> SampledRun:
        """Half of what may fail is for the sizes of batches, half for products of moduli."""
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            process, lines, failure = noisy_process(event, relation, event.batch_size), None, 0.0
        else:
            sizes = BatchSizes.of(event, relation, target.failure / 2)
            process = noisy_process(event, relation, sizes.largest)
            lines = modulus_lines(event, relation, sizes)
            failure = event.overfull_delta(relation, sizes.largest)
        if lines is None:
            stretching = Stretching.of_moduli(process.contraction, process.is_constant)
        else:
            stretching = Stretching.of_sizes(
                process.contraction, lines, sizes, target.failure / 2, process.is_constant
            )
            failure = sizes.failure + target.failure / 2
        return cls(event, relation, process, stretching, failure, target)

    def released_curve(self, event: LastIterateDpEvent) -> Curve:
        """All segments between the releases of a run of these steps, composed."""
        if not np.isfinite(values_and_counts(record_mus(event))[0]).all():
            return GaussianCurve(math.inf)
        found = segments(event)
        if not event.release_steps:
            curve = self._best(0, event.num_steps, composed_steps(event, self.relation), 1)
        else:
            curve = compose_curves(
                [
                    (self._segment_curve(start, stop, _as_many(stop - start, found)), count)
                    for (start, stop), count in found.items()
                ]
            )
        return with_delta(curve, self.failure)

    def _segment_curve(self, start: int, stop: int, alike: int) -> Curve:
        whole = self.curve_of(Windows(self.segment(start, stop)).whole())
        return self._best(start, stop, whole, alike)

    def _best(self, start: int, stop: int, whole: Curve, alike: int) -> Curve:
        """The best window, or the composition of all steps if that is smaller."""
        num_steps = stop - start
        if self.process.is_constant and self._looked_at(num_steps, _FORGOTTEN)[0] < num_steps:
            # More equal steps before those that are looked at: the distance is no smaller.
            window = _settled_window(self, self._longer(num_steps), alike)
        else:
            window = self.window(start, stop, alike)
        return whole if window is None else best_curve([window, whole])

    def _longer(self, num_steps: int) -> int:
        """The next power of two, so that few numbers of equal steps are looked at."""
        return min(2 ** math.ceil(math.log2(num_steps)), self.process.num_steps)

    def window(self, start: int, stop: int, alike: int) -> Curve | None:
        """About the best window of a segment; None if the whole segment is better."""
        steps = self.segment(start, stop)
        plan = self.plan(start, stop, steps, alike)
        if plan is None or len(steps.step_mu) == 1:
            return None
        length = min(plan.length, len(steps.step_mu) - 1)  # planned for no fewer steps
        plan = Plan(length, min(plan.shifted, length), plan.beta)
        profile = step_profile(self.event, self.relation)
        plan = moved(plan, steps, profile, self.target.delta, alike)
        return self.curve_of(Windows(steps).window(plan, *FINE))

    def plan(self, start: int, stop: int, steps: SampledSteps, alike: int = 1) -> Plan | None:
        """About the best window of a segment; None if the whole segment is better.

        Few plans are searched for: of equal steps that of the next power of two, as what holds with
        a plan for a longer run holds for a shorter one, whose distance is no larger. `alike` is the
        number of such segments that are composed.
        """
        is_constant = self.process.is_constant
        if is_constant:
            start, stop = 0, self._longer(stop - start)
        event, factor = _at_a_level(self.event)

        def search() -> Plan | None:
            looked_at = self.segment(start, stop, _NEARLY_FORGOTTEN) if is_constant else steps
            noise_std, step_mu = looked_at.noise_std * factor, looked_at.step_mu / factor
            scaled = attrs.evolve(looked_at, noise_std=noise_std, step_mu=step_mu)
            return best_plan(scaled, step_profile(event, self.relation), self.target.delta, alike)

        return _remembered((hash(event), self.relation, self.target, start, stop, alike), search)

    def segment(self, start: int, stop: int, forgotten: float = _FORGOTTEN) -> SampledSteps:
        """The steps between two releases; the last ones, if many equal ones are before them."""
        looked_at, initial = self._looked_at(stop - start, forgotten)
        before, steps = stop - start - looked_at, slice(stop - looked_at, stop)
        sensitivity = self.process.sensitivity[steps]
        return SampledSteps(
            stretching=self.stretching.between(steps.start, stop),
            distance=tracked_distances(self.process, steps, sensitivity, initial)[0],
            sensitivity=sensitivity,
            noise_std=self.process.noise_std[steps],
            step_mu=record_mus(self.event)[steps],
            rate=self.event.sampling_probability,
            is_constant=self.process.is_constant,
            before=before,
        )

    def _looked_at(self, num_steps: int, forgotten: float) -> tuple[int, float]:
        """The number of last steps that windows are searched in, and the distance before them."""
        if not self.process.is_constant:
            return num_steps, 0.0
        limit = forgotten * float(self.process.sensitivity[0])
        for tail in (tail for tail in _TAILS if tail < num_steps):
            initial = distance_after(self.process, num_steps - tail)
            with np.errstate(over="ignore"):
                kept = float(np.exp(self.stretching.log_product(0, tail)))
            if initial * kept <= limit or tail == _TAILS[-1]:
                return tail, initial
        return num_steps, 0.0

    def curve_of(self, window: Window) -> Curve:
        """The curve of a pair that dominates a segment."""
        smallest = max(_NEGLIGIBLE * window.rare, 1e-50)
        shift = GaussianMixtureCurve(window.shift_weights, window.shift_mus, smallest)
        steps = [
            (step_curve(self.event, self.relation, mu), count) for mu, count in window.sampled_mus
        ]
        return with_delta(compose_curves([(shift, 1), *steps]), window.rare)


def _at_a_level(event: LastIterateDpEvent) -> tuple[LastIterateDpEvent, float]:
    """The run at the nearest of few levels of noise, whose plan is about as good, and the ratio."""
    noise = event.noise_multiplier
    first = noise.values[0] if isinstance(noise, Schedule) else noise
    if not first:
        return event, 1.0
    level = 2 ** (round(_NOISES_PER_DOUBLING * math.log2(first)) / _NOISES_PER_DOUBLING)
    scaled = mapped(lambda noise: round(noise / first, _DIGITS) * level, noise)
    return attrs.evolve(event, noise_multiplier=scaled), level / first


def _as_many(length: int, found: Counter[tuple[int, int]]) -> int:
    """About as many segments of a length as a run amounts to, so that few are planned."""
    number = sum(
        count * min(1.0, (stop - start) / length) for (start, stop), count in found.items()
    )
    return round(number) if number < _FEW_SEGMENTS else 2 ** round(math.log2(number))
