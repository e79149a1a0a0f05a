"""Runs with any losses, in one dimension, for hypothesis."""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from hypothesis import assume
from hypothesis import strategies as st
from scipy import stats
from strategies import (
    FULL,
    KINDS,
    REPLACE_ONE,
    SAMPLED,
    decays,
    draw_curvature,
    draw_sampling_rate,
    magnitudes,
    per_step,
    relations,
)

import hidden_state_accountants as hsa


@attrs.frozen(eq=False)
class Ramp:
    """slope * (x - centre), cut at low and high: linear, Huber, sign-like, constant."""

    slope: float
    centre: float
    low: float
    high: float

    def __call__(self, x):
        return np.clip(self.slope * (x - self.centre), self.low, self.high)


@attrs.frozen(eq=False)
class Sigmoid:
    """Logistic-like: bounded by `height`, slope at most `slope`."""

    slope: float
    centre: float
    height: float

    def __call__(self, x):
        return self.height * np.tanh(self.slope / self.height * (x - self.centre))


@attrs.frozen(eq=False)
class Wave:
    """Curvature between -slope and slope, bounded by `height`."""

    slope: float
    centre: float
    height: float

    def __call__(self, x):
        return self.height * np.sin(self.slope / self.height * (x - self.centre))


@attrs.frozen(eq=False)
class Power:
    """Hölder with constant `constant`: constant * |x - centre|**exponent, even or odd, cut."""

    constant: float
    exponent: float
    centre: float
    height: float
    odd: bool

    def __call__(self, x):
        u = x - self.centre
        value = self.constant * np.abs(u) ** self.exponent
        if self.odd:  # (a + b)**e >= 2**(e - 1) (a**e + b**e)
            value = value * np.sign(u) * 2 ** (self.exponent - 1)
        return np.clip(value, -self.height, self.height)


@attrs.frozen(eq=False)
class Mix:
    """A convex combination: the classes are convex."""

    share: float
    first: object
    second: object

    def __call__(self, x):
        return self.share * self.first(x) + (1 - self.share) * self.second(x)


@attrs.frozen(eq=False)
class Tilted:
    """first(x) + slope * (x - centre): strongly convex."""

    slope: float
    centre: float
    first: object

    def __call__(self, x):
        return self.first(x) + self.slope * (x - self.centre)


@attrs.frozen(eq=False)
class GridRun:
    """A one-dimensional run; `grid` is the oracle at a resolution."""

    event: hsa.LastIterateDpEvent
    relation: NeighboringRelation
    arguments: dict
    cells: int
    escape: float = 0.0  # probability that a cap on the batches acts
    oracles: dict = attrs.field(factory=dict, repr=False)

    def grid(self, refine=1):
        if refine not in self.oracles:
            self.oracles[refine] = GridOracle(
                _moving(self.event), **self.arguments, cells_per_std=self.cells * refine
            )
        return self.oracles[refine]

    @property
    def position(self):
        """Of the record's batch in an epoch."""
        return self.arguments["record"] // self.event.batch_size

    def delta(self, epsilon):
        return [e.lower_bound for e in self.estimates("delta", epsilon)]

    def renyi(self, order):
        return [e.lower_bound for e in self.estimates("renyi", order)]

    def estimates(self, name, argument, refine=1):
        """Less what a cap on the batches, which the oracle does not know, can do."""
        if name == "renyi":
            return [] if self.escape else self.grid(refine).renyi(argument)
        slack = (1 + math.exp(argument)) * self.escape
        return [
            attrs.evolve(e, value=e.value - slack, lower_bound=e.lower_bound - slack)
            for e in self.grid(refine).delta(argument)
        ]


def _moving(event):
    """Without a cap, and without the steps that do nothing, as the oracle wants it."""
    event = attrs.evolve(event, max_batch_size=None)
    keep = event.per_step("learning_rate") > 0
    if keep.all():
        return event
    names = ["noise_multiplier", "learning_rate", "weight_decay"]
    names += ["clip_norm"] * (event.clip_norm is not None)
    arrays = {name: event.per_step(name)[keep] for name in names}
    return attrs.evolve(event, num_steps=int(keep.sum()), **arrays)


@st.composite
def grid_runs(draw, orders=tuple(hsa.BatchOrder), most_steps=8, most_work=3e7):
    """Every order, relation and kind of loss; domains; clipped and not."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    batch, period = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    period = 1 if order is FULL else period
    steps = draw(st.integers(1, most_steps))
    can_rest = order in (FULL, *SAMPLED)  # leaving a step out does not change the other batches
    eta = draw(per_step(magnitudes(0.01, 8), steps, jump=30, zeros=can_rest))
    assume(np.max(eta) > 0)
    clip = draw(per_step(magnitudes(0.2, 3), steps, jump=30))
    noise = draw(per_step(magnitudes(0.3, 4), steps, jump=10))
    decay = draw(decays(eta))
    kind = draw(st.sampled_from(KINDS))
    start = draw(st.floats(-1, 1))
    reach = float(np.max(eta * np.max(clip))) * min(steps, 4)
    domain = None
    if draw(st.booleans()):
        width = reach * draw(magnitudes(0.02, 4))
        low = start - width * draw(st.floats(0, 1))
        domain = (low, max(low + width, start))
    bounded = kind == "linear" or draw(st.booleans())
    if kind == "strongly_convex" and domain is None:
        bounded = False
    unclipped = bounded and draw(st.booleans())
    lipschitz = float(np.max(clip)) * draw(st.one_of(st.just(1.0), magnitudes(0.1, 3)))
    largest = float(lipschitz if unclipped else np.max(clip))
    loss, piece = _losses(draw, kind, lipschitz if bounded else None, largest, domain, start, reach)
    pieces = [draw(piece) for _ in range(draw(st.integers(1, 2)))]
    size = batch * period
    gradients = [pieces[draw(st.integers(0, len(pieces) - 1))] for _ in range(size)]
    record = draw(st.integers(0, size - 1))
    gradients[record] = draw(piece)
    rate, cap, escape = draw_sampling_rate(draw, order), None, 0.0
    if order is SAMPLED[1] and draw(st.booleans()):
        cap = draw(st.sampled_from([max(1, size - 1), size, size + 1]))
        escape = float(steps * stats.binom.sf(cap, size, rate or batch / size))
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise,
        learning_rate=eta,
        clip_norm=None if unclipped else clip,
        weight_decay=decay,
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        loss=loss,
        domain_diameter=math.inf if domain is None else domain[1] - domain[0],
        sampling_rate=rate,
        max_batch_size=cap,
    )
    arguments = {
        "gradients": gradients,
        "neighbour": draw(piece) if relation is REPLACE_ONE else None,
        "record": record,
        "start": start,
        "domain": domain,
    }
    cells = _affordable(event, most_work)
    assume(cells is not None)
    return GridRun(event, relation, arguments, cells, escape)


def _affordable(event, most_work):
    """The finest grid whose convolutions cost no more than `most_work` per step."""
    event = _moving(event)
    std = event.per_step("learning_rate") * event.noise_std_on_sum() / event.batch_size
    step = event.per_step("learning_rate") * event.gradient_bound() * 2
    width = min(float(np.sum(step) + 32 * np.sqrt(np.sum(std**2))) * 1.2, event.domain_diameter)
    for cells in (48, 32, 24, 16, 12):
        unit = float(std.min()) / cells
        if (width / unit) * (32 * float(std.max()) / unit) < most_work:
            return cells
    return None


def _losses(draw, kind, lipschitz, largest, domain, start, reach):
    """The declared class, with the gradient bound `lipschitz` or None, and gradients of the class.

    `largest` is the length beyond which gradients are clipped.
    """
    height = 3 * largest if lipschitz is None else lipschitz
    low, high = draw_curvature(draw, kind)
    centre = st.floats(-2, 2).map(lambda u: start + u * reach)
    extreme = min(largest, height)
    level = st.one_of(
        st.sampled_from([-extreme, extreme, 0.0]), st.floats(-1, 1).map(lambda u: u * height)
    )

    def tilt_room(slope):
        return 0.0 if domain is None else slope * (domain[1] - domain[0]) / 2

    if kind == "strongly_convex":
        if lipschitz is not None:
            low = min(low, lipschitz / max(domain[1] - domain[0], 1e-9))
            height = lipschitz - tilt_room(low)
        base = _ramps(0.0, high - low, centre, level.map(lambda v: np.clip(v, -height, height)))
        middle = start if domain is None else (domain[0] + domain[1]) / 2
        loss = hsa.LossGeometry.strongly_convex(high, low, lipschitz)
        return loss, base.map(lambda g: Tilted(low, middle, g))
    constants = level.map(lambda v: Ramp(0.0, 0.0, v, v))
    if kind == "linear":
        return hsa.LossGeometry.linear(lipschitz), constants
    if kind == "hoelder":
        exponent = draw(st.sampled_from([0.3, 0.7, 1.0]))
        powers = st.builds(
            Power, st.just(1.0), st.just(exponent), centre, st.just(height), st.booleans()
        )
        return hsa.LossGeometry.hoelder(1.0, exponent, lipschitz), constants | powers
    heights = st.sampled_from([1.0, 0.5, 0.1]).map(lambda u: u * height)
    simple = constants | _ramps(low, high, centre, level)
    simple |= st.builds(Sigmoid, st.just(high), centre, heights)
    if low < 0:
        simple |= st.builds(Sigmoid, st.just(low), centre, heights)
        simple |= st.builds(Wave, st.just(min(-low, high)), centre, heights)
    pieces = simple | st.builds(Mix, st.floats(0, 1), simple, simple)
    if kind == "weakly_convex":
        return hsa.LossGeometry.weakly_convex(high, -low, lipschitz), pieces
    return getattr(hsa.LossGeometry, kind)(high, lipschitz), pieces


def _ramps(low, high, centre, level):
    slopes = st.sampled_from([low, high, (low + high) / 2])

    def build(slope, middle, one, two):
        return Ramp(slope, middle, min(one, two), max(one, two))

    return st.builds(build, slopes, centre, level, level)
