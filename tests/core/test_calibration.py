"""Noise and epochs that meet a target, and only just."""

import attrs
import dp_accounting
import pytest
from dp_accounting import pld, rdp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from runs import block_run, cyclic_run, dice_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.gaussian import epsilon_from_mu

TOLERANCE = 1e-6
GAUSSIAN = dp_accounting.GaussianDpEvent(1.0)


def epsilon(event, delta=1e-5):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(delta)


def beside(run, other):
    """Of a noise multiplier: the run with it, composed with an event that has none of it."""
    return lambda noise: dp_accounting.ComposedDpEvent(
        [attrs.evolve(run, noise_multiplier=noise), other]
    )


def a_hundred_sampled(noise):
    step = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(step, 100)


def coarse_pld():
    return pld.PLDAccountant(value_discretization_interval=1e-2)


@pytest.mark.parametrize(
    ("run", "make_accountant", "target"),
    [
        (cyclic_run(), hsa.LastIterateAccountant, 0.1),
        (a_hundred_sampled, rdp.RdpAccountant, 0.1),
        (a_hundred_sampled, coarse_pld, 4.0),
    ],
)
def test_same_answer_as_dp_accounting(run, make_accountant, target):
    make_event = run
    if isinstance(run, dp_accounting.DpEvent):
        make_event = lambda noise: attrs.evolve(run, noise_multiplier=noise)  # noqa: E731
    noise = hsa.calibrate_noise(target, 1e-5, run, make_accountant=make_accountant)
    expected = dp_accounting.calibrate_dp_mechanism(make_accountant, make_event, target, 1e-5)
    # dp-accounting stops within 1e-6 of the answer, on either side
    assert noise == pytest.approx(expected, rel=2 * TOLERANCE, abs=3e-6)
    assert make_accountant().compose(make_event(noise)).get_epsilon(1e-5) <= target
    lower = make_event(noise * (1 - 2 * TOLERANCE))
    assert make_accountant().compose(lower).get_epsilon(1e-5) > target


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


@pytest.mark.parametrize(("relation", "factor"), [("REPLACE_SPECIAL", 1), ("REPLACE_ONE", 2)])
def test_a_closed_form(relation, factor):
    noise = hsa.calibrate_noise(1.5, 1e-6, GAUSSIAN, neighboring_relation=relation)
    assert epsilon_from_mu(factor / noise, 1e-6) == pytest.approx(1.5, rel=1e-5)


def test_other_kinds_of_runs_have_noise_of_another_name():
    dice = dice_run()
    noise = hsa.calibrate_noise(2.0, 1e-5, dice)
    assert epsilon(attrs.evolve(dice, noise_std=noise)) == pytest.approx(2.0, rel=1e-5)
    assert hsa.calibrate_epochs(2.0, 1e-5, attrs.evolve(dice, noise_std=2 * noise)) >= 2
    blocks = block_run()
    noise = hsa.calibrate_noise(2.0, 1e-5, blocks)
    assert epsilon(attrs.evolve(blocks, noise_variance=noise)) == pytest.approx(2.0, rel=1e-5)
    tiny = attrs.evolve(blocks, gradient_sensitivity=2e-9)
    assert hsa.calibrate_noise(2.0, 1e-5, tiny) == pytest.approx(1e-18 * noise, rel=1e-5)


@pytest.mark.parametrize("spent", [5.0, 4.15, 1e3])
def test_beside_what_the_noise_does_not_reach(spent):
    make = beside(full_run(), dp_accounting.GaussianDpEvent(spent))
    assert 1 - 1e-5 < epsilon(make(hsa.calibrate_noise(1.0, 1e-5, make))) <= 1


WAYS = {hsa.calibrate_noise: {"tolerance": 0.1}, hsa.calibrate_epochs: {"max_epochs": 3}}


def test_swapped_targets_are_refused_and_those_that_somebody_may_mean_are_not():
    for calibrate, options in WAYS.items():
        for swapped in ((1e-5, 1.0), (1e-9, 0.01), (3, 1.0)):
            with pytest.raises(ValueError, match="were epsilon and delta swapped"):
                calibrate(*swapped, full_run())
        silent = full_run(noise_multiplier=1e6)  # meets everything
        for target in ((0.0, 0.5), (4e-3, 0.5), (1e-3, 1e-3), (0.2, 0.1), (5, 0.99)):
            assert calibrate(*target, silent, **options) >= 0


@pytest.mark.parametrize(
    ("run", "options", "reason"),
    [
        (cyclic_run(batch_order="poisson", max_batch_size=10), {}, "Raise max_batch_size"),
        (beside(full_run(), dp_accounting.NonPrivateDpEvent()), {}, "released without noise"),
        (beside(full_run(), dp_accounting.GaussianDpEvent(0.5)), {}, "levels off"),
        (lambda z: full_run(), {}, "levels off"),
        (
            lambda z: full_run(noise_multiplier=z if z < 4 else 16 / z, num_steps=1),
            {},
            "more than one crossing|levels off",
        ),
        (full_run(), {"delta": 0.0}, "delta = 0"),
        (full_run(), {"tolerance": 0.0}, "tolerance"),
        (full_run(noise_multiplier=[1.0] * 12 + [2.0] * 12), {}, "a constant noise_multiplier"),
        (dp_accounting.NoOpDpEvent(), {}, "a constant noise_multiplier"),
        (cyclic_run(), {"neighboring_relation": "ADD_OR_REMOVE_ONE"}, "REPLACE_SPECIAL"),
    ],
)
def test_unreachable_targets_end_with_the_reason(run, options, reason):
    with pytest.raises(ValueError, match=reason):
        hsa.calibrate_noise(0.9, **{"delta": 1e-5, "make_event": run, **options})


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
    epochs = hsa.calibrate_epochs(target, 1e-5, event)
    assert epsilon(attrs.evolve(event, num_steps=4 * epochs)) <= target
    longer = epsilon(attrs.evolve(event, num_steps=4 * (epochs + 1)))
    assert longer > target or epochs == 10_000


def test_a_bound_that_levels_off_allows_any_number_of_epochs():
    event = cyclic_run(weight_decay=0.5)
    limit = epsilon(attrs.evolve(event, num_steps=4000))
    assert hsa.calibrate_epochs(limit + 0.1, 1e-5, event) == 10_000
    assert hsa.calibrate_epochs(limit + 0.1, 1e-5, event, max_epochs=77) == 77
    with pytest.raises(ValueError, match="to grow with epochs"):
        hsa.calibrate_epochs(
            50.0, 1e-5, lambda n: full_run(num_steps=n, noise_multiplier=n), max_epochs=4
        )
    with pytest.raises(ValueError, match="one length"):
        hsa.calibrate_epochs(1.0, 1e-5, full_run(release_steps=(3,)))
