"""Runs for hypothesis: what is declared, and losses that truly belong to what is declared.

A claim about a class is refuted by one run of the class. `gaussian_runs` and `secret_order_runs`
are quadratic, of any dimension, and exact; `grid_runs` have any losses, in one dimension.
"""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from hypothesis import assume
from hypothesis import strategies as st
from scipy import special, stats

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import GaussianOracle, GridOracle
from hidden_state_accountants.events.batch_order import unmet_relation

FULL, CYCLIC = hsa.BatchOrder.FULL, hsa.BatchOrder.CYCLIC
EPOCHS = (hsa.BatchOrder.SHUFFLED_ONCE, hsa.BatchOrder.RESHUFFLED)
SAMPLED = (hsa.BatchOrder.WITHOUT_REPLACEMENT, hsa.BatchOrder.POISSON)
REPLACE_ONE = NeighboringRelation.REPLACE_ONE

_ESCAPE = 1e-9  # probability, summed over the steps, of leaving the ball where losses are quadratic


def magnitudes(low, high):
    """Log-uniform."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def per_step(draw, values, steps, jump=1e3, zeros=False):
    """A number, or an array with up to two sudden falls and rises by up to `jump`."""
    value = draw(values)
    if steps == 1 or draw(st.booleans()):
        return value
    array = np.full(steps, value)
    for _ in range(draw(st.integers(0, 2))):
        array[draw(st.integers(0, steps - 1)) :] = value * draw(magnitudes(1 / jump, 1))
    if zeros:
        array[draw(st.lists(st.integers(0, steps - 1), max_size=3))] = 0.0
    return array


def relations(order):
    """The relations that make sense with an order."""
    return st.sampled_from([r for r in NeighboringRelation if unmet_relation(order, r) is None])


@st.composite
def decays(draw, learning_rate):
    """Weight decay, now and then close to where learning_rate * weight_decay = 1."""
    share = draw(st.one_of(st.just(0.0), st.floats(0.0, 0.9), magnitudes(1e-3, 1).map(_near_one)))
    if np.ndim(learning_rate) and draw(st.booleans()):
        return share / np.where(learning_rate > 0, learning_rate, np.inf)
    return share / max(float(np.max(learning_rate)), 1e-300)


def _near_one(gap):
    return 1 - gap / 2


def sound_guarantees(event, relation, accountant=True):
    """What every sound bound that applies says, and the accountant, by name.

    With sampled batches the accountant prepares dp-accounting's PLD, which takes a second.
    """
    guarantees = {
        bound.name: bound.guarantee(event, relation)
        for bound in hsa.BOUNDS
        if bound.sound
        and getattr(bound, "event_type", hsa.LastIterateDpEvent) is hsa.LastIterateDpEvent
        and not bound.check(event, relation)
    }
    if guarantees and accountant:
        composed = hsa.LastIterateAccountant(relation).compose(event)
        guarantees["accountant"] = composed.guarantee
    return guarantees


@st.composite
def events(draw, orders=tuple(hsa.BatchOrder), constant=False):
    """Any declared run that some sound bound may cover, and a relation."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    batch, period = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    period = 1 if order is FULL else period
    steps = draw(st.integers(1, 20))

    def scheduled(values):
        return draw(values if constant else per_step(values, steps, jump=100))

    eta, clip = scheduled(magnitudes(0.01, 3)), scheduled(magnitudes(0.1, 3))
    kind = draw(st.sampled_from(_KINDS))
    lipschitz = draw(st.none() | st.just(float(np.min(clip))) | magnitudes(0.1, 3))
    if kind == "linear":
        lipschitz = lipschitz or 1.0
    low, high = _curvature(draw, kind)
    loss = {
        "linear": lambda: hsa.LossGeometry.linear(lipschitz),
        "strongly_convex": lambda: hsa.LossGeometry.strongly_convex(high, low, lipschitz),
        "weakly_convex": lambda: hsa.LossGeometry.weakly_convex(high, -low, lipschitz),
        "hoelder": lambda: hsa.LossGeometry.hoelder(
            1.0, draw(st.sampled_from([0.5, 1.0])), lipschitz
        ),
    }.get(kind, lambda: getattr(hsa.LossGeometry, kind)(high, lipschitz))()
    if lipschitz is not None and draw(st.booleans()):
        clip = None
    declared = hsa.LastIterateDpEvent(
        noise_multiplier=scheduled(magnitudes(0.3, 5)),
        learning_rate=eta,
        clip_norm=clip,
        weight_decay=draw(st.just(0.0) | st.floats(0, 0.9)) / float(np.max(eta)),
        batch_size=batch,
        dataset_size=batch * period,
        num_steps=steps,
        batch_order=order,
        loss=loss,
        domain_diameter=draw(st.just(math.inf) | magnitudes(0.05, 10)),
        release_steps=draw(st.just([]) | st.lists(st.integers(1, steps), max_size=3)),
        max_batch_size=batch * period + 1 if order is SAMPLED[1] and draw(st.booleans()) else None,
        record_position=(
            draw(st.integers(0, min(period, steps) - 1))
            if order is CYCLIC and draw(st.booleans())
            else None
        ),
    )
    return declared, relation


# --- quadratic losses ---------------------------------------------------------------------------


@attrs.frozen(eq=False)
class GaussianRun:
    """A run whose released iterates are jointly Gaussian but for a probability of `slack`.

    Each loss is quadratic on a ball that the iterates leave with probability at most `slack`, and
    outside an extension (Huber's, in every eigendirection of its Hessian) with the declared
    Lipschitz constant and curvature; or the ball is the domain.
    """

    event: hsa.LastIterateDpEvent
    relation: NeighboringRelation
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
    """One order of the batches, FULL or CYCLIC; releases."""
    dimension, steps = draw(st.integers(1, 3)), draw(st.integers(1, most_steps))
    batch = draw(st.one_of(st.integers(1, 5), st.just(60)))
    period = draw(st.integers(1, 4))
    order = draw(st.sampled_from([FULL, CYCLIC]))
    period = 1 if order is FULL else period
    size = batch * period
    relation = draw(relations(order))
    kind = draw(st.sampled_from(_KINDS if relation is REPLACE_ONE else _KINDS[1:]))
    low, high = _curvature(draw, kind)
    eta = draw(per_step(magnitudes(0.01, 8), steps, zeros=True))
    assume(np.max(eta) > 0)
    decay = draw(decays(eta))
    record = draw(st.integers(0, size - 1))
    hessians = np.empty((size, dimension, dimension))
    hessians[:] = _hessian(draw, dimension, low, high, kind)
    if relation is not REPLACE_ONE:
        hessians[record] = 0.0  # both sides need the same Hessian, and the other gradient is zero
    elif draw(st.booleans()):
        hessians[record] = 0.0 if kind != "strongly_convex" else np.eye(dimension) * low
    direction = _direction(draw, dimension, hessians[record], kind)
    half = 0.5 if relation is REPLACE_ONE else 1.0
    slopes = np.zeros((size, dimension))
    slopes[record] = -direction if relation is REPLACE_ONE else 0.0
    batches = [np.arange(t % period * batch, (t % period + 1) * batch) for t in range(steps)]
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE and draw(st.booleans()):
        # The record is added: the larger data set has one more than the divisor.
        hessians = np.concatenate([hessians, np.zeros((1, dimension, dimension))])
        slopes, record = np.concatenate([slopes, np.zeros((1, dimension))]), size
        batches = [np.arange(size + 1)] * steps
    position = record // batch if order is CYCLIC and draw(st.booleans()) else None
    released = draw(st.lists(st.integers(1, steps), max_size=3))
    declared = _declare(
        draw,
        kind,
        (low, high),
        law=_Law(hessians, slopes, batches, record, direction / half, eta, decay, batch),
        noise=draw(per_step(magnitudes(0.1, 10), steps)),
        released=released,
        learning_rate=eta,
        weight_decay=decay,
        batch_size=batch,
        dataset_size=size,
        num_steps=steps,
        batch_order=order,
        record_position=position,
    )
    return GaussianRun(declared[0], relation, *declared[1:])


_KINDS = (
    "strongly_convex",
    "linear",
    "convex",
    "generalized_linear",
    "weakly_convex",
    "smooth",
    "hoelder",
)


def _curvature(draw, kind):
    """The least and the largest eigenvalue that a Hessian of the class may have."""
    if kind == "linear":
        return 0.0, 0.0
    low = {
        "strongly_convex": draw(st.floats(0.01, 1.0)),
        "weakly_convex": -draw(magnitudes(0.01, 3)),
        "smooth": -1.0,
        "hoelder": -1.0,
    }
    return low.get(kind, 0.0), 1.0


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


@attrs.frozen(eq=False)
class _Law:
    """The arguments of a recursion, and its joint law by one linear map of all the noise."""

    hessians: np.ndarray
    slopes: np.ndarray
    batches: list
    record: int
    difference: np.ndarray
    eta: np.ndarray | float
    decay: np.ndarray | float
    batch_size: int

    def iterates(self, noise):
        """Per step the mean on both data sets (d, 2) and the map (d, T d) of the noise."""
        steps, dimension = len(self.batches), self.slopes.shape[1]
        eta, decay, noise = (np.broadcast_to(a, steps) for a in (self.eta, self.decay, noise))
        there = self.slopes.copy()
        there[self.record] += self.difference
        mean, noise_map, result = np.zeros((dimension, 2)), np.zeros((dimension, 0)), []
        for t, rows in enumerate(self.batches):
            scale = eta[t] / self.batch_size
            matrix = np.eye(dimension) * (1 - eta[t] * decay[t])
            matrix -= scale * self.hessians[rows].sum(axis=0)
            drift = np.stack([s[rows].sum(axis=0) for s in (self.slopes, there)], axis=1)
            mean = matrix @ mean - scale * drift
            own = np.eye(dimension) * scale * noise[t]
            noise_map = np.hstack([matrix @ noise_map, own])
            result.append((mean, noise_map))
        return result

    def oracle(self, noise, released):
        return GaussianOracle(
            self.hessians,
            [(1.0, self.batches)],
            learning_rate=self.eta,
            noise_std=noise,
            weight_decay=self.decay,
            batch_size=self.batch_size,
            record=self.record,
            slope_difference=self.difference,
            slopes=self.slopes,
            release_steps=released,
        )


def _declare(draw, kind, curvature, *, law, noise, released, **arguments):
    """The event, the oracle and the slack of a quadratic run with noise of a given size."""
    steps, eta = arguments["num_steps"], np.broadcast_to(law.eta, arguments["num_steps"])
    iterates = law.iterates(noise)
    loss, domain, slack = _ball(draw, kind, curvature, law, iterates)
    # A step without learning rate leaves the iterate where it was.
    moving = np.flatnonzero(eta > 0)
    seen = {int(moving[moving < r].max()) for r in {*released, steps} if (moving < r).any()}
    stacked = np.vstack(
        [
            np.pad(noise_map, ((0, 0), (0, steps * len(noise_map) - noise_map.shape[1])))
            for t, (_, noise_map) in enumerate(iterates)
            if t in seen
        ]
    )
    assume(np.isfinite(stacked).all() and np.linalg.cond(stacked) < 1e4)
    means = np.concatenate([mean for t, (mean, _) in enumerate(iterates) if t in seen])
    last = max(seen) + 1
    law = attrs.evolve(
        law,
        batches=law.batches[:last],
        eta=eta[:last],
        decay=np.broadcast_to(law.decay, steps)[:last],
    )
    oracle = law.oracle(np.broadcast_to(noise, steps)[:last], [t + 1 for t in seen])
    exact = np.linalg.norm(np.linalg.pinv(stacked) @ (means[:, 1] - means[:, 0]))
    assert math.isclose(oracle.mu, exact, rel_tol=1e-6, abs_tol=1e-12)
    assume(oracle.mu < 30)
    lipschitz = loss.lipschitz
    clip = draw(st.sampled_from(["none", "at_the_bound", "above", "undeclared"]))
    if clip in ("none", "at_the_bound") or kind == "linear":
        unit = lipschitz
    else:
        unit = lipschitz * np.maximum(1.0, draw(per_step(magnitudes(1, 1e3), steps)))
    if clip == "undeclared" and kind != "linear":
        loss = attrs.evolve(loss, lipschitz=None)
    event = hsa.LastIterateDpEvent(
        noise_multiplier=noise / unit,
        clip_norm=None if clip == "none" else unit,
        loss=loss,
        domain_diameter=domain,
        release_steps=released,
        **arguments,
    )
    return event, oracle, slack


def _ball(draw, kind, curvature, law, iterates):
    """The loss class, the domain and the slack of losses that are quadratic on a ball."""
    steepest = float(np.linalg.norm(law.slopes[law.record] + law.difference))
    steepest = max(steepest, float(np.linalg.norm(law.slopes, axis=1).max()))
    if kind == "linear":
        return hsa.LossGeometry.linear(steepest), math.inf, 0.0
    quantile = math.sqrt(stats.chi2.isf(_ESCAPE / (2 * len(iterates)), law.slopes.shape[1]))
    reach = max(
        float(np.linalg.norm(mean, axis=0).max() + quantile * np.linalg.norm(noise_map, 2))
        for mean, noise_map in iterates
    )
    assume(math.isfinite(reach))
    linear = not law.hessians.any()
    bounded = kind == "strongly_convex" or draw(st.booleans())
    slack = _ESCAPE if bounded or not linear else 0.0
    bends = np.linalg.norm(law.hessians, axis=(1, 2)) * reach
    slopes = np.linalg.norm(law.slopes, axis=1)
    slopes[law.record] = steepest
    lipschitz = float(np.max(slopes + bends))
    low, high = curvature
    loss = {
        "strongly_convex": lambda: hsa.LossGeometry.strongly_convex(high, low, lipschitz),
        "weakly_convex": lambda: hsa.LossGeometry.weakly_convex(high, -low, lipschitz),
        "hoelder": lambda: _hoelder(draw(st.sampled_from([0.5, 0.9, 1.0])), bends, lipschitz),
    }.get(kind, lambda: getattr(hsa.LossGeometry, kind)(high, lipschitz))()
    return loss, 2 * reach if bounded else math.inf, slack


def _hoelder(exponent, bends, lipschitz):
    # min(M r, 2 F) <= M**a (2 F)**(1 - a) r**a, M = 1.
    constant = max((2 * float(bends.max())) ** (1 - exponent), 1e-9) if exponent < 1 else 1.0
    return hsa.LossGeometry.hoelder(constant, exponent, lipschitz)


# --- secret orders ------------------------------------------------------------------------------


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
        products = self.means @ self.means.T
        if order == 2:
            return [float(np.log(self.weights @ np.exp(products) @ self.weights))]
        if order == 3:
            terms = np.exp(products)
            inner = np.einsum("ij,ik,jk,j,k->i", terms, terms, terms, self.weights, self.weights)
            return [float(np.log(self.weights @ inner)) / 2]
        return []


@st.composite
def secret_order_runs(draw, orders=(*EPOCHS, *SAMPLED)):
    """Linear losses under every random order, with and without releases."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    period, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = period * batch
    steps = draw(st.integers(1, 6 if order in SAMPLED or order is EPOCHS[1] else 12))
    if order is EPOCHS[1]:
        assume(period ** (-(-steps // period)) <= 64)
    released = []
    if relation is not REPLACE_ONE:
        released = draw(st.one_of(st.just([]), st.lists(st.integers(1, steps)), st.just("all")))
        released = list(range(1, steps)) if released == "all" else released
    eta = draw(per_step(magnitudes(0.05, 2), steps, jump=30))
    decay = draw(decays(eta))
    noise = draw(per_step(magnitudes(0.3, 5), steps, jump=30))
    patterns = list(_patterns(order, size, batch, steps))
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
        max_batch_size=size + 1 if order is SAMPLED[1] and draw(st.booleans()) else None,
    )
    kappa = 1 - np.broadcast_to(eta, steps) * decay
    powers = np.array([[np.prod(kappa[i + 1 : t + 1]) * (i <= t) for i in range(steps)]
                       for t in range(steps)])  # fmt: skip
    seen = [r - 1 for r in sorted({*released, steps})]
    step_map = (powers * np.broadcast_to(eta, steps) / batch)[seen]
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
            batch_size=batch,
            record=0,
            slopes=[[-1.0], [others]] if relation is REPLACE_ONE else [[0.0], [others]],
            slope_difference=[2.0 if relation is REPLACE_ONE else 1.0],
        )
    return SecretOrderRun(event, relation, weights, means, oracle)


def _patterns(order, size, batch, steps):
    """(probability, presence of the record in each step) pairs."""
    period = size // batch
    if order is EPOCHS[0]:
        for position in range(period):
            yield 1 / period, [t % period == position for t in range(steps)]
        return
    if order is EPOCHS[1]:
        epochs = -(-steps // period)
        for code in range(period**epochs):
            where = [code // period**e % period for e in range(epochs)]
            yield period**-epochs, [t % period == where[t // period] for t in range(steps)]
        return
    rate = batch / size
    for code in range(2**steps if rate < 1 else 1):
        present = [bool(code >> t & 1) if rate < 1 else True for t in range(steps)]
        yield math.prod(rate if p else 1 - rate for p in present), present


# --- losses in one dimension --------------------------------------------------------------------


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
    kind = draw(st.sampled_from(_KINDS))
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
    cap, escape = None, 0.0
    if order is SAMPLED[1] and draw(st.booleans()):
        cap = draw(st.sampled_from([max(1, size - 1), size, size + 1]))
        escape = float(steps * stats.binom.sf(cap, size, batch / size))
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
        max_batch_size=cap,
        record_position=record // batch if order is CYCLIC and draw(st.booleans()) else None,
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
    low, high = _curvature(draw, kind)
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
