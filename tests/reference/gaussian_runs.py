"""Runs with quadratic losses for hypothesis: of any dimension, and exact."""

import math

import attrs
import numpy as np
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from hypothesis import assume
from hypothesis import strategies as st
from scipy import special, stats
from strategies import (
    CYCLIC,
    FULL,
    KINDS,
    REPLACE_ONE,
    decays,
    draw_curvature,
    magnitudes,
    per_step,
    relations,
)

import hidden_state_accountants as hsa

_ESCAPE = 1e-9  # probability, summed over the steps, of leaving the ball where losses are quadratic


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
    """One order of the batches, FULL or CYCLIC; releases."""
    dimension, steps = draw(st.integers(1, 3)), draw(st.integers(1, most_steps))
    batch = draw(st.one_of(st.integers(1, 5), st.just(60)))
    period = draw(st.integers(1, 4))
    order = draw(st.sampled_from([FULL, CYCLIC]))
    period = 1 if order is FULL else period
    size = batch * period
    relation = draw(relations(order))
    kind = draw(st.sampled_from(KINDS if relation is REPLACE_ONE else KINDS[1:]))
    low, high = draw_curvature(draw, kind)
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
    position = record // batch if order is CYCLIC else 0
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
    )
    return GaussianRun(declared[0], relation, position, *declared[1:])


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
