r"""Theorem A: the last iterate of a run with deterministic batches is exactly mu-GDP.

.. math::
    \mu^2 = \min_{\tau,\, a \ge 0} \sum_{t > \tau} (a_t/\sigma_t)^2 \quad\text{with}\quad
    z_\tau = D_\tau,\; z_t = c_t z_{t-1} + s_t - a_t \ge 0,\; z_T = 0

D_tau bounds the distance of the two runs before the window: it is 0 at tau = 0, and what the domain
and the bounded drift leave of it elsewhere. Source: the shifted interpolation of Bok, Su,
Altschuler 2024 (arXiv 2403.00278), with optimal shifts (docs/theory/theorem_a.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.composition import record_mus
from hidden_state_accountants.bounds.solvers.shifts import (
    LONG,
    by_tails,
    least_mu_squared,
    mu_squared_of_equal_steps,
)
from hidden_state_accountants.bounds.solvers.two_places import EpochSums
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.events.batch_order import sensitivity_in_clip_norms
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import UnmetCondition
from hidden_state_accountants.process.distances import (
    distance_after,
    distance_by_moduli,
    tracked_distances,
)
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

_MOST_SCANNED = 500_000  # steps times positions: a second
_ROUNDING = 1e-12  # relative, of the mu of two positions


def shifted_gdp_mu(
    contraction: npt.ArrayLike,
    sensitivity: npt.ArrayLike,
    noise_std: npt.ArrayLike,
    initial_shift: float = 0.0,
) -> float:
    r"""The mu of the last iterate of X_t = phi_t(X_{t-1}) + N(0, sigma_t^2 I) with optimal shifts.

    .. math::
        \mu^2 = \min_{a \ge 0} \sum_{t=1}^T (a_t/\sigma_t)^2 \quad\text{with}\quad
        z_t = c_t z_{t-1} + s_t - a_t \ge 0,\; z_0 = \text{initial\_shift},\; z_T = 0

    Formal guarantees: the last iterate is mu-GDP in both directions (so D_alpha <= alpha mu^2/2 for
    every alpha > 1) if |phi_t(x) - phi_t(y)| <= c_t |x - y|, |phi_t - phi'_t| <= s_t everywhere and
    |X_0 - X'_0| <= initial_shift under a coupling. A projection after the noise changes nothing.

    Args:
        contraction: c_t >= 0, shape (T,). A number stands for a constant, here and below.
        sensitivity: s_t >= 0, shape (T,); 0 where the batch does not hold the record.
        noise_std: sigma_t >= 0, shape (T,).
        initial_shift: z_0 >= 0, finite.

    Returns:
        mu in [0, inf]; inf if a shift is left that no noise covers.

    Raises:
        TypeError: An argument is not an array of real numbers.
        ValueError: A value is negative, NaN or infinite, or the lengths differ.

    Source: Bok, Su, Altschuler 2024 (arXiv 2403.00278) for the constraint; the optimal shifts as an
    isotonic regression, in O(T), are this project's.

    >>> round(shifted_gdp_mu([0.95] * 40, 1.0, 1.0), 12)
    5.487946252467
    """
    names = ("contraction", "sensitivity", "noise_std")
    arrays = [
        validate.real_array(name, np.atleast_1d(value))
        for name, value in zip(names, (contraction, sensitivity, noise_std), strict=True)
    ]
    sizes = {len(array) for array in arrays} - {1}
    if len(sizes) > 1:
        shapes = ", ".join(f"{name} {len(a)}" for name, a in zip(names, arrays, strict=True))
        raise ValueError(f"Expected arrays of one length, got {shapes}.")
    shift = validate.real("initial_shift", initial_shift, minimum=0)
    c, s, sigma = np.broadcast_arrays(*arrays)
    return math.sqrt(least_mu_squared(c, s, sigma, initial_shift=shift))


@attrs.frozen
class ShiftedInterpolation(HiddenStateBound):
    """Theorem A for FULL and CYCLIC runs of a loss with a linear modulus.

    Formal guarantees:
      - Relation: REPLACE_ONE and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for FULL batches.
      - Released: the last iterate and the iterates after `release_steps`; each segment between
        releases starts from a shared state, so that their mu**2 add up.
      - Cyclic order public: the worst position of the record.
      - Assumptions: those of `LastIterateDpEvent`, and that `loss` holds for every record on the
        (convex) domain, which contains x_0.
    """

    key = "shifted_interpolation"
    paper = Citation(
        "Bok, Su, Altschuler 2024", "shifted interpolation, with optimal shifts", "2403.00278"
    )

    def conditions(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """A contractive process."""
        return unmet_conditions(event, relation)

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """mu-GDP of the worst position."""
        return Proof(
            curve=GaussianCurve(math.sqrt(worst_mu_squared(noisy_process(event, relation)))),
            theorem=f"{self.cited('Theorem A')}, optimal shifts",
        )


def position_mus(event: LastIterateDpEvent, relation: NeighboringRelation) -> np.ndarray:
    """A mu for the records of each batch of an epoch; by composition without a linear modulus."""
    period, steps = event.batches_per_epoch, event.num_steps
    if not unmet_conditions(event, relation):
        mus = np.sqrt(mu_squared_by_position(noisy_process(event, relation)))
        return np.pad(mus, (0, period - len(mus)))  # the run may end before the first epoch does
    clips = sensitivity_in_clip_norms(event.batch_order, relation)
    squares = np.broadcast_to((clips * record_mus(event)) ** 2, steps)
    return np.sqrt(np.pad(squares, (0, -steps % period)).reshape(-1, period).sum(axis=0))


def worst_mu_squared(process: NoisyProcess) -> float:
    """mu**2 of the worst position of the record.

    With constant parameters and one release that is the batch processed last, whatever c is: the
    shifts for it, moved to the left, serve every other position. Otherwise windows are tried
    position by position, beginning with the one that costs most without them.
    """
    positions: Sequence[int] = process.positions
    if process.is_constant and not process.release_steps and len(positions) > 1:
        positions = [(process.num_steps - 1) % process.period]
    if len(positions) == 1:
        return _mu_squared_at(process, positions[0])
    without, worst = mu_squared_by_position(process), 0.0
    for place in np.argsort(-without).tolist():
        if without[place] <= worst * (1 + _ROUNDING):
            return max(worst, float(without[place]))
        worst = max(worst, min(_mu_squared_at(process, positions[place]), float(without[place])))
    return worst


def mu_squared_by_position(process: NoisyProcess) -> np.ndarray:
    """mu**2 of all that is released per position of the record; of many without windows."""
    positions = process.positions
    if len(positions) == 1:
        return np.array([_mu_squared_at(process, positions[0])])
    return _of_segments(process, lambda a, b: segment_mu_squared(process, a, b, positions))


def _mu_squared_at(process: NoisyProcess, position: int) -> float:
    """mu**2 of everything released for one position, each segment from its best window."""
    of_segment = functools.partial(_segment_at, process, position)
    return float(_of_segments(process, of_segment))


def _of_segments(process: NoisyProcess, of_segment: Callable[[int, int], Any]) -> Any:
    """The sum over the segments between releases; equal ones cost the same."""
    equal = functools.cache(lambda first, length: of_segment(first, first + length))
    total, start = 0.0, 0
    for end in (*process.release_steps, process.num_steps):
        is_equal = process.is_constant
        total += equal(start % process.period, end - start) if is_equal else of_segment(start, end)
        start = end
    return total


def segment_mu_squared(
    process: NoisyProcess, start: int, stop: int, positions: Sequence[int]
) -> np.ndarray:
    """mu**2 per position of the steps start+1..stop, which begin with a shared state."""
    found = _without_windows(process, start, stop, positions)
    if process.domain_diameter < math.inf and len(positions) * (stop - start) <= _MOST_SCANNED:
        windows = [_segment_at(process, position, start, stop) for position in positions]
        found = np.minimum(found, windows)
    return found


def _without_windows(
    process: NoisyProcess, start: int, stop: int, positions: Sequence[int]
) -> np.ndarray:
    if process.is_constant:
        return _from_common_start(process, start, stop, positions)
    sums = EpochSums.of(process, start, stop, growth=0.0)
    if sums is None:  # numbers out of range
        steps = slice(start, stop)
        arrays = process.contraction[steps], process.noise_std[steps]
        each = (process.sensitivity_at(position, steps) for position in positions)
        return np.array([least_mu_squared(arrays[0], s, arrays[1]) for s in each])
    return np.array([sums.mu_squared({position: 1.0}) for position in positions])


def _from_common_start(
    process: NoisyProcess, start: int, stop: int, positions: Sequence[int]
) -> np.ndarray:
    """mu**2 per position of equal steps with the window that starts where the segment does."""
    steps = stop - start
    first = (np.asarray(positions) - start) % process.period  # steps before the first participation
    participations = np.maximum(0, -((first - steps) // process.period))
    last = steps - first - (participations - 1) * process.period
    s, sigma = float(process.sensitivity[0]), float(process.noise_std[0])
    return mu_squared_of_equal_steps(
        float(process.contraction[0]),
        s / sigma if sigma else (math.inf if s else 0.0),
        period=process.period,
        participations=participations,
        last=np.where(participations > 0, last, 1),
    )


def _segment_at(process: NoisyProcess, position: int, start: int, stop: int) -> float:
    """mu**2 of a segment for one position, from the best window of those that may start in it."""
    if process.is_constant and not _may_be_cut(process, stop - start):
        return float(_from_common_start(process, start, stop, [position])[0])

    def of_tail(tail: int) -> np.ndarray:
        steps, before = slice(stop - tail, stop), stop - start - tail
        initial = distance_after(process, before) if before else 0.0
        sensitivity = process.sensitivity_at(position, steps)
        mu_squared = least_mu_squared(
            process.contraction[steps],
            sensitivity,
            process.noise_std[steps],
            initial_shift=initial,
            known_shift=_known_shift(process, steps, sensitivity, initial),
        )
        return np.array([mu_squared])

    if not process.is_constant or stop - start <= LONG:
        return float(of_tail(stop - start)[0])
    from_start = _from_common_start(process, start, stop, [position])
    return float(np.minimum(by_tails(stop - start, of_tail), from_start)[0])


def _may_be_cut(process: NoisyProcess, num_steps: int) -> bool:
    """Returns whether, in equal steps, the domain or the bounded drift could ever be smaller."""
    c, s = float(process.contraction[0]), float(process.sensitivity[0])
    kappa, drift = float(process.drift_contraction[0]), float(process.drift[0])
    largest = distance_by_moduli(process, num_steps)
    if largest == math.inf:
        return True
    return any(c * d + s > min(kappa * d + drift, process.domain_diameter) for d in (0.0, largest))


def _known_shift(
    process: NoisyProcess, steps: slice, sensitivity: np.ndarray, initial: float
) -> np.ndarray | None:
    """The distances that the domain or the drift cuts, where windows may start; None if nowhere.

    Where the drift cuts the first step of a window, kappa D + drift has to be shifted there instead
    of c D + s; the entry is the smaller distance that costs as much. Entries that contraction and
    sensitivity give are NaN: starting there is never better than at 0.
    """
    distances, is_cut = tracked_distances(process, steps, sensitivity, initial)
    if not is_cut.any():
        return None
    c, before = process.contraction[steps], distances[:-1]
    moved = process.drift_contraction[steps] * before + process.drift[steps]
    known = np.where(is_cut, distances, np.nan)
    is_moved = (moved < c * before + sensitivity) & (c > 0)
    known[:-1][is_moved] = np.maximum((moved - sensitivity)[is_moved], 0) / c[is_moved]
    return known
