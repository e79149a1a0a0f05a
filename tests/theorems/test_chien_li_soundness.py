"""Chien & Li 2024 on runs: it dominates exact oracles, and refuses what it does not cover."""

import math

import numpy as np
import pytest
from chien_li import PUBLISHED, REPLACE_ONE, SOUND, per_alpha
from dp_accounting import NeighboringRelation
from grid_oracle import GridOracle
from runs import cyclic_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Composition

REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


# --- soundness ------------------------------------------------------------------------------------


def anonymous_power(constant, exponent, sign):
    def gradient(x):
        # |a^e + b^e| <= 2^(1-e) (a + b)^e
        value = constant * 2 ** (exponent - 1) * np.sign(x) * np.abs(x) ** exponent
        return np.clip(sign * value, -1, 1)

    return gradient


@pytest.mark.parametrize("exponent", [0.3, 0.6])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("order", ["full", "cyclic", "shuffled_once"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_dominates_hoelder_runs_in_one_dimension(exponent, sign, order, decay):
    event = hsa.LastIterateDpEvent(
        noise_multiplier=0.6,
        learning_rate=0.5,
        clip_norm=1.0,
        weight_decay=decay,
        batch_size=4 if order == "full" else 2,
        dataset_size=4,
        num_steps=8,
        batch_order=order,
        loss=hsa.LossGeometry.hoelder(0.4, exponent),
        domain_diameter=0.5,
    )
    shared = anonymous_power(0.4, exponent, sign)
    oracle = GridOracle(
        event,
        [*([shared] * 3), lambda x: np.ones_like(x)],
        lambda x: -np.ones_like(x),
        record=3,
        domain=(-0.25, 0.25),
        cells_per_std=24,
    )
    guarantee = SOUND.guarantee(event, REPLACE_ONE)
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        for estimate in oracle.delta(epsilon):
            assert estimate.lower_bound <= guarantee.delta(epsilon)
    for order_ in (2.0, 6.0):
        for estimate in oracle.renyi(order_):
            assert estimate.lower_bound <= float(guarantee.rdp([order_])[0])
    assert oracle.delta(0.5)[0].lower_bound > 0.2 * guarantee.delta(0.5)  # not a trivial test


def test_hoelder_gradients_beat_composition_where_the_domain_is_small():
    """Figure 2 (a): a bounded domain and a Hölder gradient."""
    loss = hsa.LossGeometry.hoelder(0.05, 0.5)
    event = full_run(loss=loss, domain_diameter=0.1, num_steps=2000, noise_multiplier=10.0)
    own = SOUND.guarantee(event, REPLACE_SPECIAL)
    assert "Theorem 3.7" in own.theorem
    assert own.mu < 0.5 * Composition().guarantee(event, REPLACE_SPECIAL).mu
    # The last step alone: D and the step's own sensitivity.
    last_step = (0.1 + 0.5 * 0.05 * 0.1**0.5 + 0.5 / 20) / (0.5 * 10 / 20)
    assert own.mu < 0.9 * last_step
    best = hsa.LastIterateAccountant().compose(event).guarantee
    assert best.mu <= own.mu * (1 + 1e-9)


# --- the run as it is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({"batch_order": "poisson"}, "batch order"),
        ({"loss": None}, "loss geometry"),
        ({"learning_rate": [0.1] * 23 + [0.2]}, "schedules"),
        ({"noise_multiplier": [2.0] * 23 + [1.0]}, "schedules"),
        ({"release_steps": [3]}, "releases"),
        ({"dataset_size": 21}, "equal batches"),
    ],
)
@pytest.mark.parametrize("bound", [SOUND, PUBLISHED])
def test_refusals(bound, changes, condition):
    event = cyclic_run(**{"weight_decay": 0.0} | changes)
    assert condition in [u.condition for u in bound.check(event, REPLACE_ONE)]
    with pytest.raises(hsa.UnsupportedRunError, match=r"\(Chien & Li 2024\) needs"):
        bound.guarantee(event, REPLACE_ONE)


def test_refusals_of_the_paper_alone():
    unmet = PUBLISHED.check(full_run(), NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert [u.condition for u in unmet] == ["neighboring relation", "weight decay"]
    assert SOUND.check(full_run(), NeighboringRelation.ADD_OR_REMOVE_ONE) == ()
    with pytest.raises(ValueError, match="analysis"):
        hsa.ChienLiAccountant(analysis="both")


@pytest.mark.parametrize("order", ["full", "cyclic", "shuffled_once"])
@pytest.mark.parametrize("loss", [hsa.LossGeometry.convex(1.0), hsa.LossGeometry.hoelder(1.0, 0.5)])
def test_ends_of_the_range(order, loss):
    run = full_run if order == "full" else cyclic_run
    for bound in (SOUND, PUBLISHED):
        silent = run(batch_order=order, loss=loss, noise_multiplier=0.0, weight_decay=0.0)
        assert bound.guarantee(silent, REPLACE_ONE).epsilon(1e-5) == math.inf
        still = run(batch_order=order, loss=loss, learning_rate=0.0, weight_decay=0.0)
        assert bound.guarantee(still, REPLACE_ONE).epsilon(1e-5) == 0
        one = run(batch_order=order, loss=loss, num_steps=1, weight_decay=0.0)
        claimed = float(bound.guarantee(one, REPLACE_ONE).rdp([2.0])[0])
        assert 0 < claimed <= (2 / 2.0) ** 2 * (1 + 1e-12)


def test_reference_run():
    """One linear probe: weight decay helps only the sound reading."""
    assert SOUND.guarantee(probe_run(), REPLACE_SPECIAL).mu == pytest.approx(0.500411, abs=5e-6)
    without = probe_run(weight_decay=0.0)
    assert per_alpha(without, PUBLISHED, REPLACE_SPECIAL) == pytest.approx(24.9453125, rel=1e-9)
