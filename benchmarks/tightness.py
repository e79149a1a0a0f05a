"""How tight the bounds are: the best sound bound over the largest exact value that was found.

    python benchmarks/tightness.py [--output benchmarks/results/tightness.md]

For every class of runs a small family of members is evaluated by the exact oracles of the tests.
The ratio is at least the looseness of the bound on the members of that family, and so an upper
estimate of its looseness on the class.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import numpy as np
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "oracles"))
from gaussian_oracle import GaussianOracle
from grid_oracle import GridOracle

DELTA = 1e-5
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
_COARSE, _FINE = 10, 96  # cells per standard deviation: for the search, for its best member

Member = tuple[str, dict[str, Any]]
"""What distinguishes a run of a family, and the arguments of the oracle that evaluates it."""


@attrs.frozen
class Class:
    """A class of runs, declared by an event, and the family of members that is searched.

    Attributes:
        name: In the table.
        event: The declared run.
        family: The members; of `GaussianOracle` if `gaussian`, else of `GridOracle`.
        gaussian: The measure: mu, exactly, or epsilon at `DELTA` on a grid.
        comment: Why the bound is loose; empty where it is met.
        relation: The neighbouring relation.
        met: Whether the bound is known to be met: the ratio is 1.
    """

    name: str
    event: hsa.LastIterateDpEvent
    family: Callable[[hsa.LastIterateDpEvent], Iterable[Member]]
    gaussian: bool
    comment: str = ""
    relation: NeighboringRelation = REPLACE_ONE
    met: bool = False


@attrs.frozen
class Row:
    """A line of the table.

    Attributes:
        bound: mu or epsilon of the bound.
        found: The largest exact value or estimate.
        certified: A certified lower bound on the largest value.
        how: The member that attains it.
        theorem: The bound.
    """

    name: str
    measure: str
    bound: float
    found: float
    certified: float
    how: str
    theorem: str

    @property
    def ratio(self) -> float:
        return self.bound / self.found

    @property
    def certified_ratio(self) -> float:
        return self.bound / self.certified

    def cells(self) -> list[str]:
        kind = "exact" if self.measure == "mu" else "estimate"
        certified = "" if self.measure == "mu" else f"{self.certified_ratio:.3f}"
        figures = [f"{self.bound:.4f}", f"{self.found:.4f}", f"{self.ratio:.3f}", certified]
        return [self.name, self.measure, *figures, kind, self.theorem, self.how]


def run(**changes: Any) -> hsa.LastIterateDpEvent:
    """A small run without clipping, of which a class changes what it is about."""
    arguments: dict[str, Any] = {
        "noise_multiplier": 3.0,
        "learning_rate": 0.6,
        "clip_norm": None,
        "batch_size": 4,
        "dataset_size": 4,
        "num_steps": 24,
        "batch_order": "full",
        "loss": hsa.LossGeometry.convex(1.0, lipschitz=1.0),
    }
    return hsa.LastIterateDpEvent(**(arguments | changes))


def cyclic(**changes: Any) -> hsa.LastIterateDpEvent:
    """The same in three cyclic batches of two records."""
    order = {"batch_order": "cyclic", "batch_size": 2, "dataset_size": 6}
    return run(**(order | changes))


def quadratics(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """One-dimensional quadratics: a curvature per batch, and the batch of the record."""
    loss, eta = event.loss, event.per_step("learning_rate")
    assert loss is not None
    lowest = loss.strong_convexity or 0.0 - loss.weak_convexity
    curvatures = {lowest, (lowest + loss.smoothness) / 2, loss.smoothness, max(lowest, 0.0)}
    if lowest <= 1 / eta.max() <= loss.smoothness:
        curvatures.add(float(1 / eta.max()))
    yield from _quadratic_members(event, sorted(curvatures))


def linear(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """Linear losses, the gradients of which clipping leaves alone."""
    yield from _quadratic_members(event, [0.0])


def _quadratic_members(event: hsa.LastIterateDpEvent, curvatures: list[float]) -> Iterator[Member]:
    size = event.batch_size
    period = event.batches_per_epoch
    batches = [
        list(range(t % period * size, (t % period + 1) * size)) for t in range(event.num_steps)
    ]
    for pattern in itertools.product(curvatures, repeat=period):
        for position in range(period):
            text = f"curvature {', '.join(f'{h:.3g}' for h in pattern)}"
            if period > 1:
                text += f"; record in batch {position + 1} of {period}"
            yield (
                text,
                {
                    "hessians": np.repeat(pattern, size).reshape(-1, 1, 1),
                    "orders": [(1.0, batches)],
                    "learning_rate": event.per_step("learning_rate"),
                    "noise_std": event.noise_std_on_sum(),
                    "weight_decay": event.per_step("weight_decay"),
                    "batch_size": size,
                    "record": position * size,
                    "slope_difference": [2 * event.gradient_bound()[0]],
                    "release_steps": event.release_steps,
                },
            )


@attrs.frozen
class Gradient:
    """slope * (x - centre), cut at +-limit.

    The gradient of a Huber loss if slope > 0, of a loss that is concave in the middle if slope < 0.
    """

    centre: float
    slope: float = 1.0
    limit: float = 1.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.clip(self.slope * (x - self.centre), -self.limit, self.limit)

    def __str__(self) -> str:
        if math.isfinite(self.centre):
            return f"slope {self.slope:g} around {self.centre:g}"
        return f"constant {math.copysign(self.limit, -self.centre) + 0.0:g}"


def constant(value: float) -> Gradient:
    """The gradient of a linear loss."""
    return Gradient(-math.copysign(math.inf, value), limit=abs(value))


def huber(*centres: float) -> tuple[Gradient, ...]:
    """The gradients of records that take turns."""
    return tuple(map(Gradient, centres))


UP, DOWN = constant(1.0), constant(-1.0)
STILL = (UP, DOWN)


def _members(
    event: hsa.LastIterateDpEvent,
    others: Iterable[tuple[Gradient, ...]],
    pairs: Iterable[tuple[Gradient, Gradient | None]],
    records: Iterable[int] = (0,),
    **arguments: Any,
) -> Iterator[Member]:
    """Runs in which the others cycle through a pattern and the record is one of `pairs`."""
    for pattern, (here, there), record in itertools.product(others, pairs, records):
        gradients = [pattern[i % len(pattern)] for i in range(event.dataset_size)]
        gradients[record] = here
        text = f"others: {', '.join(map(str, pattern))}; record: {here} against {there or 'none'}"
        if event.batch_order is hsa.BatchOrder.CYCLIC:
            text += f", in batch {record // event.batch_size + 1} of {event.batches_per_epoch}"
        if "start" in arguments:
            text += f"; start {arguments['start']:g}"
        yield (
            text,
            {"event": event, "gradients": gradients, "neighbour": there, "record": record}
            | arguments,
        )


def cyclic_huber(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """Every batch is linear, curved everywhere where the iterates are, or curved at two places."""
    batches = (STILL, huber(0.0, 0.0), huber(-0.8, 0.8))
    others = [sum(parts, ()) for parts in itertools.product(batches, repeat=3)]
    yield from _members(event, others, [(UP, DOWN)], range(0, 6, 2))


def full_huber(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """Linear and Huber losses of the others; the record linear or Huber."""
    others = [STILL, huber(0.0), huber(-0.8, 0.8), huber(-1.5, 1.5), huber(-1.5, 0.0, 1.5)]
    yield from _members(event, others, [(UP, DOWN), (Gradient(-1.0), Gradient(1.0))])


def concave(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """Losses that are concave in the middle, as far as the class allows, or linear."""
    assert event.loss is not None
    others = [STILL]
    for centre in (0.0, 0.5, 1.0):
        for limit in (0.2, 1.0):
            here, there = (
                Gradient(c, -event.loss.weak_convexity, limit) for c in (0.0 - centre, centre)
            )
            others += [(here,), (here, there)]
    yield from _members(event, others, [(UP, DOWN)])


def projected(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """Losses on an interval; the start and what the others do vary."""
    radius = event.domain_diameter / 2
    others = [STILL, *((constant(drift),) for drift in (0.1, 0.2, 0.3, 0.5, 1.0))]
    others += [huber(centre) for centre in (0.0, -0.3, -radius)]
    records = range(0, event.dataset_size, event.batch_size)
    for start in (-radius, 0.0, radius):
        arguments = {"start": start, "domain": (-radius, radius)}
        yield from _members(event, others, [(UP, DOWN)], records, **arguments)


def zeroed(event: hsa.LastIterateDpEvent) -> Iterator[Member]:
    """The record is there or not; linear and Huber losses of the others."""
    others = [(constant(drift),) for drift in (0.0, 0.5, -0.5, 1.0, -1.0)]
    others += [huber(centre) for centre in (0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0)]
    yield from _members(event, others, [(UP, None), (Gradient(-1.0), None)])


_RATES = np.geomspace(1.0, 0.1, 24)
_HUBER = hsa.LossGeometry.generalized_linear(1.0)
_RANDOM: dict[str, Any] = {
    "clip_norm": 1.0,
    "loss": _HUBER,
    "weight_decay": 0.2,
    "batch_size": 2,
    "dataset_size": 6,
    "num_steps": 12,
    "noise_multiplier": 2.0,
}
# Few participations, little noise, and steps that the largest batch does not stretch.
_FEW = {
    "noise_multiplier": 0.5,
    "dataset_size": 24,
    "num_steps": 24,
    "learning_rate": 0.1,
    "weight_decay": 1.2,
}
_CYCLIC = (
    "Theorem A knows how far an update may stretch distances, not how little it must shrink them. "
    "Where eta M < 1, noise from before the record's batch cannot be erased, which the bound does "
    "not use."
)
_FALLING = (
    "A falling learning rate splits the steps into several blocks of the isotonic regression; a "
    "quadratic pays for one block."
)
_PLANE = (
    "The modulus of clipped losses is attained in two dimensions, the grid sees one: how much of "
    "the ratio is looseness is not known."
)
_DOMAIN = (
    "Theorem D takes what the laws of two runs have not in common for opposite ends of the domain, "
    "and in one dimension the projection of the last iterate hides the tails of the last noise."
)
_SECRET = (
    "Theorem A is about the worst run for each place of the record, or for each pattern of its "
    "batches, and that is another run for every one; fresh orders are revealed but for the last "
    "epoch's."
)
_SAMPLED = (
    "The bound adds up what every step of its window tells, the last iterate has but the sum. No "
    "run was found whose last iterate tells more, among 400 others: how much is lost is not known."
)

CLASSES = (
    Class(
        "strongly convex quadratics, full batches",
        run(loss=hsa.LossGeometry.strongly_convex(1.0, 0.5, lipschitz=1.0)),
        quadratics,
        True,
        met=True,
    ),
    Class(
        "convex, weight decay, full batches",
        run(weight_decay=0.2),
        quadratics,
        True,
        met=True,
    ),
    Class(
        "linear losses, full batches",
        run(loss=hsa.LossGeometry.linear(1.0)),
        linear,
        True,
        met=True,
    ),
    Class(
        "clipped generalized linear model, weight decay, full batches",
        run(clip_norm=1.0, loss=_HUBER, weight_decay=0.2),
        linear,
        True,
        met=True,
    ),
    Class(
        "clipped convex, full batches",
        run(clip_norm=1.0, loss=hsa.LossGeometry.convex(1.0)),
        linear,
        True,
        met=True,
    ),
    Class(
        "weakly convex quadratics, full batches",
        run(loss=hsa.LossGeometry.weakly_convex(1.0, 0.1, lipschitz=1.0), num_steps=12),
        quadratics,
        True,
        met=True,
    ),
    Class(
        "weakly convex quadratics, more weight decay, full batches",
        run(loss=hsa.LossGeometry.weakly_convex(1.0, 0.1, lipschitz=1.0), weight_decay=0.3),
        quadratics,
        True,
        met=True,
    ),
    Class(
        "weakly convex quadratics, 4 cyclic epochs",
        cyclic(loss=hsa.LossGeometry.weakly_convex(1.0, 0.05, lipschitz=1.0), num_steps=12),
        quadratics,
        True,
        _CYCLIC,
    ),
    Class(
        "convex, weight decay, full batches, three releases",
        run(weight_decay=0.2, release_steps=(5, 6, 15)),
        quadratics,
        True,
        met=True,
    ),
    Class(
        "one cyclic epoch, eta M = 1",
        cyclic(learning_rate=1.0, num_steps=3),
        quadratics,
        True,
        met=True,
    ),
    Class(
        "one cyclic epoch, eta M = 0.6",
        cyclic(num_steps=3),
        quadratics,
        True,
        _CYCLIC,
    ),
    Class(
        "strongly convex quadratics, 8 cyclic epochs",
        cyclic(loss=hsa.LossGeometry.strongly_convex(1.0, 0.1, lipschitz=1.0)),
        quadratics,
        True,
        _CYCLIC,
    ),
    Class(
        "convex, weight decay, 8 cyclic epochs",
        cyclic(weight_decay=0.2),
        quadratics,
        True,
        _CYCLIC,
    ),
    Class(
        "linear losses, 8 cyclic epochs",
        cyclic(loss=hsa.LossGeometry.linear(1.0)),
        linear,
        True,
        "The exact value counts the noise of every step; the bound forgets what comes before the "
        "last participation, as it must for convex losses with eta M >= 1.",
    ),
    Class(
        "convex, weight decay, full batches, falling learning rate",
        run(weight_decay=0.2, learning_rate=_RATES),
        quadratics,
        True,
        _FALLING,
    ),
    Class(
        "convex, weight decay, 8 cyclic epochs, falling learning rate",
        cyclic(weight_decay=0.2, learning_rate=_RATES),
        quadratics,
        True,
        _FALLING,
    ),
    Class(
        "convex, weight decay, 8 cyclic epochs, three releases",
        cyclic(weight_decay=0.2, release_steps=(5, 6, 15)),
        quadratics,
        True,
        _CYCLIC,
    ),
    Class(
        "clipped generalized linear model, weight decay, 4 cyclic epochs",
        cyclic(clip_norm=1.0, loss=_HUBER, weight_decay=0.2, num_steps=12),
        cyclic_huber,
        False,
        _CYCLIC,
    ),
    Class(
        "clipped convex, weight decay, full batches",
        run(clip_norm=1.0, loss=hsa.LossGeometry.convex(1.0), weight_decay=0.2, num_steps=12),
        full_huber,
        False,
        _PLANE,
    ),
    Class(
        "clipped weakly convex, weight decay, full batches",
        run(
            clip_norm=1.0,
            loss=hsa.LossGeometry.weakly_convex(1.0, 0.1),
            weight_decay=0.4,
            num_steps=12,
        ),
        concave,
        False,
        _PLANE,
    ),
    Class(
        "clipped generalized linear model, bounded domain, full batches",
        run(clip_norm=1.0, loss=_HUBER, domain_diameter=1.0),
        projected,
        False,
        _DOMAIN,
    ),
    Class(
        "clipped generalized linear model, weight decay, bounded domain, 4 cyclic epochs",
        cyclic(clip_norm=1.0, loss=_HUBER, domain_diameter=1.0, weight_decay=0.2, num_steps=12),
        projected,
        False,
        _DOMAIN,
    ),
    *(
        Class(
            f"clipped generalized linear model, weight decay, {order.replace('_', ' ')}"
            + (", little noise" if changes else ""),
            run(batch_order=order, **(_RANDOM | changes)),
            zeroed,
            False,
            comment,
            relation=REPLACE_SPECIAL,
        )
        for order, comment, changes in (
            ("shuffled_once", _SECRET, {}),
            ("reshuffled", _SECRET, {}),
            ("balls_in_bins", _SECRET, {}),
            ("without_replacement", _SAMPLED, {}),
            ("without_replacement", _SECRET, _FEW),
            ("poisson", _SAMPLED, {}),
            ("poisson", _SECRET, _FEW),
        )
    ),
)


def evaluate(item: Class) -> Row:
    """The bound of a class and the largest value of its family."""
    guarantee = hsa.LastIterateAccountant(item.relation).compose(item.event).guarantee
    theorem = guarantee.theorem.partition(" (")[0].partition(",")[0]
    if item.gaussian:
        found, how = max(
            ((GaussianOracle(**arguments).mu, text) for text, arguments in item.family(item.event)),
            key=lambda member: round(member[0], 12),  # the first of several equal ones
        )
        assert guarantee.mu is not None
        return Row(item.name, "mu", guarantee.mu, found, found, how, theorem)
    bound = guarantee.epsilon(DELTA)
    how, arguments = max(
        item.family(item.event),
        key=lambda member: epsilons(member[1], bound, _COARSE, certified=False),
    )
    found = epsilons(arguments, bound, _FINE, certified=False)
    certified = epsilons(arguments, bound, _FINE, certified=True)
    return Row(item.name, "epsilon", bound, found, certified, how, theorem)


def epsilons(
    arguments: dict[str, Any], largest: float, cells_per_std: int, *, certified: bool
) -> float:
    """The epsilon at `DELTA`, in the worse direction, of a run on the grid."""
    oracle = GridOracle(**arguments, cells_per_std=cells_per_std)

    def delta(epsilon: float) -> float:
        estimates = oracle.delta(epsilon)
        return max(e.lower_bound if certified else e.value for e in estimates)

    low, high = 0.0, 2 * largest
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return low


_HEADER = f"""\
# How tight the bounds are

Written by `make tightness` (`benchmarks/tightness.py`); do not edit.

Each row is a class of runs. *Bound* is the smallest sound bound that `LastIterateAccountant` finds
for the class. *Found* is the largest value that an exact oracle (`GaussianOracle`, `GridOracle`)
found among the members of a small family of the class, and *worst run found* says for which one.
*Ratio* is their quotient: 1 means that the bound cannot be improved, more than 1 that it may be
loose, **or** that the family lacks the worst member of the class. The ratio is an upper estimate of
the looseness, never a lower one.

- Rows in mu: Gaussian runs, exact up to floating-point rounding.
- Rows in epsilon (delta = {DELTA:g}): one-dimensional runs on a grid. The looseness on the class is
  proved to be at most the certified ratio.
- Cyclic rows are for the worst position of the record. Rows with random batches are for
  REPLACE_SPECIAL, all others for REPLACE_ONE.

"""
_COLUMNS = (
    "class of runs",
    "in",
    "bound",
    "found",
    "ratio",
    "certified ratio",
    "found is",
    "bound by",
    "worst run found",
)


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def page(rows: Iterable[Row]) -> str:
    """benchmarks/results/tightness.md."""
    lines = [line(_COLUMNS), line("---" for _ in _COLUMNS), *(line(row.cells()) for row in rows)]
    reasons: dict[str, list[str]] = {}
    for item in CLASSES:
        reasons.setdefault(item.comment, []).append(item.name)
    comments = [f"- **{'; '.join(names)}**: {text}" for text, names in reasons.items() if text]
    return _HEADER + "\n".join([*lines, "", "## Where it is loose, and why", "", *comments, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).resolve().parent / "results" / "tightness.md"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    output = parser.parse_args().output
    rows = []
    for number, item in enumerate(CLASSES, start=1):
        start = time.monotonic()
        print(f"[{number}/{len(CLASSES)}] {item.name}", end=" ", file=sys.stderr, flush=True)
        rows.append(evaluate(item))
        seconds = time.monotonic() - start
        print(f"{rows[-1].ratio:.3f}, {seconds:.1f} s", file=sys.stderr, flush=True)
    output.write_text(page(rows), encoding="utf-8")
    print(f"wrote {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
