"""The run of DiceSGD that its tests change."""

import numpy as np
from dice import update
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import DiceSgd
from hidden_state_accountants.bounds.dice_sgd_2024 import Effect
from hidden_state_accountants.bounds.solvers.inclusion_counts import (
    Inclusions,
)

ADD, ONE, SPECIAL = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
)


def run(**changes):
    arguments = {
        "noise_std": 2.0,
        "clip_norm": 1.0,
        "error_clip_norm": 0.25,
        "batch_size": 2,
        "dataset_size": 8,
        "num_steps": 6,
        "gradient_bound": 1.5,
    }
    return hsa.DiceSgdDpEvent(**(arguments | changes))


def published_noise_std(event, epsilon, delta):
    """The noise that Theorem 3.7 asks for; its epsilon is inverse to the noise."""
    claimed = DiceSgd("published").guarantee(event, ADD).epsilon(delta)
    return event.noise_std * claimed / epsilon


def simulate(participates, others, mine, clip_norm, radius, divisor):
    """u_t and in_t m_t + u_t per step for given others' residuals and gradients of the record.

    The others act through gradients that are clipped alike in both runs: only what they leave in
    the error matters, so `others` is added to both errors directly.
    """
    dimension = len(others[0])
    there = here = np.zeros(dimension)
    from_error, total = [], []
    for joins, drift, gradient in zip(participates, others, mine, strict=True):
        batch = [gradient] if joins else []
        v, after = update(here, batch, divisor, clip_norm, radius)
        w, before = update(there, [], divisor, clip_norm, radius)
        own, _ = update(np.zeros(dimension), batch, divisor, clip_norm, radius)
        from_error.append(v - w - own)
        total.append(v - w)
        here, there = after + drift, before + drift
    return np.array(from_error), np.array(total)


def bounds_of(participates, event, relation=SPECIAL):
    """Theorem 1's bound for one pattern, and the part of the error."""
    steps = np.flatnonzero(participates)
    count, num = len(steps), len(participates)
    pattern = Inclusions(
        np.ones(1),
        np.array([count]),
        np.array([num - 1 - steps[0] if count else 0]),
        np.array([np.sum(steps < num - 1)]),
    )
    effect = Effect.of(event, relation)
    budget = effect.error_budget(pattern.before_last, pattern.after_first)
    return float(effect.squared_shift(pattern)[0]), float(budget[0])
