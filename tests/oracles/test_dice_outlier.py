"""The outlier against DiceSGD: real runs shift as claimed, and no sound claim stays below.

What the outlier refutes is in test_counterexamples.py beside this file.
"""

import math

import numpy as np
import pytest
from dice import clip, normalise, update
from dice_outlier import DiceOutlier
from dp_accounting import NeighboringRelation
from hypothesis import given
from hypothesis import strategies as st

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.dice_sgd_2024 import sound_curve

ADD, ONE, SPECIAL = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
)


def evidence_of(event, relation=SPECIAL):
    return DiceOutlier().evidence(event, relation, lambda text: None)


def small(steps, **changes):
    arguments = {
        "noise_std": 1.0, "clip_norm": 1.0, "error_clip_norm": 0.3, "batch_size": 4,
        "dataset_size": 16, "num_steps": steps,
    }  # fmt: skip
    return hsa.DiceSgdDpEvent(**(arguments | changes))


# --- the witnesses, run by the reference implementation -------------------------------------------


def shift_of(event, joins, mine, helper, clipper):
    """What the record adds to every v_t, in one dimension; `helper` is one gradient in step 1."""
    updates = []
    for present in (True, False):
        error, values = np.zeros(1), []
        for t, joined in enumerate(joins):
            batch = [helper] * (t == 0 and helper != 0) + [mine] * (present and joined)
            v, error = update(
                error, np.array(batch), event.batch_size, event.clip_norm,
                event.error_clip_norm, clipper,
            )  # fmt: skip
            values.append(float(v[0]))
        updates.append(values)
    return np.subtract(*updates)


patterns = st.lists(st.booleans(), min_size=2, max_size=12)


@given(patterns, st.floats(0.2, 40))
def test_plain_outlier_shifts_the_sum_as_claimed(joins, bound):
    event = small(len(joins), gradient_bound=bound)
    shift = shift_of(event, joins, bound, 0.0, clip)
    step, deposit = min(1.0, bound) / 4, max(0.0, bound - 1) / 4
    counted = sum(joins[:-1]) * (step + min(deposit, 0.3))
    assert shift.sum() >= max(counted, step * sum(joins)) - 1e-9
    if any(joins):
        after = len(joins) - 1 - joins.index(True)
        assert shift.sum() >= step + min(deposit, 0.3 * after) - 1e-9
        if deposit >= 0.3 * (len(joins) - 1):
            for start in range(len(joins)):
                assert shift[start:].sum() >= 0.3 * min(after, len(joins) - start) - 1e-9


@given(patterns)
def test_opposite_errors_shift_twice(joins):
    event = small(len(joins))
    shift = shift_of(event, joins, 1e9, -1e5, clip)
    after = len(joins) - 1 - joins.index(True) if any(joins) else 0
    for start in range(1, len(joins)):
        assert shift[start:].sum() >= 0.6 * min(after, len(joins) - start) - 1e-6


@given(patterns)
def test_automatic_errors_of_opposite_sign_shift_twice(joins):
    """The signs alternate in a way that is known beforehand."""
    event = small(len(joins), automatic=True, gradient_bound=1.1)
    shift = shift_of(event, joins, 1.02, -1.002, normalise)
    signs = np.where(np.arange(len(joins)) % 2 == 1, 1.0, -1.0)
    own = np.array(joins) * 0.25  # the clipped gradient itself
    after = max(0, len(joins) - 2 - joins.index(True)) if any(joins) else 0
    from_error = signs * (shift - own)
    for start in range(1, len(joins)):
        assert from_error[start:].sum() >= 0.6 * min(after, len(joins) - start) - 1e-9


# --- no sound claim stays below -------------------------------------------------------------------


@st.composite
def runs(draw):
    order = draw(st.sampled_from(list(hsa.BatchOrder)))
    batch = draw(st.integers(1, 6))
    period = 1 if order is hsa.BatchOrder.FULL else draw(st.integers(1, 8))
    relations = [SPECIAL, ONE] + [ADD] * (order in (hsa.BatchOrder.FULL, hsa.BatchOrder.POISSON))
    event = hsa.DiceSgdDpEvent(
        noise_std=draw(st.floats(0.3, 5)) / batch,
        clip_norm=1.0,
        error_clip_norm=draw(st.sampled_from([0.01, 0.3, 2.0])),
        batch_size=batch,
        dataset_size=batch * period,
        num_steps=draw(st.sampled_from([1, 2, 5, 40, 400])),
        batch_order=order,
        gradient_bound=draw(st.sampled_from([0.5, 1.0, 1.2, 4.0, 300.0, math.inf])),
        automatic=draw(st.booleans()),
    )
    return event, draw(st.sampled_from(relations))


@given(runs())
def test_sound_guarantees_dominate_the_attack(case):
    event, relation = case
    if DiceOutlier().check(event, relation):
        return
    evidence = evidence_of(event, relation)
    curve = sound_curve(event, relation)
    # The split bound's privacy loss takes seconds: test_split_noise_dominates_the_attack.
    curve = getattr(curve, "curves", [curve])[0]
    for epsilon in (0.0, 0.5, 2.0, 10.0):
        assert evidence.delta(epsilon) <= curve.delta(epsilon) * (1 + 1e-9) + 1e-14
    # Evidence beyond epsilon 700 is reported as infinite.
    assert min(evidence.epsilon(1e-5), 700) <= curve.epsilon(1e-5) + 1e-8


@pytest.mark.parametrize(("bound", "noise"), [(1.0, 1.0), (1.1, 1.5), (math.inf, 10.0)])
def test_split_noise_dominates_the_attack(bound, noise):
    event = small(30, gradient_bound=bound, noise_std=noise)
    evidence, curve = evidence_of(event), sound_curve(event, SPECIAL)
    for epsilon in (0.0, 0.5, 2.0):
        assert evidence.delta(epsilon) <= curve.delta(epsilon) + 1e-9


def test_full_batches_without_errors_are_attacked_exactly():
    event = small(9, batch_order="full", dataset_size=4, gradient_bound=1.0)
    evidence = evidence_of(event)
    claim = sound_curve(event, SPECIAL).epsilon(1e-5)
    assert evidence.epsilon(1e-5) == pytest.approx(claim, rel=1e-3)
