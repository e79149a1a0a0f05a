r"""An outlier saturates the error of DiceSGD, and the error then shifts every later step.

The record has a constant gradient of norm G in one direction, the others have none. From its first
participation on the clipped error adds up to C2 to every step, with the same sign, so the sum of
the updates moves far beyond its noise, and no sampling of later batches hides that.

    N = 50_000, B = 1_000, T = 150, (2, 1e-5)-DP by Theorem 3.7 of Zhang, Bu, Wu, Hong 2024
    (arXiv 2311.14632): the sum of the updates alone has delta(2) >= 0.51 and epsilon(1e-5) >= 18.3.
"""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants.auditing.evidence import Evidence
from hidden_state_accountants.auditing.linear_losses import Atoms, HalfLines
from hidden_state_accountants.bounds.solvers.inclusion_counts import inclusions
from hidden_state_accountants.events.batch_order import BatchOrder, unmet_relation
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.process.conditions import UnmetCondition

_LEVELS = 1024  # shifts are rounded down to so many
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)  # of the first participation: where to start summing


@attrs.frozen
class DiceOutlier:
    """Sums of updates of runs with one outlier: certified lower bounds on half-lines.

    Formal guarantees: every figure is a lower bound on the divergence of runs of the declared class
    (or a limit of such figures), in one of the two directions. Gradients are constant, but for the
    other records in two of the witnesses, whose gradient is not zero at the initial model only.

      - The clipped gradients of the record (ordinary DP-SGD), with what each leaves in the error.
      - The first participation saturates the error: C2 in every later step.
      - No gradient bound: the first batch saturates the error in the opposite direction, and the
        record then turns it around: 2 C2 in every later step.
      - Automatic, G > C1: the smallest error of opposite sign does the same, with changing signs.
    """

    name: str = "dice_outlier"
    event_type: type = DiceSgdDpEvent

    def check(self, event, relation):
        """Why the attack does not apply to the event; empty if it does."""
        reason = unmet_relation(event.batch_order, relation)
        if reason:
            return (UnmetCondition("neighboring_relation", reason, relation.name),)
        if event.automatic and event.gradient_bound < event.clip_norm:
            need = f">= clip_norm = {event.clip_norm:g} in the automatic variant"
            return (UnmetCondition("gradient_bound", need, f"{event.gradient_bound:g}"),)
        return ()

    def evidence(self, event, relation, progress):
        """The best of the witnesses at every epsilon."""
        progress(self.name)
        statistics = list(_statistics(event, relation is NeighboringRelation.REPLACE_ONE))

        def delta(epsilon):
            doubt = 1 + math.exp(epsilon)
            found = (lines.delta(epsilon) - doubt * failure for lines, failure in statistics)
            return max(0.0, *found)

        return Evidence(self.name, "certified", "one outlier with a constant gradient", delta)


def _half_lines(shift, mass, unit, is_mirrored=False):
    """The law of a sum of standard deviation `unit`, which the record shifts, on half-lines.

    A mirrored neighbour's record shifts it by as much in the other direction.
    """
    shift = shift / unit
    if len(shift) > _LEVELS:
        width = float(shift.max()) / _LEVELS
        shift, index = np.unique(np.floor(shift / width) * width, return_inverse=True)
        mass = np.bincount(index, mass)
    shift = np.append(shift, 0.0)
    atoms = Atoms(shift, np.append(mass, max(0.0, 1 - float(mass.sum()))))
    return HalfLines(atoms, atoms, 1.0, -1.0 if is_mirrored else 0.0)


def _statistics(event, is_mirrored):
    """Sums (with signs) of updates, and how likely the other records do not play their part."""
    steps, radius = event.num_steps, event.error_clip_norm
    step = min(event.clip_norm, event.gradient_bound) / event.batch_size
    deposit = max(0.0, event.gradient_bound - event.clip_norm) / event.batch_size
    whole = event.noise_std * math.sqrt(steps)
    count, mass = _count_law(event, steps)
    yield _half_lines(step * count, mass, whole, is_mirrored), 0.0
    if steps == 1:
        return
    first = _first_inclusion(event)
    after = np.arange(steps - 1, -1, -1)
    if not event.automatic and deposit > 0:
        count, mass = _count_law(event, steps - 1)
        yield _half_lines((step + min(deposit, radius)) * count, mass, whole, is_mirrored), 0.0
        if deposit < radius * (steps - 1):
            shift = step + np.minimum(deposit, radius * after)
            yield _half_lines(shift, first, whole, is_mirrored), 0.0
        else:
            for start in _starts(first):
                shift = radius * np.minimum(after, steps - start)
                unit = event.noise_std * math.sqrt(steps - start)
                yield _half_lines(shift, first, unit, is_mirrored), 0.0
    if event.batch_size == 1:  # the first batch may hold no other record
        return
    opposed = event.automatic and event.gradient_bound > event.clip_norm
    if opposed or (not event.automatic and deposit == math.inf):
        if opposed:  # the signs may need one more step to differ
            after = np.maximum(after - 1, 0)
        failure = 0.0
        if event.batch_order is BatchOrder.POISSON:
            failure = (1 - event.sampling_probability) ** (event.dataset_size - 1)
        for start in sorted({max(1, start) for start in _starts(first)}):
            shift = 2 * radius * np.minimum(after, steps - start)
            yield _half_lines(shift, first, event.noise_std * math.sqrt(steps - start)), failure


def _starts(first):
    """Where to start summing: before it, the record has probably not taken part."""
    below = np.cumsum(first)
    starts = {int(np.searchsorted(below, quantile * below[-1])) for quantile in _QUANTILES}
    return sorted({min(start, len(first) - 1) for start in starts} | {0})


def _count_law(event, steps):
    """The number of participations in the first `steps` steps; CYCLIC: of the first batch."""
    order, rate = event.batch_order, event.sampling_probability
    if order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        number = np.arange(steps + 1)
        return number, stats.binom.pmf(number, steps, rate)
    law = inclusions(order, steps, event.batches_per_epoch, rate)
    if order is BatchOrder.CYCLIC:
        return law.count[:1], np.ones(1)
    return law.count, law.weights


def _first_inclusion(event):
    """The probabilities that the record takes part in step t + 1 and in none before."""
    steps, period, rate = event.num_steps, event.batches_per_epoch, event.sampling_probability
    law = np.zeros(steps)
    if event.batch_order in (BatchOrder.FULL, BatchOrder.CYCLIC):
        law[0] = 1.0
    elif event.batch_order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        law[:] = rate * (1 - rate) ** np.arange(steps)
    else:
        law[:period] = 1 / period
    return law
