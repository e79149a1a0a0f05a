"""Kinked losses in one dimension, on a grid: domains, Huber losses, concave pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import attrs
import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from renyi_evidence import RenyiEvidence

from hidden_state_accountants.auditing.evidence import Evidence, Progress, relation_conditions
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import LossKind
from hidden_state_accountants.process.conditions import UnmetCondition

_REACH = 9.0  # standard deviations; 1e-19 of the mass lies beyond
_SEARCH_CELLS = 8
_MOST_CELLS = 128
_SEARCH_STEPS = 40_000  # of all runs of the search together
_FEWEST_WITNESSES = 8
_TARGET_DELTA = 1e-5
_DETERMINISTIC = (BatchOrder.FULL, BatchOrder.CYCLIC)


@attrs.frozen
class OneDimensional:
    r"""Searches one-dimensional runs on a coarse grid, certifies the best on a fine one.

    The record's gradient is constant and as large as the bound allows. The others have no gradient,
    a constant one, or curvature at an end of the class, around one place or two; with a domain, the
    run starts in its middle or at an end.

    Formal guarantees: the certified lower bounds of `GridOracle` for a run of the class. Gradients
    other than constant ones are cut at the smallest gradient bound, so that one loss serves all
    steps. Strongly convex losses are affine in a domain in which they stay within the gradient
    bound; where they are clipped they are linear in the limit, see `LinearLosses`.

    Args:
        effort: Multiplications that one run may take on the fine grid, about 2e9 per second. A run
            that is too long for a useful bound is declined.

    Source: `GridOracle`; this project.
    """

    effort: float = 5e10
    name: str = "one_dimensional"
    event_type: type[dp_accounting.DpEvent] = LastIterateDpEvent

    def check(
        self, event: LastIterateDpEvent, relation: NeighboringRelation
    ) -> tuple[UnmetCondition, ...]:
        """Why the attack does not apply; empty if it does."""
        unmet = list(relation_conditions(event, relation))
        if event.release_steps:
            unmet.append(UnmetCondition("releases", "the last iterate alone", "release_steps"))
        if event.max_batch_size is not None:
            unmet.append(
                UnmetCondition("batch size", "no cap", f"max_batch_size = {event.max_batch_size}")
            )
        if curvatures(event) is None:
            unmet.append(
                UnmetCondition(
                    "strongly convex losses with a bounded gradient",
                    "a domain_diameter < 2 * gradient bound / strong_convexity",
                    f"{event.domain_diameter:g}",
                )
            )
        if not (event.per_step("learning_rate") * event.noise_std_on_sum()).all():
            unmet.append(
                UnmetCondition("noise", "learning_rate and noise_multiplier > 0 at every step", "0")
            )
        if not unmet and self._cells(event) < _fewest_cells(event):
            unmet.append(
                UnmetCondition(
                    "length of the run",
                    f"at most {self.effort:g} multiplications (effort=)",
                    f"{_cost_of_a_cell(event) * _fewest_cells(event) ** 2:.1e} for "
                    f"{event.num_steps} steps",
                )
            )
        return tuple(unmet)

    def _cells(self, event: LastIterateDpEvent) -> int:
        return int(min(_MOST_CELLS, math.sqrt(self.effort / _cost_of_a_cell(event))))

    def evidence(
        self, event: LastIterateDpEvent, relation: NeighboringRelation, progress: Progress
    ) -> Evidence:
        """The certified bounds of the run that looks worst on a coarse grid.

        Raises:
            UnsupportedRunError: No run of the family can be put on a grid.
        """
        spread = float(_spread(event)[-1])
        found: list[tuple[float, Witness]] = []
        refused = "no run of the family is in the class"
        most = max(_FEWEST_WITNESSES, _SEARCH_STEPS // event.num_steps)
        for witness in itertools.islice(witnesses(event, relation, spread), most):
            try:
                oracle = _oracle(event, witness, _SEARCH_CELLS)
            except (UnsupportedRunError, ValueError) as error:
                refused = str(error)
                continue
            found.append((_estimated_epsilon(oracle), witness))
            progress(f"{self.name}: epsilon about {found[-1][0]:.4g}, {witness}")
        if not found:
            raise UnsupportedRunError(refused)
        _, best = max(found, key=lambda pair: pair[0])
        cells = self._cells(event)
        progress(f"{self.name}: certifies on {cells} cells per standard deviation: {best}")
        oracle = _oracle(event, best, cells)
        return RenyiEvidence(
            attack=self.name,
            strength="certified",
            witness=str(best),
            delta=lambda epsilon: max(0.0, *(v.lower_bound for v in oracle.delta(epsilon))),
            renyi=lambda order: max(0.0, *(v.lower_bound for v in oracle.renyi(order))),
        )


def _estimated_epsilon(oracle: GridOracle) -> float:
    """At the target delta, from the uncertified values of the grid."""
    values = Evidence("", "", "", lambda epsilon: max(v.value for v in oracle.delta(epsilon)))
    return values.epsilon(_TARGET_DELTA)


def _oracle(event: LastIterateDpEvent, witness: Witness, cells: int) -> GridOracle:
    radius = event.domain_diameter / 2
    return GridOracle(
        event,
        witness.gradients(event),
        witness.neighbour,
        record=witness.index(event),
        start=witness.start,
        domain=None if radius == math.inf else (-radius, radius),
        cells_per_std=cells,
        reach=_REACH,
    )


def _fewest_cells(event: LastIterateDpEvent) -> float:
    """The bound loses T / (2 cells**2) on each probability: how much of it may be lost."""
    loss = 0.25 if event.batch_order in _DETERMINISTIC else 0.01  # a record that comes rarely
    return max(_SEARCH_CELLS, math.sqrt(event.num_steps / (2 * loss)))


def _spread(event: LastIterateDpEvent) -> np.ndarray:
    """Standard deviation of the iterates, where curvature does not contract; shape (num_steps,)."""
    eta, noise = event.per_step("learning_rate"), event.noise_std_on_sum()
    low = (curvatures(event) or (0.0, 0.0))[0]
    factor = 1 - eta * (event.per_step("weight_decay") + min(low, 0.0))
    variance, result = 0.0, []
    for f, std in zip(factor.tolist(), (eta * noise / event.batch_size).tolist(), strict=True):
        variance = min(f * f * variance + std * std, 1e200)
        result.append(math.sqrt(variance))
    return np.array(result)


def _cost_of_a_cell(event: LastIterateDpEvent) -> float:
    """Multiplications per squared number of cells per standard deviation, for one run."""
    eta = event.per_step("learning_rate") / event.batch_size
    std = eta * event.noise_std_on_sum()
    unit = float(std.min())
    width = 2 * _REACH * _spread(event)
    chains = 1
    if event.batch_order not in _DETERMINISTIC:
        width = width + 2 * np.cumsum(eta * event.gradient_bound())
        if event.batch_order is BatchOrder.SHUFFLED_ONCE:
            chains = event.batches_per_epoch
        if event.batch_order is BatchOrder.RESHUFFLED:
            chains = 2  # used in this epoch or not
    nodes = np.minimum(width, event.domain_diameter) / unit
    per_step = nodes * 2 * _REACH * std / unit
    return 2.5 * chains * float(per_step.sum())  # two data sets, and the coarser grid


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
        return (loss.strong_convexity, loss.smoothness) if room > 0 else None
    if loss.kind is LossKind.HOELDER:
        return (-loss.smoothness, loss.smoothness) if loss.exponent == 1 else (0.0, 0.0)
    return -loss.weak_convexity, loss.smoothness


def _positions(event: LastIterateDpEvent) -> list[int]:
    if event.batch_order is not BatchOrder.CYCLIC:
        return [0]
    return sorted({0, (event.num_steps - 1) % event.batches_per_epoch})
