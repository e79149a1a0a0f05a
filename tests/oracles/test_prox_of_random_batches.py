"""A prox after the noise, secret batches: exact laws of linear runs against every claim."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run
from scipy import special

import hidden_state_accountants as hsa

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
EPSILONS = (0.0, 0.3, 1.0, 2.0)


def participations(event):
    """(probability, steps that hold the record) of every pattern."""
    steps, period = event.num_steps, event.batches_per_epoch
    order, q = event.batch_order, 1 / period
    if order in (hsa.BatchOrder.POISSON, hsa.BatchOrder.WITHOUT_REPLACEMENT):
        for coins in itertools.product((0, 1), repeat=steps):
            yield q ** sum(coins) * (1 - q) ** (steps - sum(coins)), np.array(coins)
        return
    epochs = -(-steps // period)
    patterns = (
        [(p,) * epochs for p in range(period)]
        if order is hsa.BatchOrder.SHUFFLED_ONCE
        else list(itertools.product(range(period), repeat=epochs))
    )
    for positions in patterns:
        coins = np.zeros(epochs * period)
        coins[np.arange(epochs) * period + positions] = 1
        yield 1 / len(patterns), coins[:steps]


def exact_deltas(event):
    """The larger one of both directions: the record has gradient C, all others none."""
    rates = event.per_step("learning_rate")
    shrunk = 1 / (1 + rates * event.prox_strong_convexity)
    left = np.cumprod(shrunk[::-1])[::-1]
    moved = rates * event.clip_norm / event.batch_size * left
    std = math.sqrt(np.sum((rates * event.noise_std_on_sum() / event.batch_size * left) ** 2))
    weights, means = zip(*((w, float(c @ moved)) for w, c in participations(event)), strict=True)
    weights, means = np.array(weights), np.array(means) / std
    x = np.linspace(-10, means.max() + 10, 20_001)
    cells = np.diff(special.ndtr(x[:, None] - means), axis=0) @ weights
    base = np.diff(special.ndtr(x))
    return [
        max(
            float(np.maximum(p - math.exp(eps) * r, 0).sum())
            for p, r in ((cells, base), (base, cells))
        )
        for eps in EPSILONS
    ]


@pytest.mark.parametrize("order", ["poisson", "without_replacement", "shuffled_once", "reshuffled"])
@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("strength", [0.2, 4.0])
def test_no_linear_run_exceeds_a_claim(order, is_scheduled, strength):
    """Cells of a grid only merge outcomes: what is found is a lower bound."""
    event = cyclic_run(
        batch_order=order,
        batch_size=5,
        dataset_size=15,
        num_steps=8,
        noise_multiplier=0.8,
        weight_decay=0.0,
        learning_rate=np.linspace(0.9, 0.2, 8) if is_scheduled else 0.6,
        loss=hsa.LossGeometry.linear(1.0),
        prox_strong_convexity=strength,
    )
    exact = exact_deltas(event)
    for bound in hsa.BOUNDS:
        if bound.sound and isinstance(event, bound.event_type) and not bound.check(event, SPECIAL):
            guarantee = bound.guarantee(event, SPECIAL)
            claimed = [guarantee.delta(epsilon) for epsilon in EPSILONS]
            assert (np.array(exact) <= np.array(claimed) * (1 + 1e-6) + 1e-12).all(), bound.name
