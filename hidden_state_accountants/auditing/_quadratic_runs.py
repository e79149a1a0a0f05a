"""Scalar runs on quadratic losses: their mu, and how likely they are to leave the class."""

from __future__ import annotations

import math

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent

_TINIEST_VARIANCE = 1e-280
_ROUNDING = 1e-9  # relative, taken off mu


@attrs.frozen
class QuadraticRun:
    """A run on quadratic losses that stays in the class of the event most of the time.

    Attributes:
        mu: Of all releases together, if the losses were quadratic everywhere.
        leaves: Bound on the probability that an iterate of the run, or
        neighbour_leaves: of the run on the neighbouring data set, is where they are not.
        text: The curvatures and the position of the record.
    """

    mu: float
    leaves: float
    neighbour_leaves: float
    text: str

    def delta(self, epsilon: float) -> float:
        """A lower bound on the delta of the run in the class, in the better direction."""
        factor = math.exp(epsilon)
        lost = min(
            self.leaves + factor * self.neighbour_leaves,
            self.neighbour_leaves + factor * self.leaves,
        )
        return max(0.0, delta_from_mu(self.mu, epsilon) - lost)


def quadratic_runs(
    event: LastIterateDpEvent,
    position: int,
    gradients: tuple[int, int],
    rest: np.ndarray,
    before: np.ndarray,
) -> list[QuadraticRun]:
    """One run per pair of curvatures.

    The record, in the batch `position`, has a constant gradient. The losses of all others have
    their minimum at the start 0, and a curvature.

    Args:
        event: A FULL or CYCLIC run.
        position: Of the record.
        gradients: The gradient of the record on the two data sets, in gradient bounds.
        rest: Curvatures of the other records; shape (runs,).
        before: Their curvatures in the batch before that of the record; shape (runs,).
    """
    eta, b = event.per_step("learning_rate"), event.batch_size
    decay = 1 - eta * event.per_step("weight_decay")
    noise = eta * event.noise_std_on_sum() / b
    unit = float(noise.max())  # lengths in its multiples: no square leaves a double
    noise = noise / unit
    bound = event.gradient_bound()
    pull = eta * bound / b / unit
    period = 1 if event.batch_order is BatchOrder.FULL else event.batches_per_epoch
    last_batch = event.dataset_size - (period - 1) * b
    radius = event.domain_diameter / 2 / unit
    releases = {*event.release_steps, event.num_steps}
    with np.errstate(divide="ignore"):
        reach = 1 / np.abs(np.stack([rest, before])) / unit  # times the gradient bound

    shape = (2, len(rest))
    mean, variance, leaves = np.zeros(shape), np.zeros(len(rest)), np.zeros(shape)
    signs = np.array(gradients, dtype=np.float64)[:, None]
    apart, noisy, mu_squared = np.zeros(len(rest)), np.zeros(len(rest)), np.zeros(len(rest))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for t in range(event.num_steps):
            batch = t % period
            here = batch == position
            others = (last_batch if batch == period - 1 else b) - here
            is_before = period > 1 and (batch + 1) % period == position
            curvature = before if is_before else rest
            if others and t:
                room = bound[t] * reach[int(is_before)] - np.abs(mean)
                leaves += 2 * special.ndtr(-room / np.sqrt(variance))
            factor = decay[t] - eta[t] / b * others * curvature
            mean *= factor
            apart *= factor
            if here:
                mean -= pull[t] * signs
                apart += pull[t] * (gradients[0] - gradients[1])
            variance = factor**2 * variance + noise[t] ** 2
            noisy = factor**2 * noisy + noise[t] ** 2
            if radius < math.inf:
                leaves += 2 * special.ndtr(-(radius - np.abs(mean)) / np.sqrt(variance))
            if t + 1 in releases:
                mu_squared += np.where(noisy > _TINIEST_VARIANCE, apart**2 / noisy, 0.0)
                apart, noisy = np.zeros(len(rest)), np.zeros(len(rest))
    mu = np.nan_to_num(np.sqrt(mu_squared) * (1 - _ROUNDING), nan=0.0, posinf=0.0)
    leaves = np.minimum(np.nan_to_num(leaves, nan=1.0), 1.0)
    where = "" if period == 1 else f", record in batch {position + 1} of {period}"
    return [
        QuadraticRun(
            mu=float(m),
            leaves=float(p),
            neighbour_leaves=float(q),
            text=f"curvature {a:.4g}"
            + (f", {c:.4g} in the batch before the record's" if period > 1 and a != c else "")
            + where,
        )
        for m, p, q, a, c in zip(mu, *leaves, rest, before, strict=True)
    ]
