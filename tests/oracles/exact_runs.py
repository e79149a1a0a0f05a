"""Runs whose laws are known, for hypothesis: what is declared, and what their losses truly are.

A claim about a class is refuted by one run of the class. Each run has its event, its relation and,
in both directions, lower bounds `delta(epsilon)` and `renyi(order)`; none where it has no answer.
"""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from grid_oracle import GridOracle
from hypothesis import assume
from hypothesis import strategies as st
from scipy import special, stats
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
    magnitudes,
    per_step,
    relations,
)

import hidden_state_accountants as hsa
from hidden_state_accountants.events.batch_order import BINS

SHUFFLED_ONCE, RESHUFFLED = EPOCHS
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
        if self.slack == 0:
            return list(self.oracle.renyi(order))
        edges = np.concatenate([[-np.inf], np.linspace(-9, self.oracle.mu + 9, 800), [np.inf]])
        p, q = (_cells(edges - centre) for centre in (0.0, self.oracle.mu))
        p, q = p - self.slack, q + self.slack
        p, q = p[p > 0], q[p > 0]
        total = special.logsumexp(order * np.log(p) + (1 - order) * np.log(q))
        return [float(total) / (order - 1)]


def _cells(edges):
    low, high = edges[:-1], edges[1:]
    low, high = np.where(low > 0, -high, low), np.where(low > 0, -low, high)
    return special.ndtr(high) - special.ndtr(low)


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
    low, high = draw_curvature(draw, kind)
    eta = draw(per_step(magnitudes(0.01, 8), steps, zeros=True))
    assume(np.max(eta) > 0)
    decay = draw(decays(eta))
    noise = draw(per_step(magnitudes(0.1, 10), steps))
    released = draw(st.lists(st.integers(1, steps), max_size=3))
    record = draw(st.integers(0, size - 1))
    hessians = np.empty((size, dimension, dimension))
    hessians[:] = _hessian(draw, dimension, low, high, kind)
    if relation is not REPLACE_ONE:
        hessians[record] = 0.0  # both sides need the same Hessian, and the other gradient is zero
    elif draw(st.booleans()):
        hessians[record] = 0.0 if kind != "strongly_convex" else np.eye(dimension) * low
    direction = _direction(draw, dimension, hessians[record], kind)
    slopes = np.zeros((size, dimension))
    slopes[record] = -direction if relation is REPLACE_ONE else 0.0
    batches = [np.arange(t % period * batch, (t % period + 1) * batch) for t in range(steps)]
    position = record // batch if order is CYCLIC else 0
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and draw(st.booleans()):
        # The record is added: the larger data set has one more than the divisor.
        hessians = np.concatenate([hessians, np.zeros((1, dimension, dimension))])
        slopes, record = np.concatenate([slopes, np.zeros((1, dimension))]), size
        batches = [np.arange(size + 1)] * steps
    # A step without learning rate leaves the iterate where it was.
    moving = np.flatnonzero(np.broadcast_to(eta, steps) > 0)
    seen = {int(count) for count in np.searchsorted(moving, [*released, steps]) if count}
    last = max(seen)
    kept = moving[:last]
    batches = [batches[t] for t in moving]
    try:
        oracle = GaussianOracle(
            hessians,
            [(1.0, batches[:last])],
            learning_rate=np.broadcast_to(eta, steps)[kept],
            noise_std=np.broadcast_to(noise, steps)[kept],
            weight_decay=np.broadcast_to(decay, steps)[kept],
            batch_size=batch,
            record=record,
            slope_difference=direction * (2.0 if relation is REPLACE_ONE else 1.0),
            slopes=slopes,
            release_steps=seen,
        )
    except (ValueError, np.linalg.LinAlgError):  # no number is as large, or as near
        assume(False)
    _, joint = oracle.law(batches[:last], seen)
    assume(np.isfinite(joint).all() and np.linalg.cond(joint) < 1e8)
    assume(oracle.mu < 30)
    everywhere = oracle.law(batches[:last], set(range(1, last + 1)))
    loss, domain, slack = _ball(draw, kind, (low, high), hessians, record, everywhere)
    clip = draw(st.sampled_from(["none", "at_the_bound", "above", "undeclared"]))
    unit = loss.lipschitz
    if clip in ("above", "undeclared") and kind != "linear":
        unit = unit * np.maximum(1.0, draw(per_step(magnitudes(1, 1e3), steps)))
    if clip == "undeclared" and kind != "linear":
        loss = attrs.evolve(loss, lipschitz=None)
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise / unit,
        learning_rate=eta,
        clip_norm=None if clip == "none" else unit,
        weight_decay=decay,
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        loss=loss,
        domain_diameter=domain,
        release_steps=released,
    )
    return GaussianRun(event, relation, position, oracle, slack)


def _hessian(draw, dimension, low, high, kind):
    if kind == "generalized_linear":  # one prediction: rank one
        unit = np.eye(dimension)[0]
        return np.outer(unit, unit) * draw(st.sampled_from([0.0, high, high / 2]))
    values = [draw(st.sampled_from([low, high, (low + high) / 2])) for _ in range(dimension)]
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    rotation, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
    return (rotation * values) @ rotation.T


def _direction(draw, dimension, hessian, kind):
    if kind == "generalized_linear" and hessian.any():
        return np.eye(dimension)[0]
    angles = np.array([draw(st.floats(-1, 1)) for _ in range(dimension - 1)])
    direction = np.concatenate([[1.0], angles])
    return direction / np.linalg.norm(direction)


def _ball(draw, kind, curvature, hessians, record, law):
    """The loss class, the domain and the slack of losses that are quadratic on a ball.

    Args:
        draw: Of hypothesis.
        kind: Of the loss.
        curvature: Least and largest.
        hessians: One for each record.
        record: The one that, or whose neighbour, has a slope, of length 1; no other has one.
        law: Means and covariance of all iterates, one after the other.
    """
    if kind == "linear":
        return hsa.LossGeometry.linear(1.0), math.inf, 0.0
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
    low, high = curvature
    geometry = hsa.LossGeometry
    if kind == "strongly_convex":
        loss = geometry.strongly_convex(high, low, lipschitz)
    elif kind == "weakly_convex":
        loss = geometry.weakly_convex(high, -low, lipschitz)
    elif kind == "hoelder":
        exponent = draw(st.sampled_from([0.5, 0.9, 1.0]))
        # min(M r, 2 F) <= M**a (2 F)**(1 - a) r**a, M = 1.
        constant = max((2 * float(bends.max())) ** (1 - exponent), 1e-9) if exponent < 1 else 1.0
        loss = geometry.hoelder(constant, exponent, lipschitz)
    else:
        loss = getattr(geometry, kind)(high, lipschitz)
    return loss, 2 * float(reach) if bounded else math.inf, slack


# --- linear losses, every order that may have been ------------------------------------------------


@attrs.frozen(eq=False)
class SecretOrderRun:
    """Linear losses under a random order: mixtures of Gaussians with one covariance.

    Only the record has a gradient, so that the neighbour's law is one Gaussian if its record has
    none. Then the Renyi divergences of integer orders are finite sums, whatever is released.
    """

    event: hsa.LastIterateDpEvent
    relation: NeighboringRelation
    weights: np.ndarray
    means: np.ndarray  # (orders, released), whitened
    oracle: GaussianOracle | None

    def delta(self, epsilon):
        return [] if self.oracle is None else list(self.oracle.delta(epsilon))

    def renyi(self, order):
        if self.oracle is not None:
            return list(self.oracle.renyi(order))
        terms = np.exp(self.means @ self.means.T)
        if order == 2:
            return [float(np.log(self.weights @ terms @ self.weights))]
        if order == 3:
            inner = np.einsum("ij,ik,jk,j,k->i", terms, terms, terms, self.weights, self.weights)
            return [float(np.log(self.weights @ inner)) / 2]
        return []


@st.composite
def secret_order_runs(draw, orders=(*EPOCHS, *SAMPLED)):
    """Linear losses under every random order, with releases or a proximal map after the noise."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    period, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = period * batch
    steps = draw(st.integers(1, 12 if order is SHUFFLED_ONCE else 6))
    assume(order is not RESHUFFLED or period ** (-(-steps // period)) <= 64)
    released = []
    if relation is not REPLACE_ONE:
        released = draw(st.one_of(st.just([]), st.lists(st.integers(1, steps)), st.just("all")))
        released = list(range(1, steps)) if released == "all" else released
    eta = draw(per_step(magnitudes(0.05, 2), steps, jump=30))
    noise = draw(per_step(magnitudes(0.3, 5), steps, jump=30))
    strength = draw(st.just(0.0) | magnitudes(0.05, 4))
    decay = 0.0 if strength else draw(decays(eta))
    sampling_rate = draw_sampling_rate(draw, order)
    patterns = list(_patterns(order, period, steps, sampling_rate or 1 / period))
    weights = np.array([w for w, _ in patterns])
    present = np.array([p for _, p in patterns], dtype=float)  # (orders, T)
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise,
        learning_rate=eta,
        weight_decay=decay,
        clip_norm=1.0,
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        loss=draw(
            st.sampled_from([hsa.LossGeometry.linear(1.0), hsa.LossGeometry.convex(0.5, 1.0), None])
        ),
        release_steps=released,
        sampling_rate=sampling_rate,
        max_batch_size=size + 1 if order is SAMPLED[1] and draw(st.booleans()) else None,
        prox_strong_convexity=strength,
    )
    rates = np.broadcast_to(eta, steps)
    prox = 1 / (1 + rates * strength)
    kept = prox * (1 - rates * decay)
    powers = np.array([[np.prod(kept[i + 1 : t + 1]) * (i <= t) for i in range(steps)]
                       for t in range(steps)])  # fmt: skip
    seen = [r - 1 for r in sorted({*released, steps})]
    step_map = (powers * prox * rates / batch)[seen]
    noise_map = step_map * np.broadcast_to(noise, steps)
    assume(np.linalg.cond(noise_map) < 1e4)
    means = present @ step_map.T @ np.linalg.pinv(noise_map).T
    assume(np.abs(means @ means.T).max() < 60)
    oracle = None
    if not event.release_steps:
        others = draw(st.sampled_from([0.0, 1.0, -1.0])) if order is not SAMPLED[1] else 0.0
        oracle = GaussianOracle(
            np.zeros((2, 1, 1)),
            [(w, [[0] * p + [1] * (batch - p) for p in map(int, row)]) for w, row in patterns],
            learning_rate=eta,
            noise_std=noise,
            weight_decay=decay,
            prox=prox,
            batch_size=batch,
            record=0,
            slopes=[[-1.0], [others]] if relation is REPLACE_ONE else [[0.0], [others]],
            slope_difference=[2.0 if relation is REPLACE_ONE else 1.0],
        )
    return SecretOrderRun(event, relation, weights, means, oracle)


def _patterns(order, period, steps, rate):
    """(probability, presence of the record in each step) pairs."""
    if order is SHUFFLED_ONCE:
        for position in range(period):
            yield 1 / period, [t % period == position for t in range(steps)]
    elif order is RESHUFFLED:
        epochs = -(-steps // period)
        for code in range(period**epochs):
            where = [code // period**e % period for e in range(epochs)]
            yield period**-epochs, [t % period == where[t // period] for t in range(steps)]
    else:
        for code in range(2**steps if rate < 1 else 1):
            present = [bool(code >> t & 1) if rate < 1 else True for t in range(steps)]
            yield math.prod(rate if p else 1 - rate for p in present), present


# --- any losses, in one dimension -----------------------------------------------------------------


@attrs.frozen(eq=False)
class Piece:
    """A gradient that is a function of x - centre, cut at low and high.

    Attributes:
        of: The function, with its bounds on slope and size.
        centre: Where it is zero, or steepest.
        low: Least value.
        high: Largest value.
        text: What it is.
    """

    of: object = attrs.field(repr=False)
    centre: float
    low: float = -math.inf
    high: float = math.inf
    text: str = ""

    def __call__(self, x):
        return np.clip(self.of(x - self.centre), self.low, self.high)


def ramp(slope, centre, one, two):
    """Linear, Huber, sign-like, constant: cut at `one` and `two`."""
    return Piece(lambda u: slope * u, centre, min(one, two), max(one, two), f"{slope:g} u")


def constant(value):
    return ramp(0.0, 0.0, value, value)


def sigmoid(slope, centre, height):
    """Logistic-like: bounded by `height`, slope at most `slope`."""
    text = f"{height:g} tanh({slope / height:g} u)"
    return Piece(lambda u: height * np.tanh(slope / height * u), centre, text=text)


def wave(slope, centre, height):
    """Curvature between -slope and slope, bounded by `height`."""
    text = f"{height:g} sin({slope / height:g} u)"
    return Piece(lambda u: height * np.sin(slope / height * u), centre, text=text)


def power(exponent, centre, height, is_odd):
    """Hölder with constant 1: |u|**exponent, even or odd, cut."""

    def of(u):
        value = np.abs(u) ** exponent
        return value * np.sign(u) * 2 ** (exponent - 1) if is_odd else value

    return Piece(of, centre, -height, height, f"|u|**{exponent:g}, odd: {is_odd}")


def mix(share, first, second):
    """A convex combination: the classes are convex."""
    text = f"{share:g} {first} + ... {second}"
    return Piece(lambda x: share * first(x) + (1 - share) * second(x), 0.0, text=text)


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
    period = draw(st.integers(1, 3)) if order is not FULL else 1
    size = batch * period
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
    geometry = hsa.LossGeometry
    height = 3 * largest if lipschitz is None else lipschitz
    low, high = draw_curvature(draw, kind)
    centre = st.floats(-2, 2).map(lambda u: start + u * reach)
    extreme = min(largest, height)
    level = st.one_of(
        st.sampled_from([-extreme, extreme, 0.0]), st.floats(-1, 1).map(lambda u: u * height)
    )

    def ramps(slopes, level):
        return st.builds(ramp, st.sampled_from(slopes), centre, level, level)

    if kind == "strongly_convex":
        if lipschitz is not None:
            width = domain[1] - domain[0]
            low = min(low, lipschitz / max(width, 1e-9))
            height = lipschitz - low * width / 2
        base = ramps([0.0, high - low], level.map(lambda v: np.clip(v, -height, height)))
        middle = start if domain is None else (domain[0] + domain[1]) / 2

        def tilted(piece):
            return Piece(lambda x: piece(x) + low * (x - middle), 0.0, text=f"{piece} + {low:g} u")

        return geometry.strongly_convex(high, low, lipschitz), base.map(tilted)
    constants = level.map(constant)
    if kind == "linear":
        return geometry.linear(lipschitz), constants
    if kind == "hoelder":
        exponent = draw(st.sampled_from([0.3, 0.7, 1.0]))
        powers = st.builds(power, st.just(exponent), centre, st.just(height), st.booleans())
        return geometry.hoelder(1.0, exponent, lipschitz), constants | powers
    heights = st.sampled_from([1.0, 0.5, 0.1]).map(lambda u: u * height)
    simple = constants | ramps([low, high, (low + high) / 2], level)
    simple |= st.builds(
        sigmoid, st.sampled_from([low, high] if low < 0 else [high]), centre, heights
    )
    if low < 0:
        simple |= st.builds(wave, st.just(min(-low, high)), centre, heights)
    pieces = simple | st.builds(mix, st.floats(0, 1), simple, simple)
    if kind == "weakly_convex":
        return geometry.weakly_convex(high, -low, lipschitz), pieces
    return getattr(geometry, kind)(high, lipschitz), pieces


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
    pieces = [
        ramp(smoothness, draw(st.floats(-0.5, 0.5)), -1.0, 1.0),
        sigmoid(max(smoothness, 1e-9), 0.0, 1.0),
        ramp(smoothness, 0.0, 0.0, 1.0),
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
