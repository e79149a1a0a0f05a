r"""Theorem B: random batches (Poisson, without replacement) with hidden iterates.

Part of the noise of the last steps hides that the batches differ, the rest that the iterates do:

.. math::
    z_\tau \ge |X_\tau - X'_\tau|,\quad z_t = c_t z_{t-1} - a_t \ge 0,\quad z_T = 0

and (X_T, X'_T) is dominated by the composition, over t > tau, of the sampled Gaussian mechanism
with noise :math:`\sqrt{\beta_t}\,\sigma_t` and a Gaussian of
:math:`\mu = a_t/(\sqrt{1-\beta_t}\,\sigma_t)`. Proof: docs/theory/subsampling.md.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.shifted_interpolation import tracked_distances
from hidden_state_accountants.bounds.solvers.sampled_windows import (
    SampledSteps,
    Window,
    best_window,
)
from hidden_state_accountants.curves.base import BestOfCurves, Curve, CurveWithDelta, GaussianCurve
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.sampled import SampledWithoutReplacementCurve
from hidden_state_accountants.curves.standard import StandardCurve, StockEvent
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import Unmet
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    sampled_process,
)

_OVERFULL = 1e-12  # the probability that a batch exceeds the number of terms we plan for
_MOST_NOISE_LEVELS = 8
_OF_POISSON = (NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.ADD_OR_REMOVE_ONE)


@attrs.frozen
class Subsampling(HiddenStateBound):
    """Theorem B for POISSON and WITHOUT_REPLACEMENT runs of a loss with a linear modulus.

    Formal guarantees:
      - Relation: REPLACE_SPECIAL and ADD_OR_REMOVE_ONE for POISSON; REPLACE_SPECIAL and
        REPLACE_ONE for WITHOUT_REPLACEMENT. Both directions.
      - Released: the last iterate and those after `release_steps`, whose segments compose.
      - POISSON batches vary in size and the divisor does not: the modulus has to hold for every
        size up to a limit, and the probability that a batch exceeds it (a cap that acts included)
        adds to delta.
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
        is_poisson = event.batch_order is BatchOrder.POISSON
        relations = _OF_POISSON if is_poisson else tuple(NeighboringRelation)
        levels = len(np.unique(_step_mu(event)))
        few = f"at most {_MOST_NOISE_LEVELS} values"
        return [
            *conditions.batches(event, relation, orders, relations),
            *conditions.declared_loss(event),
            *conditions.linear_modulus(event.loss),
            *conditions.unless(
                levels <= _MOST_NOISE_LEVELS, "noise multiplier", few, f"{levels} values"
            ),
        ]

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The best window found, segment by segment."""
        terms, extra = _most_terms(event, relation)
        process = sampled_process(event, relation, terms)
        curve = _released_curve(event, process)
        return Proof(
            curve=CurveWithDelta(curve, extra) if extra else curve,
            theorem=f"{self.citation.of('Theorem B')}, sampled batches",
        )


def _step_mu(event: LastIterateDpEvent) -> np.ndarray:
    """Per step, clip norms that the record can move over the noise std; 0 if eta is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = event.gradient_bound() / event.noise_std_on_sum()
    moves = (event.per_step("learning_rate") > 0) & (event.gradient_bound() > 0)
    factor = 2 if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT else 1
    return np.where(moves, factor * ratio, 0.0)


def _most_terms(event: LastIterateDpEvent, relation: NeighboringRelation) -> tuple[int, float]:
    """How many gradients a batch sums at most, and the delta for the case that it sums more.

    POISSON: |R_t| + 1 <= terms in every step, R_t the batch without the record; P(|R_t| + 1 >
    terms) = P(Binomial(others, q) >= terms) is the same for both data sets.
    """
    if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
        return event.batch_size, 0.0
    # binom.isf goes through 1 - _OVERFULL, which loses all digits
    terms = bisect.bisect_left(
        range(event.dataset_size + 1),
        True,
        lo=1,
        key=lambda k: event.overfull_delta(relation, k) <= _OVERFULL,
    )
    if event.max_batch_size is not None:
        terms = min(terms, event.max_batch_size)
    return terms, event.overfull_delta(relation, terms)


def _released_curve(event: LastIterateDpEvent, process: NoisyProcess) -> Curve:
    step_mu = _step_mu(event)
    ends = itertools.pairwise((0, *process.release_steps, process.num_steps))
    if process.is_constant:  # segments of one length cost the same
        lengths = Counter(stop - start for start, stop in ends)
        segments = [(0, length, count) for length, count in lengths.items()]
    else:
        segments = [(start, stop, 1) for start, stop in ends]
    return compose_curves(
        [
            (_segment_curve(event, process, step_mu, start, stop), count)
            for start, stop, count in segments
        ]
    )


def _segment_curve(
    event: LastIterateDpEvent, process: NoisyProcess, step_mu: np.ndarray, start: int, stop: int
) -> Curve:
    steps = slice(start, stop)
    if not np.isfinite(step_mu[steps]).all():
        return GaussianCurve(math.inf)
    rate = event.sampling_probability
    window = best_window(
        SampledSteps(
            contraction=process.contraction[steps],
            distance=tracked_distances(process, steps, process.sensitivity[steps])[0],
            noise_std=process.noise_std[steps],
            step_mu=step_mu[steps],
        ),
        # Without replacement too: these divergences take seconds there, and only rank the windows.
        lambda mu, orders: _poisson(rate, mu).rdp(orders),
    )
    levels = np.unique(step_mu[steps], return_counts=True)
    everything = tuple((float(mu), int(count)) for mu, count in zip(*levels, strict=True))
    whole = _composed(event, Window(everything, 0.0))
    if window.sampled_mus == everything and not window.shift_mu:
        return whole
    return BestOfCurves((_composed(event, window), whole))


def _composed(event: LastIterateDpEvent, window: Window) -> Curve:
    curves: list[tuple[Curve, int]] = [(GaussianCurve(window.shift_mu), 1)]
    for mu, count in window.sampled_mus:
        if mu == 0:
            continue
        if event.batch_order is BatchOrder.POISSON:
            curves.append((_poisson(event.sampling_probability, mu), count))
        else:
            sampled = SampledWithoutReplacementCurve(event.dataset_size, event.batch_size, mu)
            curves.append((sampled, count))
    return compose_curves(curves)


def _poisson(rate: float, mu: float) -> StandardCurve:
    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(1 / mu))
    # Zeroing a record of a Poisson sample is removing it.
    return StandardCurve((StockEvent(sampled, 1, NeighboringRelation.ADD_OR_REMOVE_ONE),))
