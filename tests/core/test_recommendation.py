"""Recommended runs meet their targets, whatever accountant is asked."""

import math

import dp_accounting
import pytest
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_accountants.calibration import gaussian_log_mu


def recommend(n=1200, epsilon=1.0, delta=1e-5, **options):
    return hsa.recommend(n, epsilon, delta, **{"classes": 10, "epochs": 16, **options})


@pytest.mark.parametrize(
    ("n", "epsilon", "classes", "bias", "relation"),
    [
        (455, 0.1, 2, False, NeighboringRelation.ADD_OR_REMOVE_ONE),
        (455, 0.3, 10, True, NeighboringRelation.REPLACE_ONE),
        (3001, 3.0, 2, True, NeighboringRelation.REPLACE_SPECIAL),
    ],
)
def test_every_run_meets_the_target_and_wastes_little(n, epsilon, classes, bias, relation):
    found = recommend(n, epsilon, classes=classes, bias=bias, neighboring_relation=relation)
    for candidate in found:
        accountant = hsa.LastIterateAccountant(relation).compose(candidate.event)
        assert 0.99 * epsilon <= accountant.get_epsilon(1e-5) <= epsilon
        assert candidate.guarantee().neighboring_relation is relation
    scores = [round(c.score, 2) for c in found]
    assert scores == sorted(scores)


def test_composition_is_that_of_stock_accountants():
    """Nothing of this package is needed to believe these runs."""
    for candidate in recommend(orders=["poisson", "full"]):
        event = candidate.event.as_composition(NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        assert 0.98 < accountant.compose(event).get_epsilon(1e-5) < 1.01
        assert candidate.is_composition
        assert candidate.event.loss is None
        assert "Stock Opacus" in candidate.reason


def test_hidden_runs_need_less_noise_than_their_composition():
    found = recommend(orders=["cyclic", "shuffled_once"], bias=True)
    assert {c.event.batch_order for c in found} == {BatchOrder.CYCLIC, BatchOrder.SHUFFLED_ONCE}
    for candidate in found:
        event = candidate.event
        composed = event.as_composition("REPLACE_SPECIAL")
        accountant = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
        assert accountant.compose(composed).get_epsilon(1e-5) > 1.2
        assert event.loss.lipschitz < event.clip_norm < event.loss.lipschitz * 1.0001
        # c = 1: a step moves no two weights apart.
        assert event.learning_rate * event.loss.smoothness <= 2
        assert not candidate.is_composition


@pytest.mark.parametrize(
    ("relation", "orders"),
    [
        ("replace_special", ["full", "cyclic", "shuffled_once", "poisson", "balls_in_bins"]),
        ("add_or_remove_one", ["full", "poisson"]),
    ],
)
def test_the_orders_that_the_relation_allows_are_tried(relation, orders):
    found = recommend(neighboring_relation=relation)
    assert {c.event.batch_order.value for c in found} == set(orders)
    assert len(found) == len(found.to_dict()["candidates"])


@pytest.mark.parametrize(
    "options",
    [
        # The first term is the least one.
        {"n": 2000, "epsilon": 0.3, "epochs": 64},
        {"n": 2000, "epsilon": 0.3, "epochs": 64, "neighboring_relation": "REPLACE_ONE"},
        {"n": 2000, "epsilon": 0.3, "epochs": 64, "feature_norm": 3.0},
        {"n": 4000, "epsilon": 0.6, "epochs": 2000, "features": 100},
        {"n": 4000, "epsilon": 0.6, "epochs": 2000, "features": 9, "bias": True},
        {"n": 4000, "epsilon": 0.6, "epochs": 2000, "features": 29, "bias": True, "classes": 2},
        {"n": 4000, "epsilon": 0.6, "epochs": 2000, "features": 1, "classes": 2},
        {"n": 4000, "epsilon": 0.6, "epochs": 2000, "features": 1, "loss": "squared_error"},
        # The second one.
        {"n": 100_000, "epsilon": 50.0, "epochs": 4, "orders": ["poisson"]},
        {"n": 100_000, "epsilon": 50.0, "epochs": 4, "orders": ["poisson"],
         "loss": "squared_error"},
        # The third one.
        {"n": 2000, "epsilon": 50.0, "epochs": 4000},
        {"n": 50_000, "epsilon": 50.0, "epochs": 4000},
    ],
)  # fmt: skip
def test_the_rate_is_that_of_the_page(options):
    options = {"orders": ["full"], "classes": 10, "bias": False, "features": None, **options}
    best, is_squared = recommend(**options).best, options.get("loss") == "squared_error"
    event, square = best.event, options.get("feature_norm", 1.0) ** 2 + options["bias"]
    n, steps = event.dataset_size, event.num_steps
    mu = math.exp(gaussian_log_mu(options["epsilon"], 1e-5))
    mu /= 2 if "neighboring_relation" in options else 1
    if is_squared:
        kappa, clip, curvature, k = 0.2, 0.1, 1.0, 4 / math.sqrt(event.batches_per_epoch)
    else:
        logits = 1 if options["classes"] == 2 else 10
        weights = ((options["features"] or math.inf) + options["bias"]) * logits
        kappa = 1.4 * min(max(n * mu / math.sqrt(weights) / 35, 1), 4)
        clip, curvature, k = 0.3, 0.25 if logits == 1 else 0.5, 64
    terms = kappa * n * mu / (clip * steps), k / (2 * curvature)
    least = min(*terms, max(1e4, 3 * n) / (2 * curvature * steps))
    assert event.learning_rate == pytest.approx(least / square, rel=2e-3)
    if least == terms[0]:  # the noise of a weight
        std = event.learning_rate * event.noise_std_on_sum()[0] / event.batch_size
        expected = kappa * best.noise_factor / math.sqrt(square * steps)
        assert std == pytest.approx(expected, rel=2e-3)
        assert best.reach == 1


def test_what_is_printed_is_enough():
    """Who copies the figures of the table trains a run that meets the target."""
    found = recommend(orders=["cyclic", "full"], feature_norm=1.3, weight_decay=0.01)
    for words in ("REPLACE_SPECIAL", "Stock Opacus", "last iterate only"):
        assert words in str(found)
    for candidate, line in zip(found, str(found).splitlines()[2:], strict=False):
        event = candidate.event
        order, batch, epochs, noise, _, rate, *_ = line.split()
        assert (order, int(batch)) == (event.batch_order.value, event.batch_size)
        assert int(epochs) == candidate.epochs
        assert float(noise) >= event.noise_multiplier
        assert float(rate) == event.learning_rate
        if candidate.smoothing is not None:
            assert candidate.criterion in str(found)
            printed = float(candidate.criterion.split("smoothing=")[1].rstrip(")"))
            assert 0 < candidate.smoothing <= printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 1}, "n >= 2"),
        ({"epsilon": 0.0}, "epsilon > 0"),
        ({"classes": 1}, "classes >= 2"),
        ({"loss": "huber"}, "loss to be one of"),
        ({"orders": ["reshuffled"]}, "orders among"),
        ({"orders": []}, "none is named"),
        ({"orders": "cyclic"}, "list of batch orders"),
        (
            {"orders": ["cyclic"], "neighboring_relation": "ADD_OR_REMOVE_ONE"},
            "cannot add or remove",
        ),
        (
            {"epsilon": 0.1, "orders": ["full"], "spent": dp_accounting.GaussianDpEvent(1.0)},
            "a part of the run does not depend on it",
        ),
    ],
)
def test_impossible_arguments(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        recommend(**changes)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
@pytest.mark.parametrize(
    "spent",
    [
        dp_accounting.GaussianDpEvent(20.0),
        dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(30.0)] * 2),  # has no hash
    ],
)
def test_the_target_is_for_what_was_spent_as_well(relation, spent):
    for candidate in recommend(
        orders=["full", "cyclic"], spent=spent, neighboring_relation=relation
    ):
        accountant = hsa.LastIterateAccountant(relation).compose(candidate.event)
        alone = accountant.get_epsilon(1e-5)
        accountant.compose(spent)
        both = accountant.get_epsilon(1e-5)
        assert 0.99 < both <= 1
        assert alone < 0.99
        assert candidate.guarantee().epsilon(1e-5) == pytest.approx(both, rel=1e-6)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "squared_error"])
@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE", "ADD_OR_REMOVE_ONE"])
def test_full_batches_with_momentum_go_as_far_as_the_recipe_wants(loss, relation):
    """In closed form: no noise is searched for, and steps are 64 however many records there are."""
    options = dict(loss=loss, orders=["full"], neighboring_relation=relation)
    plain = recommend(n=1_000_000, epsilon=0.3, epochs=10_000, **options).best
    fast = recommend(n=1_000_000, epsilon=0.3, epochs=None, momentum=True, **options).best
    assert fast.event.num_steps == 64
    assert 0 < fast.momentum <= 0.97
    assert plain.momentum == 0
    reached = 64 * fast.event.learning_rate / (1 - fast.momentum)
    wanted = 10_000 * plain.event.learning_rate
    assert reached == pytest.approx(fast.reach / plain.reach * wanted, rel=0.01)
    assert fast.guarantee().epsilon(1e-5) == pytest.approx(0.3, rel=1e-5)
    stock = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    one = dp_accounting.GaussianDpEvent(fast.event.noise_multiplier)
    stock.compose(
        dp_accounting.SelfComposedDpEvent(one, 64 * (4 if relation == "REPLACE_ONE" else 1))
    )
    assert stock.get_epsilon(1e-5) == pytest.approx(0.3, rel=1e-3)
