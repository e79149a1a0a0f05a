r"""Theorem C: random batches (Poisson, without replacement) with hidden iterates.

Part of the noise of the last steps hides that the batches differ, the rest that the iterates do,
whose distance depends on the coins of the record:

.. math::
    D_t = c_t D_{t-1} + s_t b_t,\quad z_\tau = D_\tau,\quad z_t = c_t z_{t-1} - a_t \ge 0,
    \quad z_T = 0

and (X_T, X'_T) is dominated by the composition, over t > tau, of the sampled mechanisms with noise
:math:`\sqrt{\beta_t}\,\sigma_t`, and a mixture of Gaussians of
:math:`\mu = a_t(b)/(\sqrt{1-\beta_t}\,\sigma_t)`, the coins b before tau revealed. Proofs:
docs/theory/subsampling.md and docs/theory/random_distance.md.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.sampled_steps import (
    composed_steps,
    record_mus,
    step_curve,
    step_profile,
)
from hidden_state_accountants.bounds.shifted_interpolation import (
    distance_before_tail,
    tracked_distances,
)
from hidden_state_accountants.bounds.solvers.equal_steps import largest_distance
from hidden_state_accountants.bounds.solvers.quick_losses import Window
from hidden_state_accountants.bounds.solvers.sampled_windows import (
    SampledSteps,
    Windows,
    best_window,
)
from hidden_state_accountants.bounds.solvers.stretching import Stretching
from hidden_state_accountants.curves.base import (
    BestOfCurves,
    Curve,
    CurveWithDelta,
    GaussianCurve,
    GaussianMixtureCurve,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.schedule import values_and_counts
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.batch_sizes import BatchSizes, modulus_lines
from hidden_state_accountants.process.conditions import Unmet
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    sampled_process,
)

_FAILURE = 1e-12  # of what is planned about the sizes of batches: added to delta
_MOST_NOISE_LEVELS = 8
_NEGLIGIBLE = 1e-2  # beside the probability that a window does not cover
_TAILS = (2**14, 2**16, 2**18)  # steps that a long run of equal ones is looked at
_FORGOTTEN = 1e-9  # the share of a step's sensitivity that distances before them may leave
_DELTA = 1e-5  # where windows are compared; they are about as good for others


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
    paper = Citation(
        "Bok, Su, Altschuler 2024", "shifted interpolation with sampled batches", "2403.00278"
    )

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Random batches of a loss with a linear modulus, and few noise levels."""
        orders = (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT)
        levels = len(values_and_counts(record_mus(event))[0])
        few = f"at most {_MOST_NOISE_LEVELS} values"
        return [
            *conditions.batches(event, relation, orders),
            *conditions.declared_loss(event),
            *conditions.linear_modulus(event.loss),
            *conditions.unless(
                levels <= _MOST_NOISE_LEVELS, "noise multiplier", few, f"{levels} values"
            ),
        ]

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The best window found, segment by segment."""
        run = _SampledRun.of(event, relation)
        curve = run.released_curve()
        return Proof(
            curve=CurveWithDelta(curve, run.failure) if run.failure else curve,
            theorem=f"{self.citation.of('Theorem C')}, sampled batches",
        )


@attrs.frozen(eq=False)
class _SampledRun:
    """A run, and what is planned about its batches.

    Attributes:
        event: The run.
        relation: The neighbouring relation.
        process: With the moduli of the largest batch.
        stretching: Bounds on products of moduli.
        failure: The probability that the batches are not as planned.
    """

    event: LastIterateDpEvent
    relation: NeighboringRelation
    process: NoisyProcess
    stretching: Stretching
    failure: float

    @classmethod
    def of(cls, event: LastIterateDpEvent, relation: NeighboringRelation) -> _SampledRun:
        """The plan: half of what may fail is for the sizes, half for products of moduli."""
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            process = sampled_process(event, relation, event.batch_size)
            stretching = Stretching.of_moduli(process.contraction, process.is_constant)
            return cls(event, relation, process, stretching, 0.0)
        sizes = BatchSizes.of(event, relation, _FAILURE / 2)
        process = sampled_process(event, relation, sizes.largest)
        lines = modulus_lines(event, relation, sizes)
        if lines is None:
            stretching = Stretching.of_moduli(process.contraction, process.is_constant)
            failure = event.overfull_delta(relation, sizes.largest)
            return cls(event, relation, process, stretching, failure)
        stretching = Stretching.of_sizes(
            process.contraction, lines, sizes, _FAILURE / 2, process.is_constant
        )
        return cls(event, relation, process, stretching, sizes.failure + _FAILURE / 2)

    def released_curve(self) -> Curve:
        """All segments between releases, composed."""
        ends = itertools.pairwise((0, *self.process.release_steps, self.process.num_steps))
        if self.process.is_constant:  # segments of one length cost the same
            lengths = Counter(stop - start for start, stop in ends)
            segments = [(0, length, count) for length, count in lengths.items()]
        else:
            segments = [(start, stop, 1) for start, stop in ends]
        return compose_curves(
            [(self._segment_curve(start, stop), count) for start, stop, count in segments]
        )

    def _segment_curve(self, start: int, stop: int) -> Curve:
        steps = self.segment(start, stop)
        if not np.isfinite(steps.step_mu).all():
            return GaussianCurve(math.inf)
        if stop - start == self.event.num_steps:
            whole = composed_steps(self.event, self.relation)  # which others ask for, too
        else:
            whole = self.curve_of(Windows(steps).whole())
        window = best_window(steps, step_profile(self.event, self.relation), _DELTA)
        return whole if window is None else BestOfCurves((self.curve_of(window), whole))

    def segment(self, start: int, stop: int) -> SampledSteps:
        """The steps between two releases; the last ones, if many equal ones are before them."""
        looked_at, initial = self._looked_at(stop - start)
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

    def _looked_at(self, num_steps: int) -> tuple[int, float]:
        """How many steps, from the end, windows are searched in, and the distance before them."""
        if not self.process.is_constant:
            return num_steps, 0.0
        c, s = float(self.process.contraction[0]), float(self.process.sensitivity[0])
        for tail in (tail for tail in _TAILS if tail < num_steps):
            before = num_steps - tail
            by_moduli = largest_distance(c, s, 1, before) * (1 + 1e-9)
            initial = min(by_moduli, distance_before_tail(self.process, before))
            with np.errstate(over="ignore"):
                kept = np.exp(self.stretching.log_product(np.array(0), np.array(tail)))
            if initial * float(kept) <= _FORGOTTEN * s or tail == _TAILS[-1]:
                return tail, initial
        return num_steps, 0.0

    def curve_of(self, window: Window) -> Curve:
        """What dominates a segment, as a curve."""
        smallest = max(_NEGLIGIBLE * window.rare, 1e-50)
        shift = GaussianMixtureCurve(window.shift_weights, window.shift_mus, smallest)
        curves: list[tuple[Curve, int]] = [(shift, 1)]
        for mu, count in window.sampled_mus:
            curves.append((step_curve(self.event, self.relation, mu), count))
        curve = compose_curves(curves)
        return CurveWithDelta(curve, window.rare) if window.rare else curve
