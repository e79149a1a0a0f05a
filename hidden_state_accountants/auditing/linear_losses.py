r"""The attack by linear losses: constant gradients as long as the bound, which nothing contracts.

>>> import hidden_state_accountants as hsa
>>> from dp_accounting import NeighboringRelation
>>> from hidden_state_accountants.auditing import LinearLosses
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=4.0, learning_rate=0.5, clip_norm=1.0, batch_size=8, dataset_size=8,
...     num_steps=16, batch_order="full", loss=hsa.LossGeometry.convex(1.0))
>>> evidence = LinearLosses().evidence(run, NeighboringRelation.REPLACE_SPECIAL, print)
>>> evidence.witness  # as if every iterate were released
'linear losses; a record in every batch against none: mu = 1'
"""

from __future__ import annotations

import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special, stats

from hidden_state_accountants.auditing.evidence import (
    Evidence,
    Progress,
    relation_conditions,
    strongest,
)
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.events.batch_order import (
    BINS,
    OF_RANDOM_SIZE,
    BatchOrder,
    sensitivity_in_clip_norms,
)
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.process.conditions import UnmetCondition

_DETERMINISTIC = (BatchOrder.FULL, BatchOrder.CYCLIC)


@attrs.frozen
class LinearLosses:
    r"""Every per-example loss is linear; the record's gradient is as long as the bound allows.

    Linear losses are convex, weakly convex, smooth, Hölder and generalized linear with any
    constants. Where every batch holds the record they reach composition, unless weight decay
    contracts: this is what refutes a claim that hiding iterates helps by itself.

    Formal guarantees:
      - FULL, CYCLIC: the exact mu of all releases together, at the worst position of the record.
      - Random orders: lower bounds for the exact law of the shift of the last iterate (with
        releases: of a weighted sum of the increments between them). The record's gradient stands
        against minus itself (REPLACE_ONE) or none. In batches of a fixed size it may point away
        from a common gradient of the other records: the pairs of shifts, in gradient bounds, are
        (2, 0) and (1, -1) for REPLACE_ONE, (1, 0) and (2, 1) otherwise. Schedules and decay:
        shifts are rounded to a lattice, downwards on one side and upwards on the other.
      - Strongly convex losses are not linear; where clipping acts their clipped gradients are
        constant except with a probability that vanishes as their minima move away. The bound is
        the supremum over such runs.

    Source: the law of a sum of Gaussians; this project.
    """

    name: str = "linear_losses"
    event_type: type[dp_accounting.DpEvent] = LastIterateDpEvent

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """Why the attack does not apply; empty if it does."""
        unmet = list(relation_conditions(event, relation))
        if event.domain_diameter < math.inf:
            actual = f"diameter {event.domain_diameter:g}"
            unmet.append(UnmetCondition("law of the iterates", "no projection", actual))
        if has_no_linear_losses(event.loss):
            needs = "losses that are not strongly convex, or clipped ones of any gradient norm"
            unmet.append(UnmetCondition("linear losses in the class", needs, repr(event.loss)))
        silent = (event.per_step("learning_rate") > 0) & (event.noise_std_on_sum() == 0)
        if event.batch_order not in _DETERMINISTIC and silent.any():
            unmet.append(UnmetCondition("noise", "noise_multiplier > 0 at every step", "0"))
        return tuple(unmet)

    def evidence(
        self, event: LastIterateDpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The bounds of the strongest such run."""
        is_replaced = relation is NeighboringRelation.REPLACE_ONE
        neighbour = "one with the opposite gradient" if is_replaced else "none"
        if event.batch_order in _DETERMINISTIC:
            position = worst_position(event)
            factor = sensitivity_in_clip_norms(event.batch_order, relation)
            mu = factor * float(mu_by_position(event)[position])
            is_full = event.batch_order is BatchOrder.FULL
            where = "every batch" if is_full else f"batch {position + 1}"
            where += "" if event.batches_per_epoch == 1 else f" of {event.batches_per_epoch}"
            return Evidence(
                attack=self.name,
                strength="exact",
                witness=f"linear losses; a record in {where} against {neighbour}: mu = {mu:.6g}",
                delta=lambda epsilon: delta_from_mu(mu, epsilon),
            )
        pairs = [(1, -1)] if is_replaced else [(1, 0)]
        if event.batch_order not in OF_RANDOM_SIZE:
            pairs = [(2, 0), *pairs] if is_replaced else [*pairs, (2, 1)]
        down = shift_law(event)
        found = []
        for here, there in pairs:
            progress(f"{self.name}: shifts of {here} against {there} gradient bounds")
            # Downwards from a positive shift is upwards from a negative one.
            up = shift_law(event, up=True) if there > 0 else down
            lines = HalfLines(down, up, here, there)
            found.append(
                Evidence(
                    attack=self.name,
                    strength="certified",
                    witness=f"linear losses, {event.batch_order.name}; a record against "
                    f"{neighbour}: shifts of {here} and {there} gradient bounds wherever it takes "
                    "part",
                    delta=lines.delta,
                )
            )
        return strongest(found)


def has_no_linear_losses(loss: LossGeometry | None) -> bool:
    """Returns whether no loss of the class, clipped if it is not known to be short, is linear."""
    return loss is not None and loss.kind is LossKind.STRONGLY_CONVEX and loss.lipschitz is not None


def released_shifts(event: LastIterateDpEvent) -> tuple[np.ndarray, np.ndarray]:
    r"""Moves of the next released iterate by a gradient as long as the bound, in step t.

    Given the release before, the release that ends a segment is Gaussian; with
    :math:`W_t = \prod_{u > t} (1 - \eta_u w_u)` over the later steps of the segment the shift is
    :math:`W_t \eta_t G_t / b`, in units of :math:`\sqrt{\sum W_u^2 \sigma_u^2}`.

    Returns:
        The shifts, inf where there is no noise, and the segment of every step; shape (num_steps,).
    """
    eta, bound = event.per_step("learning_rate"), event.gradient_bound()
    ends = np.array([*event.release_steps, event.num_steps])
    segment = np.searchsorted(ends, np.arange(1, event.num_steps + 1))
    log_decay = np.cumsum(np.log1p(-eta * event.per_step("weight_decay")))
    log_weight = log_decay[ends - 1][segment] - log_decay
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # In logarithms, because the products of extreme but legal parameters leave a double.
        log_noise = log_weight + np.log(eta) + np.log(event.noise_std_on_sum())
        log_shift = log_weight + np.log(eta) + np.log(bound)
        unit = np.full(len(ends), -np.inf)
        np.maximum.at(unit, segment, log_noise)
        noise = np.where(np.isfinite(log_noise), np.exp(log_noise - unit[segment]), 0.0)
        std = np.sqrt(np.bincount(segment, noise**2))
        shift = np.exp(log_shift - unit[segment]) / std[segment]
    return np.where(np.isneginf(log_shift), 0.0, shift), segment


def mu_by_position(event: LastIterateDpEvent) -> np.ndarray:
    """The mu of all releases of a FULL or CYCLIC run per position, of a record against none."""
    shift, segment = released_shifts(event)
    period = 1 if event.batch_order is BatchOrder.FULL else event.batches_per_epoch
    key = segment * period + np.arange(event.num_steps) % period
    cells, index = np.unique(key, return_inverse=True)
    sums = np.bincount(index, shift)
    return np.sqrt(np.bincount(cells % period, sums**2, minlength=period))


def worst_position(event: LastIterateDpEvent) -> int:
    """The position of the record with the largest mu."""
    return int(np.argmax(mu_by_position(event)))


_MOST_WORK = 1e9  # nodes times draws of a convolution
_STEPS_IN_DOUBT = 12.0  # standard deviations of the shift that the lattice covers


@attrs.frozen(eq=False)
class Atoms:
    """A discrete law: masses at points >= 0, and beyond all of them; what is missing is at 0."""

    points: np.ndarray
    mass: np.ndarray
    beyond: float = 0.0


def shift_law(event: LastIterateDpEvent, *, up: bool = False) -> Atoms:
    r"""The law of the shift of a linear statistic of the releases, rounded down or rounded up.

    The statistic is the last iterate where nothing else is released, otherwise the sum of the
    standardised increments between releases, weighted by their expected shifts. A record that
    contributes the gradient bound wherever it takes part shifts it by the sum, over the steps that
    it joins, of the weighted `released_shifts`, in standard deviations of the statistic. The law
    bounds the real one stochastically; it is exact if all shifts are equal or there is one draw.
    """
    shift, segment = released_shifts(event)
    expected = np.bincount(segment, shift)
    size = float(np.linalg.norm(expected)) or 1.0
    return _sum_of(_draws(event, shift * (expected / size)[segment]), up)


def participation_probability(event: LastIterateDpEvent) -> float:
    """The probability that a record is in a random batch, and not dropped by a cap."""
    rate = event.sampling_probability
    if event.max_batch_size is None:
        return rate
    size = 1 + np.arange(event.dataset_size)
    kept = np.minimum(1.0, event.max_batch_size / size)
    return float(rate * (stats.binom.pmf(size - 1, event.dataset_size - 1, rate) @ kept))


def _draws(event: LastIterateDpEvent, shift: np.ndarray) -> list[Atoms]:
    order, steps, period = event.batch_order, event.num_steps, event.batches_per_epoch
    if order in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
        rate = np.array([participation_probability(event)])
        return [Atoms(shift[t : t + 1], rate) for t in range(steps)]
    sizes = np.full(period, event.batch_size)
    sizes[-1] = event.dataset_size - (period - 1) * event.batch_size
    share = sizes / event.dataset_size
    if order in BINS:
        share = np.full(period, participation_probability(event))
    if order in (BatchOrder.RESHUFFLED, BatchOrder.BALLS_IN_BINS_REDRAWN):
        epochs = [shift[start : start + period] for start in range(0, steps, period)]
        return [Atoms(epoch, share[: len(epoch)]) for epoch in epochs]
    return [Atoms(np.bincount(np.arange(steps) % period, shift, minlength=period), share)]


def _sum_of(draws: list[Atoms], up: bool) -> Atoms:
    values = np.concatenate([draw.points for draw in draws])
    largest = float(values.max())
    if largest == 0:
        return Atoms(np.zeros(1), np.ones(1))
    if len(draws) == 1:
        none = max(0.0, 1 - float(draws[0].mass.sum()))
        return Atoms(np.append(draws[0].points, 0.0), np.append(draws[0].mass, none))
    if float(values[values > 0].min()) >= largest * (1 - 1e-12):
        return _number_of_equal_shifts(draws, largest)
    return _convolved(draws, up)


def _number_of_equal_shifts(draws: list[Atoms], shift: float) -> Atoms:
    rates = np.array([float(draw.mass[draw.points > 0].sum()) for draw in draws])
    rates = np.where(rates > 1 - 1e-12, 1.0, rates)
    values, counts = np.unique(rates, return_counts=True)
    law = np.ones(1)
    for rate, count in zip(values, counts, strict=True):
        law = np.convolve(law, stats.binom.pmf(np.arange(count + 1), count, rate))
    kept = np.flatnonzero(law)
    return Atoms(kept * shift, law[kept])


def _convolved(draws: list[Atoms], up: bool) -> Atoms:
    """The law of the sum, every shift rounded down or up to a lattice."""
    top = sum(float(draw.points.max()) for draw in draws)
    mean = sum(float(draw.points @ draw.mass) for draw in draws)
    variance = sum(float(draw.points**2 @ draw.mass) for draw in draws)
    peak = max(float(draw.points.max()) for draw in draws)
    top = min(top, mean + _STEPS_IN_DOUBT * (variance**0.5 + peak))
    number = sum(len(draw.points) for draw in draws)
    nodes = int(np.clip(_MOST_WORK / number, 512, 16384))
    room = min(len(draws), nodes // 2) if up else 0  # each draw may be rounded up by a node
    width = top / (nodes - 1 - room)
    small = 0.0  # shifts too small to be worth rounding up one by one: all of them happen
    law, beyond = np.zeros(nodes), 0.0
    law[0] = 1.0
    for draw in sorted(draws, key=lambda draw: float(draw.points.max())):
        reach = float(draw.points.max())
        if up and small + reach <= width:
            small += reach
            continue
        if not up and reach < width:
            continue
        steps = draw.points / width
        steps = (np.ceil(steps) if up else np.floor(steps)).astype(np.int64)
        moved = law * max(0.0, 1 - float(draw.mass.sum()))
        for jump, mass in zip(steps.tolist(), draw.mass.tolist(), strict=True):
            moved[jump:] += mass * law[: nodes - jump]
            lost = mass * float(law[nodes - jump :].sum())
            if up:
                beyond += lost
            else:
                moved[-1] += lost
        law = moved
    return Atoms(small + width * np.arange(nodes), law, beyond)


_PER_STD = 25  # thresholds per standard deviation of the noise
_MOST_THRESHOLDS = 8000  # of half-lines that are looked at: a tenth of a second
_FAR = 14.0  # standard deviations beyond the means that thresholds reach
_ROUNDING = 1e-10  # relative: more than sums of positive terms lose
_NEGLIGIBLE = 1e-60  # atoms that are left out, and counted
_CHUNK = 4_000_000  # numbers in an array: 32 MB


class HalfLines:
    r"""Two mixtures of unit Gaussians on a line, compared on half-lines.

    .. math::
        D_{e^\varepsilon}(P, Q) \ge \max_c P(x > c) - e^\varepsilon Q(x > c), \qquad
        D_{e^\varepsilon}(Q, P) \ge \max_c Q(x < c) - e^\varepsilon P(x < c)

    Both are equalities where the likelihood ratio increases, up to the spacing of the thresholds.
    They stay lower bounds if the centres of P are rounded down and those of Q up.

    Args:
        first: Centres of P, rounded down; mass `beyond` is infinitely far to the right.
        second: Centres of Q, rounded up.
        first_factor: What the points of `first` are multiplied with.
        second_factor: The same for `second`; at most first_factor.
    """

    def __init__(self, first: Atoms, second: Atoms, first_factor: float, second_factor: float):
        p, p_mass, p_lost = _kept(first, first_factor)
        q, q_mass, q_lost = _kept(second, second_factor)
        low, high = min(p.min(), q.min()) - _FAR, max(p.max(), q.max()) + _FAR
        number = min(_MOST_THRESHOLDS, math.ceil((high - low) * _PER_STD))
        c = np.linspace(low, high, number)
        less, more = 1 - _ROUNDING, 1 + _ROUNDING
        self._p_above, self._q_above = _above(p, p_mass, c) * less, _above(q, q_mass, c) * more
        self._q_below, self._p_below = _above(-q, q_mass, -c) * less, _above(-p, p_mass, -c) * more
        self._q_above += q_lost  # what was left out counts against the bound
        self._p_below += p_lost

    def delta(self, epsilon: float) -> float:
        """A lower bound on the larger of the two hockey-stick divergences."""
        factor = math.exp(epsilon)
        forward = float(np.max(self._p_above - factor * self._q_above))
        return max(0.0, forward, float(np.max(self._q_below - factor * self._p_below)))


def _kept(atoms: Atoms, factor: float) -> tuple[np.ndarray, np.ndarray, float]:
    kept = atoms.mass > _NEGLIGIBLE
    points, index = np.unique(factor * atoms.points[kept], return_inverse=True)
    lost = float(atoms.mass[~kept].sum()) + atoms.beyond
    return points, np.bincount(index, atoms.mass[kept]), lost


def _above(centres: np.ndarray, mass: np.ndarray, c: np.ndarray) -> np.ndarray:
    rows = max(1, _CHUNK // len(centres))
    parts = [c[i : i + rows] for i in range(0, len(c), rows)]
    return np.concatenate([special.ndtr(centres - part[:, None]) @ mass for part in parts])
