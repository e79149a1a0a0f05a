"""Balls in bins: every record draws its batch among those of an epoch, and nobody learns it.

No other record moves with it, so that Theorem E applies (docs/theory/hidden_coins.md): what counts
is the law of the distance of Theorem A.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.data_order import (
    bounds_of_fresh_orders,
    by_place,
    last_epochs,
    mean_over_places,
)
from hidden_state_accountants.bounds.shifted_interpolation import mu_squared_by_position
from hidden_state_accountants.bounds.solvers.two_places import EpochSums
from hidden_state_accountants.curves.base import (
    Curve,
    GaussianMixtureCurve,
    best_curve,
    with_delta,
)
from hidden_state_accountants.curves.hidden_mixture import HiddenMixtureCurve
from hidden_state_accountants.events.batch_order import BINS, BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import UnmetCondition
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)
from hidden_state_accountants.process.stretching import likely_size

_Hidden = Callable[[GaussianMixtureCurve], Curve]


@attrs.frozen
class BallsInBins(HiddenStateBound):
    """Theorem E for BALLS_IN_BINS and BALLS_IN_BINS_REDRAWN.

    Formal guarantees:
      - Relation: all three. Both directions.
      - Released: the last iterate and those after `release_steps`.
      - One draw for all epochs: the distance of every place, those of segments between releases
        added inside the place, which they share.
      - A draw for every epoch: the law of the distance over all draws. It is that of distances
        carried over the ends of epochs, and of a record that is late in every epoch but the last
        (equal steps with c <= 1) or has left the largest distance that any draw leaves before the
        last one; of the bounds that are asked the smallest counts at every delta. Releases within
        an epoch end its shifts, and epochs compose.
      - Batches vary in size and the divisor does not: the modulus has to hold for every size up to
        a limit. The probability that a batch is larger (or reaches the cap) adds to delta.
      - Assumptions: Theorem A's; draws independent of the data and of each other, and never
        published.

    Source: this project, Theorem E (docs/theory/hidden_coins.md).
    """

    key = "balls_in_bins"
    orders = BINS
    paper = Citation(
        "Bok, Su, Altschuler 2024", "shifted interpolation, with a secret place", "2403.00278"
    )

    def conditions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """A contractive process for every order of the batches."""
        return unmet_conditions(event, relation, self.orders)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The pair of the law of the distance to the run without the record."""
        is_replaced = relation is NeighboringRelation.REPLACE_ONE
        # From the run without either record each of the two is one gradient away; a microbatch is
        # left out as a whole.
        of_none = NeighboringRelation.REPLACE_SPECIAL if is_replaced else relation
        to_none, failure = _process(attrs.evolve(event, is_microbatched=False), of_none)
        is_one_draw = event.batch_order is BatchOrder.BALLS_IN_BINS

        def hidden(law: GaussianMixtureCurve) -> Curve:
            return HiddenMixtureCurve(law.weights, law.mus, is_replaced=is_replaced)

        if is_one_draw:
            curves = [hidden(_law_of_one_draw(to_none))]
            if is_replaced and to_none.domain_diameter < math.inf:
                of_both = _process(event, relation)[0]  # which a domain may cut
                curves.append(_law_of_one_draw(of_both))
        else:
            curves = _of_draws(to_none, hidden)
        return Proof(
            curve=with_delta(best_curve(curves), failure),
            theorem=f"Theorem E on {self.cited('Theorem A')}: the batch of the record stays secret",
        )


def _process(
    event: LastIterateDpEvent, relation: NeighboringRelation
) -> tuple[NoisyProcess, float]:
    """With moduli of all sizes of batches but rare ones, and the probability of those."""
    every = noisy_process(event, relation, event.dataset_size + 1)
    largest, failure = likely_size(event, relation)
    likely = noisy_process(event, relation, largest)
    shown = slice(1 if every.is_constant else None)
    is_equal = np.array_equal(every.contraction[shown], likely.contraction[shown])
    if event.max_batch_size is None and is_equal:
        return every, 0.0
    return likely, failure


def _law_of_one_draw(process: NoisyProcess) -> GaussianMixtureCurve:
    return mean_over_places(by_place(mu_squared_by_position(process), process.period))


def _of_draws(process: NoisyProcess, hidden: _Hidden) -> list[Curve]:
    """The bounds that are asked where every epoch has a draw of its own, as for RESHUFFLED."""
    curves = bounds_of_fresh_orders(process, hidden)
    if not process.release_steps and (process.expands or not process.is_constant):
        last, distance = last_epochs(process)
        sums = EpochSums.of(last, 0, last.num_steps)
        if sums is not None and distance < math.inf:
            places = range(process.period)
            found = np.array([sums.mu_squared({place: 1.0}, distance) for place in places])
            curves.append(hidden(mean_over_places(np.sqrt(found))))
    return curves
