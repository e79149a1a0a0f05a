"""What must hold for runs that are composed, whatever their curves are made of."""

import functools
import itertools
import math
import random

import dp_accounting
import pytest
from cases import first
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.accountants import BoundAccountant
from hidden_state_accountants.bounds import Composition
from hidden_state_accountants.curves.base import (
    GaussianCurve,
    best_curve,
    with_delta,
)
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.curves.transformed import of_groups
from hidden_state_accountants.events.batch_order import unmet_relation

DELTAS = (1e-12, 1e-8, 1e-5, 1e-3)
PAIRS = [
    (order, relation)
    for order, relation in itertools.product(hsa.BatchOrder, NeighboringRelation)
    if unmet_relation(order, relation) is None
]
ROUNDING = 1 + 1e-6
"""Of grids of privacy losses."""
LOSSES = (
    hsa.LossGeometry.generalized_linear(0.5, 1.0),
    hsa.LossGeometry.convex(0.5),  # a clip that acts: the maps expand
    hsa.LossGeometry.strongly_convex(0.5, 0.2, lipschitz=1.0),
    hsa.LossGeometry.convex(0.5, 1.0),
)


def random_run(rng, order, relation):
    steps = rng.choice([1, 4, 20, 60])
    changes = {}
    if rng.random() < 0.2:
        changes["domain_diameter"] = rng.choice([0.1, 1.0])
    if steps > 1 and rng.random() < 0.2:
        changes["release_steps"] = (steps // 2,)
    return hsa.LastIterateDpEvent(
        noise_multiplier=rng.choice([1.0, 2.0, 5.0]), learning_rate=rng.choice([0.1, 0.5]),
        clip_norm=1.0, batch_size=400 if order is hsa.BatchOrder.FULL else rng.choice([10, 40]),
        dataset_size=400, num_steps=steps, batch_order=order, loss=rng.choice(LOSSES),
        weight_decay=rng.choice([0.0, 0.01, 0.3]), **changes,
    )  # fmt: skip


def stock_event(rng, relation):
    noise = rng.choice([2.0, 5.0])
    gaussian = dp_accounting.GaussianDpEvent(noise)
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        others = [dp_accounting.PoissonSampledDpEvent(0.1, gaussian)]
    else:
        others = [dp_accounting.SampledWithoutReplacementDpEvent(400, 40, gaussian)]
    return rng.choice([gaussian, dp_accounting.LaplaceDpEvent(10 * noise), *others])


def compositions(order, relation, count):
    """Lists of (event, count): one or two runs, and now and then a standard event."""
    rng = random.Random(f"{order} {relation}")
    runs = [random_run(rng, order, relation) for _ in range(10)]
    orders = [other for other, of in PAIRS if of is relation]
    runs += [random_run(rng, rng.choice(orders), relation) for _ in range(3)]
    for _ in range(count):
        parts = [
            (event, rng.choice([1, 1, 2, 5])) for event in rng.sample(runs, rng.choice([1, 2]))
        ]
        if (len(parts) == 1 and parts[0][1] == 1) or rng.random() < 0.3:
            parts.append((stock_event(rng, relation), rng.choice([1, 3])))
        yield parts


def accountant_of(parts, relation, make=hsa.LastIterateAccountant):
    return _accountant_of(tuple(parts), relation, make)


@functools.cache
def _accountant_of(parts, relation, make):
    """The laws ask about the same runs."""
    accountant = make(relation)
    for event, count in parts:
        accountant.compose(event, count)
    return accountant


def every_iterate(relation):
    return BoundAccountant(relation, Composition())


def epsilon_alone(event, relation, delta):
    return accountant_of([(event, 1)], relation).get_epsilon(delta)


@pytest.mark.parametrize(("order", "relation"), PAIRS)
def test_no_more_than_its_parts_and_no_more_than_every_iterate(order, relation, usual):
    """Finite where every part is; at most the sum; at most what it is if all is released."""
    for number, parts in enumerate(compositions(order, relation, usual(1, 20))):
        composed = accountant_of(parts, relation)
        released = accountant_of(parts, relation, every_iterate)
        runs = sum(count for _, count in parts)
        for delta in (1e-5, DELTAS[number % len(DELTAS)]):
            epsilon = composed.get_epsilon(delta)
            basic = sum(n * epsilon_alone(event, relation, delta / runs) for event, n in parts)
            assert epsilon <= basic * ROUNDING, parts
            assert epsilon <= released.get_epsilon(delta) * ROUNDING, parts


@pytest.mark.parametrize(("order", "relation"), PAIRS)
def test_two_runs_are_one_run_twice_and_a_negligible_one_is_none(order, relation, usual):
    negligible = dp_accounting.GaussianDpEvent(1e7)
    for (event, _), *_ in compositions(order, relation, usual(1, 4)):
        once = accountant_of([(event, 1)], relation)
        twice = accountant_of([(event, 2)], relation)
        again = accountant_of([(event, 1), (event, 1)], relation)
        more = accountant_of([(event, 1), (negligible, 1)], relation)
        for delta in DELTAS:
            epsilon = once.get_epsilon(delta)
            assert again.get_epsilon(delta) == twice.get_epsilon(delta)
            assert epsilon <= more.get_epsilon(delta) * (1 + 1e-9)
            assert more.get_epsilon(delta) <= epsilon * (1 + 1e-3) + 1e-4


def test_the_best_of_curves_that_may_fail_in_any_order_of_nesting():
    one, two, three = GaussianCurve(0.5), GaussianCurve(1.0), GaussianCurve(2.0)
    inside = best_curve([with_delta(one, 1e-7), best_curve([two, three])])
    assert [curve for curve, _ in inside.known] == [one, two, three]
    nested = best_curve([with_delta(with_delta(inside, 1e-11), 1e-10), three])
    found = nested.alternatives()
    assert [curve for curve, _ in found] == [one, two, three]
    assert [failure for _, failure in found] == pytest.approx([1.0011e-7, 1.1e-10, 0.0])
    twice = compose_curves([(nested, 2)])
    mu = 0.5 * math.sqrt(2)
    assert twice.epsilon(1e-5) == GaussianCurve(mu).epsilon(1e-5 - 2 * found[0][1])
    assert twice.epsilon(1e-8) == GaussianCurve(2 * mu).epsilon(1e-8 - 2 * found[1][1])
    assert twice.epsilon(1e-10) == GaussianCurve(4 * mu).epsilon(1e-10)
    assert of_groups(nested, 2).epsilon(1e-7) == pytest.approx(
        min(of_groups(with_delta(*part), 2).epsilon(1e-7) for part in found)
    )


TABLE = [
    ("poisson", "replace_one", 1.3291, 1.9336, 1.3314),
    ("without_replacement", "replace_special", 1.1732, 1.5044, 1.1740),
    ("poisson", "replace_special", 0.6802, 0.9771, 0.6812),
    ("without_replacement", "replace_one", 2.2974, 3.1110, 2.2989),
]
"""Order, relation; epsilon at 1e-5 once, twice, and once beside Gaussian noise of 100."""


@pytest.mark.parametrize(("order", "relation", "once", "twice", "beside"), first(1, TABLE))
def test_a_long_run_of_random_batches_composes(order, relation, once, twice, beside):
    event = hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=250,
        dataset_size=25_000, num_steps=5000, batch_order=order, weight_decay=0.004,
        loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0),
    )  # fmt: skip
    export = accountant_of([(event, 1)], relation).guarantee.privacy_loss().self_compose(2)
    parts = ([(event, 1)], [(event, 2)], [(event, 1), (dp_accounting.GaussianDpEvent(100.0), 1)])
    found = [accountant_of(part, relation).get_epsilon(1e-5) for part in parts]
    # Windows are compared roughly: of those that are about as good another one may be found.
    assert found == pytest.approx([once, twice, beside], rel=3e-3)
    assert found[1] == pytest.approx(export.get_epsilon_for_delta(1e-5), rel=1e-3)
    tiny = accountant_of([(event, 2)], relation)
    assert tiny.get_epsilon(1e-12) < 2.6 * tiny.get_epsilon(1e-5)  # hidden iterates still count
    assert tiny.get_epsilon(1e-20) < math.inf
    groups = hsa.LastIterateAccountant(relation, group_size=2).compose(event)
    assert once < groups.get_epsilon(1e-5) < 2.5 * once
