"""Theorems E and F, and secret orders altogether: exact laws of linear losses in both orders."""

import math

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from mixtures_of_gaussians import divergence, random_linear_run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import BallsInBins, Composition, HiddenCoins, ShuffledOnce
from hidden_state_accountants.bounds.data_order import _hidden_in_the_last_epochs
from hidden_state_accountants.curves.hidden_mixture import HiddenMixtureCurve
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
BOUNDS = {
    "poisson": HiddenCoins(),
    "without_replacement": HiddenCoins(),
    "shuffled_once": ShuffledOnce(),
    "balls_in_bins": BallsInBins(),
    "balls_in_bins_redrawn": BallsInBins(),
}


def delta_of(order, run, relation):
    """delta(epsilon) by the theorem alone, without other bounds of that order."""
    if order == "reshuffled":
        return _hidden_in_the_last_epochs(run, relation, noisy_process(run, relation)).delta
    return BOUNDS[order].guarantee(run, relation).curve.delta


@pytest.mark.parametrize("order", [*BOUNDS, "reshuffled"])
@pytest.mark.parametrize("relation", [SPECIAL, ONE], ids=lambda relation: relation.name)
@pytest.mark.parametrize("seed", seeds(20, 3))
def test_no_attack_refutes_it(seed, relation, order):
    """Of 20 runs, both orders of the neighbours at two epsilons; and the attack is no weak one."""
    rng = np.random.default_rng([seed, relation is ONE])
    tightest = 0.0
    for _ in range(20):
        run, first, second, weights = random_linear_run(rng, hsa.BatchOrder(order), relation is ONE)
        delta = delta_of(order, run, relation)
        for epsilon in rng.uniform(0, 4, 2):
            bound = delta(epsilon)
            for pair in ((first, second), (second, first)):
                truth = divergence(*pair, epsilon, weights)
                assert truth <= bound * (1 + 1e-9) + 1e-12, (run, epsilon)
                tightest = max(tightest, truth / bound if bound > 1e-9 else 0)
    assert tightest > (0.8 if order in ("shuffled_once", "balls_in_bins") else 0.5)


@pytest.mark.parametrize(
    ("order", "bound"),
    [
        ("shuffled_once", ShuffledOnce()),
        ("balls_in_bins", BallsInBins()),
        ("balls_in_bins", Composition()),
    ],
)
def test_releases_share_the_draw(order, bound):
    """All six participations of the record are seen, or none that counts.

    One pair for each epoch, composed, would be too small.
    """
    run = hsa.LastIterateDpEvent(
        noise_multiplier=1 / 1.2, learning_rate=[1.0, 0.0] * 6, clip_norm=1.0, batch_size=1,
        dataset_size=2, num_steps=12, batch_order=order,
        loss=hsa.LossGeometry.linear(1.0), release_steps=range(1, 12),
    )  # fmt: skip
    guarantee = bound.guarantee(run, SPECIAL)
    length = np.array([math.sqrt(6) * 1.2, 0.0])
    for epsilon in (4.0, 8.0):
        truth = divergence(length, np.zeros(2), epsilon, np.full(2, 0.5))
        assert truth <= guarantee.delta(epsilon)
    exact = math.log((1 + math.exp(6 * 1.44)) / 2)
    averaged = 6 * math.log((1 + math.exp(1.44)) / 2)
    assert averaged < 0.73 * exact <= 0.73 * guarantee.rdp(np.array([2.0]))[0] * (1 + 1e-12)


def test_coins_may_cost_more_than_a_public_order():
    """Two linear losses: no bound may be smaller than what an attacker sees."""
    run = hsa.LastIterateDpEvent(
        noise_multiplier=0.5, learning_rate=1.0, clip_norm=1.0, batch_size=1, dataset_size=2,
        num_steps=2, batch_order="poisson", loss=hsa.LossGeometry.linear(1.0),
    )  # fmt: skip
    move = math.sqrt(2)
    truth = HiddenMixtureCurve([0.25, 0.5, 0.25], [0.0, move, 2 * move]).epsilon(1e-5)
    assert truth == pytest.approx(13.152, abs=1e-3)
    coins = hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5)
    public = hsa.LastIterateAccountant().compose(attrs.evolve(run, batch_order="cyclic"))
    assert public.get_epsilon(1e-5) == pytest.approx(9.997, abs=1e-3)
    assert truth <= coins < 1.3 * truth
