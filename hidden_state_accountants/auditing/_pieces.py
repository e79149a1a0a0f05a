"""One-dimensional losses that make a run leak, and how their families are put together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind


@attrs.frozen
class Piece:
    """The gradient slope * (x - centre) cut at +-limit, or the constant `limit`.

    That of a Huber loss if slope > 0, of a loss that is concave in the middle if slope < 0.
    """

    slope: float
    centre: float
    limit: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if self.slope == 0:
            return np.full_like(x, self.limit)
        return np.clip(self.slope * (x - self.centre), -self.limit, self.limit)

    def __str__(self) -> str:
        if self.slope == 0:
            return f"{self.limit:.3g}"
        return f"{self.slope:.3g} (x - {self.centre:.3g}) within {self.limit:.3g}"


@attrs.frozen
class Witness:
    """A run in one dimension.

    Attributes:
        others: The gradients of the other records, who take turns; None for no gradient.
        record: The gradient of the record, and
        neighbour: of the one it stands against, None for none.
        position: The batch of the record.
        start: x_0; the domain, if there is one, is symmetric around 0.
    """

    others: tuple[Piece | None, ...]
    record: Piece
    neighbour: Piece | None
    position: int
    start: float

    def gradients(self, event: LastIterateDpEvent) -> list[Piece | None]:
        """One per record."""
        result = [self.others[i % len(self.others)] for i in range(event.dataset_size)]
        result[self.index(event)] = self.record
        return result

    def index(self, event: LastIterateDpEvent) -> int:
        """The index of the record."""
        return self.position * event.batch_size

    def __str__(self) -> str:
        others = ", ".join("none" if piece is None else str(piece) for piece in self.others)
        against = "none" if self.neighbour is None else str(self.neighbour)
        text = f"gradients: record {self.record} against {against}, others {others}"
        return f"{text}; batch {self.position + 1}, start {self.start:.3g}"


def witnesses(
    event: LastIterateDpEvent, relation: NeighboringRelation, spread: float
) -> Iterator[Witness]:
    """Runs of the class of the event.

    Args:
        event: A run of a class for which `curvatures` is not None.
        relation: The neighbouring relation.
        spread: A typical distance of iterates, the scale of everything.
    """
    limits = event.gradient_bound()
    top, limit = float(limits.max()), float(limits.min())
    low, high = curvatures(event) or (0.0, 0.0)
    radius = event.domain_diameter / 2
    strongly = event.loss is not None and event.loss.kind is LossKind.STRONGLY_CONVEX
    if strongly and low > 0:  # affine: everything has the same curvature
        steep = limit - low * radius
        pieces = [Piece(low, 0.0, limit)]
        pairs = [(Piece(low, -steep / low, limit), Piece(low, steep / low, limit))]
        patterns: list[tuple[Piece | None, ...]] = [(piece,) for piece in pieces]
    else:
        up, down = Piece(0.0, 0.0, top), Piece(0.0, 0.0, -top)
        pairs = [(up, down)]
        patterns = [(up,), (down,), (up, down)]
        if not strongly:
            patterns = [(None,)]
            for slope in sorted({low, high} - {0.0}):
                shift = min(limit / abs(slope), spread)
                patterns.append((Piece(slope, 0.0, limit),))
                patterns.append((Piece(slope, -shift, limit), Piece(slope, shift, limit)))
        if math.isfinite(radius) and not strongly:
            patterns += [(Piece(0.0, 0.0, share * limit),) for share in (-1.0, 0.3, 1.0)]
    starts = [0.0] if radius == math.inf else [0.0, -radius, radius]
    for start, pattern, (here, there), position in itertools.product(
        starts, patterns, pairs, _positions(event)
    ):
        other = there if relation is NeighboringRelation.REPLACE_ONE else None
        yield Witness(pattern, here, other, position, start)


def curvatures(event: LastIterateDpEvent) -> tuple[float, float] | None:
    """The smallest and the largest curvature of the class; None if it has no member to build."""
    loss = event.loss
    if loss is None:
        return -float(event.per_step("weight_decay").max()), 0.0
    if loss.kind is LossKind.STRONGLY_CONVEX:
        if loss.lipschitz is None:
            return 0.0, 0.0  # far from their minima, where they are clipped, losses are linear
        limits = event.gradient_bound()
        room = float(limits.min()) - loss.strong_convexity * event.domain_diameter / 2
        return (loss.strong_convexity, loss.common_smoothness) if room > 0 else None
    if loss.kind is LossKind.HOELDER:
        return (-loss.smoothness, loss.smoothness) if loss.exponent == 1 else (0.0, 0.0)
    return -loss.weak_convexity, loss.common_smoothness


def _positions(event: LastIterateDpEvent) -> list[int]:
    if event.record_position is not None:
        return [event.record_position]
    if event.batch_order is not BatchOrder.CYCLIC:
        return [0]
    return sorted({0, (event.num_steps - 1) % event.batches_per_epoch})
