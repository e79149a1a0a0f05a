"""One statement of every kind of run; the figures are those of the accountants, rounded up."""

import math

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation
from hypothesis import given
from hypothesis import strategies as st

import hidden_state_accountants as hsa
from hidden_state_accountants.accountants import compose_guarantees
from hidden_state_accountants.figures import fixed_up, round_up, text_down, text_up
from hidden_state_accountants.runs.statement import privacy_statement, with_every_iterate

DELTA = 1e-5
SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
PLAIN = hsa.LastIterateDpEvent(
    noise_multiplier=2.0, learning_rate=[0.5] * 10 + [0.25] * 10, clip_norm=1.0, batch_size=500,
    dataset_size=5000, num_steps=20, batch_order="cyclic", weight_decay=0.1,
    loss=hsa.LossGeometry.convex(0.5, lipschitz=1.0), domain_diameter=4.0, release_steps=(3,),
)  # fmt: skip
DICE = hsa.DiceSgdDpEvent(
    noise_std=0.4, clip_norm=1.0, error_clip_norm=1.0, batch_size=100, dataset_size=2500,
    num_steps=50, batch_order="poisson",
)  # fmt: skip
BLOCKS = hsa.BlockCoordinateDpEvent(
    step_size=0.5, noise_variance=0.5 * (3.0 / 4) ** 2 / 2, clip_norm=1.0, batch_size=4,
    dataset_size=12, num_epochs=2, prox_strong_convexity=0.5,
)  # fmt: skip


@given(st.floats(1e-12, 1e12), st.integers(2, 8))
def test_significant_digits(value, digits):
    """No printed figure is below the value, and no lower bound above it."""
    step = 1.01 * 10 ** (1 - digits)
    assert value <= float(text_up(value, digits)) <= value * (1 + step)
    assert value * (1 - step) <= float(text_down(value, digits)) <= value
    text = fixed_up(value, digits)
    assert value <= float(text) <= value + 1.01 * 10.0**-digits + 1e-15 * value
    assert len(text.partition(".")[2]) == digits
    short = float(f"{value:.{digits - 1}e}")  # needs no rounding
    assert round_up(short, digits) == short
    assert float(text_up(short, digits)) == float(text_down(short, digits)) == short


@pytest.mark.parametrize("value", [0.0, math.inf])
def test_ends_of_figures(value):
    assert text_up(value) == text_down(value) == f"{value:g}"
    assert fixed_up(value, 2) == f"{value:.2f}"


def accounted(*events, relation=SPECIAL):
    accountant = hsa.LastIterateAccountant(relation)
    for event in events:
        accountant.compose(event)
    return accountant.guarantee


def every_epsilon(*events):
    """With every iterate of every run released."""
    guarantees = [with_every_iterate(event, SPECIAL) for event in events]
    return compose_guarantees(guarantees, SPECIAL).epsilon(DELTA)


def fields(*events, relation=SPECIAL, guarantee=None, **notes):
    """The lines of a statement by their labels."""
    guarantee = guarantee or accounted(*events, relation=relation)
    first, second, *rest = privacy_statement(events, guarantee, DELTA, **notes).splitlines()
    assert second.startswith("epsilon = ")
    found, label = {"title": first, "epsilon": second}, ""
    for line in rest:
        if line.startswith("  - "):
            found[label] = [*found.get(label, []), line[4:]]
        else:
            label, _, value = line.partition(":")
            found |= {label: value.strip()} if value else {}
    return found


@pytest.mark.parametrize("event", [PLAIN, DICE, BLOCKS], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_the_lines_of_every_kind(event, relation):
    text = fields(event, relation=relation)
    guarantee = accounted(event, relation=relation)
    assert text["title"].startswith("Privacy of ")
    assert text["epsilon"] == f"epsilon = {fixed_up(guarantee.epsilon(DELTA), 4)} at delta = 1e-05"
    assert text["neighboring relation"] == relation.name
    assert text["theorem"].startswith(guarantee.theorem)
    declared = [a.text for a in guarantee.assumptions if a.status.value == "declared"]
    assert text["declared by you"] == declared
    assert "runs" not in text
    assert text.get("mu (Gaussian differential privacy)") == (
        None if guarantee.curve.mu is None else text_up(guarantee.mu, 6)
    )
    assert len(text) <= 14


def test_what_is_said_of_the_last_iterate():
    text = fields(PLAIN)
    assert text["released"] == "the last iterate, and after steps 3"
    assert text["run"] == "20 steps x 500 of 5000 records, cyclic (2 epochs)"
    assert text["update"] == (
        "c = 0.95 to 0.975; learning rate 0.25 to 0.5, weight decay 0.1, radius 2"
    )
    assert text["noise"] == "multiplier 2, clip norm 1, noise/sensitivity 2"
    every = fixed_up(every_epsilon(PLAIN), 4)
    assert text["epsilon if every iterate were released"] == every
    update = fields(attrs.evolve(PLAIN, loss=None, domain_diameter=math.inf))["update"]
    assert "every step counts (no loss is declared)" in update
    assert update.endswith("no projection")
    pairs = fields(PLAIN, microbatch=2)
    assert pairs["run"].startswith("20 steps x 1000 of 10000 records in microbatches of 2, cyclic")
    assert pairs["noise"].startswith("multiplier 2 (half of the optimizer's")
    drawn = attrs.evolve(PLAIN, batch_order="poisson", sampling_rate=1 / 9)
    assert "500 of 5000 records, each drawn at a rate of 0.11111111" in fields(drawn)["run"]


def test_what_is_said_of_dice():
    text = fields(DICE, update_rule="Adam")
    assert text["run"] == "50 steps x 100 of 2500 records, poisson; update rule Adam"
    assert text["noise on the mean update"] == "standard deviation 0.4"
    assert text["gradients"] == "clip norm 1; bound before clipping: none declared"
    assert text["error"] == "clip norm 1"
    assert "epsilon if every iterate were released" not in text  # they are
    drawn = fields(attrs.evolve(DICE, sampling_rate=0.2))["run"]
    assert drawn.endswith("each drawn at a rate of 0.2, poisson; update rule any")


@pytest.mark.parametrize(
    ("changes", "label", "text"),
    [
        ({}, "noise multiplier", "3 on sums of gradients clipped to 1"),
        (
            {"block_loss": hsa.LossGeometry.convex(1.0, lipschitz=0.6)},
            "noise multiplier", "3 on sums of gradients never clipped, 0.6",
        ),
        (
            {"noise_variance": hsa.Schedule([BLOCKS.noise_variance, BLOCKS.noise_variance / 4],
                                            [3, 3])},
            "noise multiplier", "1.5 to 3 on sums of gradients clipped to 1",
        ),
        (
            {"clip_norm": None, "gradient_sensitivity": 0.25},
            "noise", "gradient sensitivity 0.25",
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_dp_mbcd(changes, label, text):
    said = fields(attrs.evolve(BLOCKS, **changes))
    assert text in said[label]
    assert said["run"] == "2 epochs x 3 fixed batches of 4 records x 1 blocks, step size 0.5"
    assert said["prox"] == "0.5-strongly convex"
    loose = attrs.evolve(BLOCKS, prox_strong_convexity=0.0, block_loss=None)
    assert every_epsilon(BLOCKS) == pytest.approx(accounted(loose).epsilon(DELTA))


def test_assumptions_stand_with_who_vouches_for_them():
    A = hsa.Assumption
    assumptions = (A.checked("one"), A.declared("two"), A.checked("three"))
    text = fields(BLOCKS, guarantee=attrs.evolve(accounted(BLOCKS), assumptions=assumptions))
    assert text["checked by the software"] == ["one", "three"]
    assert text["declared by you"] == ["two"]
    assert "public" not in text


def test_several_runs():
    together = accounted(PLAIN, BLOCKS, DICE).epsilon(DELTA)
    text = fields(PLAIN, BLOCKS, DICE)
    assert text["title"].endswith("stays hidden) (3 runs)")
    assert text["epsilon"].startswith(f"epsilon = {fixed_up(together, 4)}")
    assert text["runs"].startswith("3; epsilon and theorem are those of all together")
    every = every_epsilon(PLAIN, BLOCKS, DICE)
    assert together <= every < math.inf
    assert text["epsilon if every iterate were released"] == fixed_up(every, 4)


def test_what_is_not_proven_says_so():
    with pytest.warns(UserWarning, match="theorem is false"):
        guarantee = hsa.DiceSgdAccountant(analysis="published").compose(DICE).guarantee
    assert fields(DICE, guarantee=guarantee)["NOT PROVEN"] == guarantee.caveat


def test_refused():
    with pytest.raises(TypeError, match="Expected an event of"):
        privacy_statement([PLAIN, dp_accounting.GaussianDpEvent(1.0)], accounted(PLAIN), DELTA)
