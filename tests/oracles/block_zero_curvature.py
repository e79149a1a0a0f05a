r"""The attack on DP-MBCD by convex blocks without curvature in one direction.

>>> import hidden_state_accountants as hsa
>>> from dp_accounting import NeighboringRelation
>>> from block_zero_curvature import BlockZeroCurvature
>>> run = hsa.BlockCoordinateDpEvent(
...     step_size=0.1, noise_variance=1.0, gradient_sensitivity=1.0, batch_size=1, dataset_size=25,
...     num_epochs=100, block_loss=hsa.LossGeometry.generalized_linear(1.0))
>>> attack = BlockZeroCurvature(record_curvature=1.0)
>>> evidence = attack.evidence(run, NeighboringRelation.REPLACE_ONE, len)
>>> print(f"{evidence.renyi(2.0) / 2:.5f}")  # Theorem 4.6 claims .00532
0.02090
"""

from __future__ import annotations

import math

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from renyi_evidence import RenyiEvidence
from scipy import special

from hidden_state_accountants.auditing.evidence import Evidence, Progress
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent

_PER_STD = 16  # grid points per smallest standard deviation: trapezoids are then exact
_MOST_TERMS = 4_000_000  # grid points times components
_TAIL = 14.0
_ROUNDING = 1e-11  # relative: more than the sums and the quadrature lose
_THRESHOLDS = (201, 20_001)  # fewest and most


@attrs.frozen
class BlockZeroCurvature:
    r"""One direction of the block in which the other records have no curvature.

    The record's gradient along it is :math:`h\theta \mp S_g/2` (REPLACE_ONE), or the constant
    :math:`S_g` against 0; every other gradient is 0. Given the batch that holds the record,
    :math:`\theta` is Gaussian; the batch is secret and uniform over the records, so that both laws
    are mixtures. A claim that is valid for a public partition is valid for a secret one.

    Formal guarantees: exact for h = 0 and without prox, where all positions of the record give the
    same Gaussian. Otherwise `renyi` is a quadrature, rounded downwards, or the part of it beyond
    one threshold where that would take too long; `delta` is that of the best half-line, exact where
    the likelihood ratio increases and never too large.

    Attributes:
        record_curvature: h in [0, smoothness]. 0, the strongest choice, makes the loss linear;
            the record of Chen & Liu's own class that theory quotes has h = smoothness.
    """

    record_curvature: float = 0.0
    name: str = "block_zero_curvature"
    event_type: type[dp_accounting.DpEvent] = BlockCoordinateDpEvent

    def evidence(
        self, event: BlockCoordinateDpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The bounds of this run."""
        weights, means, variances = self._laws(event, relation)
        there = -means  # the gradient turned round
        if relation is not NeighboringRelation.REPLACE_ONE:
            # S_g against 0 is the same shift as S_g/2 against -S_g/2
            means, there = 2 * means, np.zeros_like(means)
        laws = _Mixtures(weights, means, there, np.sqrt(variances))
        largest = float(np.max(np.abs(means - there) / np.sqrt(variances)))
        progress(f"{self.name}: {len(weights)} positions, largest mu {largest:.4g}")
        return RenyiEvidence(
            attack=self.name,
            strength=laws.strength,
            witness=f"a block loss of curvature {self.record_curvature:g} in the record's "
            "direction and 0 in the others', the batch of the record secret",
            delta=laws.delta,
            renyi=laws.renyi,
        )

    def _laws(
        self, event: BlockCoordinateDpEvent, relation: NeighboringRelation
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Probability, mean (for the slope -S_g/2) and variance per batch of the record."""
        b, length = event.batch_size, event.batches_per_epoch
        eta = event.step_size
        prox = min(1 / (1 + eta * event.prox_strong_convexity), event.prox_lipschitz, 1.0)
        own = 1 - eta * self.record_curvature / b
        push = eta * event.sensitivity(relation) / (2 * b)
        position = np.arange(length)
        # Per epoch: own applies once, at the record's step; prox at the end of each step.
        left = prox ** (length - position).astype(np.float64)
        mean = np.zeros(length)
        variance = np.zeros(length)
        for row in 2 * eta * event.noise_variances():
            mean = prox**length * own * mean + left * push
            noise = row * left**2
            before = np.concatenate([[0.0], np.cumsum(noise)[:-1]])
            variance = (prox**length * own) ** 2 * variance + noise.sum() - (1 - own**2) * before
        sizes = np.full(length, float(b))
        sizes[-1] = event.dataset_size - b * (length - 1)
        return sizes / event.dataset_size, mean, variance


class _Mixtures:
    """Two mixtures of Gaussians on a line that differ in their means, P's to the right."""

    def __init__(self, weights: np.ndarray, here: np.ndarray, there: np.ndarray, stds: np.ndarray):
        laws = np.stack([here, there, stds])
        parts, index = np.unique(laws, axis=1, return_inverse=True)
        self._here, self._there, self._stds = parts
        self._weights = np.bincount(index.ravel(), weights)
        low = float(np.min(self._there - _TAIL * self._stds))
        high = float(np.max(self._here + _TAIL * self._stds))
        fewest, most = _THRESHOLDS
        c = np.linspace(low, high, max(fewest, min(most, _MOST_TERMS // len(self._weights))))
        self._above_c = self._above(self._here, c), self._above(self._there, c)
        self._below_c = self._above(-self._there, -c), self._above(-self._here, -c)

    @property
    def _mu(self) -> float:
        return float((self._here - self._there)[0] / self._stds[0])

    @property
    def strength(self) -> str:
        """How sure the bounds are."""
        return "exact" if len(self._weights) == 1 else "certified"

    def delta(self, epsilon: float) -> float:
        """The largest P(x > c) - e^epsilon Q(x > c) over thresholds c, or Q(x < c) - ... of P."""
        factor = math.exp(epsilon)
        return max(0.0, *(float((p - factor * q).max()) for p, q in (self._above_c, self._below_c)))

    def _above(self, means: np.ndarray, c: np.ndarray) -> np.ndarray:
        total = np.zeros_like(c)
        for weight, mean, std in zip(self._weights, means, self._stds, strict=True):
            total += weight * special.ndtr((mean - c) / std)
        return total

    def renyi(self, order: float) -> float:
        """The larger of the two Renyi divergences of the order."""
        if len(self._weights) == 1:
            return order * self._mu**2 / 2
        return max(
            self._one_way(order, self._here, self._there),
            self._one_way(order, -self._there, -self._here),
        )

    def _one_way(self, order: float, p: np.ndarray, q: np.ndarray) -> float:
        # P^order Q^(1 - order) of one component is centred at order * p + (1 - order) * q.
        centres = order * p + (1 - order) * q
        low = min(float((part - _TAIL * self._stds).min()) for part in (centres, q))
        high = max(float((part + _TAIL * self._stds).max()) for part in (centres, p))
        number = math.ceil((high - low) / float(self._stds.min()) * _PER_STD)
        if number * len(self._weights) > _MOST_TERMS:
            return self._by_half_lines(order)
        x = np.linspace(low, high, number)
        total = special.logsumexp(
            order * self._log_density(p, x) + (1 - order) * self._log_density(q, x)
        )
        return max(0.0, float(total + math.log(x[1] - x[0]) - _ROUNDING) / (order - 1))

    def _by_half_lines(self, order: float) -> float:
        """The divergence is at least that part of it which lies beyond a threshold."""
        best = 0.0
        for p, q in (self._above_c, self._below_c):
            inside = p > q
            logs = order * np.log(p[inside]) + (1 - order) * np.log(np.maximum(q[inside], 1e-300))
            best = max(best, float(np.max(logs, initial=0.0)) / (order - 1))
        return best

    def _log_density(self, means: np.ndarray, x: np.ndarray) -> np.ndarray:
        z = (x[:, None] - means) / self._stds
        scale = self._weights / (self._stds * math.sqrt(2 * math.pi))
        return special.logsumexp(-(z**2) / 2, axis=1, b=scale)
