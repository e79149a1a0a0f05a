"""Chen & Liu 2025 (arXiv 2407.08233): Theorem 4.6 as published, and the sound account."""

import math
import warnings

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import block_run
from scipy import special

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds.chen_liu_2025 import (
    BlockCoordinate,
    block_contraction,
    published_rates,
)

REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
convex, strongly_convex = hsa.LossGeometry.convex, hsa.LossGeometry.strongly_convex


def varying_noise(epochs=6, batches=5):
    return np.exp(np.random.default_rng(0).normal(0, 0.5, (epochs, batches)))


def guarantee(event, analysis="sound", relation=REPLACE_ONE):
    return BlockCoordinate(analysis).guarantee(event, relation)


def clipped_run(clip_norm=1.0, **changes):
    return block_run(gradient_sensitivity=None, clip_norm=clip_norm, **changes)


# --- an event that tells the clip leaves the factor to the relation -------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        None,
        hsa.LossGeometry.generalized_linear(1.0),
        convex(1.0),
        convex(1.0, lipschitz=1.5),
        strongly_convex(1.0, 0.3, lipschitz=1.0),
        strongly_convex(1.0, 0.3, lipschitz=0.6),
    ],
)
@pytest.mark.parametrize("analysis", ["sound", "published"])
@pytest.mark.parametrize(("relation", "factor"), [(REPLACE_ONE, 2), (REPLACE_SPECIAL, 1)])
def test_a_clip_norm_is_the_declared_sensitivity_of_the_relation(loss, analysis, relation, factor):
    changes = {"num_blocks": 3 if loss is None else 1, "block_loss": loss}
    event = clipped_run(prox_strong_convexity=0.2, **changes)
    lipschitz = loss.lipschitz if loss is not None and loss.lipschitz else math.inf
    assert event.sensitivity(relation) == factor * min(1.0, lipschitz)
    declared = attrs.evolve(event, clip_norm=None, gradient_sensitivity=event.sensitivity(relation))
    if analysis == "sound" and lipschitz <= 1:
        # 2 * lipschitz <= S_g would not see under REPLACE_SPECIAL that lipschitz <= C
        declared = attrs.evolve(declared, update_lipschitz=1.0 - 0.1 * loss.strong_convexity)
    if analysis == "sound" or loss is not None:
        ours, theirs = (
            guarantee(e, analysis, relation).rdp([2.0, 10.0]) for e in (event, declared)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("clip", [0.3, 0.1 + 0.2])
def test_clipping_never_acts_exactly_up_to_the_clip_norm(clip):
    reached, beyond = (
        clipped_run(clip, block_loss=convex(1.0, lipschitz=lipschitz))
        for lipschitz in (clip, math.nextafter(clip, 1))
    )
    assert not reached.clipping_may_act
    assert block_contraction(reached) == 1.0
    texts = guarantee(reached, relation=REPLACE_SPECIAL).assumptions
    assert any("no gradient is ever clipped" in str(a) for a in texts)
    assert beyond.clipping_may_act
    assert block_contraction(beyond) == pytest.approx(2 / math.sqrt(3.9))
    assert beyond.sensitivity(REPLACE_ONE) == reached.sensitivity(REPLACE_ONE)


# --- the paper, typed anew ------------------------------------------------------------------------


def lsi_constant(o, eta, big_f, big_t, k, j):
    """Lemma C.3 as printed, its double sum; None at the start, where it is infinite."""
    per_epoch = o.shape[1]
    length = big_f * big_t
    total = sum(
        o[kk, jj] * length ** (2 * ((k - kk) * per_epoch - jj + j - 1))
        for kk in range(k)
        for jj in range(per_epoch)
    )
    total += sum(o[k, jj] * length ** (2 * (j - jj - 1)) for jj in range(j))
    return 1 / (2 * eta * big_t**2 * total) if total else None


def corollary_rate(o, eta, s_g, b, big_f, big_t, j0):
    """Corollary 4.5, step by step, for one position."""
    rho = 0.0
    for k in range(o.shape[0]):
        for j in range(o.shape[1]):
            if j == j0:
                rho += eta * s_g**2 / (4 * b**2 * o[k, j])
            elif rho:
                c = lsi_constant(o, eta, big_f, big_t, k, j)
                rho *= (1 + c * 2 * eta * o[k, j] / big_f**2) ** (-1 / big_t**2)
    return rho


def telescoped_rate(o, eta, s_g, b, big_f, big_t, j0):
    """(9) with its indices corrected: c_K^0 for c_K^{n/b-1}, the product over k < l < K."""
    epochs, per_epoch = o.shape
    row = np.vstack([o, o[-1:]])  # c_K^0 needs no noise of epoch K

    def c(k, j):
        return lsi_constant(row, eta, big_f, big_t, k, j)

    total = 0.0
    for k in range(epochs):
        product = math.prod(c(i, j0 + 1) / c(i, j0) for i in range(k + 1, epochs))
        power = (per_epoch - 1) * (epochs - k) - j0
        inside = c(k, j0 + 1) / c(epochs, 0) * (1 / (big_f * big_t) ** 2) ** power * product
        total += eta * s_g**2 / (4 * b**2 * o[k, j0]) * inside ** (-1 / big_t**2)
    return total


@pytest.mark.parametrize("big_f", [0.5, 1.0, 1.2])
@pytest.mark.parametrize("big_t", [0.8, 1.0, 2.0])
def test_recursion_is_corollary_4_5_with_lemma_c_3(big_f, big_t):
    o = varying_noise(4, 5)
    ours = published_rates(0.1, o, 1.7, 3, big_f, big_t)
    for rate in (corollary_rate, telescoped_rate):
        typed = [rate(o, 0.1, 1.7, 3, big_f, big_t, j0) for j0 in range(5)]
        np.testing.assert_allclose(ours, typed, rtol=1e-9)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_theorem_4_6(num_blocks):
    o = varying_noise()
    event = block_run(noise_variance=o, num_blocks=num_blocks)
    # Lemma 4.1 with a constant step: L_F = |1 - eta beta|, and L_T = 1
    rates = np.array([corollary_rate(o, 0.1, 2.0, 4, 0.9, 1.0, j0) for j0 in range(5)])
    for alpha in (1.5, 2.0, 40.0):
        expected = num_blocks * averaged(rates, alpha)
        claimed = guarantee(event, "published").rdp([alpha])[0]
        assert claimed == pytest.approx(expected, rel=1e-9)


def averaged(rates, alpha):
    exponent = special.logsumexp((alpha - 1) * alpha * rates) - np.log(len(rates))
    return float(exponent) / (alpha - 1)


def test_it_needs_a_lipschitz_constant():
    for loss in (None, hsa.LossGeometry.hoelder(1.0, 0.5)):
        with pytest.raises(hsa.UnsupportedRunError, match="update_lipschitz, or a block_loss"):
            hsa.BlockCoordinateAccountant(analysis="published").compose(block_run(block_loss=loss))


@pytest.mark.parametrize("sensitivity", [1e-3, 1e-7, 1e-60])
def test_small_losses_keep_their_digits(sensitivity):
    small = guarantee(block_run(gradient_sensitivity=sensitivity), "published")
    rates = [corollary_rate(np.ones((6, 5)), 0.1, sensitivity, 4, 0.9, 1.0, j) for j in range(5)]
    assert small.rdp([2.0])[0] == pytest.approx(2 * np.mean(rates), rel=1e-5)
    assert small.rdp([1 + 1e-9])[0] == pytest.approx(np.mean(rates), rel=1e-5)


def test_figure_1_constant_noise():
    """A plateau; the noise is not stated (1 here)."""
    values = [
        averaged(published_rates(0.05, np.ones((epochs, 25)), 1.0, 100, 0.98, 1.0), 10)
        for epochs in (1, 5, 10, 20, 200)
    ]
    assert values[:4] == pytest.approx(
        [5.46699e-6, 1.248117e-5, 1.2925375e-5, 1.2931718e-5], rel=1e-5
    )
    assert values[4] == pytest.approx(values[3], rel=1e-6)


@pytest.mark.parametrize(("num_blocks", "epsilon"), [(1, 0.00618), (4, 0.01344)])
def test_table_3_is_not_theorem_4_6(num_blocks, epsilon):
    """Printed for the MLP: 0.0612 at delta = 1e-5; o = 0.001, rho = 1, eta = 0.1, b = 60000."""
    event = block_run(
        noise_variance=0.001, gradient_sensitivity=1.0, batch_size=60_000, dataset_size=60_000,
        num_epochs=400, update_lipschitz=0.9, num_blocks=num_blocks,
    )  # fmt: skip
    assert guarantee(event, "published").epsilon(1e-5) == pytest.approx(epsilon, abs=1e-5)


# --- the sound account ----------------------------------------------------------------------------


def test_theorem_a_for_one_block():
    o = varying_noise()
    event = block_run(noise_variance=o, prox_strong_convexity=0.5)
    worst = 0.0
    for j0 in range(5):
        s = np.zeros(30)
        s[j0::5] = 0.1 * 2.0 / 4
        worst = max(worst, hsa.shifted_gdp_mu(1 / (1 + 0.1 * 0.5), s, np.sqrt(2 * 0.1 * o.ravel())))
    assert guarantee(event).mu == pytest.approx(worst, rel=1e-12)
    # The prox after the last step is post-processing.
    event = block_run(num_epochs=1, batch_size=20, prox_strong_convexity=5.0)
    assert guarantee(event).mu == pytest.approx(0.1 * 2 / 20 / math.sqrt(0.2), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "contraction"),
    [
        ({}, 1.0),  # a generalized linear model, clipped or not
        ({"step_size": 3.0}, 2.0),
        ({"block_loss": convex(1.0)}, 2 / math.sqrt(3.9)),  # may be clipped
        ({"block_loss": convex(1.0, lipschitz=1.1)}, 2 / math.sqrt(3.9)),
        ({"block_loss": convex(1.0, lipschitz=1.0)}, 1.0),
        ({"block_loss": strongly_convex(1.0, 0.3)}, 2 / math.sqrt(3.9)),
        ({"block_loss": strongly_convex(1.0, 0.3, lipschitz=1.0)}, 0.97),
        ({"prox_strong_convexity": 0.5}, 1 / 1.05),
        ({"prox_lipschitz": 2.0}, 1.0),  # every prox has 1
        ({"prox_lipschitz": 0.9}, 0.9),
        ({"block_loss": None, "update_lipschitz": 0.98}, 0.98),
        ({"update_lipschitz": 1.5}, 1.0),
        ({"block_loss": None}, None),
        ({"block_loss": hsa.LossGeometry.hoelder(1.0, 0.5)}, None),
    ],
)
def test_contraction_only_from_what_proves_it(changes, contraction):
    found = block_contraction(block_run(**changes))
    assert found == (None if contraction is None else pytest.approx(contraction, rel=1e-12))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (block_run(update_lipschitz=0.98), ["declared", "constant 0.98 on every data set"]),
        (block_run(prox_lipschitz=0.9), ["declared", "the prox is Lipschitz with constant 0.9"]),
        (block_run(num_blocks=2),
         ["hidden variables", "under REPLACE_ONE the sum of the per-record gradients"]),
        (clipped_run(num_blocks=2, block_loss=convex(1.0, lipschitz=0.5)),
         ["clipped to 1 and no longer than 0.5: under REPLACE_ONE", "by at most 1"]),
    ],
)  # fmt: skip
def test_what_it_rests_on_is_listed(event, words):
    text = " ".join(map(str, guarantee(event).assumptions))
    assert all(word in text for word in words)


@pytest.mark.parametrize("changes", [{"num_blocks": 3}, {"block_loss": None}])
def test_otherwise_composition(changes):
    o = varying_noise()
    event = block_run(noise_variance=o, **changes)
    per_position = (0.1 * 2.0 / 4) ** 2 / (2 * 0.1 * o)
    expected = math.sqrt(changes.get("num_blocks", 1) * per_position.sum(axis=0).max())
    assert guarantee(event).mu == pytest.approx(expected, rel=1e-12)
    assert "composition" in guarantee(event).theorem


@pytest.mark.parametrize(("analysis", "blocks"), [("sound", 1), ("sound", 2), ("published", 1)])
def test_no_noise_no_privacy(analysis, blocks):
    silent = np.ones((6, 5))
    silent[5, 4] = 0.0
    for noise in (np.array(0.0), silent):
        run = block_run(noise_variance=noise, num_blocks=blocks)
        assert guarantee(run, analysis).epsilon(1e-5) == math.inf
    for changes in ({"step_size": 0.0}, {"gradient_sensitivity": 0.0, "noise_variance": 0.0}):
        assert guarantee(block_run(num_blocks=blocks, **changes), analysis).epsilon(1e-5) == 0


@pytest.mark.parametrize("analysis", ["sound", "published"])
def test_conditions(analysis):
    bound = BlockCoordinate(analysis)
    (unmet,) = bound.check(block_run(), ADD_OR_REMOVE_ONE)
    assert "REPLACE_SPECIAL" in str(unmet)
    full = clipped_run(batch_size=20)
    added, zeroed = (bound.guarantee(full, r) for r in (ADD_OR_REMOVE_ONE, REPLACE_SPECIAL))
    assert added.rdp([2.0]) == zeroed.rdp([2.0])
    (unmet,) = bound.check(block_run(dataset_size=18), REPLACE_ONE)
    assert "drop 2 records" in str(unmet)


@pytest.mark.parametrize("relation", [REPLACE_ONE, REPLACE_SPECIAL])
def test_both_accountants_compose_it(relation):
    event = block_run(prox_strong_convexity=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = hsa.BlockCoordinateAccountant(relation).compose(event, 2)
        best = hsa.LastIterateAccountant(relation).compose(event, 2)
    assert best.get_epsilon(1e-5) <= own.get_epsilon(1e-5) * (1 + 1e-6)
    assert best.guarantee.mu == pytest.approx(math.sqrt(2) * guarantee(event).mu)
    best.compose(dp_accounting.GaussianDpEvent(3.0))
