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

ADD_OR_REMOVE, ONE, SPECIAL = NeighboringRelation


def named(comparison, **values):
    """The only row with these values."""
    (row,) = (
        row
        for row in comparison.rows
        if all(getattr(row, name) == value for name, value in values.items())
    )
    return row


def test_every_accountant_has_its_epsilon_or_its_reason():
    event = cyclic_run()
    found = hsa.compare(event, delta=[1e-5, 1e-3])
    bounds = [bound for bound in hsa.BOUNDS if bound.event_type is hsa.LastIterateDpEvent]
    names = [row.accountant for row in found.rows if row.delta == 1e-5]
    assert names[: len(bounds)] == [bound.name for bound in bounds]
    assert len(set(names)) == len(names)
    for bound in bounds:
        row, unmet = named(found, accountant=bound.name, delta=1e-3), bound.check(event, SPECIAL)
        if unmet:
            assert (row.epsilon, row.status) == (None, "does not apply")
            assert all(str(condition) in row.note for condition in unmet)
        else:
            exact = bound.guarantee(event, SPECIAL).epsilon(1e-3)
            assert row.epsilon == pytest.approx(exact)
            assert row.status == ("proven" if bound.sound else "published, NOT proven")
    for kind in (rdp.RdpAccountant, pld.PLDAccountant):
        accountant = kind(neighboring_relation=ADD_OR_REMOVE).compose(event.as_composition())
        row = named(found, accountant=kind.__name__, delta=1e-3)
        assert row.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-8)
    row = named(found, accountant="LastIterateAccountant", delta=1e-3)
    assert row.epsilon == hsa.LastIterateAccountant().compose(event).get_epsilon(1e-3)
    assert found.best(delta=1e-3).epsilon == pytest.approx(row.epsilon)
    assert found.best().delta == 1e-5


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
        event_type, citation = hsa.LastIterateDpEvent, hsa.BOUNDS[0].citation

        def check(self, event, relation):
            return ()

        def guarantee(self, event, relation):
            curve = hsa.curves.GaussianCurve(1e-3)
            return hsa.Guarantee(curve, relation, "Theorem 0", caveat="wrong by a factor")

    monkeypatch.setattr(comparing, "BOUNDS", (*hsa.BOUNDS, TooGood()))
    comparison = hsa.compare(cyclic_run())
    row = named(comparison, accountant="too_good")
    assert (row.status, row.note) == ("published, NOT proven", "wrong by a factor")
    assert row.epsilon < comparison.best().epsilon
    assert comparison.best().accountant != "too_good"


def test_the_cap_on_poisson_batches_is_paid_for():
    event = cyclic_run(batch_order="poisson", max_batch_size=16, num_steps=3)
    extra = event.cap_delta(SPECIAL)
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
    assert "no accountant applies" in comparison.summary()


LEVELS = [2 + step / 100 for step in range(200)]


@pytest.mark.parametrize(
    ("changes", "accountant", "note"),
    [
        ({"noise_multiplier": 0.01}, "PLDAccountant", "gigabytes"),
        ({"noise_multiplier": LEVELS, "num_steps": 200}, "Poisson batches, PLDAccountant",
         "200 noise levels"),
    ],
)  # fmt: skip
def test_no_row_fills_the_memory_or_takes_hours(changes, accountant, note):
    row = named(hsa.compare(cyclic_run(**changes)), accountant=accountant)
    assert row.epsilon is None
    assert note in row.note


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
    runs = {name: full_run(noise_multiplier=z) for name, z in (("less", 20.0), ("more | z", 40.0))}
    comparison = hsa.compare(runs, progress=lines.append)
    assert [line for line in lines if "run" in line] == [
        "compare: run 1 of 2",
        "compare: run 2 of 2",
    ]
    assert "compare: more | z, accountant 1 of " in "".join(lines)
    assert comparison.best("less").epsilon > comparison.best("more | z").epsilon
    assert str(comparison).count("| accountant |") == 2
    assert [row.run for row in hsa.compare([full_run(num_steps=1)] * 2).rows][-1] == "run 2"


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda: hsa.compare(dp_accounting.GaussianDpEvent(1.0)), TypeError, "Expected"),
        (lambda: hsa.compare([]), ValueError, "Expected"),
        (lambda: hsa.compare(full_run(), []), ValueError, "Expected"),
        (lambda: hsa.compare(full_run(), 2.0), ValueError, "Expected"),
        (lambda: hsa.position_profile(full_run()), ValueError, "Only a CYCLIC order has positions"),
        (
            lambda: hsa.position_profile(dp_accounting.GaussianDpEvent(1.0)),
            TypeError,
            "LastIterateDpEvent",
        ),
        (lambda: hsa.position_profile(cyclic_run(), 2.0), ValueError, "target_delta"),
    ],
)
def test_bad_arguments(ask, error, text):
    with pytest.raises(error, match=text):
        ask()


def test_plotted_points_are_the_first_epochs():
    event = cyclic_run(learning_rate=[0.5] * 12 + [0.25] * 11, num_steps=23, release_steps=(4, 20))
    short = first_epochs(event, 2)
    assert (short.num_steps, short.learning_rate, short.release_steps) == (8, 0.5, (4,))
    assert first_epochs(event, 6) == event
    assert first_epochs(dice_run(), 1).num_steps == 4
    louder = block_run(noise_variance=[[1.0] * 5] * 5 + [[2.0] * 5])
    assert first_epochs(louder, 2).noise_variance == 1.0


@pytest.mark.parametrize(
    ("changes", "relation"),
    [
        ({"num_steps": 22}, ONE),
        ({"learning_rate": np.linspace(0.5, 0.1, 24), "release_steps": (3, 9)}, SPECIAL),
    ],
)
def test_every_position_has_its_epsilon(changes, relation):
    event = cyclic_run(**changes)
    expected = [epsilon_from_mu(mu_at(event, place, relation), 1e-6) for place in range(4)]
    assert hsa.position_profile(event, 1e-6, relation) == pytest.approx(expected, rel=1e-9)
    assert hsa.position_profile(cyclic_run(num_steps=3))[3] == 0  # never reached


@pytest.mark.parametrize("loss", [None, hsa.LossGeometry.hoelder(0.3, 0.5)])
def test_without_a_linear_modulus_participations_count(loss):
    """The run ends in its seventh epoch: the first of four batches is seen once more."""
    event = cyclic_run(loss=loss, num_steps=25, weight_decay=0.0)
    whole = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
    composed = [epsilon_from_mu(n**0.5 / 2.0, 1e-5) for n in (7, 6, 6, 6)]
    assert hsa.position_profile(event) == pytest.approx(np.minimum(composed, whole), rel=1e-9)
