r"""Theorem A for losses with a Hölder gradient: the modulus of the update is not linear.

.. math::
    |\phi_t(x) - \phi'_t(y)| \le f_t(|x - y|), \qquad
    f_t(z) = (1 - \eta w)\,z + \eta\,\theta_t \min(L z^\lambda, 2G) + s_t

theta_t is the share of the terms of batch t that are the same for both data sets
(docs/theory/theorem_a.md).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds.base import Citation, HiddenStateBound, Proof
from hidden_state_accountants.bounds.solvers.optimal_shifts import ShiftProblem, least_mu
from hidden_state_accountants.curves.base import Curve, GaussianCurve, GaussianMixtureCurve
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.process.conditions import Unmet, UnmetCondition
from hidden_state_accountants.process.noisy_process import (
    NoisyProcess,
    noisy_process,
    unmet_conditions,
)

MOST_STEPS = 50_000
"""Steps to optimise over, all positions and releases together; 0.1 to 0.3 ms each."""


@attrs.frozen
class Hoelder(HiddenStateBound):
    """Theorem A for full batches, a fixed order or a shuffled one, and a Hölder gradient.

    Formal guarantees:
      - Relation: REPLACE_ONE and REPLACE_SPECIAL; ADD_OR_REMOVE_ONE for FULL batches.
      - Released: the last iterate and the iterates after `release_steps`; the mu**2 of the segments
        between releases add up.
      - CYCLIC (public order): the worst position of the record. SHUFFLED_ONCE: the mean over the
        positions, and neither the order nor its seed is ever published.
      - Valid for the shifts that are used, which a search chooses: no smaller than the optimum,
        and in the tests within 1e-3 of it. Never above composition.
      - Assumptions: those of `LastIterateDpEvent`, and that `loss` holds for every record on the
        (convex) domain, which contains x_0.

    Source: Bok, Su, Altschuler 2024 (arXiv 2403.00278) for the interpolation; the modulus with the
    bounded gradient and the optimal shifts are this project's. Chien & Li 2024 (arXiv 2410.01068,
    Theorem 3.7) treat Hölder gradients with a_t >= s_t.
    """

    key = "hoelder"
    orders = (BatchOrder.FULL, BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE)
    is_linear = False
    is_hoelder = True
    paper = Citation(
        "Bok, Su, Altschuler 2024", "shifted interpolation, with a Hölder modulus", "2403.00278"
    )

    def conditions(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Unmet:
        """A Hölder gradient, and a run that is short enough to optimise over."""
        of_process = unmet_conditions(event, relation, self.orders, is_linear=False)
        unmet = list(dict.fromkeys([*of_process, *self.at_a_glance(event)]))
        if not unmet:
            process = noisy_process(event, relation, is_linear=False)
            steps = _steps_to_optimise(event, process)
            if steps > MOST_STEPS:
                required = f"at most {MOST_STEPS} over all positions and releases"
                unmet.append(UnmetCondition("steps to optimise", required, f"{steps} or more"))
        return unmet

    def prove(self, event: LastIterateDpEvent, relation: NeighboringRelation) -> Proof:
        """The worst position of a public order, the mean over the positions of a secret one."""
        process = noisy_process(event, relation, is_linear=False)
        mus = mus_of(event, process, relation)
        curve: Curve = GaussianCurve(float(mus.max()))
        if event.batch_order is BatchOrder.SHUFFLED_ONCE:  # which may end before a position
            every = np.pad(mus, (0, process.period - len(mus)))
            curve = GaussianMixtureCurve(np.full(len(every), 1 / len(every)), every)
        return Proof(curve=curve, theorem=f"{self.cited('Theorem A')}, Hölder gradient")


def mus_of(
    event: LastIterateDpEvent, process: NoisyProcess, relation: NeighboringRelation
) -> np.ndarray:
    """mu of everything released, for each of `_patterns`."""
    known: dict[Hashable, float] = {}
    mus = []
    for holds in _patterns(event, process):
        found = []
        for steps, key in _segments(process, holds):
            if key not in known:
                known[key] = least_mu(shift_problem(event, process, relation, steps, holds[steps]))
            found.append(known[key])
        mus.append(math.hypot(*found))
    return np.array(mus)


def shift_problem(
    event: LastIterateDpEvent,
    process: NoisyProcess,
    relation: NeighboringRelation,
    steps: slice,
    holds: np.ndarray,
) -> ShiftProblem:
    """Some steps, of which `holds` says whether the record is in them."""
    assert event.loss is not None
    # Under add-or-remove all terms of the smaller batch, up to b, are in the other one as well.
    b = event.batch_size
    own = 1.0 if relation is NeighboringRelation.ADD_OR_REMOVE_ONE else (b - 1) / b
    eta = event.per_step("learning_rate")[steps] * np.where(holds, own, 1.0)
    return ShiftProblem(
        decay=process.drift_contraction[steps],
        coefficient=eta * event.loss.smoothness,
        cap=2 * eta * event.gradient_bound()[steps],
        sensitivity=np.where(holds, process.sensitivity[steps], 0.0),
        noise_std=process.noise_std[steps],
        exponent=event.loss.exponent,
        diameter=process.domain_diameter,
    )


def _patterns(event: LastIterateDpEvent, process: NoisyProcess) -> Iterator[np.ndarray]:
    """Yields which steps have the record, for the worst position or all that are equally likely."""
    steps, period = np.arange(process.num_steps), process.period
    positions: Sequence[int] = process.positions
    is_public = event.batch_order is not BatchOrder.SHUFFLED_ONCE
    if is_public and process.is_constant and not process.release_steps and len(positions) > 1:
        # The batch processed last: the shifts for it, moved to the left, serve every other one.
        positions = ((process.num_steps - 1) % period,)
    for position in positions:
        yield steps % period == position


def _segments(process: NoisyProcess, holds: np.ndarray) -> Iterator[tuple[slice, Hashable]]:
    """From the first step with the record to the release; equal keys are equal problems."""
    start = 0
    for stop in (*process.release_steps, process.num_steps):
        first = start + int(holds[start:stop].argmax())
        if first < stop and holds[first]:
            own = holds[first:stop].tobytes()
            yield slice(first, stop), own if process.is_constant else (first, own)
        start = stop


def _steps_to_optimise(event: LastIterateDpEvent, process: NoisyProcess) -> int:
    """Number of steps to optimise, or one above MOST_STEPS; a lookup counts as a step."""
    seen, total = set(), 0
    for holds in _patterns(event, process):
        for steps, key in _segments(process, holds):
            total += 1 if key in seen else steps.stop - steps.start
            seen.add(key)
            if total > MOST_STEPS:
                return total
    return total
