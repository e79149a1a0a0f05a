"""Every accountant beside each other, and the records of each batch."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld, rdp
from runs import block_run, cyclic_run, dice_run, full_run, mu_at, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants import comparing
from hidden_state_accountants.comparing import first_epochs
from hidden_state_accountants.curves.gaussian import epsilon_from_mu

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE


def named(comparison, **values):
    """The only row with these values."""
    (row,) = (
        row
        for row in comparison.rows
        if all(getattr(row, name) == value for name, value in values.items())
    )
    return row


@pytest.fixture(scope="module")
def cyclic():
    return hsa.compare(cyclic_run(), delta=[1e-5, 1e-3])


def test_every_bound_about_the_run_has_a_row(cyclic):
    names = [row.accountant for row in cyclic.rows if row.delta == 1e-5]
    expected = [b.name for b in hsa.BOUNDS if b.event_type is hsa.LastIterateDpEvent]
    assert names[: len(expected)] == expected
    assert len(set(names)) == len(names)


def test_bounds_that_apply_have_their_epsilon_and_the_others_their_reason(cyclic):
    relation = cyclic.neighboring_relation
    for bound in hsa.BOUNDS:
        if bound.event_type is not hsa.LastIterateDpEvent:
            continue
        row = named(cyclic, accountant=bound.name, delta=1e-3)
        unmet = bound.check(cyclic_run(), relation)
        if unmet:
            assert row.epsilon is None
            assert row.status == "does not apply"
            assert all(str(condition) in row.note for condition in unmet)
        else:
            guarantee = bound.guarantee(cyclic_run(), relation)
            assert row.epsilon == pytest.approx(guarantee.epsilon(1e-3))
            assert row.status == ("proven" if bound.sound else "published, NOT proven")


def test_combined_row_is_the_accountant_and_best_is_no_larger(cyclic):
    accountant = hsa.LastIterateAccountant().compose(cyclic_run())
    row = named(cyclic, accountant="LastIterateAccountant", delta=1e-3)
    assert row.epsilon == accountant.get_epsilon(1e-3)
    assert cyclic.best(delta=1e-3).epsilon == pytest.approx(row.epsilon)
    assert cyclic.best().delta == 1e-5


def test_stock_rows_are_what_dp_accounting_says(cyclic):
    composed = cyclic_run().as_composition()
    for kind in (rdp.RdpAccountant, pld.PLDAccountant):
        accountant = kind(neighboring_relation=ADD_OR_REMOVE).compose(composed)
        row = named(cyclic, accountant=kind.__name__, delta=1e-3)
        assert row.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [1e-10, 1e-12, 1e-14])
def test_the_error_of_a_stock_privacy_loss_counts(delta):
    """PLDAccountant says 8.525 at 1e-12, 8.540 is exact."""
    run = cyclic_run(
        batch_order="poisson", batch_size=10, dataset_size=1000, num_steps=2000,
        noise_multiplier=0.8, loss=None,
    )  # fmt: skip
    exact = hsa.LastIterateAccountant().compose(run).get_epsilon(delta)
    row = named(hsa.compare(run, delta), accountant="PLDAccountant")
    assert row.epsilon >= exact * (1 - 1e-6)


def test_poisson_row_is_marked_and_is_never_the_best():
    comparison = hsa.compare(probe_run(num_steps=300, weight_decay=0.0))
    row = named(comparison, accountant="Poisson batches, PLDAccountant")
    assert row.status == "ANOTHER ALGORITHM"
    step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0))
    expected = pld.PLDAccountant(ADD_OR_REMOVE).compose(step, 300).get_epsilon(1e-5)
    assert row.epsilon == pytest.approx(expected)
    assert row.epsilon < comparison.best().epsilon


def test_a_published_formula_is_marked_and_is_never_the_best(monkeypatch):
    class TooGood:
        name, sound, dominated_by = "too_good", False, ()
        event_type = hsa.LastIterateDpEvent
        citation = hsa.BOUNDS[0].citation

        def check(self, event, relation):
            return ()

        def guarantee(self, event, relation):
            return hsa.Guarantee(
                hsa.BOUNDS[0].guarantee(full_run(noise_multiplier=1e3), relation).curve,
                relation,
                "Theorem 0",
                caveat="wrong by a factor",
            )

    monkeypatch.setattr(comparing, "BOUNDS", (*hsa.BOUNDS, TooGood()))
    comparison = hsa.compare(cyclic_run())
    row = named(comparison, accountant="too_good")
    assert (row.status, row.note) == ("published, NOT proven", "wrong by a factor")
    assert row.epsilon < comparison.best().epsilon
    assert comparison.best().accountant != "too_good"


def test_the_cap_on_poisson_batches_is_paid_for():
    event = cyclic_run(batch_order="poisson", max_batch_size=16, num_steps=3)
    extra = event.cap_delta(NeighboringRelation.REPLACE_SPECIAL)
    assert 1e-7 < extra < 1e-5
    comparison = hsa.compare(event, delta=[1e-5, extra / 2])
    step = dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(2.0))
    stock = rdp.RdpAccountant(neighboring_relation=ADD_OR_REMOVE).compose(step, 3)
    row = named(comparison, accountant="RdpAccountant", delta=1e-5)
    assert row.epsilon == pytest.approx(stock.get_epsilon(1e-5 - extra))
    assert "cap" in row.note
    assert named(comparison, accountant="RdpAccountant", delta=extra / 2).epsilon == math.inf


def test_a_relation_without_a_theorem_gives_reasons_not_errors():
    comparison = hsa.compare(cyclic_run(), neighboring_relation=ADD_OR_REMOVE)
    assert comparison.best() is None
    row = named(comparison, accountant="LastIterateAccountant")
    assert row.epsilon is None
    assert "REPLACE_SPECIAL" in row.note
    assert "no accountant applies" in comparison.summary()


def test_a_huge_privacy_loss_does_not_fill_the_memory():
    row = named(hsa.compare(cyclic_run(noise_multiplier=0.01)), accountant="PLDAccountant")
    assert row.epsilon is None
    assert "gigabytes" in row.note


def test_schedules_with_many_noise_levels_do_not_take_hours():
    event = cyclic_run(noise_multiplier=[2 + step / 100 for step in range(200)], num_steps=200)
    row = named(hsa.compare(event), accountant="Poisson batches, PLDAccountant")
    assert row.epsilon is None
    assert "200 noise levels" in row.note


@pytest.mark.parametrize("event", [dice_run(), block_run()], ids=["dice", "blocks"])
def test_runs_of_other_kinds_have_their_own_bounds_and_no_standard_event(event):
    comparison = hsa.compare(event)
    bounds = [bound.name for bound in hsa.BOUNDS if bound.event_type is type(event)]
    assert [row.accountant for row in comparison.rows][: len(bounds)] == bounds
    for name in ("RdpAccountant", "PLDAccountant"):
        assert type(event).__name__ in named(comparison, accountant=name).note
    assert comparison.best().epsilon < math.inf
    assert comparison.to_dict()["runs"][0]["event"] == event.to_dict()


def test_several_runs_have_labels_progress_and_tables():
    lines = []
    runs = {
        "less noise": full_run(noise_multiplier=20.0),
        "more | noise": full_run(noise_multiplier=40.0),
    }
    comparison = hsa.compare(runs, progress=lines.append)
    assert [line for line in lines if "run" in line] == [
        "compare: run 1 of 2",
        "compare: run 2 of 2",
    ]
    assert "compare: more | noise, accountant 1 of " in "".join(lines)
    assert comparison.best("less noise").epsilon > comparison.best("more | noise").epsilon
    text = str(comparison)
    assert text.count("| accountant |") == 2
    assert [row.run for row in hsa.compare([full_run(num_steps=1)] * 2).rows][-1] == "run 2"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((dp_accounting.GaussianDpEvent(1.0),), TypeError),
        (([],), ValueError),
        ((full_run(), []), ValueError),
        ((full_run(), 2.0), ValueError),
        ((full_run(), "1e-5"), TypeError),
        ((full_run(), 1e-5, "replace"), ValueError),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error, match="Expected"):
        hsa.compare(*arguments)


def test_plotted_points_are_the_first_epochs():
    event = cyclic_run(learning_rate=[0.5] * 12 + [0.25] * 11, num_steps=23, release_steps=(4, 20))
    short = first_epochs(event, 2)
    assert (short.num_steps, short.learning_rate, short.release_steps) == (8, 0.5, (4,))
    assert first_epochs(event, 6) == event
    assert first_epochs(dice_run(), 1).num_steps == 4
    louder = block_run(noise_variance=[[1.0] * 5] * 5 + [[2.0] * 5])
    assert first_epochs(louder, 2).noise_variance == 1.0


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
