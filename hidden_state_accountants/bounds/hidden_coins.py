r"""Theorems E and F for random batches (Poisson, without replacement): the coins stay secret.

Theorem A gives the distance mu(b) of the runs with the record and without it for the pattern b of
batches that hold the record. An attacker does not know the pattern: what counts is the mixture over
its law (docs/theory/hidden_coins.md). In batches of a fixed size another record stands in where the
record is missing, and the coins decide whether the two change places (docs/theory/hidden_place.md).
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.solvers import coin_costs, cycle_costs
from hidden_state_accountants.bounds.solvers.coin_costs import CoinSteps
from hidden_state_accountants.bounds.solvers.rounding import fewer, geometric
from hidden_state_accountants.bounds.solvers.windows import DistanceLaw
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianCurve,
    GaussianMixtureCurve,
    with_delta,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.hidden_mixture import HiddenMixtureCurve
from hidden_state_accountants.curves.hidden_place import HiddenPlaceCurve, Places
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process import conditions
from hidden_state_accountants.process.conditions import Unmet
from hidden_state_accountants.process.noisy_process import NoisyProcess, noisy_process, segments
from hidden_state_accountants.process.stretching import likely_size

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
_MOST_NOISE = {BatchOrder.POISSON: 1.25, BatchOrder.WITHOUT_REPLACEMENT: 2.5}
_MANY_PARTICIPATIONS = 1.6  # for each squared unit of noise, without replacement
_MOST_SHAPES = 3  # of segments
_NEARLY_ONE = 4.0  # T (1 - c) up to which the law for c = 1 is asked; it is enough if more than
_DENSE = 20.0  # times the square of that participations are expected
_FORGOTTEN = 1e-12  # share of a step that equal ones before may leave
_MOST_STEPS = 2_000_000  # that are looked at one by one
_FINE, _COARSE = 1.003, 1.01  # ratios of neighbouring levels: of a mixture, and of places


@attrs.frozen
class HiddenCoins(HiddenStateBound):
    """Theorem E for POISSON and Theorem F for WITHOUT_REPLACEMENT.

    Formal guarantees:
      - Relation: all three for POISSON; REPLACE_SPECIAL and REPLACE_ONE for WITHOUT_REPLACEMENT.
        Both directions.
      - Released: the last iterate and those after `release_steps`, whose segments compose: every
        step has coins of its own.
      - POISSON: the moduli are those of the largest batch, in every step. The probability of a
        larger one (a cap that acts included) adds to delta.
      - The law of the distance is rounded up: 2 to 10 percent of epsilon.
      - Not asked where Theorem C or composition is smaller (noise multipliers above 1.25; without
        replacement above 2.5 and .8 times the root of the expected participations), for
        microbatches and segments of more than three lengths. A bounded domain is not used.
      - Assumptions: Theorem A's, in batches without replacement for every record; batches
        independent of the data and never published.

    Source: this project, Theorems E and F (docs/theory/hidden_coins.md).
    """

    key = "hidden_coins"
    orders = (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT)
    paper = Citation(
        "Bok, Su, Altschuler 2024", "shifted interpolation with secret batches", "2403.00278"
    )

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """Random batches of a loss with a linear modulus, and little noise."""
        unmet = [
            *conditions.batches(event, relation, self.orders),
            *conditions.declared_loss(event),
            *conditions.linear_modulus(event.loss),
        ]
        if unmet:
            return unmet
        assert event.loss is not None
        noise, most = _noise_multiplier(event), _MOST_NOISE[event.batch_order]
        if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
            participations = event.sampling_probability * event.num_steps
            most = max(most, math.sqrt(participations / _MANY_PARTICIPATIONS))
        shapes = len(segments(event))
        return [
            *conditions.unless(
                noise <= most, "noise multiplier", f"at most {most:g}", f"{noise:g}"
            ),
            *conditions.unless(
                event.sampling_probability < 1, "sampling probability", "below 1", "1"
            ),
            *conditions.unless(
                not event.is_microbatched, "microbatches", "of one example", "larger ones"
            ),
            *conditions.unless(
                shapes <= _MOST_SHAPES,
                "release_steps",
                f"segments of at most {_MOST_SHAPES} kinds",
                f"{shapes}",
            ),
        ]

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The segments between releases, each with the law of its coins."""
        process, failure = _of_one_record(event, relation)
        curves: list[tuple[Curve, int]] = []
        for (start, stop), count in segments(event).items():
            law = _law(process, start, stop, event.sampling_probability)
            if law is None:
                return Proof(GaussianCurve(math.inf), self.cited("Theorem A"))
            failure += count * law.rare
            curves.append((_curve(event, relation, law), count))
        theorem = "E" if event.batch_order is BatchOrder.POISSON else "F"
        return Proof(
            curve=with_delta(compose_curves(curves), failure),
            theorem=f"Theorem {theorem} on {self.cited('Theorem A')}: the coins stay secret",
        )


def _noise_multiplier(event: LastIterateDpEvent) -> float:
    """The largest noise multiplier of a step."""
    steps = event.one_step_if_constant()
    return float(np.max(steps.noise_std_on_sum() / steps.gradient_bound()))


def _of_one_record(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> tuple[NoisyProcess, float]:
    """The process of a record that is there or is not, and how probable a larger batch is."""
    relation_to_none = _REPLACE_SPECIAL if relation is _REPLACE_ONE else relation
    if event.batch_order is BatchOrder.WITHOUT_REPLACEMENT:
        return noisy_process(event, relation_to_none), 0.0
    largest, failure = likely_size(event, relation)
    return noisy_process(event, relation_to_none, largest), failure


def _law(process: NoisyProcess, start: int, stop: int, rate: float) -> DistanceLaw | None:
    """The law of mu in a segment; None where no noise or no number is large enough."""
    c, shifts, noise = (
        array[start:stop] for array in (process.contraction, process.sensitivity, process.noise_std)
    )
    if not noise[-1] > 0:
        return None
    if process.is_constant:
        law = _law_of_equal_steps(float(c[0]), stop - start, rate)
        unit = float(shifts[0] / noise[0])
        return None if law is None else attrs.evolve(law, levels=law.levels * unit)
    coins = CoinSteps.of(c, shifts, noise, rate) if len(c) <= _MOST_STEPS else None
    tails = [] if coins is None else coin_costs.tails(coins)
    return coin_costs.law_of_tails(tails) if tails else None


@functools.lru_cache(maxsize=8)  # of other relations and of other noise, too
def _law_of_equal_steps(contraction: float, num_steps: int, rate: float) -> DistanceLaw | None:
    """In units of what one step adds to the distance, divided by its noise."""
    tails, forgets = [], num_steps * (1 - contraction)
    if 0 <= forgets <= _NEARLY_ONE:  # moduli of 1 are no smaller
        tails += cycle_costs.tails(num_steps, rate)
        if tails and num_steps * rate > _DENSE * forgets**2:
            return coin_costs.law_of_tails(tails)
    looked_at, initial = num_steps, 0.0
    if contraction < 1:
        log_forgotten = math.log(_FORGOTTEN * (1 - contraction))
        last = math.ceil(log_forgotten / math.log(max(contraction, 1e-300))) + 1
        if last < num_steps:
            looked_at, initial = last, 1 / (1 - contraction)
    if looked_at <= _MOST_STEPS:
        ones = np.ones(looked_at)
        coins = CoinSteps.of(contraction * ones, ones, ones, rate, initial)
        tails += [] if coins is None else coin_costs.tails(coins)
    return coin_costs.law_of_tails(tails) if tails else None


def _curve(event: LastIterateDpEvent, relation: NeighboringRelation, law: DistanceLaw) -> Curve:
    """Theorem E or F of a law; what is `rare` has the largest distance."""
    is_replaced = relation is _REPLACE_ONE
    is_poisson = event.batch_order is BatchOrder.POISSON
    edges = geometric(law.levels, _FINE if is_poisson else _COARSE)
    mus, weights = fewer(law.levels, law.probabilities, edges)
    weights[-1] += law.rare
    if is_poisson:
        return HiddenMixtureCurve(weights, mus, is_replaced=is_replaced)
    factor = 2.0 if is_replaced else 1.0
    places = Places.of(weights, 2 * mus, factor * mus, factor * mus)
    return HiddenPlaceCurve((places,), GaussianMixtureCurve(weights, factor * mus))
