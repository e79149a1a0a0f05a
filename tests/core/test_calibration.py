import math

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation, pld, rdp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from runs import block_run, cyclic_run, dice_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import epsilon_from_mu

TOLERANCE = 1e-6


class Counter:
    """Makes accountants and counts them: one for each evaluation."""

    def __init__(self, make=hsa.LastIterateAccountant):
        self.make, self.count = make, 0

    def __call__(self):
        self.count += 1
        return self.make()


def epsilon(event, delta=1e-5):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(delta)


def a_hundred(step):
    return lambda noise: dp_accounting.SelfComposedDpEvent(step(noise), 100)


def sampled(noise):
    return dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(noise))


def coarse_pld():
    return pld.PLDAccountant(value_discretization_interval=1e-2)


@pytest.mark.parametrize(
    ("make_event", "make_accountant", "target", "most"),
    [
        (cyclic_run(), hsa.LastIterateAccountant, 0.1, 5),
        (a_hundred(dp_accounting.GaussianDpEvent), rdp.RdpAccountant, 2.0, 8),
        (a_hundred(sampled), rdp.RdpAccountant, 0.1, 12),
        (a_hundred(sampled), coarse_pld, 4.0, 12),
    ],
)
def test_same_answer_as_dp_accounting(make_event, make_accountant, target, most):
    if isinstance(run := make_event, dp_accounting.DpEvent):
        make_event = lambda noise: attrs.evolve(run, noise_multiplier=noise)  # noqa: E731
    counter = Counter(make_accountant)
    noise = hsa.calibrate_noise(target, 1e-5, run, make_accountant=counter)
    expected = dp_accounting.calibrate_dp_mechanism(make_accountant, make_event, target, 1e-5)
    # dp-accounting stops within 1e-6 of the answer, on either side
    assert noise == pytest.approx(expected, rel=2 * TOLERANCE, abs=3e-6)
    assert make_accountant().compose(make_event(noise)).get_epsilon(1e-5) <= target
    lower = make_event(noise * (1 - 2 * TOLERANCE))
    assert make_accountant().compose(lower).get_epsilon(1e-5) > target
    assert counter.count <= most


@settings(max_examples=10)
@given(
    target=st.floats(0.0, 1e3),
    delta=st.floats(1e-30, 0.9),
    num_steps=st.integers(1, 60),
    decay=st.floats(0.0, 0.5),
)
def test_the_target_is_always_met_and_only_just(target, delta, num_steps, decay):
    assume(target == 0 or target > 1e-3 or delta < 1e-2)  # swapped
    event = cyclic_run(num_steps=num_steps, weight_decay=decay)
    noise = hsa.calibrate_noise(target, delta, event)
    assert epsilon(attrs.evolve(event, noise_multiplier=noise), delta) <= target
    lower = attrs.evolve(event, noise_multiplier=noise * (1 - 2 * TOLERANCE))
    assert epsilon(lower, delta) > target


def test_a_closed_form():
    noise = hsa.calibrate_noise(1.5, 1e-6, dp_accounting.GaussianDpEvent(1.0))
    assert epsilon_from_mu(1 / noise, 1e-6) == pytest.approx(1.5, rel=1e-5)
    doubled = hsa.calibrate_noise(
        1.5,
        1e-6,
        dp_accounting.GaussianDpEvent(1.0),
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    assert doubled == pytest.approx(2 * noise, rel=1e-5)


def test_other_kinds_of_runs_have_noise_of_another_name():
    dice = dice_run()
    noise = hsa.calibrate_noise(2.0, 1e-5, dice)
    assert epsilon(attrs.evolve(dice, noise_std=noise)) == pytest.approx(2.0, rel=1e-5)
    epochs = hsa.calibrate_epochs(2.0, 1e-5, attrs.evolve(dice, noise_std=2 * noise))
    assert epochs >= 2
    blocks = block_run()
    noise = hsa.calibrate_noise(2.0, 1e-5, blocks)
    assert epsilon(attrs.evolve(blocks, noise_variance=noise)) == pytest.approx(2.0, rel=1e-5)
    tiny = attrs.evolve(blocks, gradient_sensitivity=2e-9)
    assert hsa.calibrate_noise(2.0, 1e-5, tiny) == pytest.approx(1e-18 * noise, rel=1e-5)


@pytest.mark.parametrize("spent", [5.0, 4.15, 1e3])
def test_beside_what_the_noise_does_not_reach(spent):
    def make(noise):
        parts = [dp_accounting.GaussianDpEvent(spent), full_run(noise_multiplier=noise)]
        return dp_accounting.ComposedDpEvent(parts)

    counter = Counter()
    noise = hsa.calibrate_noise(1.0, 1e-5, make, make_accountant=counter)
    assert 1 - 1e-5 < epsilon(make(noise)) <= 1
    assert counter.count <= 20


@pytest.mark.parametrize(("target_epsilon", "delta"), [(1e-5, 1.0), (1e-9, 0.01), (3, 1.0)])
def test_swapped_targets_are_refused_with_the_cause(target_epsilon, delta):
    for calibrate in FAST:
        with pytest.raises(ValueError, match="were epsilon and delta swapped"):
            calibrate(target_epsilon, delta, full_run())


def test_targets_that_somebody_may_mean_are_not():
    run = full_run(noise_multiplier=1e6)  # meets everything
    for target in ((0.0, 0.5), (4e-3, 0.5), (1e-3, 1e-3), (0.2, 0.1), (5, 0.99)):
        for calibrate, options in FAST.items():
            assert calibrate(*target, run, **options) >= 0


FAST = {
    hsa.calibrate_noise: {"tolerance": 0.1},
    hsa.calibrate_epochs: {"max_epochs": 3},
}


@pytest.mark.parametrize(
    ("make_event", "delta", "reason"),
    [
        (cyclic_run(batch_order="poisson", max_batch_size=10), 1e-5, "Raise max_batch_size"),
        (
            lambda z: dp_accounting.ComposedDpEvent(
                [full_run(noise_multiplier=z), dp_accounting.NonPrivateDpEvent()]
            ),
            1e-5,
            "released without noise",
        ),
        (
            lambda z: dp_accounting.ComposedDpEvent(
                [full_run(noise_multiplier=z), dp_accounting.GaussianDpEvent(0.5)]
            ),
            1e-5,
            "levels off",
        ),
        (lambda z: full_run(), 1e-5, "levels off"),
        (full_run(), 0.0, "delta = 0"),
    ],
)
def test_unreachable_targets_end_with_the_reason(make_event, delta, reason):
    counter = Counter()
    with pytest.raises(ValueError, match=reason):
        hsa.calibrate_noise(1.0, delta, make_event, make_accountant=counter)
    assert counter.count <= 4


def test_uncovered_runs_say_so():
    with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
        hsa.calibrate_noise(
            1.0, 1e-5, cyclic_run(), neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE
        )


def test_epsilon_that_rises_with_noise_is_noticed():
    def make(noise):
        return full_run(noise_multiplier=noise if noise < 4 else 16 / noise, num_steps=1)

    with pytest.raises(ValueError, match=r"more than one crossing|levels off"):
        hsa.calibrate_noise(0.9, 1e-5, make)


def test_a_huge_target_is_met_with_hardly_any_noise():
    def run(noise):
        step = dp_accounting.PoissonSampledDpEvent(1 / 6, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(step, 18)

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = hsa.LastIterateAccountant(relation).compose(run(0.002))
    not_sampled = epsilon_from_mu(math.sqrt(18) / 0.002, 1e-5)
    assert accountant.get_epsilon(1e-5) <= not_sampled  # with this noise it was 9 % above
    how = {"neighboring_relation": relation, "tolerance": 1e-2}
    found = hsa.calibrate_noise(1e6, 1e-5, run, **how)
    assert 0.5 < found / 0.003 < 1  # which is the noise without sampling


def test_bad_events():
    for run in (full_run(noise_multiplier=[1.0] * 12 + [2.0] * 12), dp_accounting.NoOpDpEvent()):
        with pytest.raises(ValueError, match="a constant noise_multiplier to replace"):
            hsa.calibrate_noise(1.0, 1e-5, run)
    with pytest.raises(ValueError, match="one length"):
        hsa.calibrate_epochs(1.0, 1e-5, full_run(release_steps=(3,)))
    with pytest.raises(ValueError, match="tolerance"):
        hsa.calibrate_noise(1.0, 1e-5, full_run(), tolerance=0.0)


@pytest.mark.parametrize(
    ("target", "loss", "order"),
    [
        (1.8, None, "cyclic"),
        (12.0, hsa.LossGeometry.convex(0.1), "cyclic"),
        (50.0, None, "shuffled_once"),
    ],
)
def test_epochs_are_the_most_that_meet_the_target(target, loss, order):
    event = cyclic_run(loss=loss, weight_decay=0.02, batch_order=order)
    if epsilon(attrs.evolve(event, num_steps=4)) > target:
        with pytest.raises(ValueError, match="what one epoch costs"):
            hsa.calibrate_epochs(target, 1e-5, event)
        return
    counter = Counter()
    epochs = hsa.calibrate_epochs(target, 1e-5, event, make_accountant=counter)
    assert epsilon(attrs.evolve(event, num_steps=4 * epochs)) <= target
    longer = epsilon(attrs.evolve(event, num_steps=4 * (epochs + 1)))
    assert longer > target or epochs == 10_000
    assert counter.count < 20


def test_a_bound_that_levels_off_allows_any_number_of_epochs():
    counter = Counter()
    event = cyclic_run(weight_decay=0.5)
    limit = epsilon(attrs.evolve(event, num_steps=4000))
    assert hsa.calibrate_epochs(limit + 0.1, 1e-5, event, make_accountant=counter) == 10_000
    assert counter.count < 10
    assert hsa.calibrate_epochs(limit + 0.1, 1e-5, event, max_epochs=77) == 77
