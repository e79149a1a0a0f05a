"""The epsilon of the records of each batch of an epoch."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, mu_at

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import epsilon_from_mu

SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@pytest.mark.parametrize(
    ("changes", "relation"),
    [
        ({"num_steps": 22}, NeighboringRelation.REPLACE_ONE),
        ({"learning_rate": np.linspace(0.5, 0.1, 24), "release_steps": (3, 9)}, SPECIAL),
    ],
)
def test_the_epsilon_of_the_run_is_the_largest(changes, relation):
    event = cyclic_run(**changes)
    profile = hsa.position_profile(event, 1e-6, relation)
    whole = hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-6)
    assert profile.shape == (4,)
    assert profile.max() == pytest.approx(whole, rel=1e-9)
    for position, epsilon in enumerate(profile):
        expected = epsilon_from_mu(mu_at(event, position, relation), 1e-6)
        assert epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", [None, hsa.LossGeometry.hoelder(0.3, 0.5)])
def test_without_a_linear_modulus_participations_count(loss):
    """The run ends in its seventh epoch: the first of four batches is seen once more."""
    event = cyclic_run(loss=loss, num_steps=25, weight_decay=0.0)
    whole = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
    composed = [epsilon_from_mu(n**0.5 / 2.0, 1e-5) for n in (7, 6, 6, 6)]
    assert hsa.position_profile(event) == pytest.approx(np.minimum(composed, whole), rel=1e-9)


def test_batches_that_are_never_reached_cost_nothing():
    assert hsa.position_profile(cyclic_run(num_steps=3))[3] == 0


def test_what_has_no_positions():
    with pytest.raises(ValueError, match="Only a CYCLIC order has positions"):
        hsa.position_profile(full_run())
    with pytest.raises(TypeError, match="LastIterateDpEvent"):
        hsa.position_profile(dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match="target_delta"):
        hsa.position_profile(cyclic_run(), 2.0)
