"""Runs whose laws are known, for hypothesis: what is declared, and what their losses truly are.

A claim about a class is refuted by one run of the class. Each run has its event, its relation and,
in both directions, lower bounds `delta(epsilon)` and `renyi(order)`; none where it has no answer.
"""

import functools
import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from grid_oracle import GridOracle
from hypothesis import assume
from hypothesis import strategies as st
from mixtures_of_gaussians import patterns
from scipy import stats
from strategies import (
    CYCLIC,
    EPOCHS,
    FULL,
    KINDS,
    REPLACE_ONE,
    SAMPLED,
    decays,
    draw_curvature,
    draw_sampling_rate,
    events,
    geometry_of,
    magnitudes,
    per_step,
    relations,
)

import hidden_state_accountants as hsa
from hidden_state_accountants.events.batch_order import BINS

RESHUFFLED = EPOCHS[1]
_ESCAPE = 1e-9  # probability, summed over the steps, of leaving the ball where losses are quadratic


# --- quadratic losses, one order of the batches ---------------------------------------------------


@attrs.frozen(eq=False)
class GaussianRun:
    """A run whose released iterates are jointly Gaussian but for a probability of `slack`.

    Each loss is quadratic on a ball that the iterates leave with probability at most `slack`, and
    outside an extension (Huber's, in every eigendirection of its Hessian) with the declared
    Lipschitz constant and curvature; or the ball is the domain.
    """

    event: hsa.LastIterateDpEvent
    relation: NeighboringRelation
    position: int  # of the record's batch in an epoch
    oracle: GaussianOracle
    slack: float

    def delta(self, epsilon):
        return [d - (1 + math.exp(epsilon)) * self.slack for d in self.oracle.delta(epsilon)]

    def renyi(self, order):
        return [] if self.slack else list(self.oracle.renyi(order))


@st.composite
def gaussian_runs(draw, most_steps=24):
    """Quadratic losses of any dimension, FULL or CYCLIC batches, with releases."""
    dimension, steps = draw(st.integers(1, 3)), draw(st.integers(1, most_steps))
    batch = draw(st.one_of(st.integers(1, 5), st.just(60)))
    order = draw(st.sampled_from([FULL, CYCLIC]))
    period = draw(st.integers(1, 4)) if order is CYCLIC else 1
    size = batch * period
    relation = draw(relations(order))
    kind = draw(st.sampled_from(KINDS if relation is REPLACE_ONE else KINDS[1:]))
    curvature = draw_curvature(draw, kind)
    declared = {
        "learning_rate": draw(per_step(magnitudes(0.01, 8), steps, zeros=True)),
        "batch_size": batch,
        "release_steps": draw(st.lists(st.integers(1, steps), max_size=3)),
    }
    eta = np.broadcast_to(declared["learning_rate"], steps)
    assume(eta.max() > 0)
    declared["weight_decay"] = draw(decays(declared["learning_rate"]))
    noise = draw(per_step(magnitudes(0.1, 10), steps))
    record = draw(st.integers(0, size - 1))
    position = record // batch if order is CYCLIC else 0
    hessians = np.empty((size, dimension, dimension))
    hessians[:] = _hessian(draw, dimension, curvature, kind)
    if relation is not REPLACE_ONE:
        hessians[record] = 0.0  # both sides need the same Hessian, and the other gradient is zero
    elif draw(st.booleans()):
        hessians[record] = max(curvature[0], 0.0) * np.eye(dimension)
    direction = _direction(draw, hessians[record], kind)
    slopes = np.zeros((size, dimension))
    slopes[record] = -direction if relation is REPLACE_ONE else 0.0
    batches = [np.arange(t % period * batch, (t % period + 1) * batch) for t in range(steps)]
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and draw(st.booleans()):
        # The record is added: the larger data set has one more than the divisor.
        hessians = np.concatenate([hessians, np.zeros((1, dimension, dimension))])
        slopes, record = np.concatenate([slopes, np.zeros((1, dimension))]), size
        batches = [np.arange(size + 1)] * steps
    # A step without learning rate leaves the iterate where it was.
    moving = np.flatnonzero(eta > 0)
    counts = np.searchsorted(moving, [*declared["release_steps"], steps])
    seen = {int(count) for count in counts if count}
    kept = moving[: max(seen)]
    batches = [batches[t] for t in kept]
    arrays = {"learning_rate": eta, "weight_decay": declared["weight_decay"], "noise_std": noise}
    try:
        oracle = GaussianOracle(
            hessians,
            [(1.0, batches)],
            **{name: np.broadcast_to(value, steps)[kept] for name, value in arrays.items()},
            batch_size=batch,
            record=record,
            slope_difference=direction * (2.0 if relation is REPLACE_ONE else 1.0),
            slopes=slopes,
            release_steps=seen,
        )
    except (ValueError, np.linalg.LinAlgError):  # no number is as large, or as near
        assume(False)
    _, joint = oracle.law(batches, seen)
    assume(np.isfinite(joint).all() and np.linalg.cond(joint) < 1e8)
    assume(oracle.mu < 30)
    everywhere = oracle.law(batches, set(range(1, len(kept) + 1)))
    loss, domain, slack = _ball(draw, kind, curvature, hessians, record, everywhere)
    clip = draw(st.sampled_from(["none", "at_the_bound", "above", "undeclared"]))
    unit = loss.lipschitz
    if clip in ("above", "undeclared") and kind != "linear":
        unit = unit * np.maximum(1.0, draw(per_step(magnitudes(1, 1e3), steps)))
    if clip == "undeclared" and kind != "linear":
        loss = attrs.evolve(loss, lipschitz=None)
    event = hsa.LastIterateDpEvent(
        **declared,
        noise_multiplier=noise / unit,
        clip_norm=None if clip == "none" else unit,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        loss=loss,
        domain_diameter=domain,
    )
    return GaussianRun(event, relation, position, oracle, slack)


def _hessian(draw, dimension, curvature, kind):
    levels = st.sampled_from([*curvature, sum(curvature) / 2])
    if kind == "generalized_linear":  # one prediction: rank one
        return np.diag(np.eye(dimension)[0]) * draw(levels)
    values = [draw(levels) for _ in range(dimension)]
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    rotation, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    return (rotation * values) @ rotation.T


def _direction(draw, hessian, kind):
    if kind == "generalized_linear" and hessian.any():
        return np.eye(len(hessian))[0]
    direction = np.array([1.0, *(draw(st.floats(-1, 1)) for _ in hessian[1:])])
    return direction / np.linalg.norm(direction)


def _ball(draw, kind, curvature, hessians, record, law):
    """The loss class, the domain and the slack of losses that are quadratic on a ball.

    The slope of the record or of its neighbour has length 1, no other has one. The law is means and
    covariance of all iterates, one after the other.
    """
    if kind == "linear":
        return geometry_of(kind, curvature, 1.0), math.inf, 0.0
    (means, joint), dimension = law, hessians.shape[1]
    steps = len(means) // dimension
    quantile = math.sqrt(stats.chi2.isf(_ESCAPE / (2 * steps), dimension))
    blocks = [slice(t * dimension, (t + 1) * dimension) for t in range(steps)]
    reach = max(
        np.linalg.norm(means[b], axis=0).max()
        + quantile * math.sqrt(np.linalg.norm(joint[b, b], 2))
        for b in blocks
    )
    assume(math.isfinite(reach))
    bounded = kind == "strongly_convex" or draw(st.booleans())
    slack = _ESCAPE if bounded or hessians.any() else 0.0
    bends = np.linalg.norm(hessians, axis=(1, 2)) * reach
    lipschitz = max(1 + float(bends[record]), float(bends.max()))
    exponent = draw(st.sampled_from([0.5, 0.9, 1.0]))
    # min(M r, 2 F) <= M**a (2 F)**(1 - a) r**a, M = 1.
    constant = max((2 * float(bends.max())) ** (1 - exponent), 1e-9)
    loss = geometry_of(kind, curvature, lipschitz, constant, exponent)
    return loss, 2 * float(reach) if bounded else math.inf, slack


# --- linear losses, every order that may have been ------------------------------------------------


@st.composite
def secret_order_runs(draw, orders=(*EPOCHS, *SAMPLED)):
    """Linear losses under every random order, with decay or a proximal map after the noise."""
    event, relation = draw(events(orders, most_steps=6))
    order, batch, period = event.batch_order, event.batch_size, event.batches_per_epoch
    assume(order is not RESHUFFLED or period ** (-(-event.num_steps // period)) <= 64)
    strength = draw(st.just(0.0) | magnitudes(0.05, 4))
    losses = [hsa.LossGeometry.linear(1.0), hsa.LossGeometry.convex(0.5, 1.0), None]
    event = attrs.evolve(
        event,
        clip_norm=1.0,
        loss=draw(st.sampled_from(losses)),
        weight_decay=0.0 if strength else event.weight_decay,
        prox_strong_convexity=strength,
        domain_diameter=math.inf,
        release_steps=(),
    )
    others = draw(st.sampled_from([0.0, 1.0, -1.0])) if order is not SAMPLED[1] else 0.0
    own, moved = (-1.0, 2.0) if relation is REPLACE_ONE else (0.0, 1.0)
    found = patterns(order, event.num_steps, period, event.sampling_rate or 1 / period)
    oracle = GaussianOracle.of(
        event,
        np.zeros((2, 1, 1)),
        [
            (weight, [[0] * is_in + [1] * (batch - is_in) for is_in in present])
            for present, weight in zip(*found, strict=True)
            if weight > 0
        ],
        prox=1 / (1 + event.per_step("learning_rate") * strength),
        record=0,
        slopes=[[own], [others]],
        slope_difference=[moved],
    )
    assume(oracle.mu < 8)
    return GaussianRun(event, relation, 0, oracle, 0.0)


# --- any losses, in one dimension -----------------------------------------------------------------

# Gradients at x, to which functools.partial gives the other arguments, so that a run shows them.


def ramp(x, slope, centre, one, two):
    """Linear, Huber, sign-like, constant: cut at `one` and `two`."""
    return np.clip(slope * (x - centre), min(one, two), max(one, two))


def sigmoid(x, slope, centre, height):
    """Logistic-like: bounded by `height`, slope at most `slope`."""
    return height * np.tanh(slope / height * (x - centre))


def wave(x, slope, centre, height):
    """Curvature between -slope and slope, bounded by `height`."""
    return height * np.sin(slope / height * (x - centre))


def power(x, exponent, centre, height, is_odd):
    """Hölder with constant 1: |u|**exponent, even or odd, cut."""
    u = x - centre
    value = np.abs(u) ** exponent
    value = value * np.sign(u) * 2 ** (exponent - 1) if is_odd else value
    return np.clip(value, -height, height)


def mix(x, share, first, second):
    """A convex combination: the classes are convex."""
    return share * first(x) + (1 - share) * second(x)


def tilted(x, piece, slope, middle):
    return piece(x) + slope * (x - middle)


def constant(value):
    return functools.partial(ramp, slope=0.0, centre=0.0, one=value, two=value)


def _partials(function, **arguments):
    return st.builds(functools.partial, st.just(function), **arguments)


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
def grid_runs(draw, orders, most_steps=8, most_work=3e7):
    """Every order, relation and kind of loss; domains; clipped and not."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    batch = 1 if order in BINS else draw(st.integers(1, 3))
    size = batch * (draw(st.integers(1, 3)) if order is not FULL else 1)
    steps = draw(st.integers(1, most_steps))
    can_rest = order in (FULL, *SAMPLED)  # leaving a step out does not change the other batches
    eta = draw(per_step(magnitudes(0.01, 8), steps, jump=30, zeros=can_rest))
    assume(np.max(eta) > 0)
    clip = draw(per_step(magnitudes(0.2, 3), steps, jump=30))
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
    gradients = [draw(st.sampled_from(pieces)) for _ in range(size)]
    record = draw(st.integers(0, size - 1))
    gradients[record] = draw(piece)
    rate, cap, escape = draw_sampling_rate(draw, order), None, 0.0
    if order is SAMPLED[1] and draw(st.booleans()):
        cap = draw(st.sampled_from([max(1, size - 1), size, size + 1]))
        escape = float(steps * stats.binom.sf(cap, size, rate or batch / size))
    event = hsa.LastIterateDpEvent(
        noise_multiplier=draw(per_step(magnitudes(0.3, 4), steps, jump=10)),
        learning_rate=eta,
        clip_norm=None if unclipped else clip,
        weight_decay=draw(decays(eta)),
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
    return GridRun(event, relation, arguments, _affordable(event, most_work), escape)


def _affordable(event, most_work):
    """The finest grid whose convolutions cost no more than `most_work` per step."""
    event = _moving(event)
    eta = event.per_step("learning_rate")
    std = eta * event.noise_std_on_sum() / event.batch_size
    reach = float(np.sum(2 * eta * event.gradient_bound()) + 32 * np.sqrt(np.sum(std**2)))
    width = min(1.2 * reach, event.domain_diameter)
    cells = int(math.sqrt(most_work / (width * 32 * float(std.max()))) * float(std.min()))
    assume(cells >= 12)
    return min(cells, 48)


def _losses(draw, kind, lipschitz, largest, domain, start, reach):
    """The declared class, with the gradient bound `lipschitz` or None, and gradients of the class.

    `largest` is the length beyond which gradients are clipped.
    """
    height = 3 * largest if lipschitz is None else lipschitz
    low, high = draw_curvature(draw, kind)
    centre = st.floats(-2, 2).map(lambda u: start + u * reach)
    extreme = min(largest, height)
    level = st.sampled_from([-extreme, extreme, 0.0]) | st.floats(-1, 1).map(lambda u: u * height)

    def ramps(slopes, level):
        return _partials(ramp, slope=st.sampled_from(slopes), centre=centre, one=level, two=level)

    if kind == "strongly_convex":
        middle = start if domain is None else sum(domain) / 2
        if lipschitz is not None:
            width = domain[1] - domain[0]
            low = min(low, lipschitz / max(width, 1e-9))
            height = lipschitz - low * width / 2
        base = ramps([0.0, high - low], level.map(lambda v: np.clip(v, -height, height)))
        pieces = _partials(tilted, piece=base, slope=st.just(low), middle=st.just(middle))
        return geometry_of(kind, (low, high), lipschitz), pieces
    exponent = draw(st.sampled_from([0.3, 0.7, 1.0]))
    geometry = geometry_of(kind, (low, high), lipschitz, exponent=exponent)
    constants = level.map(constant)
    if kind == "linear":
        return geometry, constants
    shape = {"centre": centre, "height": st.just(height)}
    if kind == "hoelder":
        return geometry, constants | _partials(
            power, exponent=st.just(exponent), is_odd=st.booleans(), **shape
        )
    shape["height"] = st.sampled_from([1.0, 0.5, 0.1]).map(lambda u: u * height)
    slopes = st.sampled_from([low, high] if low < 0 else [high])
    simple = constants | ramps([low, high, (low + high) / 2], level)
    simple |= _partials(sigmoid, slope=slopes, **shape)
    if low < 0:
        simple |= _partials(wave, slope=st.just(min(-low, high)), **shape)
    return geometry, simple | _partials(mix, share=st.floats(0, 1), first=simple, second=simple)


@st.composite
def sampled_runs(draw, order, relation, most_steps=5):
    """Random batches where a window of the last steps is worth having: an attack comes close."""
    is_poisson = order is SAMPLED[1]
    batch, others = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    eta = draw(magnitudes(0.3, 1.0))
    smoothness = draw(st.floats(0.0, 1.8)) / eta
    width = draw(st.none() | st.floats(0.3, 2.0)) if draw(st.booleans()) else None
    event = hsa.LastIterateDpEvent(
        noise_multiplier=draw(st.floats(0.7, 2.5)),
        learning_rate=eta,
        clip_norm=1.0,
        weight_decay=draw(st.just(0.0) | st.floats(0.0, 0.4)) / eta,
        batch_size=batch,
        dataset_size=max(batch, others) + 1,
        num_steps=draw(st.integers(2, most_steps)),
        batch_order=order,
        loss=hsa.LossGeometry.generalized_linear(smoothness, lipschitz=1.0),
        domain_diameter=np.inf if width is None else width * eta,
        sampling_rate=draw(st.floats(0.05, 0.6)) if is_poisson else None,
    )
    centre = draw(st.floats(-0.5, 0.5))
    pieces = [
        functools.partial(ramp, slope=smoothness, centre=centre, one=-1.0, two=1.0),
        functools.partial(sigmoid, slope=max(smoothness, 1e-9), centre=0.0, height=1.0),
        functools.partial(ramp, slope=smoothness, centre=0.0, one=0.0, two=1.0),
        constant(1.0),
        constant(-1.0),
    ]
    gradients = [draw(st.sampled_from([*pieces, None])) for _ in range(event.dataset_size)]
    gradients[0] = pieces[3]
    arguments = {
        "gradients": gradients,
        "neighbour": draw(st.sampled_from(pieces)) if relation is REPLACE_ONE else None,
        "record": 0,
        "start": 0.0,
        "domain": None if width is None else (-width * eta / 2, width * eta / 2),
    }
    return GridRun(event, relation, arguments, cells=8)
