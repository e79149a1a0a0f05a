"""Runs for hypothesis: what is declared; and what their losses truly are in the modules beside.

A claim about a class is refuted by one run of the class. `gaussian_runs` and `secret_order_runs`
are quadratic, of any dimension, and exact; `grid_runs` have any losses, in one dimension.
"""

import math

import numpy as np
from dp_accounting import NeighboringRelation
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

import hidden_state_accountants as hsa
from hidden_state_accountants.events.batch_order import unmet_relation

FULL, CYCLIC = hsa.BatchOrder.FULL, hsa.BatchOrder.CYCLIC
EPOCHS = (hsa.BatchOrder.SHUFFLED_ONCE, hsa.BatchOrder.RESHUFFLED)
SAMPLED = (hsa.BatchOrder.WITHOUT_REPLACEMENT, hsa.BatchOrder.POISSON)
REPLACE_ONE = NeighboringRelation.REPLACE_ONE


def quick_search(examples):
    """Settings of a search of its own: nothing is remembered, and what it finds not shrunk."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.target],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


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


KINDS = (
    "strongly_convex",
    "linear",
    "convex",
    "generalized_linear",
    "weakly_convex",
    "smooth",
    "hoelder",
)


def draw_sampling_rate(draw, order):
    """None, or a rate that POISSON batches are drawn at whatever they are divided by."""
    return draw(st.none() | st.floats(0.05, 1.0)) if order is SAMPLED[1] else None


def draw_curvature(draw, kind):
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


def geometry_of(kind, curvature, lipschitz, constant=1.0, exponent=1.0):
    """The class of losses with such eigenvalues; the constant and the exponent are Hölder's."""
    low, high = curvature
    arguments = {
        "linear": (),
        "strongly_convex": (high, low),
        "weakly_convex": (high, -low),
        "hoelder": (constant, exponent),
    }
    return getattr(hsa.LossGeometry, kind)(*arguments.get(kind, (high,)), lipschitz)


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
def events(draw, orders=tuple(hsa.BatchOrder), constant=False, most_steps=20):
    """Any declared run that some sound bound may cover, and a relation."""
    order = draw(st.sampled_from(orders))
    relation = draw(relations(order))
    batch, period = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    period = 1 if order is FULL else period
    steps = draw(st.integers(1, most_steps))

    def scheduled(values):
        return draw(values if constant else per_step(values, steps, jump=100))

    eta, clip = scheduled(magnitudes(0.01, 3)), scheduled(magnitudes(0.1, 3))
    kind = draw(st.sampled_from(KINDS))
    lipschitz = draw(st.none() | st.just(float(np.min(clip))) | magnitudes(0.1, 3))
    if kind == "linear":
        lipschitz = lipschitz or 1.0
    exponent = draw(st.sampled_from([0.5, 1.0]))
    loss = geometry_of(kind, draw_curvature(draw, kind), lipschitz, exponent=exponent)
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
        sampling_rate=draw_sampling_rate(draw, order),
        max_batch_size=batch * period + 1 if order is SAMPLED[1] and draw(st.booleans()) else None,
    )
    return declared, relation
