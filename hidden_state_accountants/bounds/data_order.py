r"""Secret orders: the record's place in the epoch is uniform, and nobody learns it.

Given the order, Theorem A applies. Theorem F (docs/theory/hidden_place.md) keeps the place secret;
where it is not asked the place is revealed, and the guarantee is the mean over the places:

.. math:: \delta(\varepsilon) \le \frac1l \sum_j \delta_{\mu_j}(\varepsilon), \qquad
          D_\alpha \le \frac{1}{\alpha-1}\log\frac1l\sum_j e^{(\alpha-1)\alpha\mu_j^2/2}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.shifted_interpolation import (
    mu_squared_by_position,
    segment_mu_squared,
)
from hidden_state_accountants.bounds.solvers.carries import (
    EpochCosts,
    best_carries,
    carried_curve,
)
from hidden_state_accountants.bounds.solvers.rounding import fewer, geometric
from hidden_state_accountants.bounds.solvers.shifts import (
    LONG,
    by_tails,
    least_mu_squared,
    mu_squared_of_equal_steps,
)
from hidden_state_accountants.bounds.solvers.two_places import (
    hidden_places,
    places_of_fresh_orders,
)
from hidden_state_accountants.curves.base import Curve, GaussianMixtureCurve, best_curve, is_smaller
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.hidden_place import HiddenPlaceCurve, Places
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import UnmetCondition
from hidden_state_accountants.process.distances import distance_after
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

_CITATION = Citation(
    "Bok, Su, Altschuler 2024", "shifted interpolation, averaged over secret orders", "2403.00278"
)

_OfLaw = Callable[[GaussianMixtureCurve], Curve]
_MANY_STEPS = 100_000  # that carries take a second for
_MANY_PLACES = 2_500  # whose curve takes half a second
_ALIKE = 1.004  # ratio of the mus of places that count as one then
_FORGOTTEN = 0.02  # product of the moduli of an epoch, with which the one before it is not asked


@attrs.frozen
class ShuffledOnce(HiddenStateBound):
    """One uniform secret order for all epochs (SHUFFLED_ONCE): Theorem F.

    Formal guarantees:
      - Relation: REPLACE_ONE and REPLACE_SPECIAL.
      - Released: the last iterate and those after `release_steps`. Releases are composed inside
        each position: they share the order.
      - Theorem F is asked with up to three homes of the record, and the smallest divergence counts
        at every epsilon. It is not asked for microbatches and for sums of more than 120,000 terms
        (long schedules): there the mean over the positions counts, which is never smaller. Renyi
        divergences are those of the mean.
      - Assumptions: Theorem A's, for every record, and that neither the order nor its seed is ever
        published.

    Source: this project, Theorem F (docs/theory/hidden_place.md).
    """

    key = "shuffled_once"
    orders = (BatchOrder.SHUFFLED_ONCE,)
    paper = _CITATION

    def conditions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """A contractive process for every order of the batches."""
        return unmet_conditions(event, relation, self.orders)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """Theorem F, or the mixture of Gaussian guarantees of the positions."""
        process = noisy_process(event, relation)
        mus = by_place(mu_squared_by_position(process), process.period)
        revealed = mean_over_places(mus)
        places: tuple[Places, ...] = ()
        # A missing record moves the mean of a microbatch by as much as another one.
        if not event.is_microbatched and (mus < math.inf).all():
            is_replaced = relation is NeighboringRelation.REPLACE_ONE
            places = hidden_places(process, mus, is_replaced=is_replaced)
        if not places:
            return Proof(revealed, self.cited("Theorem A averaged over the secret order"))
        hidden = HiddenPlaceCurve(places, revealed)
        return Proof(hidden, f"Theorem F on {self.cited('Theorem A')}: the place stays secret")


@attrs.frozen
class Reshuffled(HiddenStateBound):
    """A fresh uniform secret order in every epoch (RESHUFFLED).

    Formal guarantees:
      - Relation: REPLACE_ONE and REPLACE_SPECIAL.
      - Released: the last iterate and those after `release_steps`.
      - Distances that no order exceeds are carried over the ends of the epochs, whose costs add up,
        position by position.
      - For equal steps with c <= 1 and no releases: the record is in the last batch of every epoch
        but the last, and in a uniform position there, as a participation that is moved to a later
        step never costs less.
      - Where nothing can be carried (one epoch, releases within an epoch, more than 100,000 equal
        steps) or that may cost more (in a domain, with steps that expand): shifts that are used up
        by the end of each epoch, whose mixtures compose.
      - Theorem F on the last epoch and on the last two, without releases: the orders before them
        are revealed, and the largest distance that any of these leaves is carried into them.
      - Of the bounds that are asked the smallest counts at every delta.
      - Assumptions: Theorem A's, for every record, and that neither the orders nor their seed are
        ever published.
    """

    key = "reshuffled"
    orders = (BatchOrder.RESHUFFLED,)
    paper = _CITATION

    def conditions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """A contractive process for every order of the batches."""
        return unmet_conditions(event, relation, self.orders)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The smallest of the bounds that are asked."""
        process = noisy_process(event, relation)
        curves = bounds_of_fresh_orders(process)
        theorem = self.cited("Theorem A averaged over the secret order of each epoch")
        hidden = _hidden_in_the_last_epochs(event, relation, process)
        if hidden is not None and is_smaller(hidden, best_curve(curves)):
            curves.append(hidden)
            theorem = (
                f"Theorem F on {self.cited('Theorem A')}: the place in the last epochs is secret"
            )
        return Proof(curve=best_curve(curves), theorem=theorem)


def by_place(mu_squared: np.ndarray, period: int) -> np.ndarray:
    """The mu of every place; 0 at those beyond the array, which are never reached."""
    return np.sqrt(np.pad(mu_squared, (0, period - len(mu_squared))))


def mean_over_places(mus: np.ndarray) -> GaussianMixtureCurve:
    """The mean over equally likely places; many that are alike all count as the largest of them."""
    weights = np.full(len(mus), 1 / len(mus))
    if len(mus) > _MANY_PLACES:
        mus, weights = fewer(mus, weights, geometric(mus, _ALIKE))
    return GaussianMixtureCurve(weights, mus)


# An order for every epoch


def bounds_of_fresh_orders(process: NoisyProcess, of_law: _OfLaw = lambda law: law) -> list[Curve]:
    """The bounds that are asked where every epoch has an order, or draws, of its own."""
    over_ends = carried(process)
    curves = [] if over_ends is None else [of_law(over_ends)]
    if over_ends is None or process.expands or process.domain_diameter < math.inf:
        curves.append(epoch_by_epoch(process, of_law))
    if process.is_constant and not process.release_steps and not process.expands:
        curves.append(of_law(late_participations(process)))
    return curves


def carried(process: NoisyProcess) -> GaussianMixtureCurve | None:
    """Distances carried over the ends of epochs; None for one, releases inside, or no noise."""
    if process.num_steps <= process.period:
        return None
    if any(step % process.period for step in process.release_steps):
        return None
    if process.is_constant and process.num_steps > _MANY_STEPS:
        return None  # the other bounds are quicker, and about as good
    epochs = EpochCosts.of(process)
    if epochs is None:
        return None
    carries = best_carries(epochs)
    return carried_curve(epochs, carries) if np.isfinite(epochs.costs(carries)).all() else None


def epoch_by_epoch(process: NoisyProcess, of_law: _OfLaw) -> Curve:
    """Shifts that are used up by the end of each epoch; `of_law` makes the curve of one epoch."""
    period, steps = process.period, process.num_steps
    mixtures: dict[tuple[float, ...], tuple[Curve, int]] = {}
    known: dict[tuple[int, ...], np.ndarray] = {}
    alike = max(1, steps // period) if process.is_constant and not process.release_steps else 1
    for start in (0, *range(alike * period, steps, period)):  # the first one stands for all alike
        stop = min(start + period, steps)
        cuts = [start, *(r for r in process.release_steps if start < r < stop), stop]
        shape = tuple(cut - start for cut in cuts)
        if process.is_constant and shape in known:
            mu_squared = known[shape]
        else:
            # Every record is in one batch of the epoch: the releases in between compose.
            mu_squared = np.zeros(stop - start)
            for left, right in itertools.pairwise(cuts):
                inside = range(left - start, right - start)
                mu_squared[inside] = segment_mu_squared(process, left, right, inside)
            known[shape] = mu_squared
        key = tuple(mu_squared)
        mean = mean_over_places(by_place(mu_squared, period))
        curve, count = mixtures[key] if key in mixtures else (of_law(mean), 0)
        mixtures[key] = curve, count + (alike if start == 0 else 1)
    return compose_curves(list(mixtures.values()))


def late_participations(process: NoisyProcess) -> GaussianMixtureCurve:
    """Equal steps with c <= 1: in the last batch of every epoch but the last one."""
    c, s, sigma = (
        float(array[0]) for array in (process.contraction, process.sensitivity, process.noise_std)
    )
    shift = s / sigma if sigma else (math.inf if s else 0.0)
    mu_squared = late_mu_squared(c, shift, process.period, process.num_steps)
    if process.domain_diameter < math.inf:
        mu_squared = np.minimum(mu_squared, _late_in_a_domain(process))
    return mean_over_places(np.sqrt(mu_squared))


def _late_in_a_domain(process: NoisyProcess) -> float:
    """The costliest one, from the best window of those that start a diameter apart."""

    def of_tail(tail: int) -> np.ndarray:
        steps = slice(process.num_steps - tail, process.num_steps)
        pushes = process.sensitivity_at(process.period - 1, steps).copy()
        pushes[-1] = process.sensitivity[-1]
        mu_squared = least_mu_squared(
            process.contraction[steps],
            pushes,
            process.noise_std[steps],
            initial_shift=distance_after(process, steps.start),
            known_shift=np.full(tail, process.domain_diameter),
        )
        return np.array([mu_squared])

    number = process.num_steps
    return float((of_tail(number) if number <= LONG else by_tails(number, of_tail))[0])


def late_mu_squared(
    contraction: float, shift_in_noise: float, period: int, num_steps: int
) -> np.ndarray:
    """By position in the last epoch, of a record in the last batch of all epochs before it."""
    epochs = (num_steps - 1) // period  # before the last one
    left = num_steps - epochs * period
    position = np.arange(period)
    is_in_it = position < left
    return mu_squared_of_equal_steps(
        contraction,
        shift_in_noise,
        period=period,
        participations=epochs + is_in_it,
        last=np.where(is_in_it, left - position, left + 1),
        gap=np.where(is_in_it, position + 1, period),
    )


def _hidden_in_the_last_epochs(
    event: LastIterateDpEvent, relation: NeighboringRelation, process: NoisyProcess
) -> HiddenPlaceCurve | None:
    """Theorem F on the last epochs, after the largest distance that those before them leave."""
    # A missing record moves the mean of a microbatch by as much as another one.
    if process.release_steps or event.is_microbatched:
        return None
    is_replaced = relation is NeighboringRelation.REPLACE_ONE
    found: list[Places] = []
    for number in (1, 2)[: -(-process.num_steps // process.period)]:
        last, distance = last_epochs(process, number)
        is_whole = last.num_steps % process.period == 0
        if number == 2 and is_whole and last.contraction[-process.period :].prod() < _FORGOTTEN:
            break  # one epoch hides all
        if distance < math.inf:
            found += places_of_fresh_orders(last, distance, is_replaced=is_replaced)
    if not found:
        return None
    return HiddenPlaceCurve(tuple(found), GaussianMixtureCurve(found[0].weights, found[0].between))


def last_epochs(process: NoisyProcess, number: int = 1) -> tuple[NoisyProcess, float]:
    """The last epochs of a run without releases, and the largest distance that others leave."""
    period = process.period
    start = max(0, -(-process.num_steps // period) - number) * period
    return process.from_step(start), distance_after(process, start)
