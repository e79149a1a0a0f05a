"""Details of the engine in which a small mistake would be easy to make and hard to see."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, mu_at
from scipy import stats

import hidden_state_accountants as hsa

RELATION = NeighboringRelation.REPLACE_SPECIAL


def mu(event):
    return hsa.ShiftedInterpolationAccountant(RELATION).compose(event).guarantee.mu


@pytest.mark.parametrize("position", range(4))
def test_the_worst_position_need_not_be_the_last_one(position):
    """The batches after it take short steps: they neither hide the record nor matter themselves."""
    is_late = np.arange(24) > 20 + position
    schedules = {
        "learning_rate": np.where(is_late, 0.01, 0.5),
        "noise_multiplier": np.where(is_late, 8.0, 2.0),
    }
    event = cyclic_run(**schedules)
    by_position = [mu_at(event, p) for p in range(4)]
    assert int(np.argmax(by_position)) == position
    assert mu(event) == pytest.approx(by_position[position], rel=1e-12)


@pytest.mark.parametrize("event", [cyclic_run(), dp_accounting.GaussianDpEvent(4.0)])
def test_repetitions_of_repetitions_multiply(event):
    once = hsa.LastIterateAccountant(RELATION).compose(event).guarantee.mu
    nested = dp_accounting.SelfComposedDpEvent(dp_accounting.SelfComposedDpEvent(event, 2), 3)
    pair = dp_accounting.ComposedDpEvent([nested, event])
    accountant = hsa.LastIterateAccountant(RELATION).compose(pair, 5)
    assert accountant.guarantee.mu == pytest.approx(once * 35**0.5, rel=1e-12)


def test_divergences_add_up_over_runs_of_every_kind():
    orders = [2, 5, 16]
    fixed = cyclic_run()
    random = cyclic_run(batch_order="poisson", loss=None, num_steps=3, noise_multiplier=9.0)
    separate = [
        hsa.LastIterateAccountant(RELATION).compose(event).guarantee.rdp(orders)
        for event in (fixed, random)
    ]
    together = hsa.LastIterateAccountant(RELATION).compose(random, 3).compose(fixed, 2)
    expected = 2 * separate[0] + 3 * separate[1]
    np.testing.assert_allclose(together.guarantee.rdp(orders), expected, rtol=1e-12)


def test_the_delta_of_a_cap_on_poisson_batches_is_never_lost():
    make = {"batch_order": "poisson", "loss": None, "num_steps": 3, "noise_multiplier": 9.0}
    free = hsa.LastIterateAccountant(RELATION).compose(cyclic_run(**make))
    capped = hsa.LastIterateAccountant(RELATION)
    capped.compose(cyclic_run(**make, max_batch_size=15))
    extra = 3 * stats.binom.sf(14, 19, 5 / 20)  # some batch draws 15 of the 19 others
    assert capped.get_delta(0.1) == pytest.approx(free.get_delta(0.1) + extra, rel=1e-12)
    assert capped.get_epsilon(1e-4 + extra) == pytest.approx(free.get_epsilon(1e-4), rel=1e-9)
    assert capped.get_epsilon(0.99 * extra) == np.inf
    assert capped.guarantee.rdp([2]) == [np.inf]
    twice = hsa.LastIterateAccountant(RELATION)
    twice.compose(cyclic_run(**make, max_batch_size=15), 2)
    assert twice.get_epsilon(1.99 * extra) == np.inf > twice.get_epsilon(2.01 * extra)


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_sampled_steps_without_learning_rate_are_left_out(order):
    make = {"batch_order": order, "loss": None}
    rates = [0.5] * 9 + [0.0] * 15
    assert (
        cyclic_run(**make, learning_rate=rates).as_composition()
        == cyclic_run(**make, num_steps=9).as_composition()
    )


def test_sampled_steps_of_equal_noise_are_counted():
    noise = [2.0] * 10 + [3.0] * 9 + [2.0] * 5
    event = cyclic_run(batch_order="poisson", loss=None, noise_multiplier=noise)
    assert event.as_composition() == dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(value)),
                count,
            )
            for value, count in ((2.0, 15), (3.0, 9))
        ]
    )
