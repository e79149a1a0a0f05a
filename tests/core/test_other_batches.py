"""What the same noise would give with other batches: the figures are those of such runs."""

import attrs
import pytest
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_accountants.advice import other_batches, report_lines

RELATION, DELTA = NeighboringRelation.REPLACE_SPECIAL, 1e-5


def run(order="cyclic", steps=20, **changes):
    """A softmax probe on ten batches of 100."""
    return hsa.LastIterateDpEvent(
        **{
            "noise_multiplier": 6.0,
            "learning_rate": 0.5,
            "weight_decay": 0.005,
            "clip_norm": 1.4143,
            "batch_size": 1000 if order == "full" else 100,
            "dataset_size": 1000,
            "num_steps": steps,
            "batch_order": order,
            "loss": hsa.LossGeometry.softmax_cross_entropy(1.0),
            **changes,
        }
    )


def epsilon(event, relation=RELATION):
    return hsa.LastIterateAccountant(relation).compose(event).get_epsilon(DELTA)


def line_of_other_batches(event):
    return next((x for x in report_lines(event, RELATION, DELTA) if "other batches" in x), "")


def line_of_another_clip(event):
    return next((x for x in report_lines(event, RELATION, DELTA) if "clipping" in x), "")


@pytest.mark.parametrize(
    ("order", "others"),
    [
        ("cyclic", {"poisson", "shuffled_once", "full"}),
        ("reshuffled", {"poisson", "shuffled_once", "full"}),
        ("shuffled_once", {"poisson", "full"}),
        ("poisson", {"shuffled_once", "full"}),
        ("full", set()),
    ],
)
def test_which_orders(order, others):
    assert {o.value for o in other_batches(run(order), RELATION, DELTA)} == others


def test_the_figures():
    found = other_batches(run(), RELATION, DELTA)
    without_geometry = epsilon(run("poisson", loss=None))
    assert found[BatchOrder.POISSON] == pytest.approx(without_geometry, rel=1e-3)
    assert found[BatchOrder.SHUFFLED_ONCE] == epsilon(run("shuffled_once"))
    assert found[BatchOrder.FULL] == epsilon(run("full", steps=2))


def test_without_a_geometry_an_order_is_worth_nothing():
    assert set(other_batches(run(loss=None), RELATION, DELTA)) == {
        BatchOrder.POISSON,
        BatchOrder.FULL,
    }
    line = line_of_other_batches(run(loss=None))
    assert "cost more for any number of epochs, because no loss geometry is declared" in line


@pytest.mark.parametrize(
    "event",
    [
        run(learning_rate=[0.5] * 10 + [0.1] * 10),
        run(noise_multiplier=[6.0] * 10 + [5.0] * 10),
        run("full"),
    ],
)
def test_nothing_quick_is_known(event):
    assert other_batches(event, RELATION, DELTA) == {}
    assert line_of_other_batches(event) == ""


def test_a_record_added_or_removed_has_poisson_batches_only():
    added = NeighboringRelation.ADD_OR_REMOVE_ONE
    assert other_batches(run("poisson"), added, DELTA) == {}


def test_an_order_that_has_won_already():
    line = line_of_other_batches(run(steps=2000))
    assert line.startswith("with other batches, at this noise after 200 epochs: epsilon at most")
    assert "cyclic batches" not in line


def test_an_order_that_has_not_won():
    assert line_of_other_batches(run()).endswith("cyclic batches cost more now")


@pytest.mark.parametrize("order", ["cyclic", "poisson", "full"])
def test_a_clip_that_contracts(order):
    event = run(order, clip_norm=1.0)
    line = line_of_another_clip(event)
    assert line.startswith("raise max_grad_norm to 1.4143: clipping then never acts")
    after, before = (float(line.split(word)[1].split()[0].strip(".")) for word in ("c = ", "of "))
    assert after < 1 < before
    assert epsilon(attrs.evolve(event, clip_norm=1.4143)) < epsilon(event)


@pytest.mark.parametrize("changes", [{}, {"loss": None}, {"loss": hsa.LossGeometry.convex(0.5)}])
def test_no_clip_would_help(changes):
    assert not line_of_another_clip(run(**changes))
