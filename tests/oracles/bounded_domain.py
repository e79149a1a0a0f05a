"""Full batches on a bounded domain: both runs pinned at opposite ends before the last step."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from interval_chain import IntervalChain, ThresholdTests
from renyi_evidence import RenyiEvidence

from hidden_state_accountants.auditing.evidence import Evidence, Progress
from hidden_state_accountants.events.batch_order import BatchOrder, sensitivity_in_clip_norms
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind

Gradient = Callable[[np.ndarray], np.ndarray]
"""From points of shape (..., 2) to gradients at them."""

_OVERSHOOTS = (0.0, 0.5, 1.0, 2.0, 3.0)
"""How far beyond its end, in standard deviations of the noise, the first run is pushed."""

# In the plane with the unit vectors e1, e2: the clipped gradients point along e2, the curved
# direction is W, the domain is a segment along U. -U'(I - e2 e2')W W'U = 1/8 is the most that a
# segment can show: the largest eigenvalue of the symmetric part of -(I - e2 e2')W W'.
_W = np.array([0.5, math.sqrt(0.75)])
_U = np.array([0.5, -math.sqrt(0.75)])


@attrs.frozen
class BoundedDomain:
    r"""Refutes claims that take a clipped convex step for a nonexpansive one on a bounded domain.

    The domain is a segment of length R = domain_diameter in the plane, along U; the iterate is a
    number x in [-R/2, R/2]. The records besides the one that differs have, in pairs of opposite
    sign, the convex M-smooth losses

    .. math::
        f(z) = \tfrac{M}{2} \langle W, z \rangle^2 \pm P z_2, \quad
        P = C + \tfrac{\sqrt 3}{8} M R, \quad
        W = \tfrac12 (1, \sqrt 3), \quad U = \tfrac12 (1, -\sqrt 3)

    whose gradients are longer than C everywhere: clipping removes their change along :math:`z_2`,
    and what is left pushes the iterate AWAY from the middle. A step maps x to about
    (1 + eta M/8) x. As many records as needed are linear and add a drift. The record that differs
    pulls one run to the left, the other to the right, so that they sit at opposite ends before the
    last step; the drift is such that the left run stays at its end and is hardly pushed beyond,
    where the projection would hide how far away it is.

    Formal guarantees:
      - Every value is at most the exact divergence of the run (up to floating-point rounding):
        tests of the last iterate against a threshold, with probabilities that are certified by
        monotone rounding (`IntervalChain`).
      - The run belongs to the classes of convex, weakly convex and smooth losses, clipped. Where
        the class has no expanding losses of this form (linear, generalized linear, Hölder, no
        clipping, a small declared gradient bound, eta M >= 2) all losses are linear and the
        factor is 1; the value is then still a lower bound.

    Source: this project. Kong & Ribero 2025 (arXiv 2407.05237), Theorem 2.2, states
    :math:`D_\alpha \le \alpha (L_\lambda R + s)^2/(2 \sigma^2)` with :math:`L_\lambda = 1` for
    convex losses; clipped steps are proved :math:`\sqrt 2 L_\lambda`-Lipschitz only. See
    docs/papers/last_iterate.md.
    """

    name = "bounded_domain"
    event_type = LastIterateDpEvent

    def evidence(
        self, event: dp_accounting.DpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The largest of the certified divergences over a few drifts."""
        assert isinstance(event, LastIterateDpEvent)
        run = _Run(event, relation)
        tests = []
        for i, overshoot in enumerate((None, *_OVERSHOOTS)):
            progress(f"{self.name}: drift {i + 1} of {len(_OVERSHOOTS) + 1}")
            tests.append(run.tests(overshoot))
        return RenyiEvidence(
            attack=self.name,
            strength="certified",
            witness=run.describe(),
            delta=lambda epsilon: max(test.delta(epsilon) for test in tests),
            renyi=lambda order: max(test.renyi(order) for test in tests),
        )


class _Run:
    """The one-dimensional recursion of the run, scaled to noise of standard deviation 1."""

    def __init__(self, event: LastIterateDpEvent, relation: NeighboringRelation):
        self.eta = float(event.per_step("learning_rate")[0])
        self.b, self.steps = event.batch_size, event.num_steps
        self.bound = float(event.gradient_bound()[0])
        self.std = self.eta * float(event.noise_std_on_sum()[0]) / self.b
        self.diameter = event.domain_diameter
        pull = self.eta * self.bound / self.b
        two_sided = sensitivity_in_clip_norms(BatchOrder.FULL, relation) == 2
        self.pulls = (-pull, pull if two_sided else 0.0)  # of the record and of its neighbour
        loss = event.loss
        self.curvature = 0.0
        if (
            event.clip_norm is not None
            and loss is not None
            and loss.kind in (LossKind.CONVEX, LossKind.WEAKLY_CONVEX, LossKind.SMOOTH)
            and self.eta * loss.smoothness < 2  # keeps the step monotone
            and (
                loss.lipschitz is None
                or loss.lipschitz >= self.bound + loss.smoothness * self.diameter / 2
            )
        ):
            self.curvature = loss.smoothness

    def describe(self) -> str:
        """The run in words."""
        return (
            f"{self.steps} full-batch steps on a segment of length {self.diameter:g}, start at its "
            f"left end or middle; losses of curvature {self.curvature:g} and linear drifts"
        )

    def tests(self, overshoot: float | None) -> ThresholdTests:
        """Threshold tests of the last iterate; no overshoot: the run that is symmetric about 0."""
        common = self.common_records(overshoot)
        chain = IntervalChain(self.diameter / self.std, self.steps)
        moved = self.step(chain.nodes * self.std, common)
        left, right = ((moved + pull) / self.std for pull in self.pulls)
        start = 0.0 if overshoot is None else float(chain.nodes[0])
        return chain.tests(left, right, start=start)

    def common_records(self, overshoot: float | None) -> list[tuple[int, Gradient]]:
        """(number, gradient in the plane) of the records that do not differ, at most b - 1."""
        most = self.eta * self.bound / self.b  # the drift that one record can make
        end = np.array(-self.diameter / 2)
        drift, linear = 0.0, 0
        for _ in range(3):  # the drift depends a little on the number of records that make it
            if overshoot is None:
                drift = -sum(self.pulls) / 2
            else:
                stays = end - self.step(end, self._pairs(self.b - 1 - linear))
                drift = float(stays) - self.pulls[0] - overshoot * self.std
            linear = min(self.b - 1, math.ceil(abs(drift) / most))
        pairs = self._pairs(self.b - 1 - linear)
        if linear == 0:
            return pairs
        slope = float(np.clip(drift / (linear * most), -1, 1)) * self.bound
        return [*pairs, (linear, lambda z: np.zeros_like(z) - slope * _U)]

    def _pairs(self, most: int) -> list[tuple[int, Gradient]]:
        """The expanding losses."""
        if self.curvature == 0 or most < 2:
            return []
        push = self.bound + math.sqrt(3) / 8 * self.curvature * self.diameter

        def gradient(sign: float) -> Gradient:
            shift = np.array([0.0, sign * push])
            return lambda z: self.curvature * (z @ _W)[..., None] * _W + shift

        return [(most // 2, gradient(1.0)), (most // 2, gradient(-1.0))]

    def step(self, x: np.ndarray, records: list[tuple[int, Gradient]]) -> np.ndarray:
        """The update by `records`, clipped, along the segment, before noise and projection."""
        total = np.zeros_like(x)
        for number, gradient in records:
            values = gradient(x[..., None] * _U)
            norm = np.maximum(np.linalg.norm(values, axis=-1), 1e-300)
            total += number * (values @ _U) * np.minimum(1.0, self.bound / norm)
        return x - self.eta / self.b * total
