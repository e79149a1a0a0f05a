r"""The attack by quadratic losses: curvature that erases noise, or undoes the weight decay.

>>> import hidden_state_accountants as hsa
>>> from dp_accounting import NeighboringRelation
>>> from hidden_state_accountants.auditing import LinearLosses, QuadraticLosses
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.0, batch_size=100, dataset_size=2000,
...     num_steps=400, batch_order="cyclic", loss=hsa.LossGeometry.generalized_linear(1.0),
...     weight_decay=0.1)
>>> for attack in (LinearLosses(), QuadraticLosses()):
...     evidence = attack.evidence(run, NeighboringRelation.REPLACE_SPECIAL, lambda text: None)
...     print(attack.name, round(evidence.epsilon(1e-5), 1))
linear_losses 0.9
quadratic_losses 1.8
"""

from __future__ import annotations

import itertools
import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from hidden_state_accountants.auditing.evidence import (
    Evidence,
    Progress,
    relation_conditions,
    strongest,
)
from hidden_state_accountants.auditing.linear_losses import has_no_linear_losses, worst_position
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.process.conditions import UnmetCondition


@attrs.frozen
class QuadraticLosses:
    r"""The record's loss is linear, the others' are quadratic around the start, in one dimension.

    Curvature contracts the noise and the record's influence alike, but a cyclic batch without the
    record may erase the noise just before the record acts, and concave losses undo weight decay.

    Formal guarantees:
      - The witness is in the declared class: the others' losses are Huber-like (or their concave
        mirror images), with gradients cut at the gradient bound. They agree with quadratics of a
        curvature h while :math:`|h x_{t-1}| \le G_t` (and :math:`|x_t| \le R/2` in a domain), which
        fails with a probability of at most p on one data set and p' on the other (union bound over
        the steps, Gaussian tails). With the exact mu of the quadratic run

        .. math::
            \delta(\varepsilon) \ge \delta_\mu(\varepsilon)
                - \min(p + e^\varepsilon p',\; p' + e^\varepsilon p)

        Large batches leave much room: p is then far below a double's precision.
      - A strongly convex class has a linear record only where clipping acts, see `LinearLosses`.
      - A few curvatures are tried, for the record in the batch processed last and in the worst one
        of linear losses: bounds of a subfamily.

    Source: the law of a linear recursion; this project.
    """

    name: str = "quadratic_losses"
    event_type: type[dp_accounting.DpEvent] = LastIterateDpEvent

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """Why the attack does not apply; empty if it does."""
        unmet = list(relation_conditions(event, relation))
        if event.batch_order not in (BatchOrder.FULL, BatchOrder.CYCLIC):
            unmet.append(UnmetCondition("batch order", "FULL or CYCLIC", event.batch_order.name))
        loss = event.loss
        if loss is not None:
            if has_no_linear_losses(loss):
                unmet.append(UnmetCondition("linear record", "no strong convexity", repr(loss)))
            if loss.smoothness == 0 or loss.exponent != 1:
                unmet.append(UnmetCondition("curvature", "a bound on it above 0", repr(loss)))
        if not (event.per_step("learning_rate") * event.noise_std_on_sum()).any():
            unmet.append(UnmetCondition("noise", "noise_multiplier > 0", "0"))
        return tuple(unmet)

    def evidence(
        self, event: LastIterateDpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The bounds of the strongest run of the family."""
        gradients = (1, -1) if relation is NeighboringRelation.REPLACE_ONE else (1, 0)
        curvatures = _curvatures(event)
        period = event.batches_per_epoch
        pairs = list(itertools.product(curvatures, repeat=2))
        if period == 1:
            pairs = [(h, h) for h in curvatures]
        runs = []
        for position in _positions(event):
            progress(f"{self.name}: {len(pairs)} runs of {event.num_steps} steps")
            where = "" if period == 1 else f", record in batch {position + 1} of {period}"
            found = quadratic_runs(event, position, gradients, *np.array(pairs).T)
            for (rest, before), mu, p, q in zip(pairs, *found, strict=True):
                text = f"curvature {rest:.4g}"
                text += f", {before:.4g} in the batch before the record's" if rest != before else ""
                runs.append((float(mu), float(p), float(q), text + where))
        kept: list[tuple[float, float, float, str]] = []
        for run in sorted(runs, key=lambda run: -run[0]):
            # Not those that a run with a larger mu stays in the class as surely as.
            if all(run[1] < other[1] or run[2] < other[2] for other in kept):
                kept.append(run)
        return strongest([self._of_run(*run) for run in kept])

    def _of_run(self, mu: float, leaves: float, neighbour_leaves: float, text: str) -> Evidence:
        def delta(epsilon: float) -> float:
            factor = math.exp(epsilon)
            lost = min(leaves + factor * neighbour_leaves, neighbour_leaves + factor * leaves)
            return max(0.0, delta_from_mu(mu, epsilon) - lost)

        rarely = max(leaves, neighbour_leaves)
        chance = f" except with probability {rarely:.1e}" if rarely > 0 else ""
        witness = f"a linear record among quadratics, {text}: mu = {mu:.6g}{chance}"
        return Evidence(self.name, "certified", witness, delta)


def _positions(event: LastIterateDpEvent) -> set[int]:
    if event.batch_order is BatchOrder.FULL:
        return {0}
    return {(event.num_steps - 1) % event.batches_per_epoch, worst_position(event)}


def _curvature_range(loss: LossGeometry | None) -> tuple[float, float]:
    if loss is None:
        return -math.inf, math.inf
    if loss.kind is LossKind.HOELDER:
        return -loss.smoothness, loss.smoothness
    return loss.strong_convexity - loss.weak_convexity, loss.smoothness


def _curvatures(event: LastIterateDpEvent) -> list[float]:
    """Ends and middle of the range, flat, undoing the decay, erasing what was before."""
    low, high = _curvature_range(event.loss)
    eta = float(event.per_step("learning_rate").max())
    decay = float(event.per_step("weight_decay").max())
    wanted = [0.0, -decay, (1 / eta - decay) / 2, 1 / eta - decay]
    wanted += [h for h in (low, (low + high) / 2, high) if math.isfinite(h)]
    return sorted({min(max(h, low), high) + 0.0 for h in wanted})


_TINIEST_VARIANCE = 1e-280  # below it a double has no digits for its root
_ROUNDING = 1e-9  # relative, taken off mu


def quadratic_runs(
    event: LastIterateDpEvent,
    position: int,
    gradients: tuple[int, int],
    rest: np.ndarray,
    before: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs on quadratic losses that stay in the class of the event most of the time.

    The record, in the batch `position`, has a constant gradient: `gradients` on the two data sets,
    in gradient bounds. The losses of the others have their minimum at the start 0 and the curvature
    `rest`, in the batch before that of the record `before`; shape (runs,).

    Returns:
        The mu of all releases together, if the losses were quadratic everywhere; bounds on the
        probabilities that an iterate of the run, and of that on the neighbouring data set, is where
        they are not. Shape (runs,) each.
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
    return mu, *leaves
